"""The stacks of a process that cannot be asked, because something holds Python's lock; or of one that was forked from it.

faulthandler writes them from a signal's handler, into memory that whoever may signal the process can read through /proc.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lockstep.hooks.hang.snapshot import Frame

NUMBER = signal.SIGURG
"""A process that does not handle it ignores it."""
_WRITING_SECONDS = 0.1
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Stacks:
    """Has this process, and those that it forks from now on, answer. One at a time."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("lockstep-stacks")
        faulthandler.register(NUMBER, file=self.descriptor, all_threads=False)

    def of_children(self) -> dict[int, tuple[Frame, ...]]:
        """The stack of the main thread of each process that was forked from this one, outermost frame first."""
        found = {process: read(process, self.descriptor) for process in _children()}
        return {process: frames for process, frames in found.items() if frames}

    def close(self) -> None:
        faulthandler.unregister(NUMBER)
        os.close(self.descriptor)


def read(process: int, descriptor: int) -> tuple[Frame, ...]:
    """Return the stack of another process that has a `Stacks` with this descriptor, outermost frame first; empty if none."""
    path = Path(f"/proc/{process}/fd/{descriptor}")
    with suppress(OSError):
        before = path.stat().st_size
        os.kill(process, NUMBER)
        time.sleep(_WRITING_SECONDS)
        return parsed(path.read_bytes()[before:].decode(errors="replace"))
    return ()


def parsed(text: str) -> tuple[Frame, ...]:
    """From what faulthandler writes, the innermost first."""
    frames = [Frame(found[1], int(found[2]), found[3]) for line in text.splitlines() if (found := _FRAME.fullmatch(line)) is not None]
    return tuple(reversed(frames))


def _children() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            yield from map(int, (task / "children").read_text(encoding="ascii").split())
