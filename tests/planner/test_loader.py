"""The loader's time, measured and added to a step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planner.subjects import recipe
from planner.test_prediction import prediction
from torch import Tensor
from torch.utils.data import Dataset

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.plan import Plan
from lockstep.planner import worker as loader
from lockstep.planner.worker import LoaderTime

MILLISECOND = LoaderTime(1e-3, "measured")
STEP = prediction(seconds=1.0, microbatch=4, microbatches=25)


class Samples(Dataset[Tensor]):
    """Samples whose making is a call."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Tensor:
        self._make(index)
        return torch.full((3,), index)


def measured(make: Callable[[int], Any], folder: Path, **changes: Any) -> LoaderTime:
    return LoaderTime.measured(
        recipe(data=Samples(make), **changes), folder, loader.MEASURED_SECONDS
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """It stands still for what takes no time in a test; the process that loads has a copy."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_a_slow_dataset_is_measured_in_a_second(tmp_path: Path, clock: Clock) -> None:
    made = tmp_path / "made"

    def make(index: int) -> None:
        clock.now += 1 / 64
        with made.open("a") as file:
            file.write(".")

    found = measured(make, tmp_path)
    assert found.seconds == 1 / 64
    assert "a process loads 64 samples/s here" in found.note
    assert made.stat().st_size == 64


def test_collate_is_part_of_it(tmp_path: Path, clock: Clock) -> None:
    def collate(samples: list[Tensor]) -> Tensor:
        clock.now += 0.01 * len(samples)
        return torch.stack(samples)

    found = measured(lambda index: None, tmp_path, collate=collate)
    assert found.seconds == pytest.approx(0.01)


def test_a_stream_is_read(tmp_path: Path) -> None:
    def opened(shard: int, epoch: int, start: int) -> Iterator[Tensor]:
        for each in range(start, 50):
            time.sleep(1e-3)
            yield torch.full((3,), each)

    assert (
        LoaderTime.measured(recipe(data=ls.Stream(opened, shards=4)), tmp_path, 0.1).seconds >= 1e-3
    )


def test_without_time_one_microbatch_is_loaded_all_the_same(tmp_path: Path) -> None:
    made = tmp_path / "made"

    def make(index: int) -> None:
        with made.open("a") as file:
            file.write(".")

    given = recipe(data=Samples(make))
    assert LoaderTime.measured(given, tmp_path, 0.0).seconds > 0
    assert made.stat().st_size == given.microbatch


def fails(index: int) -> None:
    raise OSError("no such file")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (fails, r"failed with OSError: no such file \(at .*test_loader.py:\d+ in fails\)"),
        (lambda index: time.sleep(1000), "took longer than 0 s"),
        (lambda index: os.kill(os.getpid(), signal.SIGKILL), "killed its process"),
    ],
    ids=["fails", "hangs", "dies"],
)
def test_a_dataset_that_cannot_be_loaded_is_a_mistake(
    make: Callable[[int], Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "longer" in said:
        monkeypatch.setattr(loader, "PATIENCE_SECONDS", 0.4)
    with pytest.raises(
        RecipeError, match=f"loading a microbatch of Recipe.data {said}; .* correct the dataset"
    ):
        measured(make, tmp_path)


def test_without_workers_a_process_loads_before_it_computes() -> None:
    found = MILLISECOND.added_to(STEP, Plan(), processes=2, cores=2)
    assert found.seconds == pytest.approx(1.1)
    assert found.by_limit["loader"] == pytest.approx(0.1)
    assert found.seconds_with_twice["arithmetic"] == pytest.approx(
        STEP.seconds_with_twice["arithmetic"] + 0.1
    )
    assert found.note == "measured"


def test_a_slow_loader_without_workers_is_the_limit() -> None:
    found = LoaderTime(0.1, "").added_to(STEP, Plan(), processes=1, cores=1)
    assert (found.limit, next(iter(found.by_limit))) == ("loader", "loader")
    assert found.seconds == pytest.approx(1 + 100 * 0.1)


@pytest.mark.parametrize(
    ("per_sample", "seconds", "limit"), [(1e-3, 1.0, "matmul"), (0.1, 5.0, "loader")]
)
def test_with_workers_the_slower_of_both_counts(
    per_sample: float, seconds: float, limit: str
) -> None:
    found = LoaderTime(per_sample, "").added_to(STEP, Plan(workers=2), processes=1, cores=4)
    assert found.seconds == pytest.approx(seconds)
    assert found.limit == limit
    assert all(each <= seconds for each in found.seconds_with_twice.values())


def test_workers_share_the_cores_of_all_processes() -> None:
    def seconds(workers: int, processes: int) -> float:
        return (
            LoaderTime(0.1, "")
            .added_to(STEP, Plan(workers=workers), processes=processes, cores=4)
            .seconds
        )

    assert seconds(16, 1) == seconds(4, 1) == pytest.approx(2.5)
    assert seconds(4, 4) == pytest.approx(10)
    assert seconds(0, 8) == pytest.approx(1 + 2 * 10)


def test_what_was_said_before_is_kept() -> None:
    assert (
        MILLISECOND.added_to(replace(STEP, note="with values"), Plan(), processes=1, cores=1).note
        == "with values; measured"
    )
