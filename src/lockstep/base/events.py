"""The event log of a run: one JSON object per line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """Something notable that happened in a run: a plan was chosen, a step skipped, a fallback
    taken."""

    name: str
    """The kind of event, in the past tense and with dashes: `run-started`, `step-skipped`."""
    step: int
    """Number of optimizer steps done when it happened."""
    details: dict[str, Any] = field(default_factory=dict)
    """JSON values."""


class EventLog:
    """Appends events to `events.jsonl`, each flushed as it is written. `path=None` keeps them in
    memory only."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self.events: list[Event] = []
        self._clock = clock
        self._file = path.open("a", encoding="utf-8") if path is not None else None

    def record(self, event: Event) -> None:
        """Append the event. Raises `OSError` if it cannot be written; later events are then kept in
        memory only."""
        self.events.append(event)
        if self._file is not None and not self._file.closed:
            row = {"time": self._clock(), "event": event.name, "step": event.step, **event.details}
            try:
                self._file.write(json.dumps(row) + "\n")
                self._file.flush()
            except OSError as error:
                # what happens from here on, the end of the run first, cannot be written either
                self.close()
                raise OSError(error.errno, error.strerror, self._file.name) from error

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # what is left of a line that could not be written
                self._file.close()
