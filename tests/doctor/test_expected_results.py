"""The definitions of collectives, held against plain loops over what every rank inputs."""

from __future__ import annotations

from itertools import chain, product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lockstep.doctor.benchmark import bus_bandwidth
from lockstep.doctor.expected_results import (
    BLOCK_SIZE,
    COLLECTIVES,
    DATA_TYPES,
    REDUCTIONS,
    CollectiveCase,
    cases,
    expected_output,
    rank_input,
    root,
    subgroups,
)

ALL = [case for collective in COLLECTIVES if collective != "barrier" for case in cases(collective)]
BY_HAND = {"sum": sum, "min": min, "max": max, "product": np.prod, "avg": np.mean}


@given(st.sampled_from(ALL), st.integers(1, 9), st.integers(0, 2000))
def test_what_is_held_follows_from_what_all_give(
    case: CollectiveCase, size: int, first: int
) -> None:
    global_ranks = list(range(first, first + 3 * size, 3))
    inputs = [rank_input(case, global_ranks, rank).tolist() for rank in range(size)]
    for rank in range(size):
        mine = slice(BLOCK_SIZE * rank, BLOCK_SIZE * (rank + 1))
        reduced = [BY_HAND[case.operation or "sum"](column) for column in zip(*inputs, strict=True)]
        leads = rank == root(global_ranks)
        expected = {
            "send/recv": inputs[rank - 1],
            "broadcast": inputs[-1],
            "reduce": reduced if leads else None,
            "all-reduce": reduced,
            "scatter": inputs[-1][mine],
            "gather": list(chain(*inputs)) if leads else None,
            "all-gather": list(chain(*inputs)),
            "reduce-scatter": reduced[mine],
            "all-to-all": list(chain(*(each[mine] for each in inputs))),
        }[case.collective]
        found = expected_output(case, global_ranks, rank)
        assert (None if found is None else found.tolist()) == expected


@pytest.mark.parametrize(("size", "apart"), [*product([1, 2, 3, 8, 100], [1, 2, 8]), (1000, 8)])
@pytest.mark.parametrize("data_type", DATA_TYPES, ids=lambda data_type: data_type.name)
def test_every_type_holds_every_partial_result_and_every_rank_counts(
    data_type: object, size: int, apart: int
) -> None:
    global_ranks = list(range(0, size * apart, apart))
    for case in (case for case in cases("all-reduce") if case.data_type == data_type):
        inputs = np.array([rank_input(case, global_ranks, rank) for rank in range(size)])
        assert np.abs(inputs).max() <= case.data_type.limit
        if not case.data_type.signed:
            assert inputs.min() >= 0
        if case.operation in ("sum", "avg"):
            assert inputs.sum(axis=0).max() <= case.data_type.limit
            assert size > BLOCK_SIZE or (inputs.sum(axis=1) > 0).all()
        if case.operation == "product":
            assert np.prod(inputs.astype(object), axis=0).max() <= case.data_type.limit


@pytest.mark.parametrize(
    "case", [case for case in ALL if case.data_type.name == "float32"], ids=lambda case: case.name
)
def test_a_rank_that_holds_its_own_numbers_or_its_neighbour_s_is_not_right(
    case: CollectiveCase,
) -> None:
    global_ranks = [0, 1, 2, 3]
    for rank in global_ranks:
        expected = expected_output(case, global_ranks, rank)
        if expected is not None:
            leads = case.collective in ("broadcast", "scatter") and rank == root(global_ranks)
            assert leads or not np.array_equal(
                np.resize(rank_input(case, global_ranks, rank), len(expected)), expected
            )
    if case.collective not in (*REDUCTIONS, "gather", "all-gather", "broadcast"):
        assert not np.array_equal(
            expected_output(case, global_ranks, 0), expected_output(case, global_ranks, 1)
        )


@given(st.integers(2, 40))
def test_every_rank_is_in_one_group_of_each_way_and_no_group_is_one_rank(size: int) -> None:
    for parts in subgroups(size).values():
        assert sorted(chain(*parts)) == list(range(size))
        assert all(len(part) > 1 for part in parts)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    factors = {
        "all-reduce": 1.5, "reduce-scatter": 0.75, "all-gather": 0.75, "all-to-all": 0.75,
        "gather": 0.75, "scatter": 0.75,
        "broadcast": 1.0, "reduce": 1.0, "send/recv": 1.0,
    }  # fmt: skip
    assert {name: bus_bandwidth(name, 10**9, 1.0, 4) / 1e9 for name in factors} == factors
