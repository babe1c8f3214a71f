"""The file system of a run directory: real probes, and planted faults."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from lockstep.base.errors import RunDirectoryError
from lockstep.doctor.file_system import check_folder, existing, file_system_checks, probe


def verdicts(path: Path) -> dict[str, str]:
    return {check.check: check.verdict for check in file_system_checks(probe(path))}


def copying(old: Path, new: Path) -> None:
    """What stands for a rename where an object store is mounted as a file system."""
    if old.is_dir():
        shutil.copytree(old, new, copy_function=copying_slowly)
        shutil.rmtree(old)
    else:
        shutil.copyfile(old, new)
        old.unlink()


def copying_slowly(old: str, new: str) -> None:
    shutil.copyfile(old, new)
    time.sleep(0.01)


def removing_first(old: Path, new: Path) -> None:
    """A rename over a file, where none may be there."""
    new.unlink(missing_ok=True)
    time.sleep(0.01)
    old.rename(new)


def copying_folders(old: Path, new: Path) -> None:
    (copying if old.is_dir() else os.rename)(old, new)


def test_this_file_system_is_well_and_nothing_stays_in_it(tmp_path: Path) -> None:
    assert set(verdicts(tmp_path).values()) == {"ok"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rename", [copying, removing_first, copying_folders])
def test_a_rename_that_is_not_atomic_is_seen(tmp_path: Path, rename: object) -> None:
    (check,) = [
        check
        for check in file_system_checks(probe(tmp_path, rename=rename))
        if check.check == "rename"
    ]  # type: ignore[arg-type]
    assert check.verdict == "failed"
    assert check.found.startswith("is not atomic: a f")
    assert check.remedy
    assert list(tmp_path.iterdir()) == []


def test_locks_that_do_not_exclude_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert verdicts(tmp_path)["lock"] == "failed"


def test_syncs_that_fail_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    assert verdicts(tmp_path)["sync"] == "failed"


def test_a_file_system_with_another_clock_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 60)
    (check,) = [check for check in file_system_checks(probe(tmp_path)) if check.check == "clock"]
    assert check.verdict == "failed"
    assert check.found == "the file system's is 60 s ahead of this machine's"


def test_where_nothing_can_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    (check,) = check_folder(tmp_path)
    assert (check.verdict, check.found) == ("failed", f"{tmp_path}: Read-only file system")


def test_a_run_directory_that_is_not_there_yet_is_tried_where_it_would_be_made(
    tmp_path: Path,
) -> None:
    assert existing(tmp_path / "runs" / "a") == tmp_path
    assert existing(tmp_path) == tmp_path


@pytest.mark.parametrize("below", [".", "runs/a"])
def test_a_run_directory_that_is_a_file_or_lies_below_one_is_refused(
    tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        RunDirectoryError,
        match=f"{tmp_path}/file is not a folder; a run directory is a folder; choose another path",
    ):
        existing(tmp_path / "file" / below)
