"""Files written whole or not at all, and locks that end with their process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.base.system import BINARY


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that readers and crashes see the old content or the new. Raises `OSError`;
    the old content is then still there, unless only syncing the folder failed."""
    with replace_atomically(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Give the path of an empty temporary file, which is synced and renamed to `path` at the end of
    the `with`.

    An error removes it and leaves `path`. Of several writers the last one wins.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
    try:
        temporary.touch(exist_ok=False)
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the disk has a file's content or a folder's entries. Raises `OSError`."""
    if sys.platform == "win32" and path.is_dir():
        return  # it has no call for that
    descriptor = os.open(path, (os.O_RDWR if sys.platform == "win32" else os.O_RDONLY) | BINARY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_LOCKED_BYTE = 1 << 30
"""Windows hides locked bytes from others: one behind the content."""


def try_lock(descriptor: int, *, shared: bool = False) -> None:
    """Lock a file for as long as it is open. Raises `BlockingIOError` if another process holds the
    lock, `OSError` without locks. `shared`: several may hold it; on Windows it is exclusive."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(error.errno, error.strerror) from None
    else:
        import fcntl

        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
