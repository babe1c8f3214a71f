"""Streams and events without a device: what FSDP2 does with them is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

from lockstep.planner.trace import DEFAULT_STREAM, AwaitEvent, Item, RecordEvent
from lockstep.planner.tracing.torch_fakes import cpu_streams


class RecordedStream:
    def __init__(self, streams: Streams, number: int) -> None:
        self._streams = streams
        self.number = number

    def wait_event(self, event: RecordedEvent) -> None:
        if event.number is not None:
            self._streams.note(AwaitEvent(event.number, self.number))

    def wait_stream(self, other: RecordedStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: RecordedEvent | None = None) -> RecordedEvent:
        event = event or RecordedEvent(self._streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host is not waited for."""


class RecordedEvent:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.number: int | None = None

    def record(self, stream: RecordedStream | None = None) -> None:
        self.number = next(self._streams.events)
        self._streams.note(RecordEvent(self.number, (stream or self._streams.current).number))

    def wait(self, stream: RecordedStream | None = None) -> None:
        (stream or self._streams.current).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """The host is not waited for."""


class Streams:
    """The streams of one process. `note`: called with each record and wait."""

    def __init__(self, note: Callable[[Item], object]) -> None:
        self.note = note
        self.events = count()
        self._numbers = count(DEFAULT_STREAM)
        self.current = RecordedStream(self, next(self._numbers))

    def used(self) -> AbstractContextManager[None]:
        """Let torch use these for CPU tensors."""

        def stream(*_: Any, **__: Any) -> RecordedStream:
            return RecordedStream(self, next(self._numbers))

        def event(*_: Any, **__: Any) -> RecordedEvent:
            return RecordedEvent(self)

        return cpu_streams(stream, event, lambda *_: self.current, self._entered)

    @contextmanager
    def _entered(self, stream: RecordedStream | None) -> Iterator[None]:
        before = self.current
        self.current = stream or before
        try:
            yield
        finally:
            self.current = before
