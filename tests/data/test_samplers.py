"""`ls.samplers`: pure functions of (epoch, seed)."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lockstep import samplers
from lockstep.base.errors import RecipeError

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 1000)


def listed(batches: list[list[Any]]) -> list[list[list[int]]]:
    return [[[int(index) for index in microbatch] for microbatch in batch] for batch in batches]


@given(
    weights=st.lists(st.floats(0, 10), min_size=1, max_size=30).filter(
        lambda found: sum(found) > 0
    ),
    epoch=EPOCHS,
    seed=SEEDS,
)
def test_weighted_draws_only_samples_with_a_weight_and_the_same_again(
    weights: list[float], epoch: int, seed: int
) -> None:
    drawn = samplers.weighted(weights, samples=50)(epoch, seed)
    assert drawn.shape == (50,)
    assert all(weights[index] > 0 for index in drawn)
    assert np.array_equal(drawn, samplers.weighted(weights, samples=50)(epoch, seed))


def test_weighted_draws_in_proportion_and_other_samples_in_other_epochs() -> None:
    sampler = samplers.weighted([1, 0, 3], samples=40_000)
    first = Counter(sampler(0, 7).tolist())
    assert first[0] == pytest.approx(10_000, rel=0.05)
    assert first[2] == pytest.approx(30_000, rel=0.05)
    assert not np.array_equal(sampler(0, 7), sampler(1, 7))
    assert not np.array_equal(sampler(0, 7), sampler(0, 8))


def test_without_replacement_no_sample_comes_twice_and_the_heavy_ones_come_first() -> None:
    sampler = samplers.weighted([1.0] * 50 + [1e6] * 5 + [0.0] * 3, samples=10, replacement=False)
    for epoch in range(20):
        drawn = sampler(epoch, 3).tolist()
        assert len(set(drawn)) == 10
        assert set(range(50, 55)) == set(drawn[:5])
        assert max(drawn) < 55


def test_balanced_draws_each_label_equally_often() -> None:
    labels = ["cat"] * 90 + ["dog"] * 10
    drawn = Counter(labels[index] for index in samplers.balanced(labels, samples=20_000)(0, 1))
    assert drawn["dog"] == pytest.approx(10_000, rel=0.05)


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    samples=st.integers(1, 60),
    seed=SEEDS,
)
def test_a_mixture_has_each_dataset_in_its_ratio_and_repeats_no_sample_before_all_were_seen(
    sizes: list[int], samples: int, seed: int
) -> None:
    ratios = list(range(1, len(sizes) + 1))
    sampler, bounds = samplers.mixture(sizes, ratios, samples=samples), np.cumsum([0, *sizes])
    seen = np.concatenate([sampler(epoch, seed) for epoch in range(3)])
    assert len(seen) == 3 * samples
    for place, (start, stop) in enumerate(pairwise(bounds)):
        mine = seen[(seen >= start) & (seen < stop)]
        assert abs(len(mine) / 3 - samples * ratios[place] / sum(ratios)) < 1
        times = Counter(mine.tolist()).values()
        if times:
            assert max(times) - min([*times, 0] if len(times) < stop - start else times) <= 1


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    tokens=st.integers(1, 300),
    microbatches=st.integers(1, 4),
    epoch=EPOCHS,
    seed=SEEDS,
)
def test_batches_by_length_hold_each_sample_once_and_at_most_so_many_tokens(
    lengths: list[int], tokens: int, microbatches: int, epoch: int, seed: int
) -> None:
    sampler = samplers.by_length(lengths, tokens=tokens, microbatches=microbatches)
    batches = listed(sampler(epoch, seed))
    flat = [index for batch in batches for microbatch in batch for index in microbatch]
    assert sorted(flat) == list(range(len(lengths)))
    for batch in batches:
        assert 1 <= len(batch) <= microbatches
        for microbatch in batch:
            padded = len(microbatch) * max(lengths[index] for index in microbatch)
            assert padded <= tokens or len(microbatch) == 1
    assert len(listed(sampler(epoch + 1, seed))) == len(batches), "epochs have equally many batches"


def test_batches_by_length_waste_little_and_change_from_epoch_to_epoch() -> None:
    lengths = [int(length) for length in np.random.default_rng(0).integers(5, 200, 2000)]
    sampler = samplers.by_length(lengths, tokens=2000)
    batches = [microbatch for batch in listed(sampler(0, 0)) for microbatch in batch]
    padded = sum(
        len(microbatch) * max(lengths[index] for index in microbatch) for microbatch in batches
    )
    assert padded / sum(lengths) < 1.1
    assert {frozenset(each) for each in batches} != {
        frozenset(each) for batch in listed(sampler(1, 0)) for each in batch
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: samplers.weighted([0.0, 0.0]), "not all 0"),
        (lambda: samplers.weighted([1.0, -1.0]), "at least 0"),
        (lambda: samplers.weighted([1.0, float("nan")]), "finite"),
        (
            lambda: samplers.weighted([1.0, 0.0], samples=2, replacement=False),
            "without replacement at most as many as those",
        ),
        (lambda: samplers.mixture([3, 4], [1.0], samples=5), "a ratio for each dataset"),
        (lambda: samplers.by_length([3, 0], tokens=5), "at least 1 a sample"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make()
