"""Runs that are asked to end before their time: whole commands. What they save is gone on with by
the same command."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
import run_files
from processes import LOCKSTEP, started, worker

pytestmark = pytest.mark.forks

GPT = Path(__file__).parent.parent / "scripts" / "chaos.py"
ENDLESS = GPT.with_name("endless.py")


def lockstep_run(folder: Path, *line: str) -> AbstractContextManager[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    return started([LOCKSTEP, "run", *line], env=environment, stderr=subprocess.PIPE, text=True)


def gpt(folder: Path, plan: str) -> AbstractContextManager[subprocess.Popen[str]]:
    (folder / "seen").mkdir(exist_ok=True)
    return lockstep_run(
        folder,
        "--plan",
        f"{plan},numerics=bitwise",
        "--run-dir",
        str(folder / "run"),
        str(GPT),
        str(folder / "seen"),
    )


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = run_files.result(folder / "run")
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    with gpt(folder, "replicate=1") as ended:
        assert ended.communicate()[1] is not None
    return str(result(folder)["fingerprint"])


def wait_for_steps(run_dir: Path, launcher: subprocess.Popen[str]) -> None:
    while (
        not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").stat().st_size
    ):
        assert launcher.poll() is None
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("target", "number", "before", "after"),
    [
        pytest.param(None, signal.SIGTERM, "replicate=2", "shard=2", marks=pytest.mark.slow),
        pytest.param(1, signal.SIGUSR1, "shard=2", "replicate=1", marks=pytest.mark.command),
        pytest.param(0, signal.SIGTERM, "replicate=2", "replicate=2", marks=pytest.mark.slow),
        pytest.param(
            None, signal.SIGUSR1, "replicate=2,shard=2", "replicate=2", marks=pytest.mark.slow
        ),
        pytest.param(3, signal.SIGTERM, "shard=4", "replicate=4", marks=pytest.mark.slow),
        pytest.param(0, signal.SIGUSR1, "replicate=4", "shard=2", marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
@pytest.mark.timeout(120)
def test_it_saves_ends_with_75_and_goes_on_to_the_same_model(
    tmp_path: Path,
    undisturbed: str,
    target: int | None,
    number: signal.Signals,
    before: str,
    after: str,
) -> None:
    with gpt(tmp_path, before) as first:
        wait_for_steps(tmp_path / "run", first)
        os.kill(first.pid if target is None else worker(first.pid, target), number)
        words = first.communicate()[1]
    assert first.returncode == 75, words
    why = number.name if target is None else "it was asked to end"
    assert words.endswith(
        f"lockstep: saved and ended ({why}); the same command resumes from there\n"
    )
    with gpt(tmp_path, after) as second:
        words = second.communicate()[1]
    assert second.returncode == 0, words
    assert result(tmp_path)["fingerprint"] == undisturbed
    told = run_files.events(tmp_path / "run")
    (preempted,) = [event["step"] for event in told if event["event"] == "preempted"]
    (resumed,) = [event["step"] for event in told if event["event"] == "resumed"]
    assert preempted == resumed > 0


@pytest.mark.command
def test_a_deadline_asks_too(tmp_path: Path) -> None:
    with lockstep_run(
        tmp_path, "--nproc", "2", "--stop-after", "5s", str(ENDLESS), str(tmp_path / "run")
    ) as ended:
        words = ended.communicate()[1]
    assert ended.returncode == 75, words
    *_, last = run_files.events(tmp_path / "run")
    assert (last["event"], last["reason"]) == ("preempted", "the time that it was given is over")


@pytest.mark.slow
def test_a_signal_that_comes_to_workers_and_launcher_is_one_wish(tmp_path: Path) -> None:
    with lockstep_run(tmp_path, "--nproc", "2", str(ENDLESS), str(tmp_path / "run")) as ended:
        wait_for_steps(tmp_path / "run", ended)
        for number in [worker(ended.pid, 0), worker(ended.pid, 1), ended.pid]:
            os.kill(number, signal.SIGTERM)
        words = ended.communicate()[1]
    assert ended.returncode == 75, words
    *_, last = run_files.events(tmp_path / "run")
    assert last["event"] == "preempted"


def test_a_second_signal_does_not_wait_for_the_step(tmp_path: Path) -> None:
    with lockstep_run(tmp_path, "--nproc", "1", str(ENDLESS), str(tmp_path / "run"), "60") as ended:
        while not (tmp_path / "computes").exists():
            time.sleep(0.01)
        rank_0 = worker(ended.pid, 0)
        with suppress(ProcessLookupError):  # it has ended
            while ended.poll() is None:  # signals that come before the first is handled are one
                os.kill(rank_0, signal.SIGTERM)
                time.sleep(0.2)
        ended.communicate()
    assert ended.returncode == 143


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            ["--stop-after", "55"],
            "--stop-after='55'; it must be a time with its unit, more than none: 90s, 55m, 1h30m",
        ),
        (
            ["--save-every", "often"],
            (
                "--save-every='often'; it must be a number of steps, at least 1, a time with its unit,"
                " or epoch: 500, 90s, 10m, 1h30m, epoch"
            ),
        ),
        (
            ["--save-every", "0"],
            "--save-every='0'; it must be a number of steps, at least 1, a time with its unit, or epoch",
        ),
    ],
)
def test_a_time_has_a_unit(tmp_path: Path, option: list[str], words: str) -> None:
    with lockstep_run(tmp_path, *option, str(ENDLESS), str(tmp_path / "run")) as ended:
        said = ended.communicate()[1]
    assert ended.returncode == 2
    assert words in said
