from itertools import pairwise, product

import pytest
from hypothesis import given, strategies as st

from lockstep.assignment import (
    WORTHWHILE,
    MicrobatchAssignment,
    batch_span,
    contiguous_range,
    microbatch_spans,
    shares,
    split_spans,
    total_steps,
)

counts = st.integers(1, 500)


@given(counts, counts, st.integers(1, 4))
def test_in_epochs_the_steps_cover_every_position_once_and_never_straddle_an_epoch(
    length, global_batch, epochs
):
    steps = total_steps(length=length, global_batch=global_batch, steps=None, epochs=epochs)
    spans = [
        batch_span(step, length=length, global_batch=global_batch, epochs=True)
        for step in range(steps)
    ]
    assert [position for start, stop in spans for position in range(start, stop)] == list(
        range(epochs * length)
    )
    assert all(start // length == (stop - 1) // length for start, stop in spans)
    assert all(stop - start == global_batch or stop % length == 0 for start, stop in spans)


@given(counts, counts, st.integers(1, 4))
def test_without_the_last_batch_all_batches_of_an_epoch_are_whole(length, global_batch, epochs):
    steps = total_steps(
        length=length, global_batch=global_batch, steps=None, epochs=epochs, drop_last=True
    )
    spans = [
        batch_span(step, length=length, global_batch=global_batch, epochs=True, drop_last=True)
        for step in range(steps)
    ]
    kept = length - length % global_batch
    assert [position for start, stop in spans for position in range(start, stop)] == [
        epoch * length + position for epoch in range(epochs) for position in range(kept)
    ]
    assert {stop - start for start, stop in spans} <= {global_batch}


@given(counts, counts, counts)
def test_in_steps_every_batch_is_whole_and_follows_on_the_one_before(length, global_batch, steps):
    assert total_steps(length=length, global_batch=global_batch, steps=steps, epochs=None) == steps
    spans = [
        batch_span(step, length=length, global_batch=global_batch, epochs=False)
        for step in range(steps)
    ]
    assert [start for start, _ in spans] == [step * global_batch for step in range(steps)]
    assert all(stop - start == global_batch for start, stop in spans)


@given(counts, st.none() | counts, st.integers(1, 20))
def test_microbatches_make_up_the_batch_and_none_is_empty(size, microbatch, world_size):
    spans = microbatch_spans(size, microbatch, world_size)
    assert [sample for start, stop in spans for sample in range(start, stop)] == list(range(size))
    assert all(start < stop for start, stop in spans)


@given(counts, counts, st.integers(1, 20), st.integers(1, 20))
def test_a_microbatch_of_fixed_size_does_not_depend_on_the_world_size(
    size, microbatch, world_size, other
):
    spans = microbatch_spans(size, microbatch, world_size)
    assert spans == microbatch_spans(size, microbatch, other)
    assert {stop - start for start, stop in spans[:-1]} <= {microbatch}


@given(counts, st.integers(1, 20))
def test_without_a_size_there_is_one_nearly_equal_microbatch_a_rank(size, world_size):
    sizes = [stop - start for start, stop in microbatch_spans(size, None, world_size)]
    assert len(sizes) == min(size, world_size)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 500), st.integers(1, 20))
