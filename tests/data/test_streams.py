import random
import weakref
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import default_collate

import lockstep as ls
from lockstep.base.errors import DataError
from lockstep.data.loader import Span, StreamLoader
from lockstep.data.positions import ShardPosition
from lockstep.data.streams import shard_samples

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")

CPU = torch.device("cpu")
WORKERS = pytest.mark.parametrize("workers", [0, 1])


def drawn():
    """One number from each of the default generators."""
    return random.random(), np.random.random(), torch.rand(()).item()


def length_of(shard, epoch):
    return 3 + (5 * shard + 7 * epoch) % 11


def numbered(shard, epoch, start):
    """Each sample says who it is."""
    for number in range(start, length_of(shard, epoch)):
        yield shard, epoch, number


def read(count, *, window, open=numbered, shard=0, seed=0, epoch=0, position=0):
    stream = ls.Stream(open, shards=shard + 1, window=window)
    return list(
        islice(shard_samples(stream, shard, seed=seed, begin=ShardPosition(epoch, position)), count)
    )


@given(st.integers(0, 5), st.integers(1, 20), st.integers(0, 2**63 - 1))
def test_every_epoch_of_a_shard_has_each_of_its_samples_once_each_window_its_own(
    shard, window, seed
):
    found = read(60, window=window, shard=shard, seed=seed)
    epoch = 0
    while found:
        length = length_of(shard, epoch)
        seen, found = found[:length], found[length:]
        assert [sample.after for sample in seen] == [
            (epoch, place) for place in range(1, len(seen) + 1)
        ]
        assert all(sample.value == (shard, epoch, sample.name.number) for sample in seen)
        if found:
            for first in range(0, length, window):
                assert sorted(
                    sample.name.number for sample in seen[first : first + window]
                ) == list(range(first, min(first + window, length)))
        epoch += 1


@settings(max_examples=30)
@given(st.integers(0, 5), st.integers(1, 20), st.integers(0, 50))
def test_a_shard_read_from_a_position_on_goes_on_as_if_it_had_been_read_to_it(shard, window, count):
    whole = read(60, window=window, shard=shard)
    epoch, position = whole[count].after
    places = [(epoch, position - 1), *([whole[count - 1].after] if count else [])]
    for epoch, position in places:
        assert (
            read(60 - count, window=window, shard=shard, epoch=epoch, position=position)
            == whole[count:]
        )


def test_a_window_of_one_is_no_shuffle_and_larger_ones_are_shuffled_each_otherwise():
    def orders(**options):
        return [
            sample.name.number
            for sample in read(
                40, open=lambda shard, epoch, start: iter(range(start, 40)), **options
            )
        ]

    assert orders(window=1) == list(range(40))
    first, *others = [
        [number % 10 for number in orders(window=10, **options)[begin : begin + 10]]
        for options in ({}, {"shard": 1}, {"seed": 1}, {"epoch": 1})
        for begin in (0, 10, 20, 30)
    ]
    assert first != sorted(first)
    assert len({tuple(order) for order in (first, *others)}) == 16


def test_the_order_of_a_window_never_changes_between_versions():
    assert [sample.name.number for sample in read(14, window=8, seed=7, shard=2)] == [
        7,
        3,
        6,
        5,
        2,
        1,
        4,
        0,
        12,
        11,
        10,
        8,
        9,
        2,
    ]


class Heavy:
    """A sample that can be counted."""


def test_no_more_samples_are_in_memory_than_one_window_and_the_one_at_hand():
    alive = weakref.WeakSet()
    most = 0

    def heavy(shard, epoch, start):
        nonlocal most
        while True:
            sample = Heavy()
            alive.add(sample)
            most = max(most, len(alive))
            yield sample
            del sample

    stream = ls.Stream(heavy, shards=1, window=8)
    for sample in islice(shard_samples(stream, 0, seed=0, begin=ShardPosition()), 50):
        most = max(most, len(alive))
        del sample
    assert most <= 8 + 2


def test_a_resumed_shard_reads_at_most_one_window_again():
    asked = []

    def noted(shard, epoch, start):
        for number in range(start, 1000):
            asked.append(number)
            yield number

    whole = read(500, window=16, open=noted)
    asked.clear()
    assert read(1, window=16, open=noted, position=499)[0].name == whole[499].name
    assert asked == list(range(496 - 496 % 16, 512))


def test_an_epoch_without_a_sample_is_refused_and_one_that_was_seen_whole_is_not():
    asked = []

    def empty_later(shard, epoch, start):
        asked.append((shard, epoch, start))
        return iter(range(start, 4 if epoch < 2 else 0))

    message = (
        "shard 1 of the stream has no sample in epoch 2; each shard has at least one; check what"
        " open(1, 2, 0) reads, or give fewer shards"
    )
    with pytest.raises(DataError) as caught:
        read(9, window=2, open=empty_later, shard=1, position=4)
    assert str(caught.value) == message
    assert asked == [(1, 0, 4), (1, 1, 0), (1, 2, 0)]


