"""The probes of loaders see the samples of each batch, the passes, and the random numbers that
reads of data draw."""

from __future__ import annotations

import warnings
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from audit.watched import Watched, problems, watched
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lockstep.audit.probes.loaders import data_of, describe, digests
from lockstep.evidence.rows import Row

pytestmark = [pytest.mark.timeout(180), pytest.mark.forks("watched")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return watched("data.py", tmp_path_factory.mktemp("records"))


def test_no_probe_fails(data: Watched) -> None:
    assert problems(data) == []


def passed(data: Watched, mark: str) -> list[list[Row]]:
    """The batches of each pass of the loader that was made at a line."""
    begun = data.rows("pass", mark)
    assert begun
    return [
        [
            row
            for row in data.rows("batch")
            if (row["loader"], row["number"]) == (each["loader"], each["number"])
        ]
        for each in begun
    ]


def indices(batches: list[Row]) -> list[list[int]]:
    return [row["indices"] for row in batches]


def test_indices_are_those_of_the_batches(data: Watched) -> None:
    seen = data.printed["seen"]
    shuffled = passed(data, "shuffled")
    assert [indices(each) for each in shuffled[:2]] == seen[:2]
    assert indices(passed(data, "subset")[0]) == [[0, 1], [2]]
    assert data.rows("pass", "subset")[0]["dataset"]["subset"] == [9, 3, 5]
    assert indices(passed(data, "unbatched")[0]) == [[each] for each in range(10)]
    assert [indices(shuffled[2])[0], indices(shuffled[2])[1]] == [
        seen[6][0],
        seen[6][2],
    ], "two loaders in turn"


def test_indices_of_workers_are_those_of_the_batches_in_each_pass(data: Watched) -> None:
    assert [indices(each) for each in passed(data, "workers")] == data.printed["seen"][4:6]


def test_a_sample_has_one_digest_wherever_it_comes(data: Watched) -> None:
    found: dict[int, set[str]] = {}
    for mark in ("shuffled", "workers", "left"):
        for batch in (row for each in passed(data, mark) for row in each):
            for index, digest in zip(batch["indices"], batch["samples"], strict=True):
                found.setdefault(index, set()).add(digest)
    assert {len(each) for each in found.values()} == {1}
    assert len(set.union(*found.values())) == len(found) == 10
    subset = [digest for row in passed(data, "subset")[0] for digest in row["samples"]]
    assert [{each} for each in subset] == [found[index] for index in (9, 3, 5)]


def test_the_end_of_a_pass_is_seen_unless_the_loop_was_left(data: Watched) -> None:
    ended = {(row["loader"], row["number"]) for row in data.rows("pass_end")}
    for mark, complete in {
        "shuffled": [True, True, False],
        "left": [False],
        "workers": [True, True],
        "stream": [True],
    }.items():
        assert [
            (row["loader"], row["number"]) in ended for row in data.rows("pass", mark)
        ] == complete


def test_a_pass_names_its_lines_its_data_and_its_sampler(data: Watched) -> None:
    first, second, _ = data.rows("pass", "shuffled")
    assert (first["number"], second["number"], first["loader"]) == (0, 1, second["loader"])
    assert first["loop"] == data.line("the loop")
    assert (first["batches"], first["batch_size"], first["drop_last"], first["workers"]) == (
        3,
        4,
        False,
        0,
    )
    assert first["sampler"] == {
        "type": "RandomSampler",
        "batch_type": "BatchSampler",
        "replacement": False,
        "num_samples": 10,
    }
    assert (first["dataset"]["type"], first["dataset"]["length"]) == ("TensorDataset", 10)
    assert second["dataset"] is None
    (stream,) = data.rows("pass", "stream")
    assert (stream["dataset"]["iterable"], stream["dataset"]["length"], stream["batches"]) == (
        True,
        None,
        None,
    )


def test_a_loader_that_a_library_makes_from_another_one_has_the_line_of_that(data: Watched) -> None:
    assert len(data.rows("pass", "remade by a library")) == 1


def test_a_stream_has_contents_and_no_indices(data: Watched) -> None:
    (batches,) = passed(data, "stream")
    assert [row["indices"] for row in batches] == [None, None]
    assert [len(row["samples"]) for row in batches] == [4, 2]
    (texts,) = passed(data, "texts")
    assert [row["samples"] for row in texts] == [[], [], []]


def test_reads_that_draw_random_numbers_are_seen_in_the_workers(data: Watched) -> None:
    workers = [[row for row in rows if row["kind"] == "fetch"] for rows in data.processes[1:]]
    workers = [rows for rows in workers if rows]
    assert sorted(rows[0]["worker"] for rows in workers) == [
        0,
        0,
        1,
        1,
    ], "two workers in each of two passes"
    assert all(
        set(row["drawn"]) == {"numpy"} and row["number"] <= 3 for rows in workers for row in rows
    )
    assert len({row["drawn"]["numpy"] for rows in workers for row in rows}) == 8
    assert {rows[0]["parent"] for rows in data.processes[1:]} == {data.processes[0][0]["pid"]}
    assert data.rows("fetch") == []


def held(*tensors: torch.Tensor) -> str:
    digest: str = describe(TensorDataset(*tensors))["digest"]
    return digest


def test_datasets_are_told_apart_by_what_they_hold() -> None:
    one = torch.arange(4.0)
    assert held(one) == held(one.clone())
    assert held(one) != held(one + 1)
    assert held(torch.zeros(300_000)) == held(torch.zeros(300_000))
    subset = describe(Subset(Subset(TensorDataset(one), [3, 1, 0]), [2, 0]))
    assert (subset["subset"], subset["whole"], subset["whole_length"], subset["length"]) == (
        [0, 3],
        held(one),
        4,
        2,
    )


def test_datasets_are_told_apart_by_what_their_parts_hold() -> None:
    one = torch.arange(4.0)
    first, second = (describe(ConcatDataset([TensorDataset(each)])) for each in (one, one + 1))
    assert first["digest"] != second["digest"]


class Rows(Dataset[object]):
    def __init__(self, rows: object) -> None:
        self.rows = rows


class Table:
    def __len__(self) -> int:
        return 4


def test_texts_paths_and_lists_are_read() -> None:
    for one, other in [
        (["a"], ["b"]),
        ([Path("a")], [Path("b")]),
        (np.array(["a"]), np.array(["b"])),
        ({"a": 1}, {"a": 2}),
    ]:
        assert (
            describe(Rows(one))["digest"]
            == describe(Rows(one))["digest"]
            != describe(Rows(other))["digest"]
            != ""
        )
    assert describe([1, 2])["digest"] != describe([1, 3])["digest"]


def test_what_cannot_be_read_has_no_digest() -> None:
    """A table of pandas, a list of objects: they may differ from rank to rank."""
    assert describe(Rows(Table()))["digest"] == describe(Rows([object()]))["digest"] == ""
    assert describe(Subset(Rows(Table()), [0]))["digest"] == ""
    assert all(describe(Rows(each))["digest"] for each in (len, object())), "transforms"


@dataclass
class Batch:
    data: torch.Tensor
    name: str = "a batch"


def test_samples_of_a_batch_of_any_kind_are_told_apart() -> None:
    x = torch.arange(6.0).view(3, 2)
    read_only = x.numpy().copy()
    read_only.flags.writeable = False
    with warnings.catch_warnings(action="error"):
        assert (
            digests(Batch(x))
            == digests(UserDict(x=x))
            == digests(x.numpy())
            == digests(read_only)
            == digests([x])
        )


def test_samples_are_told_apart_by_all_their_tensors() -> None:
    x, y = torch.zeros(3, 2), torch.tensor([0, 1, 0])
    first, second, third = digests([x, y])
    assert first == third != second
    assert digests({"x": x, "y": y.numpy(), "name": "a"}) == digests([x, y])
    assert len(digests([x, torch.tensor(1.0)])) == 1
    assert digests(["a", 1]) == digests([]) == []
    assert digests(torch.zeros(2, 100_000))[0] == digests(torch.zeros(1, 100_000))[0]


def test_loaders_have_numbers_of_their_own(data: Watched) -> None:
    rows = data.rows("pass", "made in a loop")
    others = {
        row["loader"] for row in data.rows("pass") if row["line"] != data.line("made in a loop")
    }
    assert not {row["loader"] for row in rows} & others


def test_the_data_of_a_dataset_are_told_from_its_settings_and_its_caches() -> None:
    class Images(Dataset[Tensor]):
        def __init__(self, seed: int) -> None:
            self.seed, self.transform, self.cache, self.kept = (
                seed,
                nn.Identity(),
                {seed: "an image"},
                [None, seed],
            )
            self.ranks, self.names = (seed, 2), {"name": "a", "rank": seed}
            self.images = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
            self.files, self.by_name = [f"{seed}.png"] * 8, {"labels": [seed] * 8}
            self.inner = TensorDataset(self.images)

    one, other = data_of(Images(0)), data_of(Images(1))
    assert one.keys() == {"images", "files", "by_name", "inner.tensors"}
    assert all(one[name] != other[name] for name in one)
    assert one == data_of(Images(0))
    assert data_of([0] * 8) != data_of([1] * 8)
    whole = TensorDataset(torch.arange(4))
    assert (
        describe(Subset(whole, [0, 1]))["data"]["indices"]
        != describe(Subset(whole, [0, 2]))["data"]["indices"]
    )
