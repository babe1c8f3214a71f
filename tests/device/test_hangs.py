"""Hangs and losses on accelerators: who is named, and what the others save of a state that their
hosts are ahead of."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import run_files
from device.ranks import command, on_device
from device.test_training import steps

import lockstep as ls
from lockstep.launch.termination import HUNG_STATUS
from lockstep.testing.pool import WorkerPool
from lockstep.training.device_progress import DeviceProgress, EndedStep

SCRIPT = """
import os
import signal
import sys
import time

import lockstep as ls
from device.test_hangs import recipe
from lockstep.options import WatchdogTimeouts


def limit_seconds(*given):
    return _limit_seconds(*given) if os.path.exists("stopped") else float("inf")


_limit_seconds = WatchdogTimeouts.limit_seconds
WatchdogTimeouts.limit_seconds = limit_seconds  # before, a busy machine may be slower


class Stops(ls.Hook):
    def after_step(self, run):
        if run.step == 4 and run.rank == 1 and not os.path.exists("stopped"):
            open("stopped", "w").close()
            if sys.argv[1] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)


if __name__ == "__main__":
    result = ls.train(recipe(), hooks=[Stops()], log_every=100)
    if result.rank == 0:
        print("fingerprint", result.fingerprint)
"""


def of_means(output: Any, batch: Any) -> ls.Loss:
    return ls.Loss(((output - batch[2]) ** 2).mean(1).sum(), len(output))


def recipe() -> ls.Recipe:
    """The host reads nothing of a step, not even weights from the other ranks: it goes ahead of its
    device."""
    return steps(weight=None, loss=of_means, global_batch=20, steps=8)


def run(
    devices: WorkerPool, folder: Path, how: str, *options: str, ahead: str | None
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    line = ["-m", "lockstep", "run", "--nproc", "2", "--run-dir", "run", *options, "train.py", how]
    variables = {} if ahead is None else {"STAND_IN_HOST_AHEAD": ahead}
    return command(devices, folder, *line, **variables)


def event_rows(folder: Path) -> list[dict[str, Any]]:
    return run_files.events(folder / "run")


def events(folder: Path) -> dict[str, int]:
    return {row["event"]: row["step"] for row in event_rows(folder)}


def train(run_dir: str) -> str:
    # its module has another name here
    return ls.train(recipe(), run_dir=run_dir, log_every=100, allow_change=["loss"]).fingerprint


@pytest.fixture(scope="module")
def undisturbed(devices: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    return devices.run(2, on_device, train, str(tmp_path_factory.mktemp("undisturbed") / "run"))[0]


class Fails(ls.Hook):
    """Fails after three steps."""

    def __init__(self, moment: str) -> None:
        self._moment = moment

    def before_step(self, run: Any) -> None:
        self._fail(run, "before_step")

    def after_backward(self, run: Any, model: Any) -> None:
        self._fail(run, "after_backward")

    def _fail(self, run: Any, moment: str) -> None:
        if run.step == 3 and moment == self._moment:
            raise RuntimeError("on purpose")


class Counts(ls.Hook):
    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, state: Any) -> None:
        pass


def oldest(progress: DeviceProgress, _: float) -> EndedStep:
    return progress._ended[0]


def fail(run_dir: str, moment: str, *hooks: ls.Hook) -> dict[str, Any]:
    """Train until it fails. Returns the events of the emergency save."""
    with suppress(RuntimeError):
        ls.train(recipe(), run_dir=run_dir, log_every=100, hooks=[Fails(moment), *hooks])
    rows = run_files.events(run_dir)
    return {row["event"]: row for row in rows if row["event"].startswith("rescue")}


def fail_in_each_way(folder: str) -> list[dict[str, Any]]:
    found = [fail(f"{folder}/between", "before_step"), fail(f"{folder}/amid", "after_backward")]
    with patch("lockstep.hooks.checkpointing.accelerator_groups_failed", lambda: True):
        found.append(fail(f"{folder}/failed", "before_step"))
    with patch.object(DeviceProgress, "newest", oldest):
        found.append(fail(f"{folder}/behind", "before_step", Counts()))
    return found


def test_what_is_not_certainly_the_state_of_one_step_is_not_saved(
    devices: WorkerPool, tmp_path: Path
) -> None:
    ((between, amid, failed, behind),) = devices.run(1, on_device, fail_in_each_way, str(tmp_path))
    assert between["rescued"]["step"] == 3
    assert "the device is in the middle of a step" in amid["rescue-failed"]["reason"]
    assert (
        "collectives of the accelerator were aborted, or have failed"
        in failed["rescue-failed"]["reason"]
    )
    assert (
        "the device has done 1 steps, and hooks with a state have seen later steps"
        in behind["rescue-failed"]["reason"]
    )
    expected = devices.run(1, on_device, train, str(tmp_path / "undisturbed"))
    assert devices.run(1, on_device, train, str(tmp_path / "between")) == expected


@pytest.mark.command
@pytest.mark.parametrize("ahead", [None, "3"], ids=["host waits", "host ahead"])
def test_what_the_survivors_of_a_killed_rank_save_is_resumed_to_the_same_bits(
    devices: WorkerPool, tmp_path: Path, undisturbed: str, ahead: str | None
) -> None:
    ended = run(devices, tmp_path, "killed", "--max-restarts", "1", ahead=ahead)
    assert ended.returncode == 0, ended.stderr
    found = events(tmp_path)
    assert found["rescued"] == found["resumed"] == 4, ended.stderr
    assert f"fingerprint {undisturbed}" in ended.stdout


@pytest.mark.command
def test_a_rank_that_waits_for_its_device_is_named_with_the_one_it_waits_for(
    devices: WorkerPool, tmp_path: Path, undisturbed: str
) -> None:
    ended = run(devices, tmp_path, "sleeps", "--hang-after", "6s", ahead="2")
    assert ended.returncode == HUNG_STATUS, ended.stderr
    line = next(
        number for number, text in enumerate(SCRIPT.splitlines(), start=1) if "time.sleep" in text
    )
    assert (
        "rank 1 is waited for: it is in a call that does not return at"
        f" {tmp_path / 'train.py'}:{line}" in ended.stderr
    )
    assert "rank 0 waits in ALLREDUCE of float32" in ended.stderr
    assert ", after step 5, " in ended.stderr, "its host is two steps ahead of its device"
    (hang,) = [row for row in event_rows(tmp_path) if row["event"] == "hang"]
    assert hang["ranks"] == [1]
    late = re.search(
        r"rank 1 \(.*\) is in a call that does not return since (\d+) s, .* which may take 6 s",
        ended.stderr,
    )
    assert late is not None, ended.stderr
    (page,) = (tmp_path / "run").glob("hang-*.txt")
    hung = page.stat().st_mtime - (tmp_path / "stopped").stat().st_mtime
    assert max(hang["seconds"], int(late[1])) < hung + 1, "by the clocks of both ranks"
    assert events(tmp_path)["rescued"] == 4
    assert devices.run(2, on_device, train, str(tmp_path / "run"))[0] == undisturbed
