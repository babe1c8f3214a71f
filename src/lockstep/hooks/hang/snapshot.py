"""Stack snapshots: a process's phase, its threads' stacks, the collectives it is in, and whether it makes progress."""

from __future__ import annotations

import dis
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from lockstep.comm import wait_times as waits
from lockstep.comm.active_calls import CollectiveCall, active_calls

Doing = Literal["waits", "runs", "computes", "sleeps"]
"""In a collective, for the others; through Python code; in native code, on the processor; in a call that does not return."""
_JUMPS = ("JUMP", "POP_JUMP")
"""A loop without a body is at its jump whenever it is looked at; what calls native code is at no jump."""
LOOKS = 5
LOOK_SECONDS = 0.04
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_EXCHANGES = os.sep + os.path.join("torch", "distributed") + os.sep
_WAITS = waits.__file__
"""Stands between torch's waits and their callers."""
_HERE = str(Path(__file__).parents[2]) + os.sep


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def is_the_users(self) -> bool:
        """Neither of Python, nor of an installed package, nor of lockstep."""
        return not self.file.startswith(("<", _HERE, _PYTHON)) and not any(folder in self.file for folder in _PACKAGES)

    @property
    def is_of_torch(self) -> bool:
        return f"{os.sep}torch{os.sep}" in self.file

    @property
    def is_ours(self) -> bool:
        return self.file.startswith(_HERE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The snapshot of one rank. It is sent between processes as JSON."""

    rank: int
    host: str
    process: int
    phase: str
    step: int
    seconds: float
    """In this phase."""
    limit_seconds: float
    """The phase's timeout."""
    is_first: bool
    """True if the phase has never ended yet, so that the timeout is a default."""
    doing: Doing
    calls: tuple[CollectiveCall, ...]
    stack: tuple[Frame, ...]
    """The stack of the training thread, outermost frame first."""
    threads: Mapping[str, tuple[Frame, ...]]
    """The others, by name."""
    children: Mapping[int, tuple[Frame, ...]] = field(default_factory=dict)
    """The stacks of forked processes (loader workers), by process id, if they were asked."""

    def say(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Place:
        """From what `say` gave, through JSON."""
        threads = {name: _frames_of(frames) for name, frames in said["threads"].items()}
        calls = tuple(CollectiveCall(**call) for call in said["calls"])
        children = {int(process): _frames_of(frames) for process, frames in said["children"].items()}
        return cls(**{**said, "calls": calls, "stack": _frames_of(said["stack"]), "threads": threads, "children": children})

    @property
    def is_late(self) -> bool:
        """True if the phase has exceeded its timeout."""
        return self.seconds >= self.limit_seconds

    @property
    def call(self) -> CollectiveCall | None:
        """The collective that the rank waits in; None if it is in none."""
        return self.calls[0] if self.doing == "waits" and self.calls else None

    @property
    def line(self) -> Frame | None:
        """The innermost frame of the user's code; if there is none, the innermost frame."""
        return line_of(self.stack)


def line_of(stack: Sequence[Frame]) -> Frame | None:
    """The innermost line of the user's own that a stack stands in; where there is none, the innermost of all."""
    return next((frame for frame in reversed(stack) if frame.is_the_users), stack[-1] if stack else None)


def _frames_of(said: Sequence[Mapping[str, Any]]) -> tuple[Frame, ...]:
    return tuple(Frame(**frame) for frame in said)


def look(
    rank: int,
    thread: threading.Thread,
    *,
    phase: str,
    step: int,
    seconds: float,
    limit_seconds: float,
    is_first: bool,
    sleep: Callable[[float], object] = time.sleep,
) -> Place:
    """Take a snapshot of this process, whose training thread is `thread`. Takes a fifth of a second."""
    assert thread.ident is not None
    before, seen = _processor_seconds(thread), []
    for _ in range(LOOKS):
        seen.append(_instruction(thread.ident))
        sleep(LOOK_SECONDS)
    used = (_processor_seconds(thread) - before) / (LOOKS * LOOK_SECONDS)
    stacks = {ident: stack_of(frame) for ident, frame in sys._current_frames().items()}
    stack = stacks.pop(thread.ident, ())
    calls = active_calls()
    if not calls and stack and (call := called_in(stack)) is not None:
        calls = [call]
    names = {each.ident: each.name for each in threading.enumerate()}
    return Place(
        rank=rank,
        host=socket.gethostname(),
        process=os.getpid(),
        phase=phase,
        step=step,
        seconds=seconds,
        limit_seconds=limit_seconds,
        is_first=is_first,
        doing=doing(stack, calls=calls, moves=len(set(seen)) > 1 or seen[-1][2].startswith(_JUMPS), processor=used),
        calls=tuple(calls),
        stack=stack,
        threads={names.get(ident, str(ident)): frames for ident, frames in stacks.items() if ident != threading.get_ident()},
    )


def doing(stack: Sequence[Frame], *, calls: Sequence[CollectiveCall], moves: bool, processor: float) -> Doing:
    """`moves`: whether it went on in Python code while it was looked at; `processor`: the share of that time that it was computing."""
    if moves:
        return "runs"
    if calls and stack and (stack[-1].is_of_torch or stack[-1].is_ours):
        return "waits"
    return "computes" if processor > 0.5 else "sleeps"


def called_in(stack: Sequence[Frame]) -> CollectiveCall | None:
    """The collective that a stack stands in, where torch has not noted it: what goes from one rank to another."""
    frames = [frame for frame in stack if frame.file != _WAITS]
    inside = [frame for frame in frames if _EXCHANGES in frame.file]
    if not inside or inside[-1] is not frames[-1]:
        return None
    public = [frame.function for frame in inside if frame.file.endswith("distributed_c10d.py") and frame.function[0] != "_"]
    names = [name for name in public if name != "wrapper"] or [frames[-1].function.strip("_")]
    return CollectiveCall(names[0], "", 0, "")


def _instruction(ident: int) -> tuple[int, int, str]:
    """The instruction of its Python code that a thread is at."""
    frame = sys._current_frames().get(ident)
    if frame is None or frame.f_lasti < 0:
        return 0, 0, ""
    return id(frame), frame.f_lasti, dis.opname[frame.f_code.co_code[frame.f_lasti]]


def stack_of(frame: FrameType | None) -> tuple[Frame, ...]:
    """The outermost first."""
    found = []
    while frame is not None:
        found.append(Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_qualname))
        frame = frame.f_back
    return tuple(reversed(found))


def _processor_seconds(thread: threading.Thread) -> float:
    """That a thread of this process has computed for."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:  # not Linux
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
