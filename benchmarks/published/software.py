"""Classes of training software: what its kernels fuse, how it holds state, and what it runs beside
computation."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from published.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What a framework, at a time, does with a step."""

    name: str
    fused: bool
    """Element-wise kernels are fused, by hand or by a compiler."""
    attention: str = "flash"
    """`flash`, `cudnn`, or `unfused`: two batched matrix multiplications and a softmax whose
    results go to memory."""
    composed: bool = False
    """Its model writes softmax, mask and activation out in elementary operations; a compiler fuses
    them."""
    fused_loss: bool = True
    dropout: bool = False
    sharding: int = 3
    """What data parallel ranks share out: 1 the optimizer's state, 3 all (FSDP), 0 nothing."""
    reduce_bytes: int = 2
    """Bytes of a gradient that is reduced."""
    master_bytes: int = 12
    """Bytes of fp32 parameters and moments that a parameter has, and of the optimizer's other
    copies."""
    gradient_bytes: int = 2
    """Bytes of a gradient that is kept over microbatches."""
    weight_bytes: int = 2
    """Bytes of the parameters that computation uses, beside the master copy; 0 where it is cast or
    gathered."""
    logits_bytes: float = 14.0
    """Bytes of a token's score for each word at the loss: bf16, and fp32 copies."""
    buffer_bytes: int = 0
    """Buckets for communication."""
    outside_bytes: int = 0
    """What the measured memory holds that is not the allocator's: the device's context and NCCL's
    buffers."""
    overlaps_data: bool = True
    overlaps_tensor: bool = False
    overlaps_pipeline: bool = False
    sequence_parallel: bool = False
    scatters_messages: bool = False
    """Tensor parallel ranks send a share each of a message between stages."""
    default_checkpointing: str = ""
    """What it does where a row does not say. Empty: the least that fits into memory."""
    distributed_tensors: bool = False
    """Its tensor parallelism is DTensor's."""
    launch_seconds: float = 0.0
    """The host's time for an operation, where it waits for each kernel's end before it launches the
    next."""
    half_checkpointing: str = "layers"
    """What `selective` checkpointing recomputes: half of the `layers`, half of the `matmuls`, or
    `attention`."""


