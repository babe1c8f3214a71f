import tracemalloc
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lockstep.base.errors import DataError
from lockstep.order import Order

seeds = st.integers(0, 2**63 - 1)
lengths = st.integers(1, 2**62)


def epochs_of(length, seed, count):
    """The samples of the first `count` epochs, one epoch a row."""
    return Order(length, seed).samples(np.arange(count * length))[1].reshape(count, length)


def deviation(counts):
    """Return by how many standard deviations the chi-square of counts, all equally likely, is off
    what chance gives."""
    expected = counts.sum() / len(counts)
    return normal(((counts - expected) ** 2 / expected).sum(), len(counts) - 1)


def normal(statistic, freedom):
    """Return a chi-square statistic as a normal deviate (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - 1 + spread) / spread**0.5


@given(st.integers(1, 3000), seeds, st.integers(0, 10**6))
def test_every_epoch_has_every_sample_exactly_once(length, seed, epoch):
    epochs, samples = Order(length, seed).samples(np.arange(epoch * length, (epoch + 1) * length))
    assert set(epochs.tolist()) == {epoch}
    assert sorted(samples.tolist()) == list(range(length))


@given(lengths, seeds, st.lists(st.integers(0, 2**62), min_size=1, max_size=50))
def test_a_position_has_the_same_sample_alone_as_among_others(length, seed, positions):
    order = Order(length, seed)
    epochs, samples = order.samples(np.array(positions))
    assert epochs.tolist() == [position // length for position in positions]
    assert all(0 <= sample < length for sample in samples)
    for position, sample in zip(positions, samples, strict=True):
        assert order.samples(np.array(position))[1] == sample


@given(st.integers(1, 2**16), seeds, st.integers(1, 2**30))
def test_many_positions_of_an_epoch_have_the_same_samples_as_a_few(length, seed, epoch):
    """The rounds of many positions are looked up in tables."""
    order = Order(length, seed)
    positions = epoch * length + np.arange(min(length, 1000))
    few = np.concatenate([order.samples(some)[1] for some in np.array_split(positions, 32)])
    assert order.samples(positions)[1].tolist() == few.tolist()


@given(st.integers(2**20, 2**62), seeds, st.integers(0, 2**61))
def test_samples_of_neighbouring_positions_differ_and_are_spread_over_the_data(length, seed, start):
    start -= start % length
    _, samples = Order(length, seed).samples(np.arange(start, start + 4096))
    assert len(set(samples.tolist())) == 4096
    assert deviation(np.histogram(samples, bins=16, range=(0, length))[0]) < 6


def test_orders_never_change_between_versions():
    def samples(length):
        return Order(length, 7).samples(np.array([0, 1, 2, 3, 2**62]))[1].tolist()

    assert samples(1) == [0, 0, 0, 0, 0]
    assert samples(2) == [0, 1, 1, 0, 0]
    assert samples(5) == [0, 4, 1, 2, 2]
    assert samples(37) == [29, 11, 35, 24, 13]
    assert samples(1000) == [608, 737, 490, 730, 636]
    assert samples(10**12) == [652091481436, 357070635231, 653132815908, 956882882134, 78778932405]
    assert samples(2**62) == [
        2401871995258298326,
        2783275072139779088,
        4511647291240821125,
        4595680444779043080,
        2058222127579985098,
    ]


def test_seeds_and_epochs_have_orders_of_their_own():
    first, second = epochs_of(1000, 0, 2).tolist()
    assert first != second
    assert epochs_of(1000, 1, 1)[0].tolist() not in (first, second)


# Samples in one epoch are drawn without replacement, so a table of places by samples varies less
# than independent draws would by the factor (n - 1) / n, and has (n - 1)**2 degrees of freedom.
# Pairs are taken from one place an epoch, so they are independent.
STATISTICS = pytest.mark.parametrize(
    ("length", "epochs"), [(3, 100_000), (5, 200_000), (16, 100_000), (37, 50_000), (1000, 2000)]
)


@STATISTICS
@pytest.mark.parametrize("seed", [0, 1])
def test_every_sample_is_equally_likely_at_every_place(length, epochs, seed):
    cells = np.arange(length) * length + epochs_of(length, seed, epochs)
    counts = np.bincount(cells.ravel(), minlength=length**2)
    expected = epochs / length
    statistic = ((counts - expected) ** 2 / expected).sum() * (length - 1) / length
    assert abs(normal(statistic, (length - 1) ** 2)) < 4.75


@STATISTICS
@pytest.mark.parametrize("seed", [0, 1])
def test_every_pair_of_samples_is_equally_likely_at_adjacent_places(length, epochs, seed):
    samples = epochs_of(length, seed, epochs)
    rows, places = np.arange(epochs), np.arange(epochs) % (length - 1)
    distances = (samples[rows, places + 1] - samples[rows, places]) % length
    assert deviation(np.bincount(distances, minlength=length)[1:]) < 4.75
    if length < 1000:
        counts = np.bincount(
            samples[rows, places] * length + samples[rows, places + 1], minlength=length**2
        )
        assert deviation(counts.reshape(length, length)[~np.eye(length, dtype=bool)]) < 4.75


@pytest.mark.parametrize("length", [3, 4, 5])
def test_every_permutation_of_a_tiny_dataset_is_equally_likely(length):
    places = length ** np.arange(length)
    counts = np.bincount(epochs_of(length, 3, 200_000) @ places, minlength=length**length)
    orders = [sum(np.array(each) * places) for each in permutations(range(length))]
    assert deviation(counts[orders]) < 4.75


@pytest.mark.parametrize("length", [5, 37, 1000])
def test_the_orders_of_different_seeds_are_as_random_as_those_of_epochs(length):
    pairs = np.array([epochs_of(length, seed, 1)[0, :2] for seed in range(1000)])
    distances = (pairs[:, 1] - pairs[:, 0]) % length
    assert deviation(np.bincount(pairs[:, 0], minlength=length)) < 4.75
    assert deviation(np.bincount(distances, minlength=length)[1:]) < 4.75


@pytest.mark.parametrize("length", [10**6, 10**9, 10**12])
def test_4096_positions_take_less_than_a_megabyte_at_any_length(length):
    order, positions = Order(length, 0), np.arange(4096) + length // 2
    order.samples(positions)
    tracemalloc.start()
    try:
        order.samples(positions)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [0, -1])
def test_an_order_of_nothing_is_refused(length):
    with pytest.raises(
        DataError,
        match=rf"length={length}; an order needs at least one sample; give data that is not empty",
    ):
        Order(length, 0)
