"""The kernels of attention in documents: which one computes a call, with which arguments, and that
each computes the attention of the dense mask. `varlen_attn` runs on no CPU, so a loop with the same
signature stands in for it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from model.context.families import family
from model.context.test_transformers import (
    CASES,
    CPU,
    IDS,
    TOKENS,
    attending,
    backward,
    next_labels,
    taken,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import varlen
from worlds import all_ranks

from lockstep.base import accelerator
from lockstep.comm.world import World
from lockstep.model.context import kernels
from lockstep.model.context.active import ActiveSequence
from lockstep.model.context.attention import attention
from lockstep.model.context.documents import Documents
from lockstep.model.context.exchange import TokenLayout
from lockstep.model.context.kernels import KERNELS, Facts, choose
from lockstep.model.context.transformers import open_transformers
from lockstep.model.context.varlen import Bounds, bounds
from lockstep.testing.pool import WorkerPool

GPU = Facts(no_varlen="", no_flex="", on_cpu=False, dtype=torch.bfloat16, features=64)
HERE = Facts(
    no_varlen="an NVIDIA GPU", no_flex="on cpu", on_cpu=True, dtype=torch.float32, features=64
)


@pytest.mark.parametrize(
    ("facts", "kernel", "words"),
    [
        (GPU, "varlen", ()),
        (replace(GPU, dtype=torch.float16), "varlen", ()),
        (replace(GPU, features=256), "varlen", ()),
        (replace(GPU, features=8, no_flex="x"), "varlen", ()),
        (replace(GPU, whole_rows=False), "varlen", ()),
        (replace(GPU, no_varlen="old GPU"), "flex", ("varlen_attn: old GPU",)),
        (replace(GPU, dtype=torch.float32), "flex", ("bf16 and fp16, not float32",)),
        (replace(GPU, features=264), "flex", ("at most 256", "queries have 264")),
        (replace(GPU, features=60), "flex", ("multiple of 8",)),
        (replace(GPU, equal_features=False), "flex", ("the same for values",)),
        (replace(GPU, own_rule=True), "flex", ("without windows and padding",)),
        (replace(GPU, features=12), "mask", ("multiple of 8", "at least 16 features, not 12")),
        (replace(GPU, dtype=torch.float64), "mask", ("not float64; FlexAttention: it takes",)),
        (replace(GPU, no_varlen="old GPU", no_flex="no Triton"), "mask", ("old GPU", "no Triton")),
        (replace(GPU, dropout=0.1), "mask", ("varlen_attn: it has no dropout; FlexAttention",)),
        (replace(GPU, own_mask=True), "mask", ("a mask of its own",)),
        (replace(GPU, own_softmax=True), "mask", ("sinks or a softcap",)),
        (HERE, "documents", ("an NVIDIA GPU", "on cpu")),
        (replace(HERE, whole_rows=False), "mask", ()),
        (replace(HERE, dropout=0.1), "mask", ()),
        (replace(HERE, own_mask=True), "mask", ()),
        (replace(HERE, own_rule=True, own_softmax=True), "documents", ()),
    ],
)
def test_the_fastest_kernel_that_computes_the_call_is_chosen(
    facts: Facts, kernel: str, words: tuple[str, ...]
) -> None:
    found, why = choose(facts)
    assert found == kernel
    assert all(each in why for each in words), why
    assert bool(why) == (kernel != "varlen")


def test_devices_have_the_kernels_that_torch_has_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "compute capability 8.0" in accelerator.why_no_varlen_attention(CPU)
    capability, built = (9, 0), True
    monkeypatch.setattr(accelerator, "compute_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    gpu = torch.device("cuda", 0)
    assert accelerator.why_no_varlen_attention(gpu) == ""
    built = False
    assert "without flash attention" in accelerator.why_no_varlen_attention(gpu)
    capability = (7, 5)
    assert "compute capability 8.0" in accelerator.why_no_varlen_attention(gpu)
    assert accelerator.why_no_flex_attention(gpu) == ""
    assert "no backward on mps" in accelerator.why_no_flex_attention(torch.device("mps"))


def test_bounds_are_the_documents_of_the_queries() -> None:
    lengths = [3, 5, 2]
    assert bounds(lengths, range(10), is_causal=True) == Bounds(
        [0, 3, 8, 10], [0, 3, 8, 10], range(10)
    )
    assert bounds(lengths, range(5, 9), is_causal=True) == Bounds([0, 3, 4], [0, 5, 6], range(3, 9))
    assert bounds(lengths, range(5, 9), is_causal=False) == Bounds(
        [0, 3, 4], [0, 5, 7], range(3, 10)
    )
    assert bounds(lengths, range(4, 5), is_causal=True) == Bounds([0, 1], [0, 2], range(3, 5))


def stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """`varlen_attn` as torch describes it: one document after the other, the last query aligned
    with the last key."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (len(query), len(key)) == (cu_seq_q[-1], cu_seq_k[-1])
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    outputs, longest = [], [0, 0]
    for own, seen in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        sizes = own[1] - own[0], seen[1] - seen[0]
        longest = [*map(max, longest, sizes)]
        q, k, v = (
            each[slice(*place)].transpose(0, 1)
            for each, place in ((query, own), (key, seen), (value, seen))
        )
        mask = None
        if window_size == (-1, 0):
            mask = torch.ones(sizes, dtype=torch.bool).tril(sizes[1] - sizes[0])
        output = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(output[0].transpose(0, 1))
    assert longest == [max_q, max_k]
    return torch.cat(outputs)


