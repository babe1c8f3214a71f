"""The global norm of gradients: torch's, the same however they are cut, and read by one of the
ranks that hold the same."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from itertools import zip_longest

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from lockstep.comm import segment
from lockstep.comm.mesh import Mesh
from lockstep.comm.world import join
from lockstep.plan import Plan
from lockstep.testing.pool import WorkerPool
from lockstep.training.optim import gradient_norm

SHAPES = [(40, 7), (40,), (3, 2**16), (1, 5), (), (0, 4), (700, 200)]


def mesh(rank: int = 0, size: int = 1, *, bitwise: bool = False) -> Mesh:
    world = join(
        rank=rank, size=size, local_rank=rank, local_size=size, timeout=timedelta(minutes=1)
    )
    return Mesh.of(world, Plan.parse("numerics=bitwise" if bitwise else "").resolve(size))


@given(
    st.lists(
        st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5), min_size=1, max_size=5
    ),
    st.floats(0.01, 1000),
)
def test_clipping_is_torchs_to_within_its_epsilon(rows: list[list[float]], limit: float) -> None:
    gradients = [torch.tensor(row) for row in rows]
    parameters = [nn.Parameter(torch.zeros(len(row))) for row in rows]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    expected = float(nn.utils.clip_grad_norm_(parameters, limit))
    found = gradient_norm.GradientNorm(mesh(), bitwise=False).of(gradients)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-18)
    gradient_norm.clip(gradients, found, limit)
    for gradient, parameter in zip(gradients, parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bitwise", [False, True])
def test_the_norm_of_no_gradients_is_0(bitwise: bool) -> None:
    alone = gradient_norm.GradientNorm(mesh(bitwise=bitwise), bitwise=bitwise)
    assert alone.of([]) == alone.check([]) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_squares_are_summed_in_float64_and_leave_the_gradient_as_it_is(
    dtype: torch.dtype,
) -> None:
    for shape in SHAPES:
        part = torch.full(shape, 3.0, dtype=dtype)
        (sums,) = gradient_norm.squares_of_rows([part])
        assert sums.dtype is torch.float64
        assert sums.tolist() == [9.0 * math.prod(shape[1:])] * (shape[0] if shape else 1)
        assert part.eq(3).all()


@pytest.mark.parametrize("shape", [(2000, 80), (3, 20_000), (2, 30_000), (4, 100_003), (2, 2**20)])
def test_the_squares_of_a_row_do_not_depend_on_the_rows_beside_it(shape: tuple[int, int]) -> None:
    chance = torch.Generator().manual_seed(0)
    gradient = torch.randn(shape, generator=chance) * torch.randn(shape, generator=chance).exp()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for compute in (gradient_norm.squares_of_rows, gradient_norm.squares_by_halves):
            (together,) = compute([gradient])
            torch.testing.assert_close(
                together, torch.cat(compute(gradient.split(1))), rtol=0, atol=0
            )
            torch.testing.assert_close(together, gradient.double().square().sum(1))
    finally:
        torch.set_num_threads(threads)


def test_halves_are_added_as_they_are_written_here() -> None:
    """And not by a reduction kernel, whose order depends on the rows and the device."""

    def by_hand(numbers: list[float]) -> float:
        half = -(-len(numbers) // 2)
        if len(numbers) < 2:
            return sum(numbers)
        return by_hand(
            [a + b for a, b in zip_longest(numbers[:half], numbers[half:], fillvalue=0.0)]
        )

    matrices = [
        torch.randn(rows, width, generator=torch.Generator().manual_seed(width))
        for rows, width in ((1, 1), (3, 0), (2, 7), (5, 1025))
    ]
    found = gradient_norm.squares_by_halves(matrices)
    expected = [[by_hand(row) for row in matrix.double().square().tolist()] for matrix in matrices]
    assert [each.tolist() for each in found] == expected
    assert any(
        each.tolist() != matrix.double().square().sum(1).tolist()
        for each, matrix in zip(found, matrices, strict=True)
    )


@given(st.lists(st.integers(0, 100), max_size=20).map(tuple), st.integers(1, 5))
def test_gradients_are_shared_out_about_evenly(sizes: tuple[int, ...], ranks: int) -> None:
    takers = gradient_norm.balanced_assignment(sizes, ranks)
    loads = [
        sum(size for size, taker in zip(sizes, takers, strict=True) if taker == rank)
        for rank in range(ranks)
    ]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_the_largest_gradient_is_shared_out_first() -> None:
    assert gradient_norm.balanced_assignment((1, 1, 1, 1, 4), 2) == [1, 1, 1, 1, 0]


def norms(bitwise: bool, hosts: str, odd: float | None) -> tuple[float, float, float, list[int]]:
    """As one process has it, as these have it together, as they check it; and the sizes of the
    gradients that this one read for it."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    segment.process_id_space = lambda: [hosts[rank], 1]  # type: ignore[attr-defined]
    gradient_norm.MIN_SHARED_BYTES = 8
    gradients = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in SHAPES]
    if odd is not None:
        gradients[0][0, 0] = odd
    alone = gradient_norm.GradientNorm(mesh(bitwise=bitwise), bitwise=bitwise).of(gradients)
    laid_out = mesh(rank, size, bitwise=bitwise)
    together = gradient_norm.GradientNorm(laid_out, bitwise=bitwise)
    read: list[int] = []
    compute = {True: gradient_norm.squares_of_rows, False: torch._foreach_norm}[bitwise]

    def noting(given: list[Tensor]) -> object:
        read.extend(each.numel() for each in given)
        return compute(given)  # type: ignore[operator]

    if bitwise:
        gradient_norm.squares_of_rows = noting  # type: ignore[assignment]
    else:
        torch._foreach_norm = noting  # type: ignore[assignment]
    found = float(alone), float(together.of(gradients)), float(together.check(gradients)), read
    laid_out.close()
    return found


@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize(("size", "hosts"), [(2, "aa"), (3, "aab")])
def test_ranks_that_share_memory_read_some_of_the_gradients_each_for_the_same_norm(
    pool: WorkerPool, bitwise: bool, size: int, hosts: str
) -> None:
    found = pool.run(size, norms, bitwise, hosts, None)
    assert len({value for alone, together, *_ in found for value in (alone, together)}) == 1
    everything = sorted(math.prod(shape) for shape in SHAPES)
    shares = [sorted(read[: len(read) // 2 if bitwise else None]) for *_, read in found]
    if bitwise and size == 3:
        assert shares == [everything] * 3, "ranks of other hosts have no memory in bitwise numerics"
    else:
        assert sorted([*shares[0], *shares[1]]) == everything
        assert min(len(share) for share in shares) > 0
        assert shares[2:] == [everything] * (size - 2), "alone on its host"


@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_on_the_rank_that_reads_it_is_so_for_all(
    pool: WorkerPool, odd: float
) -> None:
    for _, together, checked, _ in pool.run(2, norms, False, "aa", odd):
        assert not math.isfinite(together)
        assert not math.isfinite(checked)
