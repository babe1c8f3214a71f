"""The runner sees a hang, passes on what a script prints, and ends all that it started. Scripts
here need no torch."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lockstep.audit.runner import (
    SITE,
    AuditedEnd,
    AuditOptions,
    RecordGrowth,
    aborted_at_exit,
    environment,
    failure_in,
    run_audited,
)
from lockstep.scripts.line import ScriptLine

WRITES = """
import json, os, subprocess, sys, time
from pathlib import Path
folder = Path(os.environ["LOCKSTEP_REQUEST"]).parent
record = (folder / f"process-{os.getpid()}.jsonl").open("w", buffering=1)
def write(**row): record.write(json.dumps(row) + "\\n")
write(kind="process")
"""
ORPHANS = """
quiet = "stdout=-3, stderr=-3, start_new_session=True"
orphan = f"import subprocess, sys; child = subprocess.Popen(['sleep', '1000'], {quiet}); print(child.pid)"
pid = subprocess.run([sys.executable, "-c", orphan], capture_output=True, text=True).stdout
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
open("writing", "w").write(f"{pid} {child.pid}")
os.rename("writing", "pids")
"""
HANGS = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR2, file=(folder / f"stacks-{os.getpid()}.txt").open("w"))
write(kind="rank", rank=0, world_size=1)
def waits_for_ever(): time.sleep(1000)
waits_for_ever()
"""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "records").mkdir()
    return tmp_path / "records"


def ran(
    folder: Path, text: str, *arguments: str, echo: io.BytesIO | None = None, **options: float
) -> AuditedEnd:
    Path("script.py").write_text(text)
    return run_audited(
        AuditOptions(line=ScriptLine("script.py", arguments), launcher="python", **options),
        folder,
        torchrun=False,
        echo=echo,
    )


def assert_ended(pids: str) -> None:
    assert pids.split()
    alive = [
        pid
        for pid in map(int, pids.split())
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]
    assert alive == []


def test_time_counts_from_the_last_line_and_not_before_a_rank_has_written(tmp_path: Path) -> None:
    clock = Clock()
    growth = RecordGrowth(tmp_path, clock)
    clock.now = 100.0
    assert growth.stalled_seconds() == 0.0
    (tmp_path / "process-1.jsonl").write_text('{"kind": "process"}\n')
    clock.now = 200.0
    assert growth.stalled_seconds() == 0.0
    clock.now = 300.0
    assert growth.stalled_seconds() == 0.0, "no rank yet"
    (tmp_path / "process-2.jsonl").write_text('{"kind": "rank", "rank": 0}\n')
    assert growth.stalled_seconds() == 0.0
    clock.now = 304.0
    assert growth.stalled_seconds() == 4.0
    with (tmp_path / "process-1.jsonl").open("a") as record:
        record.write('{"kind": "step"}\n')
    assert growth.stalled_seconds() == 0.0, "any process counts"


def test_a_script_runs_unchanged_and_its_output_is_passed_on(folder: Path) -> None:
    echo = io.BytesIO()
    text = (
        "import os, sys; print('out', sys.argv, os.getcwd()); print('err', file=sys.stderr);"
        " sys.exit(input)"
    )
    result = ran(
        folder,
        text.replace("sys.exit(input)", "print(repr(sys.stdin.read())); os._exit(0)"),
        "--lr",
        "1",
        echo=echo,
    )
    assert (result.status, result.error, result.hang, result.timed_out) == (0, "", None, False)
    assert echo.getvalue().decode().splitlines() == [
        f"out ['script.py', '--lr', '1'] {folder.parent}",
        "err",
        "''",
    ]


def test_the_script_does_not_have_the_place_of_another_launcher() -> None:
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    found = environment({**launcher, "HOME": "/h", "PYTHONPATH": "/mine"})
    assert found == {"HOME": "/h", "PYTHONUNBUFFERED": "1", "PYTHONPATH": f"{SITE}:/mine"}
    assert environment({})["PYTHONPATH"] == str(SITE)


def test_a_script_that_fails_has_its_last_lines_and_its_status(folder: Path) -> None:
    result = ran(folder, "print('begins')\nraise ValueError('boom')")
    assert result.status == 1
    assert result.error.splitlines()[0] == "begins"
    assert result.error.endswith("ValueError: boom")
    assert ran(folder, "import os; os.kill(os.getpid(), 9)").status == 128 + 9


