"""The process that started this one: this one dies with it, and may put temporary files in its folder."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile

_PR_SET_PDEATHSIG = 1
_folder: str | None = None


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends. It ends at once if that is no longer its parent. Linux
    only.

    `parent`: the process id that the parent itself has passed on.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def use_parents_folder(folder: str) -> None:
    """Put temporary files in this folder from now on. The parent removes it, however this process ends."""
    global _folder
    _folder = folder


def temporary_folder(most_bytes: int) -> str:
    """The parent's folder, if its path has at most so many bytes; else the system's, or that of TMPDIR."""
    if _folder is not None and len(os.fsencode(_folder)) <= most_bytes and os.path.isdir(_folder):
        return _folder
    return tempfile.gettempdir()
