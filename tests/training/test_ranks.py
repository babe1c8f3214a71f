"""What each rank's time goes to."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
from hypothesis import given, strategies as st
from tiers import spread
from training.subjects import recipe, rows, squared_error

import lockstep as ls
from lockstep.hooks.stragglers import EXCHANGE_SECONDS, next_interval
from lockstep.launch.termination import Preempted
from lockstep.logging.phases import StreamTimes
from lockstep.testing.pool import WorkerPool


def busy(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, seconds: float, slow_rank: int) -> None:
        self.rows = rows(64)
        self.seconds = seconds
        self.slow_rank = slow_rank

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds * (ls.rank() == self.slow_rank))
        return self.rows[index]


def slowly(run_dir: str, plan: str, part: str, slow_rank: int) -> None:
    """40 steps of about 20 ms, twice as much longer in one part on one rank. They sleep: a busy
    machine adds little."""

    def loss(model: Any, batch: Any) -> Any:
        time.sleep(0.01 + 0.02 * (part == "compute" and ls.rank() == slow_rank))
        return squared_error(model, batch)

    data = Samples(0.005 * (part == "data"), slow_rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.hooks.stragglers.MIN_SECONDS", 0.5)
        ls.train(
            recipe(data=data, loss=loss, steps=40, global_batch=16, microbatch=4),
            run_dir=run_dir,
            plan=plan,
            log_every=10,
        )


class TwiceAsLong:
    """A GPU's event, of a GPU that takes twice the time of the host."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: TwiceAsLong) -> float:
        return 2e3 * (end.at - self.at)


class OnAStream(ls.Hook):
    def on_start(self, run: ls.Run) -> None:
        run.context.phases.stream = StreamTimes(TwiceAsLong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "part"),
    spread(["replicate=2", "shard=2", "replicate=2,transport=torch"], ["data", "compute"], every=3),
)
def test_a_slow_rank_is_named_with_the_part(
    pool: WorkerPool, tmp_path: Path, plan: str, part: str
) -> None:
    pool.run(2, slowly, str(tmp_path / "run"), plan, part, 1)
    told = run_files.events(tmp_path / "run", "straggler")
    assert {(event["rank"], event["part"]) for event in told} == {(1, part)}
    seen = run_files.rows(tmp_path / "run" / "ranks.jsonl")
    assert [row["step"] for row in seen] == [10, 20, 30, 40]
    for row in seen:
        assert row["ranks"].keys() == {"step", "data", "compute", "hooks", "communication"}
        assert row["ranks"][part][1] > row["ranks"][part][0]
        assert row["ranks"]["communication"][0] > row["ranks"]["communication"][1]
        assert len(row["hosts"]) == 2


def stop(run: Any) -> None:
    if run.step == 13:
        os.kill(os.getpid(), 10)


class Stops(ls.Hook):
    def after_step(self, run: Any) -> None:
        stop(run)


def test_rows_of_repeated_steps_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr("lockstep.hooks.stragglers.EXCHANGE_SECONDS", 0.0)
    with pytest.raises(Preempted):
        ls.train(recipe(steps=20), run_dir=str(run), hooks=[Stops()], log_every=1)
    with (run / "ranks.jsonl").open("a") as file:
        file.write('{"step": 15}\n{"ste')
    ls.train(recipe(steps=20), run_dir=str(run), log_every=1)
    assert [row["step"] for row in run_files.rows(run / "ranks.jsonl")] == list(range(1, 21))


@given(seconds=st.floats(0, 10), before=st.integers(1, 10**6), ranks=st.integers(1, 16384))
def test_exchanges_are_at_most_a_few_a_second_and_rarer_with_very_many_ranks(
    seconds: float, before: int, ranks: int
) -> None:
    found = next_interval(seconds, before=before, ranks=ranks)
    wanted = EXCHANGE_SECONDS * max(1, ranks / 256)
    assert 1 <= found <= 2 * before
    if seconds >= wanted:
        assert found == 1
    if found < 2 * before:
        assert found * seconds >= wanted


def test_on_a_gpu_what_counts_is_the_time_of_its_stream(tmp_path: Path) -> None:
    def loss(model: Any, batch: Any) -> Any:
        busy(0.01)
        return squared_error(model, batch)

    ls.train(
        recipe(loss=loss, steps=6), run_dir=str(tmp_path / "run"), log_every=2, hooks=[OnAStream()]
    )
    for line in run_files.rows(tmp_path / "run" / "ranks.jsonl")[1:]:
        assert line["ranks"]["compute"][0] >= 2 * 4 * 0.01
        assert line["ranks"]["compute"][0] > line["ranks"]["step"][0]
