"""metrics.jsonl has a checksum of the gradient, and runs with the same gradients have the same
checksums."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
import run_files
import torch
from hypothesis import given
from torch import Tensor
from training.subjects import adamw, each_of, network, recipe, rows, squared_error

import lockstep as ls
from lockstep.hooks.gradient_checksum import PIECE_ELEMENTS, checksum_of, gradient_sums
from lockstep.logging.run_files import CHECKSUM
from lockstep.testing.pool import WorkerPool

CPU = torch.device("cpu")
CASES = {
    1: [("replicate=1,numerics=bitwise", 0), ("replicate=1,numerics=bitwise", 1)],
    2: [("replicate=2,numerics=bitwise", 0), ("shard=2,numerics=bitwise", 0)],
}


def value(**gradients: Tensor) -> int:
    return checksum_of(gradient_sums(gradients.items(), CPU))


@given(st.integers(0, 12), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_the_parts_of_a_gradient_add_up_to_its_checksum(cut: int, dtype: torch.dtype) -> None:
    gradient = torch.randn(12, 3).to(dtype)
    assert value(w=gradient) == (value(w=gradient[:cut]) + value(w=gradient[cut:])) % 2**64


@pytest.mark.parametrize("elements", [PIECE_ELEMENTS, PIECE_ELEMENTS + 1, 3 * PIECE_ELEMENTS - 1])
def test_a_large_gradient_is_summed_in_pieces(elements: int) -> None:
    gradient = torch.randn(elements)
    rows = [gradient[start : start + 1000] for start in range(0, elements, 1000)]
    assert value(w=gradient) == sum(value(w=row) for row in rows) % 2**64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_one_bit_or_a_name_changes_it(dtype: torch.dtype) -> None:
    gradient = torch.randn(5, 3).to(dtype)
    flipped = gradient.clone()
    flipped.view(torch.uint8)[2, 1] ^= 1
    assert value(w=gradient) == value(w=gradient.t().contiguous().t())
    assert len({value(w=gradient), value(w=flipped), value(v=gradient), value()}) == 4


def test_it_is_the_sum_of_the_bits_of_every_element_times_a_number_of_its_tensor() -> None:
    """Published checksums stay as they are."""
    large = torch.arange(2 * PIECE_ELEMENTS, dtype=torch.float32)
    assert f"{value(w=-large, b=torch.tensor([1.5, -0.25])):016x}" == "d8a996bb05c00000"


def checksums(folder: str, plan: str, seed: int) -> list[str]:
    ls.train(recipe(seed=seed, steps=3, clip_norm=0.1), plan=plan, run_dir=folder, log_every=2)
    return [row[CHECKSUM] for row in run_files.metrics(folder)]


def checksums_of(folder: str, size: int) -> list[list[str]]:
    found: list[list[str]] = each_of(checksums, folder, CASES[size], may_refuse=False)
    return found


def test_each_bitwise_plan_writes_the_same_checksums(pool: WorkerPool, tmp_path: Path) -> None:
    (alone, other), (replicas, shards) = (
        pool.run(size, checksums_of, str(tmp_path / str(size)), size)[0] for size in CASES
    )
    assert alone == replicas == shards
    assert len({*alone, *other}) == 4, "another seed, other gradients; steps 2 and 3 are logged"
    assert all(len(each) == 16 for each in alone)


def test_a_step_that_every_model_skips_has_none(tmp_path: Path) -> None:
    with ls.Session(run_dir=str(tmp_path / "run"), log_every=1) as session:
        model, optimizer = session.prepare(network, adamw)
        for step in session.steps(rows(48), global_batch=16, microbatch=4, steps=3):
            if step.index == 1:
                step.skip(optimizer)
                continue
            for batch in step.microbatches():
                step.backward(squared_error(model, batch))
            step.commit(optimizer)
    found = {row["step"]: row.get(CHECKSUM) for row in run_files.metrics(tmp_path / "run")}
    assert found[1] is not None
    assert found.get(2) is None
    assert found[3] not in (None, found[1])
