"""Processes that end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, in whatever way. Does nothing but on Linux.

    `parent`: the process id that the parent itself has passed on. A parent that ended before the kernel knew of the wish sends no signal;
    then this process has another parent, and ends here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
