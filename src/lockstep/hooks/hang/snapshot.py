"""Takes stack snapshots of a process. A signal handler of faulthandler writes the stack of a
process whose GIL is held, and the stacks of forked loader workers, into memory. All ranks on the
machine can read the stacks through /proc (Linux)."""

from __future__ import annotations

import dis
import faulthandler
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from lockstep.base.contents import is_users_file
from lockstep.comm import segment, torch_collectives
from lockstep.comm.active_calls import CollectiveCall, active_calls
from lockstep.logging.phases import Phases
from lockstep.training.reducers.exchange_order import Exchanges

Activity = Literal["waits", "runs", "computes", "sleeps"]
"""`waits`: in a collective, or waiting for a device that is in a collective. `runs`: executing
Python. `computes`: executing native code, but no collective. `sleeps`: in a call that does not
return."""
STACK_SIGNAL: int = getattr(signal, "SIGURG", 0)  # by default, processes ignore it
_WRITING_SECONDS = 2.0
_POLL_SECONDS = 0.01
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
# bytecode jumps: every sample of a Python loop without a body shows one, a thread in native code
# none
_JUMPS = ("JUMP", "POP_JUMP")
SAMPLES = 5
SAMPLE_SECONDS = 0.04
_TORCH_DISTRIBUTED = os.sep + os.path.join("torch", "distributed") + os.sep
_LOCKSTEP = str(Path(__file__).parents[2]) + os.sep


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def is_user_code(self) -> bool:
        return is_users_file(self.file)


Stack = tuple[Frame, ...]  # outermost frame first


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSnapshot:
    """The state of one rank's process at a moment. Each rank sends its snapshot to all ranks as
    JSON."""

    rank: int
    host: str
    process: int
    phase: str
    step: int
    seconds: float  # since the phase began
    limit_seconds: float
    is_first: bool  # True if the phase has never ended, so that the timeout is a default
    activity: Activity
    calls: tuple[CollectiveCall, ...]
    stack: Stack  # of the training thread
    threads: Mapping[str, Stack]  # by name, without the training thread
    children: Mapping[int, Stack] = field(default_factory=dict)
    """Stack of the main thread of each forked loader worker, by process id. Empty unless the rank
    is late."""
    exchanges: tuple[Exchanges, ...] = ()
    """All-gathers and reductions of sharded parameters over Gloo or NCCL."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StackSnapshot:
        threads, children = values["threads"].items(), values["children"].items()
        typed = {
            "calls": tuple(CollectiveCall(**call) for call in values["calls"]),
            "stack": _frames(values["stack"]),
            "threads": {name: _frames(frames) for name, frames in threads},
            "children": {int(process): _frames(frames) for process, frames in children},
            "exchanges": tuple(map(Exchanges.from_json, values["exchanges"])),
        }
        return cls(**{**values, **typed})

    @property
    def is_late(self) -> bool:
        return self.seconds >= self.limit_seconds

    @property
    def call(self) -> CollectiveCall | None:
        """The collective in which the rank waits."""
        return self.calls[0] if self.activity == "waits" and self.calls else None

    @property
    def line(self) -> Frame | None:
        return innermost_line(self.stack)


def innermost_line(stack: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the user's code. Without user code, return the innermost
    frame."""
    return next(
        (frame for frame in reversed(stack) if frame.is_user_code), stack[-1] if stack else None
    )


def _frames(values: Sequence[Mapping[str, Any]]) -> Stack:
    return tuple(Frame(**frame) for frame in values)


def take_snapshot(
    rank: int,
    thread: threading.Thread,
    phases: Phases,
    *,
    limit_seconds: float,
    is_first: bool,
    exchanges: Sequence[Exchanges] = (),
) -> StackSnapshot:
    """Take a snapshot of the training thread `thread`, in a fifth of a second."""
    assert thread.ident is not None
    phase, step, seconds = phases.name, phases.step, phases.seconds
    seen, runnable = [], 0
    for _ in range(SAMPLES):
        seen.append(_instruction(thread.ident))
        runnable += _is_runnable(thread)
        time.sleep(SAMPLE_SECONDS)
    stacks = {ident: stack_of(frame) for ident, frame in sys._current_frames().items()}
    stack = stacks.pop(thread.ident, ())
    calls = active_calls()
    if not calls and stack and (call := call_in_stack(stack)) is not None:
        calls = [call]
    names = {each.ident: each.name for each in threading.enumerate()}
    moves = len(set(seen)) > 1 or seen[-1][2].startswith(_JUMPS)
    return StackSnapshot(
        rank=rank,
        host=socket.gethostname(),
        process=os.getpid(),
        phase=phase,
        step=step,
        seconds=seconds,
        limit_seconds=limit_seconds,
        is_first=is_first,
        activity=activity(stack, calls=calls, moves=moves, is_busy=runnable > SAMPLES / 2),
        calls=tuple(calls),
        stack=stack,
        exchanges=tuple(exchanges),
        threads={
            names.get(ident, str(ident)): frames
            for ident, frames in stacks.items()
            if ident != threading.get_ident()
        },
    )


