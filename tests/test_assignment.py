from hypothesis import given
from hypothesis import strategies as st

from lockstep.assignment import batch_span, microbatches, share, steps_of

counts = st.integers(1, 500)


@given(counts, counts, st.integers(1, 4))
def test_in_epochs_the_steps_cover_every_position_once_and_never_straddle_an_epoch(length, global_batch, epochs):
    steps = steps_of(length=length, global_batch=global_batch, steps=None, epochs=epochs)
    spans = [batch_span(step, length=length, global_batch=global_batch, epochs=True) for step in range(steps)]
    assert [position for start, stop in spans for position in range(start, stop)] == list(range(epochs * length))
    assert all(start // length == (stop - 1) // length for start, stop in spans)
    assert all(stop - start == global_batch or stop % length == 0 for start, stop in spans)


@given(counts, counts, counts)
def test_in_steps_every_batch_is_whole_and_follows_on_the_one_before(length, global_batch, steps):
    assert steps_of(length=length, global_batch=global_batch, steps=steps, epochs=None) == steps
    spans = [batch_span(step, length=length, global_batch=global_batch, epochs=False) for step in range(steps)]
    assert [start for start, _ in spans] == [step * global_batch for step in range(steps)]
    assert all(stop - start == global_batch for start, stop in spans)


@given(counts, st.none() | counts, st.integers(1, 20))
def test_microbatches_make_up_the_batch_and_none_is_empty(size, microbatch, world_size):
    spans = microbatches(size, microbatch, world_size)
    assert [sample for start, stop in spans for sample in range(start, stop)] == list(range(size))
    assert all(start < stop for start, stop in spans)


@given(counts, counts, st.integers(1, 20), st.integers(1, 20))
def test_a_microbatch_of_fixed_size_does_not_depend_on_the_world_size(size, microbatch, world_size, other):
    spans = microbatches(size, microbatch, world_size)
    assert spans == microbatches(size, microbatch, other)
    assert {stop - start for start, stop in spans[:-1]} <= {microbatch}


@given(counts, st.integers(1, 20))
def test_without_a_size_there_is_one_nearly_equal_microbatch_a_rank(size, world_size):
    sizes = [stop - start for start, stop in microbatches(size, None, world_size)]
    assert len(sizes) == min(size, world_size)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 500), st.integers(1, 20))
def test_shares_are_contiguous_balanced_and_larger_ones_come_first(count, world_size):
    shares = [share(count, rank, world_size) for rank in range(world_size)]
    assert [item for part in shares for item in part] == list(range(count))
    sizes = [len(part) for part in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