def test_the_stand_in_has_the_signature_of_torch() -> None:
    def names(function: Any) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [(each.name, each.kind, each.default) for each in parameters]

    assert names(stand_in) == names(varlen.varlen_attn)


@contextmanager
def only(kernel: str) -> Iterator[None]:
    """Choose as on a GPU on which no other of the fast kernels runs."""

    def choose_on_gpu(facts: Facts) -> tuple[Any, str]:
        none = {"no_varlen": "none", "no_flex": "none"}
        none[f"no_{kernel}"] = ""
        given = replace(facts, **none, on_cpu=False, dtype=torch.bfloat16, features=64)  # type: ignore[arg-type]  # names of fields
        return choose(given)

    with (
        patch.object(kernels, "choose", choose_on_gpu),
        patch.object(varlen, "varlen_attn", stand_in),
    ):
        yield


def attended(
    layout: TokenLayout, exchange: Any, *, is_causal: bool, chosen: dict[str, str]
) -> list[Tensor]:
    """The attention of this rank's tokens in documents of two rows, and its gradients."""
    generator = torch.Generator().manual_seed(2)
    whole = [
        torch.randn(2, heads, IDS.shape[1], 8, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2)
    ]
    parts = [layout.take(each, 2).requires_grad_(torch.is_grad_enabled()) for each in whole]
    sequence = ActiveSequence(layout, exchange, Documents.of(IDS, CPU))
    output = attention(sequence, *parts, is_causal=is_causal, scale=0.3, enable_gqa=True)
    chosen |= sequence.chosen.details()
    if not torch.is_grad_enabled():
        return [output]
    return [output, *torch.autograd.grad(output.sin().sum(), parts)]


def distances(kernel: str) -> tuple[set[str], float]:
    """Return the kernels of attention over a GPU of this kind, and its largest difference from the
    attention of a CPU."""
    layout, chosen, most = TokenLayout(IDS.shape[1], 8, all_ranks()), dict[str, str](), 0.0
    gradients = torch.enable_grad() if kernel == "varlen" else torch.no_grad()
    for exchange in ("keys", "heads"):
        for is_causal in (True, False):
            with gradients:
                truth = attended(layout, exchange, is_causal=is_causal, chosen={})
                with only(kernel):
                    found = attended(layout, exchange, is_causal=is_causal, chosen=chosen)
            off = [float((a - b).abs().max()) for a, b in zip(truth, found, strict=True)]
            most = max(most, *off)
    return {*chosen}, most


@pytest.mark.parametrize("kernel", ["varlen", "flex"])
def test_each_kernel_computes_the_attention_of_the_dense_mask(
    pool: WorkerPool, kernel: Any
) -> None:
    for ranks in (1, 2):
        for chosen, off in pool.run(ranks, distances, kernel):
            assert chosen == {KERNELS[kernel]}
            assert off < 1e-12, (ranks, off)


def outputs(model: nn.Module, world: World, case: str, chosen: set[str]) -> list[Tensor]:
    """The logits of this rank's tokens, and with them the gradients if there are any."""
    ids = CASES[case]
    layout = TokenLayout(ids.shape[1], 8, world)
    given: dict[str, Any] = {"input_ids": layout.take(TOKENS, 1)}
    if case == "padded":
        given["attention_mask"] = layout.take((ids >= 0).long(), 1)
    documents = Documents.of(ids, CPU) if case == "documents" else None
    labels = layout.take(next_labels(ids), 1)
    with attending(layout, documents) as sequence:
        logits = model(**given).logits
    chosen |= {*sequence.chosen.details()}
    read = logits[labels != -100]
    if not torch.is_grad_enabled():
        return [read]
    backward(logits, labels)
    return [read.detach(), *taken(model)]


def distances_of_families(
    kernel: str, families: tuple[str, ...]
) -> tuple[dict[str, set[str]], float]:
    """Return the kernels of each family for each case, and the largest difference from a CPU."""
    world, found, most = all_ranks(), dict[str, set[str]](), 0.0
    for name in families:
        model = family(name, torch.float64)
        open_transformers(model)
        for case in CASES:
            with torch.set_grad_enabled(kernel == "varlen"):
                truth = outputs(model, world, case, set())
                with only(kernel):
                    mine = outputs(model, world, case, found.setdefault(f"{name} {case}", set()))
            off = [float((a - b).abs().max()) for a, b in zip(truth, mine, strict=True)]
            most = max(most, *off)
    return found, most


@pytest.mark.usefixtures("transformers_in_pool")
@pytest.mark.parametrize(
    ("kernel", "ranks", "expected"),
    [
        ("varlen", 1, {"llama": "vmv", "mistral": "mmm", "gemma2": "mmm"}),
        ("varlen", 2, {"llama": "omv"}),
        ("flex", 2, {"mistral": "fff"}),
    ],
)
def test_models_of_transformers_attend_by_the_kernels_that_compute_their_masks(
    pool: WorkerPool, kernel: str, ranks: int, expected: dict[str, str]
) -> None:
    """Of causal attention, a window and a softcap, plain, padded and with documents."""
    names = {each[0]: name for each, name in KERNELS.items()}
    for chosen, off in pool.run(ranks, distances_of_families, kernel, (*expected,)):
        assert chosen == {
            f"{name} {case}": {names[letter]}
            for name, letters in expected.items()
            for case, letter in zip(CASES, letters, strict=True)
        }
        assert off < 1e-5  # Gemma 2 computes its softmax in fp32
