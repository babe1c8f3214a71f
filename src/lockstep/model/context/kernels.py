"""Chooses the attention kernel if the tokens of a row belong to different documents, or if a rank
has only some of the queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Final, Literal

import torch
from torch import Tensor

from lockstep.base import accelerator
from lockstep.base.dtypes import dtype_name

Kernel = Literal["varlen", "flex", "documents", "mask", "own"]
VARLEN_DTYPES: Final = (torch.bfloat16, torch.float16)
FLEX_DTYPES: Final = (*VARLEN_DTYPES, torch.float32)
MOST_FEATURES: Final = 256
"""Largest size of a head in the flash kernels. The size of a head must be a multiple of 8."""
FEWEST_FEATURES: Final = 16
KERNELS: Mapping[Kernel, str] = {
    "varlen": "torch.nn.attention.varlen",
    "flex": "FlexAttention",
    "documents": "the model's attention for each document",
    "mask": "the model's attention with a dense mask",
    "own": "the model's attention",
}
"""Maps each kernel, the fastest first, to its name in the event that reports the choice."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts that decide which kernel computes a call of attention."""

    no_varlen: str
    """The reason why `varlen_attn` does not run on the device, or an empty string."""
    no_flex: str
    on_cpu: bool
    dtype: torch.dtype
    features: int
    """Size of a head."""
    equal_features: bool = True
    dropout: float = 0.0
    whole_rows: bool = True
    """True if a query exists for each key."""
    own_mask: bool = False
    own_rule: bool = False
    """True if a query attends to less than its document, as with a sliding window or padding."""
    own_softmax: bool = False
    """True if the model's attention has sinks or a softcap."""


def facts(query: Tensor, value: Tensor, **given: bool | float) -> Facts:
    no_varlen, no_flex = _device_facts(query.device)
    return Facts(
        no_varlen=no_varlen,
        no_flex=no_flex,
        on_cpu=query.is_cpu,
        dtype=computed_dtype(query),
        features=query.shape[-1],
        equal_features=query.shape[-1] == value.shape[-1],
        **given,  # type: ignore[arg-type]  # by the names of fields
    )


@cache
def _device_facts(device: torch.device) -> tuple[str, str]:
    """Return the reasons why `varlen_attn` and FlexAttention do not run on a device, or empty
    strings."""
    triton = "" if find_spec("triton") else "it needs Triton, which is not installed"
    no_flex = accelerator.why_no_flex_attention(device) or triton
    return accelerator.why_no_varlen_attention(device), no_flex


def computed_dtype(given: Tensor) -> torch.dtype:
    """Return the dtype to which `F.scaled_dot_product_attention` casts `given`. Autocast leaves
    float64 unchanged."""
    kind = given.device.type
    casts = torch.is_autocast_enabled(kind) and given.dtype is not torch.float64
    return torch.get_autocast_dtype(kind) if casts else given.dtype


def choose(facts: Facts) -> tuple[Kernel, str]:
    """Return the kernel, and the reasons against each faster kernel."""
    no_varlen, no_flex = _why_no_varlen(facts), _why_no_flex(facts)
    if not no_varlen:
        return "varlen", ""
    why = f"varlen_attn: {no_varlen}"
    if not no_flex:
        return "flex", why
    why += f"; FlexAttention: {no_flex}"
    if facts.on_cpu and facts.whole_rows and not (facts.dropout or facts.own_mask):
        return "documents", why
    return "mask", why


def _why_no_varlen(facts: Facts) -> str:
    if facts.no_varlen:
        return facts.no_varlen
    if facts.dtype not in VARLEN_DTYPES:
        return f"it takes bf16 and fp16, not {dtype_name(facts.dtype)}"
    if not facts.equal_features or facts.features % 8 or facts.features > MOST_FEATURES:
        return (
            f"it takes heads of a multiple of 8 features, at most {MOST_FEATURES}, the same for"
            f" values; the queries have {facts.features}"
        )
    if facts.own_rule:
        return "it computes causal or full attention, without windows and padding"
    return _unsupported(facts)


def _why_no_flex(facts: Facts) -> str:
    if facts.no_flex:
        return facts.no_flex
    if facts.dtype not in FLEX_DTYPES:
        return f"it takes bf16, fp16 and fp32, not {dtype_name(facts.dtype)}"
    if facts.features < FEWEST_FEATURES:
        return f"it takes heads of at least {FEWEST_FEATURES} features, not {facts.features}"
    return _unsupported(facts)


def _unsupported(facts: Facts) -> str:
    if facts.dropout:
        return "it has no dropout"
    if facts.own_mask:
        return "the model gives a mask of its own"
    if facts.own_softmax:
        return "the model's attention is not sdpa, and may have sinks or a softcap"
    return ""


@dataclass(slots=True)
class ChosenKernels:
    """Collects the chosen attention kernels, and the reasons for the choices, for an event."""

    why: dict[Kernel, str] = field(default_factory=dict)
    is_reported: bool = False

    def add(self, facts: Facts) -> Kernel:
        kernel, why = choose(facts)
        self.why.setdefault(kernel, why)
        return kernel

    def details(self) -> dict[str, str]:
        return {KERNELS[kernel]: self.why[kernel] for kernel in KERNELS if kernel in self.why}
