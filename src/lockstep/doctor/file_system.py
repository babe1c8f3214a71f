"""Checks the file system of a run directory: atomic renames, fsync, locks and time stamps."""

from __future__ import annotations

import errno
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lockstep.base.container import VOLUME, ends_with_container, mount_of
from lockstep.base.errors import RunDirectoryError
from lockstep.base.files import sync, try_lock
from lockstep.doctor.check_result import CheckResult, check_result, format_bytes, format_seconds
from lockstep.doctor.machine_checks import MAX_CLOCK_OFFSET_SECONDS

_check = partial(check_result, "run directory")
Rename = Callable[[Path, Path], object]

RENAMES = 40
FILE_BYTES = 256 << 10
FILES = 8
SYNCS = 5
SLOW_SYNC_SECONDS = 1.0
LEAST_FREE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSystemInfo:
    path: str
    kind: str
    free_bytes: int
    rename_fault: str
    sync_seconds: float | None
    sync_error: str
    lock_fault: str
    clock_offset_seconds: float
    lost: str = ""


def existing(path: Path) -> Path:
    path = path.absolute()
    parent = next(each for each in (path, *path.parents) if each.exists())
    if not parent.is_dir():
        raise RunDirectoryError(
            f"--run-dir {path}: {parent} is not a folder; a run directory is a folder; choose"
            " another path"
        )
    return parent


def probe(path: Path, *, rename: Rename = os.rename) -> FileSystemInfo:
    folder = Path(tempfile.mkdtemp(prefix=".lockstep-doctor-", dir=path))
    try:
        sync_seconds, sync_error = _measure_sync(folder)
        return FileSystemInfo(
            path=str(path),
            kind=mount_of(path)[1],
            free_bytes=shutil.disk_usage(path).free,
            rename_fault=_check_file_renames(folder, rename)
            or _check_folder_renames(folder, rename),
            sync_seconds=sync_seconds,
            sync_error=sync_error,
            lock_fault=_lock_fault(folder),
            clock_offset_seconds=_clock_offset(folder),
            lost=ends_with_container(path, os.environ) or "",
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_file_renames(folder: Path, rename: Rename) -> str:
    """Replace a file by renames while a thread reads it. Return a fault if the thread reads an
    incomplete file."""
    target = folder / "target"
    contents = [bytes([65 + number]) * FILE_BYTES for number in range(2)]
    target.write_bytes(contents[0])

    def read() -> str:
        try:
            content = target.read_bytes()
        except OSError as error:
            return f"a file could not be read while another replaced it ({error.strerror})"
        if content in contents:
            return ""
        return f"a file had {len(content)} of {FILE_BYTES} bytes while another replaced it"

    def change(number: int) -> None:
        part = folder / "part"
        part.write_bytes(contents[number % 2])
        rename(part, target)

    return _read_during(read, change)


def _check_folder_renames(folder: Path, rename: Rename) -> str:
    """Rename folders while a thread lists them. Return a fault if the thread sees an incomplete
    folder."""

    def read() -> str:
        for final in folder.glob("final-*"):
            count = sum((final / str(number)).exists() for number in range(FILES))
            if count < FILES:
                return f"a folder had {count} of its {FILES} files after its rename"
        return ""

    def change(number: int) -> None:
        part = folder / f"part-{number}"
        part.mkdir()
        for file in range(FILES):
            (part / str(file)).write_bytes(b"x" * 4096)
        rename(part, folder / f"final-{number}")

    return _read_during(read, change)


def _read_during(read: Callable[[], str], change: Callable[[int], None]) -> str:
    seen: list[str] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set() and not seen:
            if text := read():
                seen.append(text)

    watcher = threading.Thread(target=watch, name="lockstep-doctor-watch")
    watcher.start()
    try:
        for number in range(RENAMES):
            if seen:
                break
            change(number)
    finally:
        ended.set()
        watcher.join()
    return seen[0] if seen else ""


def _measure_sync(folder: Path) -> tuple[float | None, str]:
    seconds = []
    for number in range(SYNCS):
        try:
            with (folder / f"synced-{number}").open("wb") as file:
                file.write(os.urandom(FILE_BYTES))
                file.flush()
                began = time.perf_counter()
                os.fsync(file.fileno())
            sync(folder)
            seconds.append(time.perf_counter() - began)
        except OSError as error:
            return None, error.strerror or str(error)
    return statistics.median(seconds), ""


def _lock_fault(folder: Path) -> str:
    path = folder / "lock"
    path.touch()
    first, second = (os.open(path, os.O_RDWR) for _ in range(2))
    try:
        try_lock(first)
        try:
            try_lock(second)
        except BlockingIOError:
            return ""
        return "a second lock was granted while the first was held"
    except OSError as error:
        return f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror}"
    finally:
        os.close(first)
        os.close(second)


