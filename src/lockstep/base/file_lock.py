"""Locks on open files, which the system releases however the process ends."""

from __future__ import annotations

import os
import sys

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
