"""Traces as values: the peak of the memory, and the bytes that are sent."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import get_args

import pytest
from hypothesis import given, strategies as st

from lockstep.planner.trace import (
    Cause,
    Collective,
    CollectiveKind,
    Communicate,
    Compute,
    Mark,
    MemoryChange,
    Operation,
    TracedStep,
    memory_peak,
    sent_bytes,
    with_more_microbatches,
)

CAUSES = get_args(Cause)


def trace_of(*changes: tuple[int, int], causes: dict[int, Cause] | None = None) -> TracedStep:
    """A trace of changes of blocks of memory, one before each item."""
    known = causes or dict.fromkeys((number for number, _ in changes), "activations")
    return TracedStep(
        0, [], [MemoryChange(number, size, at) for at, (number, size) in enumerate(changes)], known
    )


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Blocks that are allocated, some of them freed later, in any order."""
    sizes = draw(st.lists(st.integers(1, 1000), max_size=12))
    changes = [(number, size) for number, size in enumerate(sizes)]
    for number, size in enumerate(sizes):
        if draw(st.booleans()):
            start = changes.index((number, size)) + 1
            changes.insert(draw(st.integers(start, len(changes))), (number, -size))
    return changes


def test_without_allocations_nothing_is_in_memory() -> None:
    assert memory_peak(trace_of()).bytes == 0
    assert memory_peak(trace_of()).by_cause == {}


def test_the_peak_is_that_of_the_moment_with_the_most() -> None:
    trace = trace_of((1, 50), (2, 30), (1, -50), (3, 40), (2, -30))
    items = [Mark("microbatch"), item("backward"), Mark("update")]
    found = memory_peak(replace(trace, items=items))
    assert (found.bytes, found.moment) == (80, "the step of microbatch 1")
    assert memory_peak(replace(trace, items=items[1:])).moment == "the backward of microbatch 0"
    assert memory_peak(replace(trace, items=items[2:])).moment == "the optimizer's step"


def test_the_peak_names_what_is_in_memory_then_the_most_first() -> None:
    causes: dict[int, Cause] = {1: "parameters", 2: "activations", 3: "activations", 4: "logits"}
    found = memory_peak(
        trace_of((1, 50), (4, 10), (4, -10), (2, 40), (3, 30), (2, -40), causes=causes)
    )
    assert list(found.by_cause.items()) == [("activations", 70), ("parameters", 50)]


def test_a_block_may_grow_and_shrink() -> None:
    assert memory_peak(trace_of((1, 10), (1, 30), (1, -35), (2, 20))).bytes == 40


@given(histories())
def test_the_peak_is_the_largest_sum_and_its_causes_add_up(changes: list[tuple[int, int]]) -> None:
    causes: dict[int, Cause] = {number: CAUSES[number % len(CAUSES)] for number, _ in changes}
    found = memory_peak(trace_of(*changes, causes=causes))
    assert found.bytes == max([0, *accumulate(size for _, size in changes)])
    assert sum(found.by_cause.values()) == found.bytes
    assert all(found.by_cause.values())


@given(histories(), histories())
def test_more_memory_has_no_lower_peak(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    both = [*first, *((number + len(first), size) for number, size in second)]
    assert memory_peak(trace_of(*both)).bytes >= memory_peak(trace_of(*first)).bytes


# Bytes sent


def collective(kind: CollectiveKind, ranks: int, size: int, axis: str = "") -> Collective:
    return Collective(kind, ranks, 1, size, axis)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all_reduce", 1500),
        ("all_gather", 750),
        ("reduce_scatter", 750),
        ("all_to_all", 750),
        ("broadcast", 750),
        ("send", 1000),
    ],
)
def test_bytes_that_a_rank_of_four_sends_of_a_thousand(kind: CollectiveKind, sent: int) -> None:
    assert sent_bytes(collective(kind, 4, 1000)) == sent


