"""Temporary folders, removed by their process, or if it is killed by the next that makes one.

Other users may put anything beside them, so only this user's own folders and files are looked at,
without following links or waiting.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lockstep.base.errors import LaunchError
from lockstep.base.files import try_lock
from lockstep.base.system import signals_blocked

_NAME = re.compile(r"lockstep-([a-z]+-)?[a-z0-9_]{8}")
_ALIVE = "alive"
"""A file that every process which needs the folder keeps locked."""
_EMPTY_SECONDS = 60.0
"""A folder that has been empty for so long was left by a process that was killed while it made or
removed it."""
_REGULAR_ONLY: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Neither follow a link nor wait for a FIFO."""


@contextmanager
def locked_folder(prefix: str = "lockstep-") -> Iterator[Path]:
    """Give an empty temporary folder; remove what killed processes have left."""
    with ExitStack() as stack:
        with signals_blocked():
            temporary, descriptor = _make(prefix)
            stack.callback(_remove, temporary, descriptor)
        yield Path(temporary.name)


def _make(prefix: str) -> tuple[tempfile.TemporaryDirectory[str], int]:
    try:
        remove_left_folders(Path(tempfile.gettempdir()))
        temporary = tempfile.TemporaryDirectory(prefix=prefix)
        unlocked = Path(temporary.name, "new")
        descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise LaunchError(
            "no temporary folder can be made:"
            f" {error.strerror}{f' ({error.filename})' if error.filename else ''}; lockstep keeps"
            " what its processes tell each other in one; set TMPDIR to a folder that can be"
            " written to, and has room"
        ) from None
    try_lock(descriptor, shared=True)
    unlocked.rename(unlocked.with_name(_ALIVE))  # locked before another process can find it
    return temporary, descriptor


def _remove(temporary: tempfile.TemporaryDirectory[str], descriptor: int) -> None:
    with signals_blocked():  # a signal's exception, or end, would leave a part of it
        os.close(descriptor)
        _empty(Path(temporary.name))
        temporary.cleanup()


def hold_folder(folder: Path) -> int | None:
    """Keep another process's `locked_folder`, should that be killed. Returns the descriptor that
    holds it, or None."""
    with suppress(OSError):
        descriptor = _open_own(folder / _ALIVE)
        try_lock(descriptor, shared=True)
        return descriptor
    return None


def remove_left_folders(parent: Path) -> None:
    """Remove what this user's killed processes have left."""
    with suppress(OSError), os.scandir(parent) as entries:
        for name in [entry.name for entry in entries if _NAME.fullmatch(entry.name)]:
            _remove_if_left(parent / name)


def _remove_if_left(folder: Path) -> None:
    with suppress(OSError):  # another user's, or another process is faster
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or not _is_own(found):
            return
        if time.time() - found.st_mtime > _EMPTY_SECONDS:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        descriptor = _open_own(folder / _ALIVE)
        try:
            try_lock(descriptor)
            _empty(folder)
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)


def _empty(folder: Path) -> None:
    """Remove everything but `alive`: if this process is killed meanwhile, the next finds it."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry)
            elif entry.name != _ALIVE:
                os.unlink(entry)


def _open_own(path: Path) -> int:
    """Open this user's regular file. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDWR | _REGULAR_ONLY)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and _is_own(found):
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{path} is no file of this user")


def _is_own(found: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
