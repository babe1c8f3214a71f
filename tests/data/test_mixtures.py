"""`ls.Stream.mix`: which stream has a sample, where each goes on, what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import lockstep as ls
from lockstep.base.errors import DataError, RecipeError
from lockstep.data.positions import Position, beginning, position_in
from lockstep.data.streams import BLOCK, Sample, chosen_streams, shard_samples

WEIGHTS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6)


@given(WEIGHTS, st.integers(0, 2**64 - 1))
def test_each_stream_has_its_share_of_a_block_rounded_up_or_down(
    weights: list[float], seed: int
) -> None:
    found = np.bincount(chosen_streams(np.array(weights), seed), minlength=len(weights))
    shares = BLOCK * np.array(weights) / sum(weights)
    assert found.sum() == BLOCK
    assert (abs(found - shares) < 1 + 1e-6).all()


def test_a_stream_of_less_than_a_sample_a_block_has_its_share_of_many_blocks() -> None:
    weights = np.array([1, 4 * BLOCK - 1])
    blocks = [chosen_streams(weights, seed).count(0) for seed in range(2000)]
    assert max(blocks) == 1
    assert sum(blocks) == pytest.approx(500, rel=0.15)


@dataclass(frozen=True)
class Numbered:
    """Samples that say who they are; epochs of lengths of their own."""

    name: str
    most: int

    def __call__(self, shard: int, epoch: int, start: int) -> Iterator[tuple[str, int, int, int]]:
        for number in range(start, 1 + (5 * shard + 7 * epoch) % self.most):
            yield self.name, shard, epoch, number


def read(
    stream: ls.Stream, count: int, *, shard: int = 1, seed: int = 3, begin: Position | None = None
) -> list[Sample]:
    return list(
        islice(shard_samples(stream, shard, seed=seed, begin=begin or beginning(stream)), count)
    )


@st.composite
def mixtures(draw: st.DrawFn) -> ls.Stream:
    weights = draw(st.dictionaries(st.sampled_from("abcd"), st.floats(0.01, 9), min_size=1))
    streams = {
        name: ls.Stream(
            Numbered(name, draw(st.integers(1, 30))), shards=2, window=draw(st.integers(1, 7))
        )
        for name in weights
    }
    first = min(streams)
    if draw(st.booleans()):  # a mixture in the mixture
        streams[first] = ls.Stream.mix({"own": streams[first]}, weights={"own": 7})
    return ls.Stream.mix(streams, weights=weights)


@settings(max_examples=25)
@given(mixtures(), st.integers(0, 98), st.integers(0, 2**63 - 1))
def test_a_mixture_goes_on_from_any_position_as_if_it_had_been_read_to_it(
    stream: ls.Stream, count: int, seed: int
) -> None:
    whole = read(stream, 99, seed=seed)
    after = whole[count].after
    assert position_in(json.loads(json.dumps(after))) == after
    assert read(stream, 98 - count, seed=seed, begin=after) == whole[count + 1 :]


@settings(max_examples=25)
@given(mixtures(), st.integers(0, 2**63 - 1))
def test_each_stream_gives_each_sample_once_an_epoch_and_goes_on_where_it_ends(
    stream: ls.Stream, seed: int
) -> None:
    whole = [sample.value for sample in read(stream, 99, seed=seed)]
    for name in {sample[0] for sample in whole}:
        own = [sample[2:] for sample in whole if sample[0] == name]
        epochs = [epoch for epoch, _ in own]
        assert epochs == sorted(epochs)
        for epoch in range(epochs[-1]):  # the last one may not have ended
            numbers = sorted(number for each, number in own if each == epoch)
            assert numbers == list(range(len(numbers)))
        assert len(set(own)) == len(own)


def test_which_stream_has_a_position_depends_on_seed_and_shard_not_on_samples_or_other_names() -> (
    None
):
    def names(sizes: dict[str, int], **where: int) -> list[str]:
        streams = {name: ls.Stream(Numbered(name, most), shards=3) for name, most in sizes.items()}
        mixed = ls.Stream.mix(streams, weights=dict.fromkeys(sizes, 1.0))
        return [sample.value[0] for sample in read(mixed, 60, **where)]

    whole = names({"a": 3, "b": 40})
    assert names({"b": 9, "a": 17}) == whole
    assert [name.replace("z", "b") for name in names({"z": 40, "a": 3})] == whole
    assert len({tuple(whole), tuple(names({"a": 3, "b": 40}, shard=0))}) == 2
    assert len({tuple(whole), tuple(names({"a": 3, "b": 40}, seed=0))}) == 2


def test_a_mixture_never_changes_between_versions() -> None:
    streams = {name: ls.Stream(Numbered(name, 9), shards=2, window=4) for name in "ab"}
    mixed = ls.Stream.mix(streams, weights={"a": 2, "b": 1})
    values = [sample.value for sample in read(mixed, 12)]
    assert " ".join(f"{name}{epoch}{number}" for name, _, epoch, number in values) == (
        "a01 a03 b02 a00 b00 a02 b03 a05 b01 a04 a13 a10"
    )


def test_an_empty_stream_is_named_before_the_first_sample_of_the_others() -> None:
    full = ls.Stream(Numbered("full", 5), shards=2)
    empty = ls.Stream(lambda *_: iter(()), shards=2)
    mixed = ls.Stream.mix({"full": full, "web": empty}, weights={"full": 1e6, "web": 1})
    with pytest.raises(DataError) as caught:
        read(mixed, 1)
    assert str(caught.value) == (
        "shard 1 of the stream 'web' has no sample in epoch 0; each shard has at least one; check"
        " what open(1, 0, 0) reads, or give fewer shards"
    )


def test_a_failing_sample_of_a_mixture_is_named() -> None:
    def fails(shard: int, epoch: int, start: int) -> Iterator[int]:
        yield from range(start, 2)
        raise OSError("disk gone")

    mixed = ls.Stream.mix({"web": ls.Stream(fails, shards=2)}, weights={"web": 1})
    with pytest.raises(OSError, match="disk gone") as caught:
        read(mixed, 3)
    assert caught.value.__notes__ == [
        "raised by sample 2 of shard 1 of 'web' in epoch 0, from Stream.open(1, 0, 0)"
    ]


STREAM = ls.Stream(Numbered("a", 5), shards=4)
NO_WEIGHTS: list[Any] = [
    *(0, -0.5, float("nan"), float("inf"), "1", True, None, 1j),
    *(np.float32("nan"), np.bool_(True), np.array([1.0]), Decimal("NaN"), Fraction(-1, 2)),
]


@pytest.mark.parametrize("kind", [int, np.int64, np.float32, Fraction, Decimal])
def test_a_weight_is_any_real_number(kind: Any) -> None:
    streams = {"a": STREAM, "b": STREAM}
    mixture = ls.Stream.mix(streams, weights={"a": kind(1), "b": kind(3)}).open
    assert mixture.weights == {"a": 1.0, "b": 3.0}  # type: ignore[attr-defined]  # a Mixture
    assert {type(each) for each in mixture.weights.values()} == {float}  # type: ignore[attr-defined]  # a Mixture


@pytest.mark.parametrize(
    ("streams", "weights", "error", "message"),
    [
        ({}, {}, RecipeError, "Stream.mix({}); it mixes streams by name; give a dict of them"),
        ([STREAM], [1], RecipeError, "it mixes streams by name; give a dict of them"),
        ({1: STREAM}, {1: 1}, RecipeError, "a stream named 1; a name is a str; name it '1'"),
        (
            {"a": [1, 2]},
            {"a": 1},
            DataError,
            "Stream.mix, and 'a' is a list; it mixes streams; give ls.Stream.of(...) or"
            " ls.Stream.files(...), or mix datasets by ls.samplers.mixture",
        ),
        (
            {"a": STREAM, "b": STREAM},
            {"a": 1, "c": 1},
            RecipeError,
            "of the streams ['a', 'b'] with weights={'a': 1, 'c': 1}; each stream has one weight,"
            " under its name; give weights={'a': ..., 'b': ...}",
        ),
        ({"a": STREAM}, {}, RecipeError, "each stream has one weight, under its name"),
        ({"a": STREAM}, [1], RecipeError, "each stream has one weight, under its name"),
        *(
            (
                {"a": STREAM, "b": STREAM},
                {"a": 1, "b": weight},
                RecipeError,
                f"Stream.mix with the weight {weight!r} of 'b'; a weight is a number above 0, and"
                " only the proportions count; leave out a stream that is not to be read",
            )
            for weight in NO_WEIGHTS
        ),
        *(
            ({"a": STREAM, "b": STREAM}, {"a": 1, "b": 10**digits}, RecipeError, message)
            for digits, message in (
                (400, f"Stream.mix with the weight 1{'0' * 59}... of 'b'; a weight is a number"),
                (5000, "Stream.mix with the weight a whole number of 16610 bits of 'b'"),
            )
        ),
        (
            {"a": STREAM, "b": STREAM},
            {"a": 1, "b": Fraction(1, 10**400)},
            RecipeError,
            "a weight is a number above 0",
        ),
        (
            {"a": STREAM, "b": STREAM},
            {"a": 1e308, "b": 1e308},
            RecipeError,
            "whose sum is not a float; only the proportions count; divide each by the largest",
        ),
        (
            {"a": STREAM, "b": ls.Stream(Numbered("b", 5), shards=8)},
            {"a": 1, "b": 1},
            RecipeError,
            "Stream.mix of streams with {'a': 4, 'b': 8} shards; shard k of the mixture reads shard"
            " k of each stream, so all have equally many; give each shards=8",
        ),
    ],
)
def test_what_is_no_mixture_is_refused(
    streams: Any, weights: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        ls.Stream.mix(streams, weights=weights)


def test_a_mixture_is_not_opened_without_a_run() -> None:
    mixed = ls.Stream.mix({"a": STREAM}, weights={"a": 1})
    with pytest.raises(DataError, match=r"open\(0, 0, 0\) of a Mixture; .* open the streams that"):
        mixed.open(0, 0, 0)


def test_a_recipe_tells_the_streams_and_weights_of_a_mixture() -> None:
    mixed = ls.Stream.mix({"a": STREAM}, weights={"a": 1})
    described = ls.Recipe(
        model=dict, data=mixed, loss=lambda *_: None, optimizer=dict,
        global_batch=4, microbatch=1, steps=1,
    ).describe()["data"]  # fmt: skip
    assert described["open"]["weights"] == {"a": 1.0}
    assert described["open"]["streams"]["a"]["shards"] == described["shards"] == 4
