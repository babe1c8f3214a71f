"""The numbers that a forward reads on the host, by the tokens that it has."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from worlds import ALONE

from lockstep.comm.world import World
from lockstep.model.context.exchange import TokenLayout
from lockstep.model.context.host_reads import HostReads, Noting, PartReads, noting

PARTS = [torch.full((6, 4), value) for value in (0.5, -0.5)]
"""Tokens of two ranks."""

DECIDES: dict[str, Callable[[Tensor], Any]] = {
    "bool": lambda x: bool(x.sum() > 0),
    "branch": lambda x: 1 if x.mean() > 0 else 2,
    "item": lambda x: x.amax().item(),
    "int": lambda x: int(x.sum()),
    "float": lambda x: float(x.norm()) > 0 and float(x.sum()),
    "index": lambda x: range(3)[(x.sum() > 0).long()],
    "tolist": lambda x: x.mean().tolist(),
    "equal": lambda x: torch.equal(x, x.abs()),
    "allclose": lambda x: torch.allclose(x, x.abs()),
    "number of all": lambda x: bool((x > 0).sum() == x.numel()),
    "majority": lambda x: bool((x > 0).sum() > 3),
    "max": lambda x: max(x.sum(), x.new_zeros(())),
}
MAY_DIFFER: dict[str, Callable[[Tensor], Any]] = {
    "any": lambda x: bool((x > 0).any()),
    "all": lambda x: bool((x > 0).all()),
    "no token": lambda x: bool((x > 0).sum() == 0),
    "count": lambda x: int((x > 0).sum()),
    "each count": lambda x: [int(count) for count in F.one_hot((x > 0).long().view(-1), 2).sum(0)],
    "bincount": lambda x: torch.bincount((x > 0).long().view(-1), minlength=2).max().item(),
    "nonzero": lambda x: [int(row) for row in (x > 0).nonzero()[:, 0]],
    "no read": lambda x: torch.where(x.sum() > 0, x, -x),
    "log": lambda x: f"{x.sum():.3f}",
}


def sums(body: Callable[[Tensor], Any], parts: list[Tensor]) -> tuple[list[float], str | None]:
    """Return the sums of the numbers of the ranks that have these parts, and the difference."""
    reads, forward = HostReads(ALONE), 1
    for rank, tokens in enumerate(parts):
        part = PartReads()
        with Noting(part):
            body(tokens)
        world = SimpleNamespace(rank=rank, size=len(parts))
        reads.end_part(forward, TokenLayout(12, 2, cast(World, world)), part)
    numbers = reads.numbers()
    reads.end_step()
    assert not any(reads.numbers())
    reads.ranks = [*range(len(parts))]
    return numbers, reads.difference()


@pytest.mark.parametrize("name", DECIDES)
def test_a_decision_by_some_tokens_is_named(name: str) -> None:
    numbers, text = sums(DECIDES[name], PARTS)
    assert any(numbers)
    assert text is not None
    assert "test_host_reads.py, line" in text
    assert "on rank 0" in text or "on rank 1" in text
    for tokens in PARTS:
        numbers, text = sums(DECIDES[name], [tokens] * 3)
        assert not any(numbers)
        assert text is None


@pytest.mark.parametrize("name", MAY_DIFFER)
def test_counts_of_tokens_and_logs_may_differ(name: str) -> None:
    numbers, text = sums(MAY_DIFFER[name], PARTS)
    assert not any(numbers)
    assert text is None


def test_differences_of_two_forwards_do_not_cancel() -> None:
    """The ranks read (True, False), then (False, True)."""
    reads = HostReads(ALONE)
    for forward in (1, 2):
        for rank in range(2):
            part = PartReads()
            with Noting(part):
                bool(PARTS[(forward + rank) % 2].sum() > 0)
            world = cast(World, SimpleNamespace(rank=rank, size=2))
            reads.end_part(forward, TokenLayout(12, 2, world), part)
    assert any(reads.numbers())


def test_a_rank_that_reads_less_is_seen() -> None:
    def body(tokens: Tensor) -> None:
        for _ in tokens.unbind():
            bool(tokens.new_ones(()))

    numbers, text = sums(body, [PARTS[0], PARTS[0][:5]])
    assert any(numbers)
    assert text is not None
    assert "gives True on rank 0;" in text


def test_calls_of_a_loss_are_noted_once_if_they_read_the_same() -> None:
    """One rank calls it for two parts of its tokens, another rank for one."""
    once, twice, changed = PartReads(), PartReads(), PartReads()

    def loss(tokens: Tensor, _: None) -> bool:
        return bool(tokens.sum() > 0)

    for part, calls in ((once, PARTS[:1]), (twice, PARTS[:1] * 2), (changed, PARTS)):
        noted = noting(loss, part)
        for tokens in calls:
            noted(tokens, None)
    assert once.digest.digest() == twice.digest.digest() != changed.digest.digest()
