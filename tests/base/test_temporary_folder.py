"""A locked folder goes with its process; where that was killed, with the next process that makes
one. What others put beside it is left alone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.base import system, temporary_folder as module
from lockstep.base.errors import LaunchError
from lockstep.base.temporary_folder import hold_folder, locked_folder
from lockstep.scripts.process import ended_by_signals, run_script
from lockstep.scripts.request import ScriptRequest

HOLD = """
import time
from lockstep.base.temporary_folder import locked_folder
with locked_folder("lockstep-audit-") as folder:
    (folder / "rank-0.record").touch()
    print(folder, flush=True)
    time.sleep(60)
"""


class Request(ScriptRequest):
    answered_by = "nobody"


def test_a_killed_processs_folder_is_removed_and_a_live_ones_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "lockstep-of_nobody").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(3)
    ]
    killed, alive, held = [
        Path(process.stdout.readline().strip())
        for process in processes
        if process.stdout is not None
    ]
    holding = hold_folder(held)  # as a worker does that ends after its launcher
    for process in (processes[0], processes[2]):
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert killed.exists()
    with locked_folder() as mine:
        assert sorted(tmp_path.iterdir()) == sorted(
            [alive, held, mine, tmp_path / "lockstep-of_nobody"]
        )
    assert not mine.exists()
    assert holding is not None
    os.close(holding)
    with locked_folder() as mine:
        assert not held.exists()
    processes[1].kill()
    processes[1].communicate()


@pytest.mark.parametrize("moment", ["made", "removed"])
def test_a_signal_while_a_folder_is_made_or_removed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    function = {"made": "open", "removed": "rmdir"}[moment]
    real = getattr(os, function)
    hits = []

    def with_a_signal(*arguments: Any, **settings: Any) -> Any:
        if not hits:
            hits.append(arguments)
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments, **settings)

    monkeypatch.setattr(os, function, with_a_signal)
    with pytest.raises(SystemExit), ended_by_signals(), locked_folder() as folder:
        (folder / "rank-0.record").touch()
    assert hits
    assert list(tmp_path.iterdir()) == []


def test_a_signal_at_any_line_leaves_no_folder_when_the_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(module, "_own", [])  # not that of these tests
    traced = (__file__, contextlib.__file__, module.__file__, system.__file__)
    before, left = sys.gettrace(), []
    for last in itertools.count(1):
        rest = iter([False] * (last - 1) + [True])

        def trace(frame: Any, event: str, arg: object, rest: Any = rest) -> Any:
            if frame.f_code.co_filename not in traced:
                return None
            if event == "line" and next(rest, False):
                signal.raise_signal(signal.SIGTERM)
            return trace

        try:
            with ended_by_signals():
                sys.settrace(trace)
                with locked_folder() as folder:
                    os.mkdir(folder / "start-1")
                sys.settrace(before)
        except SystemExit:
            sys.settrace(before)
            left += os.listdir(tmp_path)
            module.remove_own_folders()
        else:
            break
        assert os.listdir(tmp_path) == []
    assert last > 50
    assert left, "without `remove_own_folders`, some would stay"


def test_a_fork_that_exits_leaves_the_folder(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from lockstep.base.temporary_folder import locked_folder\n"
        "with locked_folder() as folder:\n"
        "    if (child := os.fork()) == 0:\n"
        "        sys.exit()\n"
        "    os.waitpid(child, 0)\n"
        "    print(folder.is_dir())\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    line = [sys.executable, "-c", program]
    ended = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("True\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_handler_that_raises_as_signals_are_blocked_leaves_none_blocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = signal.pthread_sigmask
    before = real(signal.SIG_BLOCK, ())

    def raises(how: int, numbers: Any) -> Any:
        found = real(how, numbers)
        if how == signal.SIG_BLOCK and numbers:
            raise SystemExit  # Python calls handlers before this function returns
        return found

    monkeypatch.setattr(signal, "pthread_sigmask", raises)
    with pytest.raises(SystemExit), system.signals_blocked():
        pass
    assert real(signal.SIG_BLOCK, ()) == before


def test_an_old_empty_folder_was_left_by_a_process_that_was_killed_as_it_made_or_removed_it(
    tmp_path: Path,
) -> None:
    contents = {"old_empt": None, "old_new_": "new", "recent__": None, "recent_n": "new"}
    contents |= {"training": "mine"}
    for name, file in contents.items():
        folder = tmp_path / f"lockstep-{name}"
        folder.mkdir()
        if file is not None:
            (folder / file).touch()
        if not name.startswith("recent"):
            os.utime(folder, (0.0, time.time() - 61.0))
    module.remove_left_folders(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [
        f"lockstep-{name}" for name in ("recent__", "recent_n", "training")
    ]


def test_what_a_script_is_ended_with_leaves_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    made: list[Path] = []

    def has_begun() -> bool:
        made[:] = (tmp_path / "tmp").glob("lockstep-audit-*/rank-0.record")
        return bool(made)

    ended = run_script(
        [sys.executable, "-c", HOLD], Request(), tmp_path, environ=environ, look=has_begun
    )
    assert ended.status == 128 + signal.SIGTERM
    assert made
    assert os.listdir(tmp_path / "tmp") == []


def test_a_process_that_starts_at_the_same_moment_leaves_the_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lock = fcntl.flock

    def while_another_starts(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        module.remove_left_folders(tmp_path)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", while_another_starts)
    with locked_folder() as mine:
        assert mine.exists()
        assert fcntl.flock is lock, "another one has looked while this one started"


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "made",
    ["fifo", "link to a fifo", "link to a file", "folder", "link to a folder", "another user's"],
)
def test_what_another_user_puts_there_is_neither_waited_for_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "alive").touch()
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    folder = shared / "lockstep-abcdefgh"
    alive = folder / "alive"
    if made == "link to a folder":
        folder.symlink_to(mine)
    else:
        folder.mkdir()
    if made == "fifo":
        os.mkfifo(alive)
    elif made == "link to a fifo":
        os.mkfifo(tmp_path / "fifo")
        alive.symlink_to(tmp_path / "fifo")
    elif made == "link to a file":
        alive.symlink_to(mine / "alive")
    elif made == "folder":
        alive.mkdir()
    elif made == "another user's":
        alive.touch()
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with locked_folder():
        pass
    assert folder.exists()
    assert (mine / "alive").exists()


def test_a_folder_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/lockstep-abcdefgh")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", fail)
    with pytest.raises(LaunchError) as refused, locked_folder():
        pass
    why = "no temporary folder can be made: No space left on device (/tmp/lockstep-abcdefgh); "
    assert str(refused.value).startswith(why)
    assert str(refused.value).endswith("set TMPDIR to a writable folder with free space")


def test_a_temporary_folder_that_cannot_be_listed_stops_nothing(tmp_path: Path) -> None:
    module.remove_left_folders(tmp_path / "absent")


def test_every_temporary_folder_of_lockstep_is_a_locked_one_or_beside_what_it_becomes() -> None:
    source = Path(module.__file__).parent.parent
    without_dir = re.compile(rf"{tempfile.__name__}\.TemporaryDirectory\((?![^)]*dir=)")
    found = [
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if without_dir.search(path.read_text(encoding="utf-8"))
    ]
    assert found == ["base/temporary_folder.py"]


def test_a_folder_without_write_permission_is_removed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty(folder: Path) -> None:  # root may remove anything
        raise PermissionError(folder)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(module, "_empty", empty)
    with locked_folder() as folder:
        (folder / "read-only").mkdir(mode=0o555)
    assert not folder.exists()
