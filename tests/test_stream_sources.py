"""`ls.Stream.files` and `ls.Stream.of`: shards of what libraries stream, each sample once an
epoch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch.utils.data import IterableDataset

import lockstep as ls
from lockstep.base.errors import DataError

Sample = tuple[int, int]


def read(path: tuple[int, int], start: int) -> Iterator[Sample]:
    """The samples of a file called (number, length)."""
    number, length = path
    return ((number, sample) for sample in range(start, length))


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    shards=st.integers(1, 6),
    counted=st.booleans(),
)
def test_uneven_files_are_balanced_and_each_sample_is_in_one_shard(
    counts: list[int], shards: int, counted: bool
) -> None:
    paths = list(enumerate(counts))
    if sum(counts) < shards:
        with pytest.raises(DataError, match="at least one sample in each shard"):
            ls.Stream.files(paths, read, shards=shards)
        return
    stream = ls.Stream.files(paths, read, shards=shards, counts=None if counted else counts)
    parts = [list(stream.open(shard, 0, 0)) for shard in range(shards)]
    assert sorted(sample for part in parts for sample in part) == [
        sample for path in paths for sample in read(path, 0)
    ]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for shard, part in enumerate(parts):
        for start in range(len(part) + 1):
            assert list(stream.open(shard, 3, start)) == part[start:]


def test_only_the_files_of_a_shard_are_opened_and_sought_in() -> None:
    opened = []

    def noted(path: tuple[int, int], start: int) -> Iterator[Sample]:
        opened.append((path[0], start))
        return read(path, start)

    stream = ls.Stream.files([(0, 4), (1, 4), (2, 4)], noted, shards=2, counts=[4, 4, 4])
    assert list(stream.open(1, 0, 1)) == [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]
    assert opened == [(1, 3), (2, 0)]


class Numbers(IterableDataset[Any]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + 10))


def test_an_iterable_is_split_by_taking_every_nth_sample() -> None:
    stream = ls.Stream.of(Numbers(), shards=3)
    assert [list(stream.open(shard, 2, 0)) for shard in range(3)] == [
        [200, 203, 206, 209],
        [201, 204, 207],
        [202, 205, 208],
    ]
    assert list(stream.open(0, 0, 2)) == [6, 9]


class Streaming:
    """What a streaming dataset of Hugging Face can do."""

    def __init__(self, parts: list[list[str]], epoch: int = 0, skipped: int = 0) -> None:
        self.parts, self.epoch, self.skipped = parts, epoch, skipped
        self.num_shards = len(parts)

    def shard(self, num_shards: int, index: int) -> Streaming:
        return Streaming(self.parts[index::num_shards], self.epoch)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def skip(self, count: int) -> Streaming:
        return Streaming(self.parts, self.epoch, count)

    def __iter__(self) -> Iterator[str]:
        return islice(
            (f"{text}{self.epoch}" for part in self.parts for text in part), self.skipped, None
        )


def test_a_dataset_of_hugging_face_shards_and_skips_by_itself() -> None:
    stream = ls.Stream.of(Streaming([["a", "b"], ["c"], ["d"], ["e"]]), shards=2)
    assert list(stream.open(0, 1, 0)) == ["a1", "b1", "d1"]
    assert list(stream.open(0, 1, 2)) == ["d1"]
    assert list(stream.open(1, 0, 0)) == ["c0", "e0"]


def test_what_the_library_itself_gives() -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    whole = datasets.Dataset.from_dict({"n": list(range(12))}).to_iterable_dataset(num_shards=4)
    stream = ls.Stream.of(whole, shards=2)
    parts = [[sample["n"] for sample in stream.open(shard, 0, 0)] for shard in range(2)]
    assert sorted(parts[0] + parts[1]) == list(range(12))
    assert [sample["n"] for sample in stream.open(1, 0, 4)] == parts[1][4:]


@pytest.mark.parametrize(
    ("data", "shards", "message"),
    [
        (
            [1, 2, 3],
            1,
            "Stream.of(list), which has a length and random access; give it as data itself",
        ),
        (3, 1, "Stream.of(int), which cannot be iterated over"),
        (
            Streaming([["a"]] * 4),
            3,
            "of a dataset of 4 files or parts; each shard has equally many; give a divisor of 4",
        ),
    ],
)
def test_what_is_no_stream_is_refused(data: Any, shards: int, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        ls.Stream.of(data, shards=shards)