@given(st.integers(1, 10**5), st.integers(0, 10**12))
def test_an_all_reduce_sends_as_much_as_a_reduce_scatter_and_an_all_gather(
    ranks: int, chunk: int
) -> None:
    """Of a tensor that splits evenly: exactly, with whole numbers of any size."""
    total = chunk * ranks
    parts = sent_bytes(collective("reduce_scatter", ranks, total)) + sent_bytes(
        collective("all_gather", ranks, total)
    )
    assert sent_bytes(collective("all_reduce", ranks, total)) == parts == 2 * chunk * (ranks - 1)


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
    st.integers(0, 10**12),
)
def test_one_rank_sends_nothing(kind: CollectiveKind, size: int) -> None:
    assert sent_bytes(collective(kind, 1, size)) == 0


def test_a_trace_sums_what_it_sends_by_kind_and_axis_and_what_it_receives_is_not_sent() -> None:
    items = [
        Communicate(collective("all_gather", 2, 100, "shard"), 1, 0, "a"),
        Communicate(collective("all_gather", 2, 60, "shard"), 2, 0, "a"),
        Communicate(collective("all_gather", 2, 60, "tensor"), 3, 0, "b"),
        Communicate(collective("send", 2, 7, "pipeline"), 4, 0, "c", peer=1),
        Communicate(collective("send", 2, 9, "pipeline"), 5, 0, "c", peer=1, receives=True),
    ]
    trace = TracedStep(0, items, [], {})
    assert trace.sent_bytes() == {
        "all_gather on shard": 80,
        "all_gather on tensor": 30,
        "send on pipeline": 7,
    }
    assert [each.bytes for each in trace.collectives()] == [100, 60, 60, 7]


# More microbatches


def item(kind: str) -> Mark | Compute:
    if kind == "microbatch":
        return Mark(kind)
    return Compute(
        Operation(
            kind="memory",
            dtype="float32",
            flops=0,
            bytes=4,
            shape=(),
            phase="backward",
            name="aten.add_",
        )
    )


def two_microbatches(
    *changes: tuple[int, int, int], causes: dict[int, Cause] | None = None
) -> TracedStep:
    """A step of two microbatches, with changes of blocks: number, bytes, place."""
    known = causes or dict.fromkeys((number for number, _, _ in changes), "activations")
    items = [item(kind) for kind in ("microbatch", "backward", "microbatch", "backward")]
    return TracedStep(0, [*items, Mark("update")], [MemoryChange(*each) for each in changes], known)


def test_what_each_microbatch_leaves_until_the_last_backward_grows_with_their_number() -> None:
    trace = two_microbatches((1, 10, 1), (2, 10, 3), (1, -10, 4), (2, -10, 4))
    assert [memory_peak(with_more_microbatches(trace, 2, count)).bytes for count in (2, 3, 8)] == [
        20,
        30,
        80,
    ]
    assert sum(each.bytes for each in with_more_microbatches(trace, 2, 7).allocations) == 0


@pytest.mark.parametrize(
    "changes",
    [
        [(1, 10, 1), (1, -10, 2), (2, 10, 3), (2, -10, 3)],
        [(1, 10, 0), (2, 10, 0)],
        [(1, 10, 1), (2, 20, 3), (1, -10, 4), (2, -20, 4)],
        [(1, 10, 4), (2, 10, 4), (1, -10, 5), (2, -10, 5)],
    ],
    ids=[
        "freed before the last backward",
        "there before the step",
        "one alone of its size",
        "allocated after the last backward",
    ],
)
def test_other_memory_does_not(changes: list[tuple[int, int, int]]) -> None:
    trace = two_microbatches(*changes)
    assert with_more_microbatches(trace, 2, 8).allocations == trace.allocations


@pytest.mark.parametrize("cause", ["parameters", "gradients", "optimizer"])
def test_state_does_not_grow_with_the_number_of_microbatches(cause: Cause) -> None:
    trace = two_microbatches((1, 10, 1), (2, 10, 3), causes={1: cause, 2: cause})
    assert with_more_microbatches(trace, 2, 8).allocations == trace.allocations
