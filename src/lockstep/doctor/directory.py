"""Whether a file system keeps what a run directory needs: renames that happen whole, syncs that return, locks that exclude, a clock.

Tried for real, in a folder of its own that is removed again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.base.errors import RunDirectoryError
from lockstep.doctor.line import Line, Verdict, duration, size
from lockstep.doctor.machine import CLOCK_SECONDS

Rename = Callable[[Path, Path], object]

RENAMES = 40
"""Of a file onto another, and as many of a folder."""
FILE_BYTES = 256 << 10
FILES = 8
"""In a folder that is renamed, as a checkpoint is."""
SYNCS = 5
SLOW_SYNC_SECONDS = 1.0
"""For a file of `FILE_BYTES`. A checkpoint waits for a few."""
LEAST_FREE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Directory:
    """What was seen."""

    path: str
    system: str
    """The kind of file system, as the kernel names it."""
    free_bytes: int
    torn: str
    """What somebody who looked during a rename saw. Empty: each was whole, before and after."""
    sync_seconds: float | None
    """The median. None: syncing failed."""
    sync_error: str
    lock: str
    """Why locks do not exclude. Empty: they do."""
    clock_seconds: float
    """How far the file system's clock is ahead of this machine's."""


def existing(path: Path) -> Path:
    """The folder itself, or the nearest above it that is there: where a run would make it. Raises `RunDirectoryError` for a file."""
    path = path.absolute()
    found = next(each for each in (path, *path.parents) if each.exists())
    if not found.is_dir():
        raise RunDirectoryError(f"--run-dir {path}: {found} is not a folder; a run directory is a folder; choose another path")
    return found


def probe(path: Path, *, rename: Rename = os.rename) -> Directory:
    """Try what a run does in `path`, which is there. Raises `OSError` where nothing can be written there."""
    folder = Path(tempfile.mkdtemp(prefix=".lockstep-doctor-", dir=path))
    try:
        sync_seconds, sync_error = _sync(folder)
        return Directory(
            path=str(path),
            system=_system(path),
            free_bytes=shutil.disk_usage(path).free,
            torn=_files(folder, rename) or _folders(folder, rename),
            sync_seconds=sync_seconds,
            sync_error=sync_error,
            lock=_lock(folder),
            clock_seconds=_clock(folder),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _files(folder: Path, rename: Rename) -> str:
    """Put files over one another while a thread reads: what it read must be one of them, whole."""
    target = folder / "target"
    contents = [bytes([65 + number]) * FILE_BYTES for number in range(2)]
    target.write_bytes(contents[0])

    def look() -> str:
        try:
            found = target.read_bytes()
        except OSError as error:
            return f"a file could not be read while another took its place ({error.strerror})"
        return "" if found in contents else f"a file had {len(found)} of {FILE_BYTES} bytes while another took its place"

    def change(number: int) -> None:
        part = folder / "part"
        part.write_bytes(contents[number % 2])
        rename(part, target)

    return _watched(look, change)


def _folders(folder: Path, rename: Rename) -> str:
    """Give folders of files their names while a thread looks: under its name, a folder must have all its files."""

    def look() -> str:
        for final in folder.glob("final-*"):
            count = sum((final / str(number)).exists() for number in range(FILES))
            if count < FILES:
                return f"a folder had {count} of its {FILES} files when it had its name"
        return ""

    def change(number: int) -> None:
        part = folder / f"part-{number}"
        part.mkdir()
        for file in range(FILES):
            (part / str(file)).write_bytes(b"x" * 4096)
        rename(part, folder / f"final-{number}")

    return _watched(look, change)


def _watched(look: Callable[[], str], change: Callable[[int], None]) -> str:
    """Do all changes while another thread looks again and again. What it saw first that is wrong; empty: nothing."""
    seen: list[str] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set() and not seen:
            if text := look():
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


def _sync(folder: Path) -> tuple[float | None, str]:
    seconds = []
    for number in range(SYNCS):
        try:
            with (folder / f"synced-{number}").open("wb") as file:
                file.write(os.urandom(FILE_BYTES))
                file.flush()
                began = time.perf_counter()
                os.fsync(file.fileno())
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            seconds.append(time.perf_counter() - began)
        except OSError as error:
            return None, error.strerror or str(error)
    return statistics.median(seconds), ""


def _lock(folder: Path) -> str:
    path = folder / "lock"
    path.touch()
    first, second = (os.open(path, os.O_RDWR) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
        return "a second one was given while the first was held"
    except OSError as error:
        return f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror}"
    finally:
        os.close(first)
        os.close(second)


def _clock(folder: Path) -> float:
    path = folder / "clock"
    before = time.time()
    path.write_bytes(b"x")
    after = time.time()
    stamp = path.stat().st_mtime
    # A file system counts in steps, up to two seconds on some.
    return stamp - min(max(stamp, before), after)


def _system(path: Path) -> str:
    """From /proc/mounts; empty where that says nothing."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    points = {point.encode().decode("unicode_escape"): kind for _, point, kind, *_ in mounts}
    return next((points[str(folder)] for folder in (path.resolve(), *path.resolve().parents) if str(folder) in points), "")


def lines_of(seen: Directory) -> list[Line]:
    """Pure."""
    other = "keep run directories on another file system (a local disk, NFS, Lustre), and checkpoints on object stores by their URL"
    lines = [_say("path", "ok", f"{seen.path} ({seen.system or 'unknown'}), {size(seen.free_bytes)} free")]
    if seen.free_bytes < LEAST_FREE_BYTES:
        lines = [_say("path", "wrong", f"{seen.path}: {size(seen.free_bytes)} free", "make room: a run keeps a few checkpoints there")]
    if seen.torn:
        lines.append(_say("rename", "wrong", f"is not atomic: {seen.torn}", other))
    else:
        lines.append(_say("rename", "ok", f"atomic: {2 * RENAMES} of files and folders, each seen before or after, never between"))
    if seen.sync_seconds is None:
        lines.append(_say("sync", "wrong", f"fsync failed: {seen.sync_error}; a checkpoint may be lost with the power", other))
    else:
        slow = seen.sync_seconds > SLOW_SYNC_SECONDS
        text = f"{duration(seen.sync_seconds)} for {size(FILE_BYTES)} and its folder"
        lines.append(_say("sync", "slow" if slow else "ok", text, "every checkpoint waits for it: a faster disk, or save less often"))
    if seen.lock:
        remedy = "two runs could write to one directory: mount it with locks (NFS: with lockd, or version 4; Lustre: -o flock)"
        lines.append(_say("lock", "wrong", f"flock does not exclude: {seen.lock}", remedy))
    else:
        lines.append(_say("lock", "ok", "flock excludes a second holder"))
    way = "ahead of" if seen.clock_seconds > 0 else "behind"
    if abs(seen.clock_seconds) > CLOCK_SECONDS:
        text = f"the file system's is {duration(abs(seen.clock_seconds))} {way} this machine's"
        lines.append(_say("clock", "wrong", text, "set the clocks of machine and file server by NTP (chronyc tracking, timedatectl)"))
    else:
        lines.append(_say("clock", "ok", "the file system's is this machine's, to a moment"))
    return lines


def unusable(path: Path, error: OSError) -> list[Line]:
    """Where `probe` raised."""
    text = f"{path}: {error.strerror or error}"
    return [_say("path", "wrong", text, "give a --run-dir in which files can be made")]


def _say(check: str, verdict: Verdict, found: str, remedy: str = "") -> Line:
    return Line(section="run directory", check=check, verdict=verdict, found=found, remedy="" if verdict == "ok" else remedy)
