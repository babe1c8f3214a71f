"""`Session.gather`: the rows of all data ranks, however many each has, with a gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training.subjects import network

import lockstep as ls
from lockstep.testing.pool import WorkerPool


def rows_of(rank: int, counts: list[int]) -> torch.Tensor:
    return torch.arange(2.0 * counts[rank]).reshape(-1, 2) + 100 * rank


def gathered(run_dir: str, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
    with ls.Session(run_dir=run_dir) as session:
        session.prepare(network, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
        mine = rows_of(session.rank, counts).requires_grad_()
        everyone = session.gather(mine)
        factors = torch.arange(1.0, everyone.numel() + 1).reshape(everyone.shape)
        (everyone * factors * (session.rank + 1)).sum().backward()
        return everyone.detach(), mine.grad


@pytest.mark.parametrize("counts", [[3], [22, 21], [22, 21, 21], [2, 0, 1]])
def test_each_rank_has_the_rows_of_all_and_the_gradients_of_all_for_its_own(
    pool: WorkerPool, tmp_path: Path, counts: list[int]
) -> None:
    found = pool.run(len(counts), gathered, str(tmp_path / "run"), counts)
    expected = torch.cat([rows_of(rank, counts) for rank in range(len(counts))])
    factors = torch.arange(1.0, expected.numel() + 1).reshape(expected.shape)
    for rank, (everyone, gradient) in enumerate(found):
        start = sum(counts[:rank])
        assert torch.equal(everyone, expected)
        assert gradient is not None
        assert torch.equal(
            gradient, factors[start : start + counts[rank]] * sum(range(1, len(counts) + 1))
        )
