"""`kill -9` of searches at any moment: the same command ends with the same trials, none lost, none
made twice."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest
from cli.searches import events, left_of, reported, results, search, searched, starts


def changed_since(folder: Path, began: float, pattern: str = "*") -> bool:
    """True if a trial has written something since."""
    for path in folder.glob(f"trial-*/{pattern}"):
        try:
            if path.stat().st_mtime > began:
                return True
        except OSError:
            continue
    return False


def wait_for_a_moment(process: subprocess.Popen[str], folder: Path, chance: random.Random) -> None:
    """Wait for a random time: one in three from the start, the others from the first sign of a
    trial. Until then a search imports."""
    began = time.time()
    if chance.random() < 2 / 3:
        while process.poll() is None and not changed_since(folder, began):
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 1.2))
    else:
        time.sleep(chance.uniform(0.0, 4.0))


def wait_for_a_checkpoint(process: subprocess.Popen[str], folder: Path) -> None:
    """Wait until a trial has saved one, which is long before its end."""
    began = time.time()
    while process.poll() is None and not changed_since(folder, began, "checkpoints/step-*"):
        time.sleep(0.01)


def wait_until_nothing_runs(folder: Path) -> None:
    """The kernel ends what a search has started with it, each process after its parent."""
    deadline = time.monotonic() + 60
    while running := [each for each in left_of(folder) if each.startswith("process")]:
        assert time.monotonic() < deadline, running
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("sampler", "parallel", "trials", "kills"),
    [
        pytest.param("random", 2, 6, 3, marks=pytest.mark.command),
        pytest.param("random", 2, 12, 20, marks=pytest.mark.slow),
        pytest.param("tpe", 1, 12, 20, marks=pytest.mark.slow),
    ],
)
@pytest.mark.forks
@pytest.mark.timeout(290)
def test_killed_many_times_it_ends_with_the_trials_of_an_undisturbed_search(
    tmp_path: Path, sampler: str, parallel: int, trials: int, kills: int
) -> None:
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    words = ("--sampler", sampler, "--trials", trials, "--parallel", parallel)
    found = searched(tmp_path / "undisturbed", *words)
    assert found.returncode == 0, found.stderr
    expected = reported(tmp_path / "undisturbed")

    folder, chance = tmp_path / "killed", random.Random(25)
    killed = 0
    for number in range(kills):
        with search(folder, *words, "--", "--seconds", 0.08) as process:
            if number == 0:
                wait_for_a_checkpoint(process, folder / "s")
            else:
                wait_for_a_moment(process, folder / "s", chance)
            killed += process.poll() is None
            process.send_signal(signal.SIGKILL)
            process.communicate()
        wait_until_nothing_runs(folder)
    last = searched(folder, *words, "--", "--seconds", 0.08)
    assert last.returncode == 0, last.stderr
    found = reported(folder)
    assert results(found) == results(expected)
    assert [trial["number"] for trial in found] == list(range(trials))
    assert sqlite3.connect(folder / "s" / "search.db").execute(
        "PRAGMA integrity_check"
    ).fetchall() == [("ok",)]
    assert sorted(path.name for path in (folder / "s").glob("trial-*")) == [
        f"trial-{number:04d}" for number in range(trials)
    ]
    ended = [
        sum(event["event"] == "run-ended" for event in events(folder, number))
        for number in range(trials)
    ]
    assert killed >= kills // 2
    assert sum(starts(folder, number) for number in range(trials)) > trials, (
        "no kill met a trial that ran"
    )
    assert any(
        event["event"] == "resumed" and event["step"]
        for number in range(trials)
        for event in events(folder, number)
    )
    assert max(ended) <= 1
    assert left_of(folder) == []
