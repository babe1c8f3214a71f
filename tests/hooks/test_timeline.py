"""Traces of all ranks on one clock, and what their time went to."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lockstep.base.errors import LaunchError
from lockstep.hooks.profiling.trace import (
    Span,
    TimeParts,
    heaviest,
    length,
    merged,
    profiled_steps,
    time_parts,
    union,
    without,
)

TRAINS, OTHER = 7, 8
WINDOW = (0.0, 100.0)
ends = st.tuples(st.integers(-10, 110), st.integers(-10, 110))
spans = st.lists(ends.map(lambda two: (float(min(two)), float(max(two)))), max_size=12)


def event(
    name: str, start: float, stop: float, *, cat: str = "cpu_op", thread: int = TRAINS
) -> dict[str, Any]:
    """Times in seconds."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "tid": thread,
        "ts": start * 1e6,
        "dur": (stop - start) * 1e6,
    }


def of(*events: dict[str, Any], base: int = 0) -> dict[str, Any]:
    return {"baseTimeNanoseconds": base, "traceEvents": list(events)}


@pytest.mark.parametrize(
    "text", ["10:13", "steps=13:10", "steps=10:10", "steps=-1:2", "steps=1", ""]
)
def test_steps_are_the_first_and_the_one_after_the_last(text: str) -> None:
    assert profiled_steps("steps=10:13") == range(10, 13)
    with pytest.raises(
        LaunchError, match="it must be the first step and the one after the last: steps=10:13"
    ):
        profiled_steps(text)


def inside(moment: float, several: list[Span]) -> bool:
    return any(start <= moment < stop for start, stop in several)


@given(spans, spans)
def test_spans_are_sets_of_times(some: list[Span], others: list[Span]) -> None:
    one, other = union(some, WINDOW), union(others, WINDOW)
    for moment in [number + 0.5 for number in range(-12, 112)]:
        here, there = (
            inside(moment, some) and 0 <= moment < 100,
            inside(moment, others) and 0 <= moment < 100,
        )
        assert inside(moment, one) == here
        assert inside(moment, without(one, other)) == (here and not there)
    assert all(stop < start for (_, stop), (start, _) in pairwise(one))
    assert length(one) == length(without(one, other)) + length(without(one, without(one, other)))


def test_overlapped_exchanges_are_counted_apart_from_exposed_ones() -> None:
    found = time_parts(
        of(
            # its hooks may wait in Python
            event("autograd::engine::evaluate_function: DDPSinkBackward", 0, 40),
            event("DDPSinkBackward", 5, 40),
            event("aten::addmm", 10, 40),
            event("gloo:all_reduce", 30, 60, cat="user_annotation", thread=OTHER),
            event("c10d::allreduce_", 40, 60),
            event("aten::mm", 70, 80),
            event("aten::mm", 0, 100, thread=OTHER),
        ),
        WINDOW,
        TRAINS,
    )
    assert found == TimeParts(whole=100.0, compute=40.0, exposed=20.0, overlapped=10.0)
    assert found.idle == 40.0


def test_an_operator_computes_beside_those_that_it_calls() -> None:
    copies = [
        event("aten::copy_", 2, 4),
        event("aten::expand", 0, 1),
        event("aten::as_strided", 0, 1),
    ]
    waits = [event("_c10d_functional::wait_tensor", 4, 10), event("aten::mm", 4, 12)]
    found = time_parts(of(event("aten::addmm", 0, 40), *copies, *waits), WINDOW, TRAINS)
    assert found.compute == 34.0, "a matrix product on a CPU calls operators that only prepare it"


def test_sums_in_shared_memory_belong_to_the_exchange() -> None:
    found = time_parts(
        of(event("shared:all_reduce", 0, 30, cat="user_annotation"), event("aten::add", 5, 10)),
        WINDOW,
        TRAINS,
    )
    assert (found.compute, found.exposed, found.overlapped) == (0.0, 30.0, 0.0)


def test_kernels_are_computation_and_nccl_kernels_are_exchanges() -> None:
    found = time_parts(
        of(
            event("gemm", 0, 30, cat="kernel", thread=20),
            event("ncclAllReduce", 20, 50, cat="kernel", thread=21),
        ),
        WINDOW,
        TRAINS,
    )
    assert (found.compute, found.exposed, found.overlapped) == (30.0, 20.0, 10.0)


def test_the_time_of_an_operator_excludes_those_that_it_calls() -> None:
    trace = of(
        event("linear", 0, 10),
        event("mm", 2, 8.5),
        event("linear", 10, 12),
        event("elsewhere", 0, 50, thread=OTHER),
    )
    assert heaviest(trace, TRAINS, 5) == [("mm", 1, 6.5), ("linear", 2, 5.5)]
    assert heaviest(trace, TRAINS, 1) == [("mm", 1, 6.5)]


def test_the_merged_trace_has_a_process_for_each_rank_on_one_clock() -> None:
    arrow = {"ph": "s", "id": 5, "name": "fwdbwd", "pid": 111, "tid": 1, "ts": 1.0}
    old_name = {"ph": "M", "name": "process_name", "pid": 111, "args": {}}
    traces = {
        0: of(event("a", 1, 2), base=10**9),
        1: of(event("b", 1, 2), arrow, old_name, base=2 * 10**9),
    }
    found = merged(traces, ["one", "two"], [0.0, 0.25])
    times = {
        each["name"]: (each["pid"], each["ts"])
        for each in found["traceEvents"]
        if each["ph"] == "X"
    }
    assert times == {"a": (0, 1e6), "b": (1, 1e6 + 1e6 - 0.25e6)}
    assert {each.get("id") for each in found["traceEvents"]} == {None, "1.5"}
    names = [
        each["args"]["name"] for each in found["traceEvents"] if each["name"] == "process_name"
    ]
    assert names == ["rank 0 on one", "rank 1 on two"]
    assert found["baseTimeNanoseconds"] == 10**9
