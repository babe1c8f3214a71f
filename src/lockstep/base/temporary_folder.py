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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.base.errors import LaunchError
from lockstep.base.files import try_lock

_NAME = re.compile(r"lockstep-([a-z]+-)?[a-z0-9_]{8}")
_ALIVE = "alive"
"""A file that every process which needs the folder keeps locked."""
_REGULAR_ONLY: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Neither follow a link nor wait for a FIFO."""


@contextmanager
def locked_folder(prefix: str = "lockstep-") -> Iterator[Path]:
    """Give an empty temporary folder; remove what killed processes have left."""
    try:
        remove_left_folders(Path(tempfile.gettempdir()))
        temporary = tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise LaunchError(
            "no temporary folder can be made:"
            f" {error.strerror}{f' ({error.filename})' if error.filename else ''}; lockstep keeps"
            " what its processes tell each other in one; set TMPDIR to a folder that can be"
            " written to, and has room"
        ) from None
    with temporary as folder:
        unlocked = Path(folder, "new")
        descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT)
        try:
            try_lock(descriptor, shared=True)
            unlocked.rename(unlocked.with_name(_ALIVE))  # locked before another process can find it
            yield Path(folder)
        finally:
            os.close(descriptor)


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
        descriptor = _open_own(folder / _ALIVE)
        try:
            try_lock(descriptor)
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)


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
