"""The temporary folder of a launcher, and the folders that killed launchers left behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.base.file_lock import try_lock

_PREFIX = "lockstep-"
_ALIVE = "alive"
"""A file in the folder that the launcher keeps locked. The system releases the lock however the launcher ends."""


@contextmanager
def launcher_folder() -> Iterator[Path]:
    """An empty folder, removed at the end. Removes folders of dead launchers first."""
    remove_folders_of_dead_launchers(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        unlocked = Path(folder, "new")
        descriptor = os.open(unlocked, os.O_WRONLY | os.O_CREAT)
        try:
            try_lock(descriptor)
            unlocked.rename(unlocked.with_name(_ALIVE))  # locked before another launcher can find it
            yield Path(folder)
        finally:
            os.close(descriptor)


def remove_folders_of_dead_launchers(parent: Path) -> None:
    """Remove what killed launchers have left in the temporary folder `parent`."""
    for alive in parent.glob(f"{_PREFIX}*/{_ALIVE}"):
        with suppress(OSError):  # another user's, or another launcher is faster
            descriptor = os.open(alive, os.O_WRONLY)
            try:
                try_lock(descriptor)
                shutil.rmtree(alive.parent)
            finally:
                os.close(descriptor)
