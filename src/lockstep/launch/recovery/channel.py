"""The connection between a worker and its launcher, over which they agree on a recovery in place.

[Note: recovery in place] Messages are JSON objects with a `kind`.

1. When a run opens, each worker says `able`, with the reason if it cannot recover in place. With `images` it gives the
   launcher the memory in which it keeps images of its state, and of that of ranks of other hosts; so they outlive it.
   When it writes its second image, all ranks have given theirs: it says `all-offered`, and launchers drop older ones.
2. The launcher sees that a worker has ended, and sends `lost` to the others. They leave the collective that they wait
   in, and say `ready`, with the step whose state they hold, or `refuses`, with the reason. The launcher starts a
   replacement for the lost worker. It says `ready`, without a state, when its script comes to `ls.train`.
   A worker that hangs does not end. The watchdog that finds it sends `hangs`, with its rank, and the launcher kills it.
3. When all are ready, the launcher makes a new store and sends `rejoin` to each, with the variables of its rank and the
   images of all. If that is not possible, it sends `restart`: the workers save and end, and all start again.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

CHANNEL = "LOCKSTEP_CHANNEL"
"""The variable that holds the number of the worker's descriptor."""
ENDED = "the training has ended on this process"
"""Why a worker that has done all it had to cannot recover in place."""
_MOST_BYTES = 1 << 16
_MOST_DESCRIPTORS = 253
"""In one message, on Linux. More of them go ahead, in messages of the kind `_AHEAD`."""
_AHEAD = "descriptors"


class Channel:
    """One end of the connection."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._ahead: list[int] = []

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, kind: str, descriptors: Sequence[int] = (), **values: Any) -> None:
        """Send a message. Does nothing if the other process has ended. `descriptors`: open files that it then has
        too."""
        rest = list(descriptors)
        with suppress(OSError):
            while len(rest) > _MOST_DESCRIPTORS:
                socket.send_fds(self._end, [json.dumps({"kind": _AHEAD}).encode()], rest[:_MOST_DESCRIPTORS])
                del rest[:_MOST_DESCRIPTORS]
            socket.send_fds(self._end, [json.dumps({"kind": kind, **values}).encode()], rest)

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next message; None after `seconds` without one, or if the other process has ended. `seconds`:
        None waits for as long as that process runs. The receiver closes the message's `descriptors`."""
        self._end.settimeout(seconds)
        while True:
            try:
                text, descriptors, _, _ = socket.recv_fds(self._end, _MOST_BYTES, _MOST_DESCRIPTORS)
            except (OSError, ValueError):
                return None
            self._ahead += descriptors
            if not text:
                return None
            message = json.loads(text)
            if message["kind"] != _AHEAD:
                message["descriptors"], self._ahead = self._ahead, []
                return dict(message)

    def close(self) -> None:
        self._end.close()


def open_channel() -> tuple[Channel, socket.socket] | None:
    """Return the launcher's end, and the worker's, which the worker inherits. None where there is no such socket."""
    if sys.platform != "linux":
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours), theirs


def variables(theirs: socket.socket) -> Mapping[str, str]:
    """The variable by which a worker that inherits `theirs` finds it."""
    return {CHANNEL: str(theirs.fileno())}


def inherited(environment: Mapping[str, str]) -> list[int]:
    """The descriptors that a process with these variables must inherit."""
    return [int(environment[CHANNEL])] if CHANNEL in environment else []


def take_channel(environ: MutableMapping[str, str]) -> Channel | None:
    """The worker's end; None if no launcher gave it one. Called once, before the user's code runs.

    Removes the variable: children of the user's code do not inherit the connection.
    """
    text = environ.pop(CHANNEL, None)
    if text is None:
        return None
    os.set_inheritable(int(text), False)
    return Channel(socket.socket(fileno=int(text)))
