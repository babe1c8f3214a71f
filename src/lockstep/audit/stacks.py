"""The line of the user's code at which a process stands, from the stacks that `faulthandler`
writes. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def waiting_lines(stacks: Mapping[int, str], root: str) -> dict[int, str]:
    """Return the innermost line of the user's code in the main thread, by process id. Processes
    without one are left out. `root`: the directory of the user's code."""
    found = {}
    for pid, text in stacks.items():
        frames = _FRAME.findall(_main_thread(text))
        for path, line, function in frames:
            name = os.path.relpath(path, root)
            if os.path.isabs(path) and not name.startswith("..") and "site-packages" not in name:
                found[pid] = f"{name}:{line}, in {function}"
                break
    return found


def _main_thread(text: str) -> str:
    """The stack of the main thread: it is the last, because threads are listed from the youngest to
    the oldest."""
    starts = [found.start() for found in _THREAD.finditer(text)]
    return text[starts[-1] :] if starts else ""
