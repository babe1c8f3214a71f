"""The simulated time of a step: kernels, streams, collectives, and pipelines. In these traces a
kernel takes as many seconds as it has operations, and a collective as many as it has bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from planner.subjects import MICROBATCH, recipe, traced

from lockstep.planner.simulate import Costs, HostCosts, StepTime, extended_trace, fused, simulate
from lockstep.planner.trace import (
    DISPATCH,
    Await,
    AwaitEvent,
    Collective,
    CollectiveKind,
    Communicate,
    Compute,
    Item,
    Kind,
    Mark,
    Operation,
    RecordEvent,
    TracedStep,
)

COSTS = Costs(lambda operation: float(operation.flops), lambda collective: float(collective.bytes))
SECONDS = st.integers(0, 100)


def kernel(seconds: int, stream: int = 0, kind: Kind = "matmul") -> Compute:
    return Compute(Operation(kind, "float32", seconds, 0), stream)


def begun(
    number: int,
    seconds: int,
    *,
    stream: int = 0,
    group: str = "group",
    axis: str = "shard",
    kind: CollectiveKind = "all_gather",
) -> Item:
    return Communicate(Collective(kind, 2, 1, seconds, axis), number, stream, group)


def sent(number: int, to: int, seconds: int = 0) -> Item:
    return Communicate(
        Collective("send", 2, 1, seconds, "pipeline"), number, 0, "pipeline", peer=to
    )


def received(number: int, source: int) -> list[Item]:
    message = Collective("send", 2, 1, 0, "pipeline")
    return [
        Communicate(message, number, 0, "pipeline", peer=source, receives=True),
        Await(number, 0),
    ]


def time_of(*items: Item, costs: Costs = COSTS) -> StepTime:
    return simulate([TracedStep(0, items, [], {})], costs)


# One rank


def test_an_empty_step_takes_no_time() -> None:
    assert time_of().seconds == 0


@given(st.lists(SECONDS))
def test_kernels_of_a_stream_run_one_after_another(times: list[int]) -> None:
    assert time_of(*map(kernel, times)).seconds == sum(times)


@given(st.lists(SECONDS, max_size=20), st.integers(1, 50))
def test_the_host_puts_a_kernel_on_the_stream_before_it_runs(times: list[int], host: int) -> None:
    """The textbook recurrence: a kernel starts when it is there, and the one before it has
    ended."""
    end = 0
    for place, seconds in enumerate(times):
        end = max(end, (place + 1) * host) + seconds
    costs = Costs(COSTS.operation, COSTS.collective, host=HostCosts(host))
    step = time_of(*map(kernel, times), costs=costs)
    assert step.seconds == end
    assert sum(step.by_limit.values()) == end


def test_a_step_that_the_host_limits_is_all_launches_but_its_last_kernel() -> None:
    """However long each kernel takes, as long as the host takes longer: faster kernels would gain
    nothing."""
    costs = Costs(COSTS.operation, COSTS.collective, host=HostCosts(10))
    assert time_of(*map(kernel, [9, 9, 9, 9]), costs=costs).by_limit == {
        "launches": 40,
        "matmul": 9,
    }
    assert time_of(*map(kernel, [30, 30, 5, 5]), costs=costs).by_limit == {
        "matmul": 70,
        "launches": 10,
    }
    assert time_of(*map(kernel, [16, 1, 1]), costs=costs).by_limit == {"launches": 14, "matmul": 17}


@given(st.lists(SECONDS, max_size=20), st.integers(1, 50))
def test_a_host_that_computes_itself_does_nothing_meanwhile(times: list[int], host: int) -> None:
    costs = Costs(COSTS.operation, COSTS.collective, host=HostCosts(host), is_synchronous=True)
    assert time_of(*map(kernel, times), costs=costs).seconds == sum(times) + host * len(times)


@given(SECONDS, SECONDS, SECONDS)
def test_a_collective_runs_beside_kernels_until_it_is_waited_for(
    before: int, collective: int, after: int
) -> None:
    step = time_of(kernel(before), begun(1, collective), kernel(after), Await(1, 0), kernel(10))
    assert step.seconds == before + max(collective, after) + 10
    assert step.by_limit.get("shard", 0) == max(0, collective - after), "what nothing overlaps"
    assert step.overlapped_seconds == min(collective, after)


@given(SECONDS, SECONDS)
def test_collectives_of_a_group_run_one_after_another_and_those_of_two_groups_at_once(
    first: int, second: int
) -> None:
    assert (
        time_of(begun(1, first), begun(2, second), Await(1, 0), Await(2, 0)).seconds
        == first + second
    )
    assert time_of(
        begun(1, first), begun(2, second, group="other"), Await(1, 0), Await(2, 0)
    ).seconds == max(first, second)


def test_a_collective_that_nobody_waits_for_ends_within_the_step() -> None:
    assert time_of(begun(1, 50), kernel(10)).seconds == 50


def test_a_wait_for_what_began_before_the_step_takes_no_time() -> None:
    assert time_of(Await(7, 0), AwaitEvent(7, 0), kernel(3)).seconds == 3


@given(SECONDS, SECONDS, SECONDS)
def test_streams_run_at_once_and_an_event_orders_them(first: int, second: int, third: int) -> None:
    assert time_of(kernel(first), kernel(second, stream=1)).seconds == max(first, second)
    ordered = time_of(
        kernel(first), RecordEvent(0, 0), AwaitEvent(0, 1), kernel(second, stream=1), kernel(third)
    )
    assert ordered.seconds == first + max(second, third)


@given(SECONDS, SECONDS, SECONDS)
def test_a_wait_for_an_event_of_a_stream_that_waits_for_a_collective_goes_to_its_axis(
    work: int, gather: int, copy: int
) -> None:
    """As FSDP2 does: the all-gather and the copies after it are on a stream of their own."""
    items = (
        kernel(work),
        begun(1, gather, stream=1),
        Await(1, 1),
        kernel(copy, stream=1),
        RecordEvent(0, 1),
        AwaitEvent(0, 0),
        kernel(1),
    )
    step = time_of(*items)
    assert step.seconds == max(work, gather + copy) + 1
    if gather and gather + copy > work:
        assert step.by_limit["shard"] == gather + copy - work


@given(
    st.lists(st.tuples(st.sampled_from(["matmul", "memory", "attention"]), SECONDS), min_size=1),
    SECONDS,
)
def test_the_parts_of_a_step_add_up_to_it(kernels: list[tuple[Kind, int]], collective: int) -> None:
    items = [kernel(seconds, kind=kind) for kind, seconds in kernels]
    step = time_of(begun(1, collective), *items, Await(1, 0))
    assert sum(step.by_limit.values()) == step.seconds
    if step.seconds:
        assert step.by_limit[next(iter(step.by_limit))] == max(step.by_limit.values())


def test_a_mark_has_the_time_of_its_place() -> None:
    assert time_of(kernel(3), Mark("update"), kernel(4), Mark("end")).marks == {
        "update": 3,
        "end": 7,
    }


HOST = Costs(
    COSTS.operation, COSTS.collective, HostCosts(2, {"microbatch": 7, DISPATCH: 5}, {"shard": 20})
)


def test_the_host_works_at_marks_and_collectives_while_the_device_computes() -> None:
    items = [kernel(100), Mark("microbatch"), Mark(DISPATCH), begun(1, 3), Await(1, 0), kernel(10)]
    assert time_of(*items, costs=HOST).seconds == 2 + 100 + 3 + 10, (
        "the kernel is longer than all of that"
    )
    late = time_of(kernel(1), *items[1:], costs=HOST)
    assert late.seconds == 2 + 7 + 5 + 20 + 3 + 10
    assert late.by_limit == {"launches": 33, "shard": 3, "matmul": 11}


def test_a_collective_that_the_host_launches_late_waits_for_the_host_not_for_the_network() -> None:
    step = time_of(*[begun(1, 3), Await(1, 0), kernel(1)] * 9, costs=HOST)
    assert next(iter(step.by_limit)) == "launches"
    assert step.by_limit["launches"] > 0.8 * step.seconds


def test_what_the_host_does_after_the_last_kernel_is_launches() -> None:
    step = time_of(kernel(1), Mark("microbatch"), costs=HOST)
    assert step.by_limit == {"launches": 8, "matmul": 1}
    assert step.seconds == 9


def test_compiled_code_pads_the_operands_of_products() -> None:
    product = replace(kernel(1).operation, aligned_bytes=2)
    trace = TracedStep(0, [Compute(product), Mark("end")], [], {})
    assert fused(trace).items == [Compute(replace(product, aligned_bytes=16)), Mark("end")]


# More processes than cores


def shared(processes: int, slice_seconds: float) -> Costs:
    return Costs(
        COSTS.operation,
        COSTS.collective,
        is_synchronous=True,
        processes=processes,
        cores=2,
        slice_seconds=slice_seconds,
    )


@given(SECONDS, SECONDS, st.integers(1, 6))
def test_processes_share_the_cores_evenly_where_time_slices_are_short(
    first: int, second: int, processes: int
) -> None:
    slower = max(1.0, processes / 2)
    items = [kernel(first), begun(1, 5), Await(1, 0), kernel(second), begun(2, 5), Await(2, 0)]
    assert time_of(*items, costs=shared(processes, 0.0)).seconds == pytest.approx(
        slower * (first + second) + 10
    )


@given(SECONDS, SECONDS, st.integers(1, 6))
def test_processes_take_turns_where_time_slices_are_long(
    first: int, second: int, processes: int
) -> None:
    """Of three processes on two cores the third begins when one of the others waits for it."""
    items = [kernel(first), begun(1, 5), Await(1, 0), kernel(second), begun(2, 5), Await(2, 0)]
    assert time_of(*items, costs=shared(processes, 1e6)).seconds == pytest.approx(
        -(-processes // 2) * (first + second) + 10
    )


@given(st.integers(1, 100), st.integers(1, 100))
def test_the_last_process_is_late_by_half_a_slice_at_most(seconds: int, slice_seconds: int) -> None:
    step = time_of(kernel(seconds), begun(1, 0), Await(1, 0), costs=shared(3, slice_seconds))
    assert step.seconds == pytest.approx(min(2 * seconds, 1.5 * seconds + slice_seconds / 2))


def test_marks_take_what_the_machine_takes_at_them() -> None:
    costs = replace(COSTS, is_synchronous=True, host=HostCosts(marks={"end": 3.0}))
    assert time_of(kernel(1), Mark("microbatch"), Mark("end"), costs=costs).seconds == 1 + 3


# Pipelines


def one_f_one_b(
    stage: int, stages: int, microbatches: int, forward: int, backward: int, message: int = 0
) -> TracedStep:
    """A stage's rank under 1F1B: a warm-up of forwards, then a forward and a backward in turns,
    then the other backwards."""
    items: list[Item] = []
    number = iter(range(1, 10**6))
    warm = min(microbatches, stages - stage)

    def one_forward() -> None:
        if stage > 0:
            items.extend(received(next(number), stage - 1))
        items.append(kernel(forward))
        if stage < stages - 1:
            items.append(sent(next(number), stage + 1, message))

    def one_backward() -> None:
        if stage < stages - 1:
            items.extend(received(next(number), stage + 1))
        items.append(kernel(backward))
        if stage > 0:
            items.append(sent(next(number), stage - 1, message))

    for _ in range(warm):
        one_forward()
    for _ in range(microbatches - warm):
        one_backward()
        one_forward()
    for _ in range(warm):
        one_backward()
    return TracedStep(stage, items, [], {})


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 12), SECONDS, SECONDS)
def test_a_pipeline_without_communication_takes_the_time_of_the_textbook(
    stages: int, microbatches: int, forward: int, backward: int
) -> None:
    """(m + P - 1)(f + b), of which (P - 1)(f + b) is the bubble (Narayanan et al.,
    arXiv:2104.04473)."""
    step = simulate(
        [one_f_one_b(stage, stages, microbatches, forward, backward) for stage in range(stages)],
        COSTS,
    )
    assert step.seconds == (microbatches + stages - 1) * (forward + backward)
    assert step.by_limit.get("bubble", 0) == (stages - 1) * (forward + backward)


@settings(max_examples=30)
@given(st.integers(2, 6), st.integers(1, 12), SECONDS, SECONDS, st.integers(1, 20))
def test_messages_of_one_microbatch_go_through_the_pipeline_and_back(
    stages: int, microbatches: int, f: int, b: int, message: int
) -> None:
    alone = simulate(
        [one_f_one_b(stage, stages, 1, f, b, message) for stage in range(stages)], COSTS
    )
    assert alone.seconds == stages * (f + b) + 2 * (stages - 1) * message
    more = simulate(
        [one_f_one_b(stage, stages, microbatches, f, b, message) for stage in range(stages)], COSTS
    )
    assert more.seconds >= max(alone.seconds, (microbatches + stages - 1) * (f + b))


@settings(max_examples=30)
@given(st.integers(4, 8), st.integers(1, 10), SECONDS, SECONDS)
def test_a_trace_may_stand_for_the_ranks_after_it(
    stages: int, microbatches: int, forward: int, backward: int
) -> None:
    """Forwards alone: under 1F1B the middle ranks differ in their order."""

    def of(stage: int) -> TracedStep:
        items: list[Item] = []
        for count in range(microbatches):
            items += received(2 * count, stage - 1) if stage else []
            items.append(kernel(forward + backward))
            items += [sent(2 * count + 1, stage + 1)] if stage < stages - 1 else []
        return TracedStep(stage, items, [], {})

    own = [of(stage) for stage in range(stages)]
    shared = [own[0], *[own[1]] * (stages - 2), own[-1]]
    assert simulate(shared, COSTS) == simulate(own, COSTS)


@given(st.lists(SECONDS, min_size=1, max_size=8))
def test_messages_are_matched_in_their_order(times: list[int]) -> None:
    sender = [
        item for number, seconds in enumerate(times) for item in (kernel(seconds), sent(number, 1))
    ]
    receiver = [
        item for number in range(len(times)) for item in (*received(number, 0), Mark(str(number)))
    ]
    step = simulate([TracedStep(0, sender, [], {}), TracedStep(1, receiver, [], {})], COSTS)
    assert step.seconds == sum(times)
    first = simulate(
        [TracedStep(0, sender[:2], [], {}), TracedStep(1, [*receiver[:2], kernel(1)], [], {})],
        COSTS,
    )
    assert first.seconds == times[0] + 1


def test_a_collective_over_the_pipeline_waits_for_its_last_rank() -> None:
    """Each rank is traced alone: torch may name its group otherwise."""
    ranks = [
        TracedStep(
            rank,
            [
                kernel(before),
                begun(1, 5, group=f"{rank}", axis="pipeline"),
                Await(1, 0),
                kernel(after),
            ],
            [],
            {},
        )
        for rank, (before, after) in enumerate([(3, 10), (20, 0), (7, 0)])
    ]
    assert simulate(ranks, COSTS).seconds == 20 + 5 + 10


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    with pytest.raises(AssertionError, match="wait for each other"):
        simulate(
            [TracedStep(0, received(1, 1), [], {}), TracedStep(1, received(1, 0), [], {})], COSTS
        )


# More microbatches


def times(traces: Sequence[TracedStep]) -> list[float]:
    """With a collective's bytes in thousands: the sums of a step have some bytes for each
    microbatch."""
    costs = Costs(
        lambda operation: 1.0 + operation.bytes / 1000,
        lambda collective: 5.0 + round(collective.bytes, -3) / 2000,
    )
    return [simulate([trace], costs).seconds for trace in traces]


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_a_repeated_microbatch_takes_the_time_of_a_traced_one(plan: str) -> None:
    three, four = (traced(plan, recipe(global_batch=2 * MICROBATCH * count)) for count in (3, 4))
    longer = extended_trace(three, 3, 4)
    assert Counter(each.kind for each in longer.collectives()) == Counter(
        each.kind for each in four.collectives()
    )
    assert sum(isinstance(item, Mark) for item in longer.items) == sum(
        isinstance(item, Mark) for item in four.items
    )
    short, found, expected = times([three, longer, four])
    assert found == pytest.approx(expected, rel=1e-4)
    assert expected > short


def test_a_step_that_has_as_many_microbatches_is_not_changed() -> None:
    trace = TracedStep(0, [Mark("microbatch"), kernel(1), Mark("microbatch"), kernel(1)], [], {})
    assert extended_trace(trace, 2, 2) is trace