def test_a_shard_that_has_become_shorter_than_what_was_seen_of_it_is_refused():
    with pytest.raises(DataError) as caught:
        read(1, window=4, open=lambda shard, epoch, start: iter(range(start, 5)), position=7)
    assert (
        str(caught.value) == "shard 0 of the stream ends before sample 7 of epoch 0, from which the"
        " run continues; a shard's samples must depend on shard and epoch only; give the shards that"
        " the run began with"
    )


def test_what_open_returns_must_be_an_iterator():
    with pytest.raises(
        DataError,
        match=(
            r"Stream\.open\(0, 0, 0\) returned a NoneType; it returns an iterator over the shard's"
            r" samples; make"
        ),
    ):
        read(1, window=4, open=lambda *_: None)


# The loader


def spans(steps=6, first=0, microbatches=3, size=4, mine=None):
    """This rank's microbatches of `steps` global batches."""
    for step in range(first, steps):
        for index in range(microbatches) if mine is None else mine:
            start = (step * microbatches + index) * size
            yield Span(step=step, index=index, start=start, stop=start + size)


@pytest.fixture
def load():
    """Fetches all microbatches of some spans; closes the loaders at the end."""
    loaders = []

    def fetch(open, among=None, *, begin=(0, 0), shards=6, window=5, **options):
        loaders.append(
            StreamLoader(
                ls.Stream(open, shards=shards, window=window),
                **{"seed": 0, "device": CPU, **options},
            )
        )
        positions = dict.fromkeys(range(shards), ShardPosition(*begin))
        return list(
            loaders[-1].fetch(
                spans() if among is None else among, microbatches=3, positions=positions
            )
        )

    yield fetch
    for loader in loaders:
        loader.close()


def augmented(shard, epoch, start):
    for number in range(start, length_of(shard, epoch)):
        yield shard, epoch, number, drawn()


