from hypothesis import given
from hypothesis import strategies as st

from lockstep.assignment import Deal, batch_span, microbatches, share, slices, steps_of

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


@st.composite
def split(draw):
    ranks = draw(st.integers(1, 20))
    return Deal(ranks, in_turn=True, slices=draw(st.integers(1, ranks)))


deals = st.builds(Deal, st.integers(1, 20), st.booleans()) | split()


@given(st.integers(0, 500), deals)
def test_every_microbatch_is_dealt_to_one_rank(count, deal):
    assert sorted(place for share in deal.shares(count) for place in share) == list(range(count))


@given(st.integers(1, 500), deals)
def test_what_counts_of_a_ranks_rounds_is_its_share(count, deal):
    for rank in range(deal.ranks):
        assert [place for place, counts in deal.rounds(count, rank) if counts] == list(deal.share(count, rank))


@given(st.integers(1, 500), st.integers(1, 20))
def test_dealt_in_turn_all_ranks_have_as_many_rounds_and_round_r_has_the_next_microbatches(count, ranks):
    rounds = [Deal(ranks, in_turn=True).rounds(count, rank) for rank in range(ranks)]
    assert {len(mine) for mine in rounds} == {-(-count // ranks)}
    counted = [place for together in zip(*rounds, strict=True) for place, counts in together if counts]
    assert counted == list(range(count))
    assert all(0 <= place < count for mine in rounds for place, _ in mine)


@given(st.integers(0, 500), deals)
def test_places_put_the_shares_into_order(count, deal):
    dealt = [place for share in deal.shares(count) for place in share]
    assert [dealt[place] for place in deal.places(count)] == list(range(count))


@given(counts, counts, st.integers(1, 20))
def test_split_microbatches_are_computed_one_a_round_by_as_many_ranks_as_have_a_slice(size, microbatch, ranks):
    deal = Deal(ranks, in_turn=True, slices=min(microbatch, ranks))
    whole = microbatches(size, microbatch, 1)
    spans = slices(whole, deal.slices)
    rounds = [deal.rounds(len(spans), rank) for rank in range(ranks)]
    for together, (start, stop) in zip(zip(*rounds, strict=True), whole, strict=True):
        mine = [spans[place] for place, counts in together if counts]
        assert [sample for a, b in mine for sample in range(a, b)] == list(range(start, stop))
        sizes = [b - a for a, b in mine]
        assert len(sizes) == min(stop - start, ranks)
        assert max(sizes) - min(sizes) <= 1
    assert all(0 <= place < len(spans) for mine in rounds for place, _ in mine)
