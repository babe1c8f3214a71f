"""The connection between a worker and its launcher, for recovery in place. When a worker is lost,
the surviving workers continue in their processes with a replacement.

[Note: recovery in place]

1. When a run opens, each worker says `able`, with the reason if it cannot recover in place. With
`images`, a worker passes the launcher the shared memory that has copies of the worker's state, and
of the state of ranks on other hosts. The images outlive the worker.

2. When a worker has ended, the launcher sends `lost` to the surviving workers. The survivors leave
their collective, and say `ready` with the step of their state, or `refuses` with the reason. The
replacement says `ready`, without a state, when its script reaches `ls.train`. A watchdog that finds
a hanging worker sends `hangs`, and the launcher kills that worker.

3. When all workers are ready, the launcher sends `rejoin` to each, with the variables of its rank
and the images of all workers. If recovery is not possible, the launcher sends `restart`: the
workers save and end, and all workers start again.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lockstep.launch.worker_files import WorkerStart

ENDED = "the training has ended on this process"
_PIECE_BYTES = 1 << 15
_PIECE_DESCRIPTORS = 253
_FIRST, _LAST = 1, 2


class Channel:
    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()
        self._text = b""
        self._descriptors: list[int] = []
        self.has_ended = False

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, kind: str, descriptors: Sequence[int] = (), **values: Any) -> None:
        """Send a message, with open files in `descriptors`. Does nothing if the receiving process
        has ended."""
        text = json.dumps({"kind": kind, **values}).encode()
        count = max(
            1, math.ceil(len(text) / _PIECE_BYTES), math.ceil(len(descriptors) / _PIECE_DESCRIPTORS)
        )
        with self._sending, suppress(ConnectionError):
            for place in range(count):
                mark = _FIRST * (place == 0) | _LAST * (place == count - 1)
                piece = text[place * _PIECE_BYTES : (place + 1) * _PIECE_BYTES]
                theirs = descriptors[place * _PIECE_DESCRIPTORS : (place + 1) * _PIECE_DESCRIPTORS]
                socket.send_fds(self._end, [bytes([mark]), piece], theirs)

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next message. None if no message is complete within `seconds`, or if the
        sending process has ended. The receiver must close the `descriptors` in the message."""
        until = None if seconds is None else time.monotonic() + seconds
        while self._is_readable(until):
            try:
                piece, descriptors, _, _ = socket.recv_fds(
                    self._end, 1 + _PIECE_BYTES, _PIECE_DESCRIPTORS
                )
            except (OSError, ValueError):
                piece, descriptors = b"", []
            if not piece:
                self.has_ended = True
                return None
            if piece[0] & _FIRST:  # drop pieces of an earlier message, whose sender was killed
                for descriptor in self._descriptors:
                    os.close(descriptor)
                self._text, self._descriptors = b"", []
            self._text += piece[1:]
            self._descriptors += descriptors
            if piece[0] & _LAST:
                message = {**json.loads(self._text), "descriptors": self._descriptors}
                self._text, self._descriptors = b"", []
                return message
        return None

    def _is_readable(self, until: float | None) -> bool:
        poll = select.poll()
        try:
            poll.register(self._end, select.POLLIN)
        except ValueError:  # the socket is closed
            self.has_ended = True
            return False
        return bool(poll.poll(None if until is None else max(0.0, until - time.monotonic()) * 1000))

    def close(self) -> None:
        self._end.close()


def open_channel() -> tuple[Channel, socket.socket] | None:
    """Return the launcher's channel, and the socket that the worker must inherit. None on systems
    other than Linux."""
    if sys.platform != "linux":
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours), theirs


def inherited(environment: Mapping[str, str]) -> list[int]:
    told = WorkerStart.read(environment)
    return [] if told is None or told.channel is None else [told.channel]


def worker_channel(descriptor: int) -> Channel:
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor))
