"""The definitions of collectives, held against plain loops over what every rank gives."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from lockstep.doctor.bandwidth import algorithm_bandwidth, bus_bandwidth
from lockstep.doctor.definitions import BLOCK, COLLECTIVES, DATA_TYPES, REDUCING, Case, cases, given, held, root, subgroups

ALL = [case for collective in COLLECTIVES if collective != "barrier" for case in cases(collective)]
BY_HAND = {"sum": sum, "min": min, "max": max, "product": np.prod, "avg": np.mean}


@examples(st.sampled_from(ALL), st.integers(1, 9), st.integers(0, 2000))
def test_what_is_held_follows_from_what_all_give(case: Case, size: int, first: int) -> None:
    members = list(range(first, first + 3 * size, 3))
    gives = [given(case, members, me).tolist() for me in range(size)]
    for me in range(size):
        mine = slice(BLOCK * me, BLOCK * (me + 1))
        reduced = [BY_HAND[case.operation or "sum"](column) for column in zip(*gives, strict=True)]
        leads = me == root(members)
        expected = {
            "send/recv": gives[me - 1],
            "broadcast": gives[-1],
            "reduce": reduced if leads else None,
            "all-reduce": reduced,
            "scatter": gives[-1][mine],
            "gather": list(chain(*gives)) if leads else None,
            "all-gather": list(chain(*gives)),
            "reduce-scatter": reduced[mine],
            "all-to-all": list(chain(*(each[mine] for each in gives))),
        }[case.collective]
        found = held(case, members, me)
        assert (None if found is None else found.tolist()) == expected


@pytest.mark.parametrize("apart", [1, 2, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 100, 1000])
@pytest.mark.parametrize("kind", DATA_TYPES, ids=lambda kind: kind.name)
def test_every_type_holds_every_partial_result_and_every_rank_counts(kind: object, size: int, apart: int) -> None:
    members = list(range(0, size * apart, apart))
    for case in (case for case in cases("all-reduce") if case.kind == kind):
        gives = np.array([given(case, members, me) for me in range(size)])
        assert np.abs(gives).max() <= case.kind.limit
        if not case.kind.signed:
            assert gives.min() >= 0
        if case.operation in ("sum", "avg"):
            assert gives.sum(axis=0).max() <= case.kind.limit
            assert size > BLOCK or (gives.sum(axis=1) > 0).all()
        if case.operation == "product":
            assert np.prod(gives.astype(object), axis=0).max() <= case.kind.limit


@pytest.mark.parametrize("case", [case for case in ALL if case.kind.name == "float32"], ids=lambda case: case.name)
def test_a_rank_that_holds_its_own_numbers_or_its_neighbour_s_is_not_right(case: Case) -> None:
    members = [0, 1, 2, 3]
    for me in members:
        expected = held(case, members, me)
        if expected is not None:
            leads = case.collective in ("broadcast", "scatter") and me == root(members)
            assert leads or not np.array_equal(np.resize(given(case, members, me), len(expected)), expected)
    if case.collective not in (*REDUCING, "gather", "all-gather", "broadcast"):
        assert not np.array_equal(held(case, members, 0), held(case, members, 1))


@examples(st.integers(2, 40))
def test_every_rank_is_in_one_group_of_each_way_and_no_group_is_one_rank(size: int) -> None:
    for parts in subgroups(size).values():
        assert sorted(chain(*parts)) == list(range(size))
        assert all(len(part) > 1 for part in parts)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert algorithm_bandwidth(10**9, 0.5) == 2e9
    factors = {
        "all-reduce": 1.5, "reduce-scatter": 0.75, "all-gather": 0.75, "all-to-all": 0.75, "gather": 0.75, "scatter": 0.75,
        "broadcast": 1.0, "reduce": 1.0, "send/recv": 1.0,
    }  # fmt: skip
    assert {name: bus_bandwidth(name, 10**9, 1.0, 4) / 1e9 for name in factors} == factors