FSDP2 = Software(
    name="FSDP2",
    fused=False,
    fused_loss=False,
    reduce_bytes=4,
    gradient_bytes=4,
    weight_bytes=0,
    sequence_parallel=True,
)
FSDP1 = Software(name="FSDP1", fused=False, fused_loss=False, gradient_bytes=4, weight_bytes=0)
DDP = Software(
    name="DDP",
    fused=False,
    fused_loss=False,
    sharding=0,
    reduce_bytes=4,
    gradient_bytes=4,
    weight_bytes=0,
)
XLA = Software(name="XLA", fused=True, attention="cudnn", weight_bytes=0, gradient_bytes=4)
MEGATRON = Software(
    name="Megatron Core", fused=True, attention="cudnn", sharding=1, gradient_bytes=4,
    overlaps_tensor=True, overlaps_pipeline=True,
    sequence_parallel=True, half_checkpointing="attention", reduce_bytes=2,
    default_checkpointing="none", logits_bytes=8,
)  # fmt: skip
MEGATRON_2021 = Software(
    name="Megatron-LM 2021", fused=True, attention="unfused", fused_loss=False, dropout=True,
    sharding=0, gradient_bytes=4,
    reduce_bytes=4, overlaps_data=False, half_checkpointing="attention", scatters_messages=True,
    default_checkpointing="full",
)  # fmt: skip
MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021, name="Megatron-DeepSpeed", dropout=False, sharding=1, reduce_bytes=2,
    gradient_bytes=2,
    master_bytes=16, buffer_bytes=3 * 5 * 10**8 * 2, outside_bytes=3 << 30,
)  # fmt: skip
"""Its optimizer makes fp32 gradients of its share; three buckets of 5e8 numbers, DeepSpeed's
default; the memory that its rows report is the device's, with 1.5 GiB of kernels."""
BLOOM = replace(
    MEGATRON_DEEPSPEED, name="Megatron-DeepSpeed, blocking launches", launch_seconds=1e-4
)
"""Its chronicles say that it ran with CUDA_LAUNCH_BLOCKING=1, and that this cost 0 to 7% of a step.
An operation here is about four kernels of theirs, and the host takes about 25 us for each: an
estimate within that, not fitted."""
PURE_HALF = Software(
    name="torchtune",
    fused=False,
    fused_loss=False,
    sharding=0,
    master_bytes=4,
    weight_bytes=2,
    gradient_bytes=2,
)  # parameters, gradients and AdamW's moments in bf16
FRAMEWORKS = (
    ("torchtune", PURE_HALF),
    ("maxtext|jax|levanter", XLA),
    ("bigscience", BLOOM),
    ("megatron-deepspeed|gpt-neox", MEGATRON_DEEPSPEED),
    ("vtrain", MEGATRON_2021),
    ("megatron|nemo|dgxc", MEGATRON),
    ("torchtitan", replace(FSDP2, half_checkpointing="matmuls", distributed_tensors=True)),
    ("fms-fsdp", FSDP1),
    ("llm-foundry|composer|mosaicml", FSDP1),
    (
        "nanotron|picotron",
        replace(DDP, name="nanotron", fused=True, sharding=1, sequence_parallel=True),
    ),
    ("tinyllama|lit-gpt|litgpt", replace(FSDP1, fused=True, fused_loss=True, logits_bytes=6)),
    (
        r"llm\.?c",
        replace(DDP, fused=True, fused_loss=True, attention="cudnn", sharding=1, reduce_bytes=2),
    ),
    # early 2023: before flash attention
    ("(?<!modded-)nanogpt", replace(DDP, attention="unfused", composed=True)),
    ("olmo|fsdp", FSDP2),
    ("modded-nanogpt", DDP),
)
"""The first pattern found in a row's source and notes, and what it runs."""


def is_known(row: Row) -> bool:
    """True if a row names software that is listed here."""
    return _named(row) is not None


def _named(row: Row) -> Software | None:
    text = f"{row.notes} {row.source}".lower()
    return next((software for pattern, software in FRAMEWORKS if re.search(pattern, text)), None)


def _by_layout(row: Row) -> Software:
    """FSDP where parameters are sharded, Megatron where tensors or layers are split, else DDP."""
    return FSDP2 if row.shards > 1 else MEGATRON if row.tp * row.pp > 1 else DDP


@cache
def software_of(row: Row) -> Software:
    """Return what ran a row, by its framework and what the row says of compilation, precision and
    checkpointing."""
    text = f"{row.notes} {row.source}".lower()
    found = _named(row) or _by_layout(row)
    if found is MEGATRON and row.dtype == "float16":
        # fp16 in Megatron is older than bf16, flash attention and the overlaps
        found = MEGATRON_2021
    if "sequence-parallel" in row.checkpointing:
        found = replace(found, sequence_parallel=True)
    if "ZeRO-0" in row.notes:
        found = replace(found, sharding=0)
    if found in (BLOOM, MEGATRON_DEEPSPEED) and row.dtype == "bfloat16":
        found = replace(found, gradient_bytes=6, reduce_bytes=4)  # bf16, and fp32 sums
    if found.attention == "unfused" and "flash" in text:
        found = replace(found, attention="flash")
    if row.compiled.startswith("yes"):
        found = replace(found, fused=True)
    if re.search(
        "graph|chunked CE|activation ckpt|optimizer-in-bwd",
        f"{row.compiled} {row.notes} {row.source}",
    ):
        found = replace(found, fused_loss=True, logits_bytes=2.5)
    if "optimizer-in-bwd" in row.notes:
        found = replace(found, gradient_bytes=0)  # each is applied and freed as it comes
    if "async TP" in row.notes:
        found = replace(found, overlaps_tensor=True)
    return found
