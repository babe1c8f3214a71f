"""How far a run is, for a person to read: one live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_Values = tuple[float | None, float | None, float | None, Mapping[str, float]]

_LIVE_SECONDS = 0.1
"""Least time between two refreshes of the live line."""
_LINE_SECONDS, _LONGEST_LINE_SECONDS, _LINE_SHARE = 2.0, 60.0, 0.02
"""Where there is no terminal: least time between two lines; later in the run, this share of the time gone by; never more than 60 s."""
_WARM_UP_STEPS = 5
"""Steps that a first interval must have for a guess at the time left to be made from it."""
_BAR_LEAST, _BAR_MOST = 8, 40
"""Columns."""


class Progress:
    """Shows a run on `stream`. Made on one rank, when the first step is about to start; close it, or use it in a `with`.

    On a terminal, the last line of `stream` is kept up to date, and what is printed to a terminal meanwhile appears above it. Elsewhere
    the same is written as plain lines: for the first and the last step, and every 2 seconds between, rarer as the run gets longer.
    There is no thread: the display moves when it is called. Where `stream` can no longer be written to, the display ends, not the run.

    `total_steps` and `start` (steps done before) are optimizer steps; `clock` gives seconds.
    """

    def __init__(self, total_steps: int, *, stream: TextIO, clock: Callable[[], float] = time.monotonic, start: int = 0) -> None:
        self._total = total_steps
        self._clock = clock
        self._began = clock()
        self._pace = _Pace(start, self._began)
        self._step = start
        self._latest: _Values = (None, None, None, {})
        self._shown_at = -math.inf
        self._stale = False
        console = _terminal(stream)
        self._display: _LiveLine | _PlainLines | None = _LiveLine(console) if console is not None else _PlainLines(stream)
        self._gap = _LIVE_SECONDS if console is not None else _LINE_SECONDS
        if console is not None:
            self._show("")

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        lr: float | None = None,
        samples_per_second: float | None = None,
        extra: Mapping[str, float] | None = None,
    ) -> None:
        """`step` steps are done. What is None is not shown; on a narrow terminal, `extra` is the first to be left out, then `lr`."""
        now = self._clock()
        self._pace.update(step, now)
        self._step = step
        self._latest = (loss, lr, samples_per_second, extra or {})
        self._stale = True
        if step >= self._total:
            self._show(f"after {_duration(now - self._began)}")
        elif now - self._shown_at >= self._gap:
            self._shown_at = now
            if isinstance(self._display, _PlainLines):
                self._gap = min(_LONGEST_LINE_SECONDS, max(_LINE_SECONDS, _LINE_SHARE * (now - self._began)))
            self._show(self._pace.left(self._total))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write what an evaluation after `step` steps gave, to stay."""
        self._pace.evaluation(step)
        numbers = "".join(f"  {name} {_number(value)}" for name, value in values.items())
        self.message(f"evaluation at step {step}/{self._total}{numbers}")

    def message(self, text: str) -> None:
        """Write `text` as a line, or lines, to stay."""
        try:
            if self._display is not None:
                self._display.line(text)
        except OSError:
            self._end()

    def close(self) -> None:
        """Show the last update if it has not been, and leave the terminal as it was. May be called again, and does nothing then."""
        if self._stale or isinstance(self._display, _LiveLine):
            self._show(f"after {_duration(self._clock() - self._began)}")
        self._end()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _show(self, time_text: str) -> None:
        self._stale = False
        parts = _numbers(*self._latest, time_text)
        try:
            if self._display is not None:
                self._display.status(self._step, self._total, parts)
        except OSError:
            self._end()

    def _end(self) -> None:
        display, self._display = self._display, None
        if display is not None:
            with suppress(OSError):
                display.close()


class _Pace:
    """What a step takes, and what evaluations take besides, and from both the time left.

    The seconds of a step are a mean over the steps seen so far, in which step n has a weight in proportion to n: steady, and the latest
    half of the run counts for three quarters. The first interval, in which things warm up, counts only until there is a second: what it
    gives is a guess, marked with "~". What an interval with an evaluation took more than its steps do is expected as often as so far.
    """

    def __init__(self, step: int, now: float) -> None:
        self._start = self._step = step
        self._time = now
        self._counted = self._intervals = 0
        self._seconds_a_step = math.nan
        self._evaluated: int | None = None
        self._last_evaluation = step
        self._evaluation_seconds = 0.0

    def evaluation(self, step: int) -> None:
        self._evaluated = step

    def update(self, step: int, now: float) -> None:
        steps, seconds = step - self._step, now - self._time
        if steps <= 0:
            return
        self._step, self._time = step, now
        evaluated, self._evaluated = self._evaluated, None
        if evaluated is not None and self._intervals > 1:
            self._last_evaluation = evaluated
            self._evaluation_seconds += max(0.0, seconds - steps * self._seconds_a_step)
            return
        if self._intervals == 1:
            self._counted = 0
        self._intervals += 1
        # Weights in proportion to n: the share of the newest `steps` of n in all is 1 - ((n - steps) / n)².
        share = 1 - (self._counted / (self._counted + steps)) ** 2
        self._seconds_a_step = seconds / steps if share == 1 else self._seconds_a_step + share * (seconds / steps - self._seconds_a_step)
        self._counted += steps

    def left(self, total: int) -> str:
        if self._intervals == 0 or (self._intervals == 1 and self._counted < _WARM_UP_STEPS):
            return ""
        seconds = (total - self._step) * self._seconds_a_step
        if self._last_evaluation > self._start:
            seconds += (total - self._last_evaluation) * self._evaluation_seconds / (self._last_evaluation - self._start)
        return ("~" if self._intervals == 1 else "") + f"{_duration(seconds)} left"