def test_a_script_that_hangs_gives_its_stacks_and_leaves_no_process(folder: Path) -> None:
    result = ran(folder, WRITES + ORPHANS + HANGS, hang_after_seconds=2)
    assert result.hang is not None
    assert result.hang.seconds > 2
    (stack,) = result.hang.stacks.values()
    assert "in waits_for_ever" in stack
    assert (result.error, result.timed_out) == ("", False)
    assert_ended(" ".join([Path("pids").read_text(), *map(str, result.hang.stacks)]))


@pytest.fixture
def late_once_it_has_started_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of the runner, a script takes 2000 s, once it has written `pids`."""
    clock = SimpleNamespace(monotonic=lambda: 2000.0 if Path("pids").exists() else 0.0)
    monkeypatch.setattr("lockstep.scripts.process.time", clock)


@pytest.mark.usefixtures("late_once_it_has_started_others")
def test_a_script_that_takes_too_long_is_ended_with_all_it_started(folder: Path) -> None:
    result = ran(folder, WRITES + ORPHANS + "time.sleep(1000)", timeout_seconds=1000.0)
    assert result.timed_out
    assert result.hang is None
    assert_ended(Path("pids").read_text())


def test_what_a_script_leaves_behind_is_ended(folder: Path) -> None:
    assert ran(folder, WRITES + ORPHANS).status == 0
    assert_ended(Path("pids").read_text())


@pytest.mark.usefixtures("late_once_it_has_started_others")
def test_a_script_that_ignores_sigterm_is_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.scripts.process.STOP_SECONDS", 0.3)
    ignores = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    text = ignores + WRITES + ORPHANS + "time.sleep(1000)"
    assert ran(folder, text, timeout_seconds=1000.0).timed_out
    assert_ended(Path("pids").read_text())


def test_an_interrupted_audit_leaves_no_process(folder: Path) -> None:
    class Interrupts(io.BytesIO):
        def write(self, data: object) -> int:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ran(folder, WRITES + ORPHANS + "print('ready')\ntime.sleep(1000)", echo=Interrupts())
    assert_ended(Path("pids").read_text())


TORCHRUN = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]: ValueError: boom
W1125 10:00:00.1 7 torch/distributed/elastic/multiprocessing/api.py:1014] Sending process 12 closing signal SIGTERM
E1125 10:00:00.2 7 torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: 1) local_rank: 1 (pid: 13)
Traceback (most recent call last):
  File "torch/distributed/run.py", line 7, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


def test_the_failure_is_the_ranks_without_what_torchrun_adds() -> None:
    assert failure_in(TORCHRUN).splitlines()[-1] == "[rank1]: ValueError: boom"
    assert failure_in(
        "W1125 10:00:00.1 7 torch/distributed/run.py:880] OMP_NUM_THREADS\n" + TORCHRUN
    ).endswith("boom")
    assert failure_in("\n".join(map(str, range(100)))).splitlines() == list(
        map(str, range(70, 100))
    )
    only = (
        "E1125 10:00:00.2 7 torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode:"
        " -11) local_rank: 1\n"
    )
    assert failure_in(only) == only.strip()
    banner = (
        f"{'*' * 41}\nSetting OMP_NUM_THREADS environment variable for each process to be 1 in"
        f" default. \n{'*' * 41}\n"
    )
    assert failure_in(f"{banner}boom") == "boom"
    unwritten = (
        "--- Logging error ---\nTraceback (most recent call last):\n"
        '  File "/lib/torch/distributed/run.py", line 1\nRuntimeError: reentrant call\n'
        "Call stack:\n    result = agent.run()\nMessage: 'a %s'\nArguments: ('b',)\n"
    )
    assert failure_in(f"{unwritten}ValueError: boom\n{unwritten}{TORCHRUN}").splitlines()[-1] == (
        "[rank1]: ValueError: boom"
    )
    assert failure_in(f"boom\n{unwritten}") == "boom"


def test_an_abort_after_the_end_of_the_script_is_no_failure() -> None:
    abort = "epoch 2: loss 0.1\nterminate called without an active exception"
    assert aborted_at_exit(abort)
    assert not aborted_at_exit(f"Traceback (most recent call last):\n  ...\nValueError: a\n{abort}")
    assert not aborted_at_exit("")
