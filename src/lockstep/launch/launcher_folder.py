"""A launcher's own temporary folder, and those that launchers left that were killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "lockstep-"
_ALIVE = "alive"
"""A file in it, which its launcher holds locked: the system lets go of it however the launcher ends."""


@contextmanager
def launcher_folder() -> Iterator[Path]:
    """An empty folder, while inside. First removes those whose launcher lives no more."""
    _remove_dead(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        descriptor = os.open(Path(folder, _ALIVE), os.O_WRONLY | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(folder)
        finally:
            os.close(descriptor)


def _remove_dead(parent: Path) -> None:
    for alive in parent.glob(f"{_PREFIX}*/{_ALIVE}"):
        with suppress(OSError):  # another user's, or another launcher is faster
            descriptor = os.open(alive, os.O_WRONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(alive.parent)
            finally:
                os.close(descriptor)
