"""Sketches are linear, and those of shards add up to the whole tensor's: from them alone factors
are read."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from audit.given_records import sketched
from hypothesis import given as drawn, settings, strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from lockstep.audit.probes.gradients import shard_start
from lockstep.base import torch_private
from lockstep.evidence.sketch import sketch
from lockstep.evidence.tensors import PROJECTIONS, sketch_difference

some = settings(max_examples=40)


@some
@drawn(st.integers(0, 2**32 - 1), st.integers(1, 300), st.floats(-5, 5), st.floats(-5, 5))
def test_sketches_are_linear(seed: int, count: int, a: float, b: float) -> None:
    x, y = torch.randn(2, count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    both = a * np.array(sketch(x)[:-1]) + b * np.array(sketch(y)[:-1])
    np.testing.assert_allclose(sketch(a * x + b * y)[:-1], both, atol=1e-10 * count)


@some
@drawn(st.lists(st.integers(0, 200_000), max_size=4), st.integers(0, 3))
def test_sketches_of_shards_add_up_to_the_whole_ones(cuts: list[int], extra: int) -> None:
    whole = torch.randn(
        131_072 + extra * 30_000, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
    )
    places = sorted({0, *(min(cut, len(whole)) for cut in cuts), len(whole)})
    parts = [sketch(whole[start:end], start) for start, end in pairwise(places)]
    np.testing.assert_allclose(np.sum(parts, axis=0), sketch(whole), rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize(
    ("start", "count"),
    [(65_535, 1), (65_535, 2), (65_536, 65_536), (1, 65_536), (70_000, 0), (3 * 65_536, 5)],
)
def test_a_shard_at_the_border_of_a_chunk_has_the_signs_of_its_place(
    start: int, count: int
) -> None:
    whole = torch.zeros(4 * 65_536, dtype=torch.float64)
    part = whole[start : start + count] = torch.arange(1.0, count + 1, dtype=torch.float64)
    np.testing.assert_allclose(sketch(part, start), sketch(whole), rtol=1e-12)


def test_a_sketch_is_of_the_values_and_not_of_their_layout() -> None:
    x = torch.randn(6, 5)
    assert sketch(x) == sketch(x.reshape(-1)) == sketch(x.t().contiguous().t())
    assert sketch(x.to_sparse()) == sketch(x)
    assert sketch(torch.tensor(3.0))[-1] == 9.0
    assert len(sketch(torch.empty(0))) == PROJECTIONS + 1
    assert sketch(torch.tensor([1 + 2j]))[-1] == 5.0


@some
@drawn(st.integers(0, 2**32 - 1), st.floats(1e-6, 1.0))
def test_the_difference_of_two_tensors_is_told_within_the_accuracy_of_a_sketch(
    seed: int, share: float
) -> None:
    random = np.random.default_rng(seed)
    x, y = random.standard_normal((2, 400))
    other = x + share * y
    true = np.linalg.norm(other - x) / max(np.linalg.norm(x), np.linalg.norm(other))
    assert 0.2 < sketch_difference(sketched(x), sketched(other)) / true < 2.2
    assert sketched(x)[-1] == pytest.approx(np.linalg.norm(x) ** 2)


def test_tensors_that_are_equal_or_not_there_do_not_differ() -> None:
    assert sketch_difference(sketched([1.0, 2.0]), sketched([1.0, 2.0])) == 0.0
    assert sketch_difference(None, sketched([1.0])) == sketch_difference(None, None) == 0.0
    assert sketch_difference(sketched([0.0]), sketched([0.0])) == 0.0
    assert sketch_difference(sketched([np.nan]), sketched([1.0])) == float("inf")


def test_tensors_that_are_not_finite_on_any_rank_do_not_differ() -> None:
    assert sketch_difference(sketched([np.nan, 1.0]), sketched([np.nan, 1.0])) == 0.0


# Shards


@pytest.fixture
def in_mesh() -> Iterator[Callable[..., DeviceMesh]]:
    """Make the mesh of a process with this rank that has no others: they need not answer."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(rank: int, *shape: int) -> DeviceMesh:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
        return init_device_mesh("cpu", shape)

    yield make
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("rank", "shape", "placements", "expected"),
    [
        (0, (4,), [Shard(0)], 0),
        (2, (4,), [Shard(0)], 4 * 3),
        (3, (4,), [Shard(0)], 5 * 3),  # the parts of 5 rows: 2, 2, 1, 0
        (0, (4,), [Replicate()], 0),
        (1, (4,), [Replicate()], None),
        (0, (4,), [Partial()], None),
        (0, (4,), [Shard(1)], None),
        (1, (2, 2), [Replicate(), Shard(0)], 3 * 3),
        (2, (2, 2), [Replicate(), Shard(0)], None),
        (1, (2, 2), [Shard(0), Replicate()], None),
        (2, (2, 2), [Shard(0), Shard(0)], 3 * 3),
    ],
)
def test_shard_start(
    in_mesh: Callable[..., DeviceMesh],
    rank: int,
    shape: tuple[int, ...],
    placements: list[Placement],
    expected: int | None,
) -> None:
    whole = torch.zeros(5, 3)
    tensor = DTensor.from_local(
        torch.zeros(1, 3),
        in_mesh(rank, *shape),
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    assert shard_start(tensor) == expected


def test_shard_start_is_where_the_local_part_begins(in_mesh: Callable[..., DeviceMesh]) -> None:
    mesh = in_mesh(2, 3)
    for shape in [(7, 2, 3), (7,), (2,), (3, 1)]:
        whole = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
        part = torch_private.to_local(
            distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        ).reshape(-1)
        start = shard_start(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
        assert whole.reshape(-1)[start : start + len(part)].tolist() == part.tolist()