def activity(
    stack: Sequence[Frame], *, calls: Sequence[CollectiveCall], moves: bool, is_busy: bool
) -> Activity:
    """`moves` is True if the thread's Python code advanced between samples.

    [Note: waits for the device] A host that waits for its device may be anywhere in native code,
    often with full use of a processor. A rank whose device is in a collective counts as waiting.
    """
    innermost = stack[-1].file if stack else ""
    if calls and innermost == segment.__file__:
        return "waits"  # in a loop of Python that polls shared memory
    if moves:
        return "runs"
    in_call = f"{os.sep}torch{os.sep}" in innermost or innermost.startswith(_LOCKSTEP)
    if any(call.on_device for call in calls) or (calls and in_call):
        return "waits"
    return "computes" if is_busy else "sleeps"


def call_in_stack(stack: Sequence[Frame]) -> CollectiveCall | None:
    """Find a collective in a stack. Torch's flight recorder does not record send and recv."""
    # this file wraps torch's waits
    frames = [frame for frame in stack if frame.file != torch_collectives.__file__]
    inside = [frame for frame in frames if _TORCH_DISTRIBUTED in frame.file]
    if not inside or inside[-1] is not frames[-1]:
        return None
    public = [
        frame.function
        for frame in inside
        if frame.file.endswith("distributed_c10d.py") and frame.function[0] != "_"
    ]
    names = [name for name in public if name != "wrapper"] or [frames[-1].function.strip("_")]
    return CollectiveCall(names[0], "", 0, "")


def _instruction(ident: int) -> tuple[int, int, str]:
    frame = sys._current_frames().get(ident)
    if frame is None or frame.f_lasti < 0:
        return 0, 0, ""
    return id(frame), frame.f_lasti, dis.opname[frame.f_code.co_code[frame.f_lasti]]


def stack_of(frame: FrameType | None) -> Stack:
    frames = []
    while frame is not None:
        frames.append(
            Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_qualname)
        )
        frame = frame.f_back
    return tuple(reversed(frames))


def error_with_line(error: BaseException) -> str:
    """Return the error's text with the innermost line of the user's code."""
    traced = traceback.extract_tb(error.__traceback__)
    line = innermost_line([Frame(each.filename, each.lineno or 0, each.name) for each in traced])
    where = f" (at {line})" if line is not None and line.is_user_code else ""
    return f"{type(error).__name__}: {error}{where}"


def _is_runnable(thread: threading.Thread) -> bool:
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] == "R"
    except OSError:
        return False


class StackWriter:
    """Makes this process and its forks write their stacks into memory when they receive
    `STACK_SIGNAL`. A process has at most one `StackWriter`. Linux only."""

    def __init__(self) -> None:
        self.descriptor: int | None = None
        if sys.platform == "linux":
            self.descriptor = os.memfd_create("lockstep-stacks")
            faulthandler.register(STACK_SIGNAL, file=self.descriptor, all_threads=False)

    def of_children(self) -> dict[int, Stack]:
        if self.descriptor is None:
            return {}
        found = {process: read_stack(process, self.descriptor) for process in _children()}
        return {process: frames for process, frames in found.items() if frames}

    def close(self) -> None:
        if self.descriptor is not None:
            faulthandler.unregister(STACK_SIGNAL)
            os.close(self.descriptor)


def read_stack(process: int, descriptor: int) -> Stack:
    """Make a process write its stack to the file `descriptor` of its `StackWriter`, and return the
    stack. Empty if the process has ended, is stopped, or has no handler."""
    path, until = Path(f"/proc/{process}/fd/{descriptor}"), time.monotonic() + _WRITING_SECONDS
    with suppress(OSError):
        before = path.stat().st_size
        if not _is_set(process, "SigCgt"):
            return ()
        os.kill(process, STACK_SIGNAL)
        # the kernel blocks the signal until its handler has returned
        while path.stat().st_size == before or _is_set(process, "SigBlk"):
            if time.monotonic() > until or _status(process)["State"].startswith("T"):
                break
            time.sleep(_POLL_SECONDS)
        lines = path.read_bytes()[before:].decode(errors="replace").splitlines()
        frames = [
            Frame(found[1], int(found[2]), found[3])
            for line in lines
            if (found := _FRAME.fullmatch(line)) is not None
        ]
        return tuple(reversed(frames))  # faulthandler writes the innermost frame first
    return ()


def _is_set(process: int, field: str) -> bool:
    return bool(int(_status(process)[field], 16) >> (STACK_SIGNAL - 1) & 1)


def _status(process: int) -> dict[str, str]:
    lines = Path(f"/proc/{process}/status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _children() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            yield from map(int, (task / "children").read_text(encoding="ascii").split())