def _clock_offset(folder: Path) -> float:
    path = folder / "clock"
    before = time.time()
    path.write_bytes(b"x")
    after = time.time()
    stamp = path.stat().st_mtime
    # Some file systems round time stamps to two seconds.
    return stamp - min(max(stamp, before), after)


def file_system_checks(info: FileSystemInfo) -> Iterator[CheckResult]:
    other = (
        "keep run directories on another file system (a local disk, NFS, Lustre), and checkpoints"
        " on object stores by their URL"
    )
    free = f"{format_bytes(info.free_bytes)} free"
    if info.free_bytes < LEAST_FREE_BYTES:
        remedy = "free some space: a run keeps several checkpoints there"
        yield _check("path", "failed", f"{info.path}: {free}", remedy)
    else:
        yield _check("path", "ok", f"{info.path} ({info.kind or 'unknown'}), {free}")
    if info.lost:
        yield _check("lifetime", "failed", info.lost, VOLUME)
    if info.rename_fault:
        yield _check("rename", "failed", f"is not atomic: {info.rename_fault}", other)
    else:
        text = f"atomic: {2 * RENAMES} renames of files and folders, no intermediate state seen"
        yield _check("rename", "ok", text)
    if info.sync_seconds is None:
        text = f"fsync failed: {info.sync_error}; a power failure may lose a checkpoint"
        yield _check("sync", "failed", text, other)
    else:
        is_slow = info.sync_seconds > SLOW_SYNC_SECONDS
        text = format_seconds(info.sync_seconds)
        remedy = "every checkpoint waits for it: use a faster disk, or save less often"
        yield _check(
            "sync",
            "slow" if is_slow else "ok",
            f"{text} for {format_bytes(FILE_BYTES)} and its folder",
            remedy,
        )
    if info.lock_fault:
        remedy = (
            "two runs could write to one directory: mount it with locking (NFS: with lockd, or"
            " version 4; Lustre: -o flock)"
        )
        yield _check("lock", "failed", f"flock does not exclude: {info.lock_fault}", remedy)
    else:
        yield _check("lock", "ok", "flock excludes a second holder")
    if abs(info.clock_offset_seconds) > MAX_CLOCK_OFFSET_SECONDS:
        relation = "ahead of" if info.clock_offset_seconds > 0 else "behind"
        offset = f"{format_seconds(abs(info.clock_offset_seconds))} {relation}"
        remedy = "synchronize the clocks of machine and file server by NTP"
        yield _check(
            "clock",
            "failed",
            f"the file system's is {offset} this machine's",
            f"{remedy} (chronyc tracking, timedatectl)",
        )
    else:
        yield _check("clock", "ok", "the file system's agrees with this machine's")


def check_folder(path: Path) -> list[CheckResult]:
    try:
        return list(file_system_checks(probe(path)))
    except OSError as error:
        remedy = "choose a --run-dir in which files can be created"
        return [_check("path", "failed", f"{path}: {error.strerror or error}", remedy)]