def test_contiguous_ranges_are_balanced_and_larger_ones_come_first(count, world_size):
    shares = [contiguous_range(count, rank, world_size) for rank in range(world_size)]
    assert [item for part in shares for item in part] == list(range(count))
    sizes = [len(part) for part in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@st.composite
def split(draw):
    ranks = draw(st.integers(1, 20))
    return MicrobatchAssignment(ranks, round_robin=True, slices=draw(st.integers(1, ranks)))


@st.composite
def unequal(draw):
    speeds = draw(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
    return MicrobatchAssignment(len(speeds), speeds=tuple(speeds))


assignments = (
    st.builds(MicrobatchAssignment, st.integers(1, 20), st.booleans()) | split() | unequal()
)


@given(st.integers(0, 500), assignments)
def test_every_microbatch_belongs_to_one_rank(count, assigned):
    assert sorted(
        index for indices in assigned.indices_by_rank(count) for index in indices
    ) == list(range(count))


@given(st.integers(1, 500), assignments)
def test_without_the_dummies_a_rank_computes_its_indices(count, assigned):
    for rank in range(assigned.ranks):
        assert [
            place for place, is_dummy in assigned.with_dummies(count, rank) if not is_dummy
        ] == list(assigned.indices(count, rank))


@given(st.integers(1, 500), assignments)
def test_a_step_has_dummies_if_a_rank_has_one(count, assigned):
    dummies = [
        is_dummy
        for rank in range(assigned.ranks)
        for _, is_dummy in assigned.with_dummies(count, rank)
    ]
    assert assigned.has_dummies(count) == any(dummies)


@given(st.integers(1, 500), st.integers(1, 20))
def test_round_robin_all_ranks_have_as_many_rounds_and_round_r_has_the_next_microbatches(
    count, ranks
):
    rounds = [
        MicrobatchAssignment(ranks, round_robin=True).with_dummies(count, rank)
        for rank in range(ranks)
    ]
    assert {len(mine) for mine in rounds} == {-(-count // ranks)}
    counted = [
        place
        for together in zip(*rounds, strict=True)
        for place, is_dummy in together
        if not is_dummy
    ]
    assert counted == list(range(count))
    assert all(0 <= place < count for mine in rounds for place, _ in mine)


@given(st.integers(0, 500), assignments)
def test_gathered_positions_put_all_indices_into_order(count, assigned):
    gathered = [index for indices in assigned.indices_by_rank(count) for index in indices]
    assert [gathered[place] for place in assigned.gathered_positions(count)] == list(range(count))


@given(counts, counts, st.integers(1, 20))
def test_split_microbatches_are_computed_one_a_round_by_as_many_ranks_as_have_a_slice(
    size, microbatch, ranks
):
    assigned = MicrobatchAssignment(ranks, round_robin=True, slices=min(microbatch, ranks))
    whole = microbatch_spans(size, microbatch, 1)
    spans = split_spans(whole, assigned.slices)
    rounds = [assigned.with_dummies(len(spans), rank) for rank in range(ranks)]
    for together, (start, stop) in zip(zip(*rounds, strict=True), whole, strict=True):
        mine = [spans[place] for place, is_dummy in together if not is_dummy]
        assert [sample for a, b in mine for sample in range(a, b)] == list(range(start, stop))
        sizes = [b - a for a, b in mine]
        assert len(sizes) == min(stop - start, ranks)
        assert max(sizes) - min(sizes) <= 1
    assert all(0 <= place < len(spans) for mine in rounds for place, _ in mine)


speeds_of_ranks = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12).map(tuple)


@given(st.integers(0, 300), speeds_of_ranks)
def test_shares_sum_to_the_count_and_no_rank_is_idle_if_there_are_enough(count, speeds):
    sizes = shares(count, speeds)
    assert len(sizes) == len(speeds)
    assert sum(sizes) == count
    assert min(sizes) >= (count >= len(speeds))


@given(st.integers(0, 300), speeds_of_ranks, st.data())
def test_a_faster_rank_has_at_least_as_many(count, speeds, data):
    rank = data.draw(st.integers(0, len(speeds) - 1))
    faster = (*speeds[:rank], speeds[rank] * data.draw(st.floats(1, 100)), *speeds[rank + 1 :])
    assert shares(count, faster)[rank] >= shares(count, speeds)[rank]
    sizes = shares(count, speeds)
    order = sorted(range(len(speeds)), key=speeds.__getitem__)
    assert all(sizes[slow] <= sizes[fast] + 1 for slow, fast in pairwise(order))


@given(
    st.integers(0, 9),
    st.lists(st.floats(0.01, 100) | st.integers(1, 4).map(float), min_size=1, max_size=4).map(
        tuple
    ),
)
def test_no_other_shares_let_the_slowest_rank_be_done_earlier(count, speeds):
    least = int(count >= len(speeds))

    def longest(sizes):
        return max(size / speed for size, speed in zip(sizes, speeds, strict=True))

    possible = [
        sizes
        for sizes in product(range(least, count + 1), repeat=len(speeds))
        if sum(sizes) == count
    ]
    assert longest(shares(count, speeds)) == min(map(longest, possible))


@given(st.integers(0, 500), st.integers(1, 20), st.floats(1e-3, 1e3))
def test_equal_speeds_give_the_ranges_of_an_equal_assignment(count, ranks, speed):
    equal, measured = (
        MicrobatchAssignment(ranks),
        MicrobatchAssignment(ranks, speeds=(speed,) * ranks),
    )
    assert measured.indices_by_rank(count) == equal.indices_by_rank(count)


@given(
    st.integers(1, 100),
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8),
    st.lists(st.floats(1e-3, 1e3), min_size=8, max_size=8),
)
def test_an_assignment_changes_once_and_only_if_steps_become_shorter(count, seconds, before):
    def longest(assigned):
        return max(
            len(share) * each
            for share, each in zip(assigned.indices_by_rank(count), seconds, strict=True)
        )

    now = MicrobatchAssignment(len(seconds), speeds=tuple(before[: len(seconds)]))
    found = now.at_speeds(seconds, count)
    if found is None:
        assert longest(now) <= WORTHWHILE * longest(
            MicrobatchAssignment(len(seconds), speeds=tuple(1 / each for each in seconds))
        )
    else:
        assert longest(now) > WORTHWHILE * longest(found)
        assert found.at_speeds(seconds, count) is None


def test_a_rank_twice_as_fast_has_twice_as_many():
    assert MicrobatchAssignment(2).at_speeds([1.0, 2.0], 12).indices_by_rank(12) == (
        range(8),
        range(8, 12),
    )


@pytest.mark.parametrize("unknown", [float("nan"), float("inf"), 0.0])
def test_nothing_changes_before_each_rank_has_been_measured(unknown):
    assert MicrobatchAssignment(2).at_speeds([1.0, unknown], 12) is None
