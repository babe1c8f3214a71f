"""Memory shared with the writer process. Needs no torch.

On Linux it has no name and goes with its last process; elsewhere it is a temporary file.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from lockstep.base.system import BINARY


class SharedFile:
    """A file of zeros until `close`."""

    def __init__(self, size_bytes: int) -> None:
        self._path: str | None = None
        if sys.platform == "linux":
            self._descriptor = os.memfd_create("lockstep-checkpoint")
        else:
            self._descriptor, self._path = tempfile.mkstemp(prefix="lockstep-checkpoint-")
        os.ftruncate(self._descriptor, size_bytes)
        self.mapped = mmap.mmap(self._descriptor, size_bytes)

    @property
    def name(self) -> str:
        """The argument of `map_shared_file`."""
        return str(self._descriptor) if self._path is None else self._path

    @property
    def inherited(self) -> Sequence[int]:
        """Descriptors that a process which maps the file inherits."""
        return [self._descriptor] if self._path is None else []

    def close(self) -> None:
        """Call it when no tensor uses the memory and the other process has ended."""
        del self.mapped
        os.close(self._descriptor)
        if self._path is not None:
            with suppress(OSError):  # on Windows, if something still maps it
                os.unlink(self._path)


def map_shared_file(name: str, size_bytes: int) -> mmap.mmap:
    """Map another process's `SharedFile` for reading."""
    descriptor = int(name) if name.isdecimal() else os.open(name, os.O_RDONLY | BINARY)
    return mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_READ)