STREAMS = {
    "numbered": (numbered, None),
    "augmented": (augmented, list),
    "randomly collated": (numbered, lambda samples: (default_collate(samples), *drawn())),
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("mine", [None, [0, 2], [1]])
def test_any_number_of_workers_gives_the_same_microbatches(load, kind, mine):
    open, collate = STREAMS[kind]
    alone, one, three = (
        repr(load(open, spans(mine=mine), collate=collate, workers=workers))
        for workers in (0, 1, 3)
    )
    assert alone.count("Microbatch(") == 6 * (3 if mine is None else len(mine))
    assert alone == one == three


@WORKERS
def test_a_loader_that_begins_anew_elsewhere_does_so_with_its_workers(workers):
    loader = StreamLoader(
        ls.Stream(numbered, shards=6, window=5), seed=0, workers=workers, device=CPU
    )
    whole = list(loader.fetch(spans(), microbatches=3, positions={}))
    positions = {each.origin.shard: each.origin.after for each in whole[:9]}
    again = list(loader.fetch(spans(first=3), microbatches=3, positions=positions))
    loader.close()
    assert repr(again) == repr(whole[9:])


@WORKERS
def test_the_default_generators_are_left_as_they_are(load, workers):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = drawn()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    load(augmented, collate=list, workers=workers)
    assert drawn() == expected


def augmentation(load, **options):
    found = [sample for each in load(augmented, collate=list, **options) for sample in each.batch]
    return {(shard, epoch, number): numbers for shard, epoch, number, numbers in found}


def test_the_augmentation_of_a_sample_depends_on_seed_epoch_shard_and_sample_only(load):
    numbers = augmentation(load)
    assert len(numbers) == 6 * 3 * 4
    for one_generator in zip(*numbers.values(), strict=True):
        assert len(set(one_generator)) == len(numbers)
    others = augmentation(load, among=spans(size=2, steps=12), window=3)
    assert others.keys() & numbers.keys()
    assert all(numbers[sample] == others[sample] for sample in others.keys() & numbers.keys())
    assert not set(augmentation(load, seed=1).values()) & set(numbers.values())
    resumed = augmentation(load, begin=(0, 2), window=2)
    assert len(resumed.keys() & numbers.keys()) > 30
    assert all(numbers[sample] == resumed[sample] for sample in resumed.keys() & numbers.keys())


def test_what_open_itself_draws_does_not_depend_on_where_it_starts():
    found = []

    def draws(shard, epoch, start):
        found.append(drawn())
        return iter(range(start, 20))

    read(1, window=4, open=draws)
    read(1, window=4, open=draws, position=9)
    read(1, window=4, open=draws, epoch=1)
    assert found[0] == found[1] != found[2]


def test_random_collation_depends_on_seed_step_and_microbatch_only(load):
    def numbers(**options):
        return {
            (each.step, each.index): each.batch
            for each in load(numbered, collate=lambda samples: drawn(), **options)
        }

    assert len(set(numbers().values())) == 18
    assert numbers(window=1) == numbers()
    assert not set(numbers(seed=1).values()) & set(numbers().values())


@WORKERS
def test_a_microbatch_says_which_samples_it_has_and_where_its_shard_goes_on(load, workers):
    for each in load(numbered, collate=list, workers=workers):
        shard = each.index + 3 * (each.step % 2)
        assert each.origin.shard == shard
        assert each.batch == [(shard, name.epoch, name.number) for name in each.origin.samples]
    found = load(
        lambda shard, epoch, start: iter(range(start, 6)), spans(steps=3), window=1, shards=3
    )
    assert [str(each.origin) for each in found if each.index == 1] == [
        "samples [0, 1, 2, 3] of shard 1 in epoch 0",
        "samples [4, 5] of shard 1 in epoch 0 and [0, 1] of shard 1 in epoch 1",
        "samples [2, 3, 4, 5] of shard 1 in epoch 1",
    ]
    assert [each.origin.after for each in found if each.index == 1] == [(0, 4), (1, 2), (1, 6)]


def test_a_microbatch_that_is_computed_again_is_not_read_again_and_not_what_was_made_of_the_first(
    load,
):
    again = [
        Span(step=0, index=1, start=4, stop=8),
        Span(step=0, index=1, start=4, stop=8, is_dummy=True),
        Span(step=1, index=1, start=16, stop=20),
    ]
    first, second, third = load(
        lambda shard, epoch, start: (torch.tensor(n) for n in range(start, 99)),
        again,
        window=1,
        shards=3,
    )
    assert [each.is_dummy for each in (first, second, third)] == [False, True, False]
    first.batch.zero_()
    assert second.batch.tolist() == [0, 1, 2, 3]
    assert third.batch.tolist() == [4, 5, 6, 7]


@WORKERS
def test_a_failing_sample_keeps_its_exception_and_is_named(load, workers):
    def fails(shard, epoch, start):
        for number in range(start, 5):
            if (shard, epoch, number) == (2, 1, 3):
                raise KeyError("no such record", number)
            yield number

    with pytest.raises(KeyError) as caught:
        load(fails, workers=workers)
    assert caught.value.args == ("no such record", 3)
    assert caught.value.__notes__ == [
        "raised by sample 3 of shard 2 in epoch 1, from Stream.open(2, 1, 0)"
    ]
    if workers:
        assert "in fails" in str(caught.value.__cause__)


@WORKERS
def test_a_failing_open_keeps_its_exception_and_is_named(load, workers):
    def fails(shard, epoch, start):
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone") as caught:
        load(fails, workers=workers, begin=(3, 7))
    assert caught.value.__notes__ == [
        "raised by sample 5 of shard 0 in epoch 3, from Stream.open(0, 3, 5)"
    ]


@WORKERS
def test_samples_that_make_no_batch_are_named(load, workers):
    with pytest.raises(DataError) as caught:
        load(
            lambda shard, epoch, start: (torch.zeros(1 + n) for n in range(start, 9)),
            workers=workers,
            window=1,
        )
    assert "microbatch 0: samples [0, 1, 2, 3] of shard 0 in epoch 0 do not make a batch: " in str(
        caught.value
    )

    def cannot(samples):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        load(numbered, collate=cannot, workers=workers, window=1)
    said = "samples [0, 1, 2] of shard 0 in epoch 0 and [0] of shard 0 in epoch 1"
    assert caught.value.__notes__ == [f"raised by collate after step 0, microbatch 0: {said}"]


@WORKERS
def test_a_batch_made_otherwise_than_the_first_is_refused(load, workers):
    with pytest.raises(
        DataError,
        match=(
            r"^after step 0, microbatch 1: batch is torch.float32 and was torch.int64 in the first"
            r" microbatch;"
        ),
    ):
        load(
            lambda shard, epoch, start: (torch.tensor(1.0 if shard else 1) for _ in range(9)),
            workers=workers,
        )


@WORKERS
def test_requests_are_taken_only_as_far_ahead_as_workers_make_them(workers):
    taken = []

    def noted():
        for span in spans(steps=10**9):
            taken.append(span)
            yield span

    loader = StreamLoader(
        ls.Stream(numbered, shards=3, window=2), seed=0, workers=workers, device=CPU
    )
    next(loader.fetch(noted(), microbatches=3, positions={}))
    assert len(taken) <= 5
    loader.close()


def test_closing_ends_what_open_returned():
    closed = []

    def noted(shard, epoch, start):
        try:
            yield from range(start, 100)
        finally:
            closed.append(shard)

    loader = StreamLoader(ls.Stream(noted, shards=3), seed=0, device=CPU)
    fetched = loader.fetch(spans(), microbatches=3, positions={})
    assert len(list(islice(fetched, 3))) == 3
    assert closed == []
    loader.close()
    assert sorted(closed) == [0, 1, 2]


def test_shards_are_opened_one_after_another_and_each_epoch_once(load):
    asked = []

    def noted(shard, epoch, start):
        asked.append((shard, epoch, start))
        return numbered(shard, epoch, start)

    load(noted, spans(steps=20))
    for shard in range(6):
        mine = [(epoch, start) for number, epoch, start in asked if number == shard]
        assert mine[0] == (0, 0)
        assert all(later == (epoch + 1, 0) for (epoch, _), later in pairwise(mine))
