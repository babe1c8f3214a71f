"""What a run measured: `metrics.jsonl`, one JSON object a line, and the same numbers as TensorBoard events."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.base.errors import DataError, cannot_write
from lockstep.logging.event_file import EventFile

RESERVED_NAMES = frozenset({"step", "time", "not_finite"})
"""What every line of `metrics.jsonl` says besides the metrics, so that no metric may be called so."""

_FLUSH_SECONDS = 1.0


class MetricsLog:
    """Appends to `metrics.jsonl` and to a TensorBoard event file in the folder `path`. Made on one rank; close it.

    Rows reach the files when they are written a second or more after the last flush, and on `flush` and `close`. `clock` gives
    seconds since 1970. There is no thread.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._rows = (path / "metrics.jsonl").open("a", encoding="utf-8")
        self._events = EventFile(path, clock())
        self._waiting: list[tuple[int, float, dict[str, float]]] = []
        self._flushed = -math.inf

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row: `step`, `time` and the values, each a number or a scalar tensor on the CPU.

        A value that is NaN or infinite is null in the row, which also says `"not_finite": {name: "nan" | "inf" | "-inf"}`.
        Raises `DataError` for a value that is no number, or a name that the row itself needs.
        """
        now = self._clock()
        self._waiting.append((step, now, _numbers(values)))
        if abs(now - self._flushed) >= _FLUSH_SECONDS:
            self._flushed = now
            self.flush()

    def go_on(self, step: int) -> None:
        """Take out what an earlier process wrote of steps after `step`, which will be done again. Before the first `write`."""
        name = Path(self._rows.name)
        self._rows.close()
        keep_up_to(step, name)
        self._rows = name.open("a", encoding="utf-8")
        self._events.go_on(step, self._clock())

    def flush(self) -> None:
        """Hand what was written to the operating system, so that other processes can read it."""
        waiting, self._waiting = self._waiting, []
        try:
            for step, time_, numbers in waiting:  # put into words here, many at a time: it takes half as long as amid a step
                self._rows.write(json.dumps(_row(step, time_, numbers)) + "\n")
                self._events.write(step, time_, numbers)
            self._rows.flush()
            self._events.flush()
        except OSError as error:
            with suppress(OSError):  # what is left of a line that could not be written
                self._rows.close()
            raise cannot_write(self._rows.name, error) from error

    def close(self) -> None:
        """May be called again, and does nothing then."""
        if not self._rows.closed:
            self.flush()
        self._rows.close()
        with suppress(OSError):  # flush has told
            self._events.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def keep_up_to(step: int, path: Path) -> None:
    """Take out of a file of JSON lines those of later steps, and what is half written."""
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _is_up_to(step, line)]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    partial.replace(path)


def _is_up_to(step: int, line: str) -> bool:
    """Whether a line is a row of one of the first `step` steps. What a crash has left of a line is none."""
    try:
        return bool(json.loads(line)["step"] <= step)
    except ValueError:
        return False


def _row(step: int, now: float, numbers: dict[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "time": now, **numbers}
    if not all(map(math.isfinite, numbers.values())):
        not_finite = {name: str(number) for name, number in numbers.items() if not math.isfinite(number)}
        row.update(dict.fromkeys(not_finite), not_finite=not_finite)
    return row


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    if not RESERVED_NAMES.isdisjoint(values):
        name = min(RESERVED_NAMES.intersection(values))
        raise DataError(f"a metric is named {name!r}; a row of metrics.jsonl has {name!r} of its own; choose another name")
    return {name: value if type(value) is float else as_number(name, value) for name, value in values.items()}


def as_number(name: str, value: Any) -> float:
    """The metric as a float. Raises `DataError` where it is no number or scalar tensor."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"metric {name!r} is {value!r} (a {type(value).__name__}); a metric is one number; reduce it to one, say by mean()"
        ) from None
