"""Replicas are compared: one bit that flips in one of them is found, and nothing of it is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from training.subjects import recipe

import lockstep as ls
from lockstep.base.errors import DivergenceError
from lockstep.checkpoint.storage import FolderStorage
from lockstep.hooks.replica_audit import replica_difference
from lockstep.testing.pool import WorkerPool
from lockstep.training.checksum import checksum, mixed

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.complex64,
)


@given(st.data(), st.sampled_from(DTYPES), st.integers(0, 40))
def test_any_flipped_bit_changes_the_checksum(
    data: st.DataObject, dtype: torch.dtype, size: int
) -> None:
    count = size * dtype.itemsize
    raw = torch.tensor(
        data.draw(st.lists(st.integers(0, 255), min_size=count, max_size=count)), dtype=torch.uint8
    )
    tensor = raw.clone().view(dtype)
    before = checksum(tensor)
    assert torch.equal(before, checksum(raw.clone().view(dtype)))
    if size:
        tensor.view(torch.uint8)[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(
            st.integers(0, 7)
        )
        assert not torch.equal(before, checksum(tensor))


def test_a_checksum_is_of_the_values_however_they_lie() -> None:
    tensor = torch.arange(24.0).view(4, 6)
    assert torch.equal(checksum(tensor.t().contiguous().t()), checksum(tensor))
    assert torch.equal(checksum(tensor[1:, 1:]), checksum(tensor[1:, 1:].clone()))
    assert checksum(torch.tensor(2.5)).shape == ()


def test_what_is_mixed_counts_by_its_place() -> None:
    assert mixed(torch.tensor([1, 2])) != mixed(torch.tensor([2, 1]))
    assert mixed(torch.tensor([2**62, -(2**62), 5])) != mixed(torch.tensor([2**62, -(2**62), 6]))


@pytest.mark.parametrize(
    ("sums", "text"),
    [
        ({0: [1, 2], 1: [1, 2]}, ""),
        ({0: [1, 2], 1: [1, 3]}, "ranks 0, 1 have 2 different values of b"),
        (
            {0: [1, 2], 2: [5, 3], 4: [1, 2]},
            "rank 2 differs from the others in a, the first of 2 tensors",
        ),
        (
            {0: [1, 2], 1: [1, 3], 2: [1, 2], 3: [1, 4], 4: [1, 2]},
            "ranks 1, 3 differ from the others in b",
        ),
    ],
)
def test_who_differs_is_said_with_the_first_tensor(sums: dict[int, list[int]], text: str) -> None:
    assert replica_difference(["a", "b"], sums) == text


class Flip(ls.Hook):
    """One bit of one rank, after a step."""

    def __init__(self, rank: int, where: str, step: int = 3) -> None:
        self.rank, self.where, self.step = rank, where, step

    def after_step(self, run: Any) -> None:
        if run.step == self.step and run.context.world.rank == self.rank:
            parameter, *_ = run.model.parameters()
            tensor = (
                parameter
                if self.where == "parameter"
                else run.optimizers[0].state[parameter]["exp_avg"]
            )
            local = getattr(tensor, "_local_tensor", tensor).detach()
            # a lower one may be rounded away in the next step
            local.view(-1).view(torch.int32)[0] ^= 1 << 20


def flipped(run_dir: str, plan: str, rank: int, where: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_COMPARE_EVERY", "2")
        try:
            ls.train(
                recipe(steps=8, optimizer=adamw),
                run_dir=run_dir,
                plan=plan,
                hooks=[Flip(rank, where)],
                saving=ls.Saving(every=2),
            )
        except DivergenceError as error:
            return str(error)
    return ""


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("plan", "processes", "rank", "where", "text"),
    [
        (
            "replicate=3",
            3,
            1,
            "parameter",
            "were the same after step 2: rank 1 differs from the others in 0/model/",
        ),
        (
            "replicate=2",
            2,
            1,
            "optimizer",
            "were the same after step 2: ranks 0, 1 have 2 different values of 0/",
        ),
        pytest.param(
            "replicate=2,shard=2",
            4,
            3,
            "parameter",
            "ranks 1, 3 have 2 different values of 0/model/",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_flipped_bit_is_found_at_the_next_comparison_on_every_rank_and_not_saved(
    pool: WorkerPool, tmp_path: Path, plan: str, processes: int, rank: int, where: str, text: str
) -> None:
    said = set(pool.run(processes, flipped, str(tmp_path / "run"), plan, rank, where))
    assert len(said) == 1
    assert text in said.pop()
    assert {name.step for name in FolderStorage(tmp_path / "run" / "checkpoints").names()} <= {2}


def equal(run_dir: str, plan: str) -> int:
    return ls.train(recipe(steps=8), run_dir=run_dir, plan=plan, saving=ls.Saving(every=1)).steps


def test_replicas_of_a_healthy_run_are_the_same(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, equal, str(tmp_path / "run"), "replicate=2") == [8, 8]
