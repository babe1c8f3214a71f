"""Attention of packed documents by each kernel, and the loss of chunked logits."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from models import GPT
from results import CPU, attempt, folder, report, rows_of
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.comm.world import World
from lockstep.model.chunked_logits import chunk_logits
from lockstep.model.context import kernels
from lockstep.model.context.active import ActiveSequence
from lockstep.model.context.attention import attention
from lockstep.model.context.documents import Documents
from lockstep.model.context.exchange import TokenLayout
from lockstep.model.context.kernels import KERNELS, Facts, Kernel

DEVICE = torch.device("cpu") if CPU else torch.device("cuda", 0)
SAMPLES, TOKENS, HEADS, FEATURES = (2, 96, 2, 16) if CPU else (4, 8192, 16, 64)
DOCUMENT = 24 if CPU else 1024
"""Mean tokens of a document."""
ROWS, WIDTH, WORDS = (256, 32, 512) if CPU else (16384, 1024, 50304)
REPEATS = 2 if CPU else 10
TOLERANCE = 2e-2
"""Relative error of a result in bf16."""


def context() -> None:
    """Which kernel an H100 gets, its result beside the dense mask's, and tokens a second; then the
    peak of whole and of chunked logits."""
    for function in (documents, logits, trained):
        attempt(function.__name__, function)


def documents() -> None:
    generator = torch.Generator().manual_seed(0)
    ends = torch.rand(SAMPLES, TOKENS, generator=generator) < 1 / DOCUMENT
    ids = ends.long().cumsum(1).to(DEVICE)
    dtype = torch.bfloat16
    given = [
        torch.randn(SAMPLES, HEADS, TOKENS, FEATURES, generator=generator).to(DEVICE, dtype)
        for _ in range(3)
    ]
    truth: list[Tensor] = []
    usual = kernels.choose
    for kernel in ("mask", *(("documents",) if CPU else ("flex", "varlen"))):
        with patch.object(kernels, "choose", partial(_forced, usual, kernel)):
            try:
                found, seconds = _timed(partial(_attended, given, ids))
            except (RuntimeError, NotImplementedError, TypeError) as error:
                report(f"documents, {kernel}", ok=False, error=str(error)[:400])
                continue
        truth = truth or found
        off = max(float((a - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True))
        report(
            f"documents, {kernel}",
            ok=off < TOLERANCE,
            off=off,
            kernel=KERNELS[kernel],
            tokens_per_second=round(SAMPLES * TOKENS / seconds),
            short=f"{SAMPLES * TOKENS / seconds:.3g} tokens/s, off {off:.1g}",
        )
    facts = kernels.facts(given[0], given[2])
    chosen, why = usual(facts)
    expected = "documents" if CPU else "varlen"
    report("documents, chosen", ok=chosen == expected, kernel=chosen, why=why, short=chosen)


def _forced(
    usual: Callable[[Facts], tuple[Kernel, str]], kernel: Kernel, facts: Facts
) -> tuple[Kernel, str]:
    return kernel, usual(facts)[1]


def _attended(given: list[Tensor], ids: Tensor) -> list[Tensor]:
    """Return the attention and its gradients."""
    world = World(0, 1, 0, 1, DEVICE, owns_group=False)
    sequence = ActiveSequence(
        TokenLayout(ids.shape[1], 16, world), "auto", Documents.of(ids, DEVICE)
    )
    query, key, value = (each.detach().requires_grad_() for each in given)
    output = attention(sequence, query, key, value, is_causal=True)
    output.float().square().sum().backward()
    return [output.detach(), *(each.grad for each in (query, key, value))]


def _timed(function: Callable[[], list[Tensor]]) -> tuple[list[Tensor], float]:
    """Return the result, and the seconds of a call after the first."""
    result = function()
    _wait()
    began = time.perf_counter()
    for _ in range(REPEATS):
        function()
    _wait()
    return result, (time.perf_counter() - began) / REPEATS


def _wait() -> None:
    if not CPU:
        torch.cuda.synchronize()


def logits() -> None:
    """The loss of a head, whole and chunked: the same gradients, less memory, as fast."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(DEVICE)
    labels = torch.randint(WORDS, (ROWS,), generator=generator).to(DEVICE)
    found = {}
    for kind in ("whole", "chunked"):
        torch.manual_seed(0)
        model = nn.Sequential()
        model.add_module("head", nn.Linear(WIDTH, WORDS, bias=False, device=DEVICE))
        if kind == "chunked":
            chunk_logits(model, "head")
        step = partial(_loss, model, hidden, labels)
        step()
        if not CPU:
            torch.cuda.reset_peak_memory_stats()
        values, seconds = _timed(step)
        peak = 0 if CPU else torch.cuda.max_memory_allocated()
        found[kind] = values, seconds, peak
    (whole, slow, large), (chunked, fast, small) = found["whole"], found["chunked"]
    off = max(float((a - b).norm() / b.norm()) for a, b in zip(chunked, whole, strict=True))
    report(
        "logits=chunked beside whole",
        ok=off < TOLERANCE and (CPU or (small < large and fast <= 1.05 * slow)),
        off=off,
        seconds={"whole": slow, "chunked": fast},
        peak_gb={"whole": large / 1e9, "chunked": small / 1e9},
        short=f"{fast / slow:.2f} of the time, {large / 1e9:.2f} -> {small / 1e9:.2f} GB",
    )


def _loss(model: nn.Module, hidden: Tensor, labels: Tensor) -> list[Tensor]:
    model.zero_grad()
    hidden = hidden.detach().requires_grad_()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        F.cross_entropy(model(hidden), labels).backward()
    return [hidden.grad, *(each.grad for each in model.parameters())]


def trained() -> None:
    """The event of a training with packed documents."""
    generator = torch.Generator().manual_seed(0)
    texts = [
        torch.randint(256, (length,), generator=generator).tolist()
        for length in torch.randint(2, 48, (64,), generator=generator).tolist()
    ]
    run_dir = folder("documents")
    ls.train(
        ls.Recipe(
            model=partial(GPT, layers=2, width=64, heads=4, context=64, vocabulary=256),
            data=ls.pack(texts, 64),
            inputs=lambda batch: batch["input_ids"],
            loss=_entropy,
            weight=lambda batch: (batch["labels"][:, 1:] != -100).sum(),
            sequence=ls.Sequence(documents=lambda batch: batch["document_ids"]),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            global_batch=4,
            microbatch=2,
            steps=3,
            precision="bf16",
        ),
        run_dir=run_dir,
    )
    said = [
        row["kernels"]
        for row in rows_of(run_dir / "events.jsonl")
        if row["event"] == "attention-kernel"
    ]
    expected = KERNELS["documents" if CPU else "varlen"]
    report("event attention-kernel", ok=[[*each] for each in said] == [[expected]], kernels=said)


def _entropy(output: Tensor, batch: dict[str, Tensor]) -> ls.Sum:
    logits, labels = output[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return ls.Sum(F.cross_entropy(logits.float(), labels, reduction="sum"))