_LOSS, _LR, _RATE, _TIME, _EXTRA = range(5)
"""The numbers in the order in which they stand."""
_IMPORTANCE = {_LOSS: 0, _TIME: 0, _RATE: _BAR_LEAST + 1, _LR: _BAR_LEAST + 1, _EXTRA: 2 * _BAR_LEAST + 1}
"""The numbers in the order in which a narrow line takes them in, and the columns that each must leave for the bar."""


def _numbers(
    loss: float | None, lr: float | None, samples_per_second: float | None, extra: Mapping[str, float], time_text: str
) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    if loss is not None:
        found.append((_LOSS, f"loss {_number(loss)}"))
    if lr is not None:
        found.append((_LR, f"lr {lr:.1e}"))
    if samples_per_second is not None and math.isfinite(samples_per_second):
        digits = 0 if samples_per_second >= 100 else 1 if samples_per_second >= 10 else 2
        found.append((_RATE, f"{samples_per_second:,.{digits}f} samples/s"))
    if time_text:
        found.append((_TIME, time_text))
    if extra:
        found.append((_EXTRA, "  ".join(f"{name} {_number(value)}" for name, value in extra.items())))
    return found


def _number(value: float) -> str:
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.3e}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    minutes = round(seconds / 60)
    return f"{minutes // 60}h {minutes % 60:02d}m" if minutes < 1440 else f"{minutes // 1440}d {minutes % 1440 // 60:02d}h"


class _PlainLines:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def status(self, step: int, total: int, parts: list[tuple[int, str]]) -> None:
        self.line("  ".join([f"step {step}/{total}", *(text for _, text in parts)]))

    def line(self, text: str) -> None:
        self._stream.write(_encodable(text, self._stream.encoding) + "\n")
        self._stream.flush()

    def close(self) -> None:
        pass


class _LiveLine:
    def __init__(self, console: Console) -> None:
        from rich.live import Live
        from rich.text import Text

        self._text = Text
        self._console = console
        self._done, self._left = "━─" if _encodable("━─", console.encoding) == "━─" else "=-"
        self._width, self._columns = console.width, _BAR_MOST
        # Only what would land on the terminal anyway goes through the console: `script.py > file` still fills the file.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty(), redirect_stderr=sys.stderr.isatty())
        self._live.start()
        console.show_cursor(True)  # a process that is killed could not bring it back

    def status(self, step: int, total: int, parts: list[tuple[int, str]]) -> None:
        line = self._text(f"{step:>{len(str(total))}}/{total}", no_wrap=True, overflow="crop")
        width = self._console.width
        room = width - len(line)
        taken = []
        importance = list(_IMPORTANCE)
        for place, text in sorted(parts, key=lambda part: importance.index(part[0])):
            if len(text) + 2 + _IMPORTANCE[place] > room:
                break
            room -= len(text) + 2
            taken.append((place, text))
        if width != self._width:
            self._width, self._columns = width, _BAR_MOST
        if room > _BAR_LEAST:
            # The bar gives way where a number gets longer, and does not grow back: it would flicker.
            self._columns = min(self._columns, room - 1)
            done = round(self._columns * min(1.0, step / max(1, total)))
            line.append(" ")
            line.append(self._done * done, "cyan")
            line.append(self._left * (self._columns - done), "bright_black")
        for _, text in sorted(taken):
            line.append("  " + _encodable(text, self._console.encoding))
        self._live.update(line, refresh=True)

    def line(self, text: str) -> None:
        self._console.print(self._text(_encodable(text, self._console.encoding), "bold"), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


def _terminal(stream: TextIO) -> Console | None:
    """A console for `stream`, or None where it is not a terminal that can redraw a line. rich costs 80 ms to import."""
    if not stream.isatty():
        return None
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    return console if console.is_terminal and not console.is_dumb_terminal else None


def _encodable(text: str, encoding: str | None) -> str:
    encoding = encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
