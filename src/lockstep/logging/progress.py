from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TextIO

from lockstep.base.closing import Closing
from lockstep.base.foreign_text import printable
from lockstep.base.notebook import is_notebook

if TYPE_CHECKING:
    from rich.console import Console

_Latest = tuple[float | None, float | None, float | None, Mapping[str, float]]

_LIVE_SECONDS = 0.1
_LINE_SECONDS, _LONGEST_LINE_SECONDS, _LINE_SHARE = 2.0, 60.0, 0.02
"""Interval of progress lines without a terminal: its minimum and its maximum in seconds, and its
fraction of the elapsed time."""
_WARM_UP_STEPS = 5
_MIN_BAR_COLUMNS, _MAX_BAR_COLUMNS = 8, 40
_NOTEBOOK_COLUMNS = 100


class Progress(Closing):
    """The progress display of a run. On a terminal or in a notebook, the display is one live line
    below all output. Without a terminal or a notebook, the display is a line for the first step,
    for the last step, and for steps at least 2 seconds apart. Rank 0 creates the display, after
    `start` steps. A broken `stream` ends the display, not the run."""

    def __init__(
        self,
        total_steps: int,
        *,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        start: int = 0,
    ) -> None:
        self._total = total_steps
        self._clock = clock
        self._began = clock()
        self._estimate = _TimeEstimate(start, self._began)
        self._step = start
        self._latest: _Latest = (None, None, None, {})
        self._shown_at = -math.inf
        self._has_update = False
        console = _terminal(stream)
        self._display: _Display | None
        if console is not None:
            self._display = _LiveLine(console)
        else:
            self._display = _NotebookLine(stream) if is_notebook(stream) else _PlainLines(stream)
        self._refresh_seconds = _LIVE_SECONDS if self._display.is_live else _LINE_SECONDS
        if self._display.is_live:
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
        """On a narrow terminal, `extra` is dropped first, and then `lr`."""
        now = self._clock()
        self._estimate.update(step, now)
        self._step = step
        self._latest = (loss, lr, samples_per_second, extra or {})
        self._has_update = True
        if step >= self._total:
            self._show(f"after {_duration(now - self._began)}")
        elif now - self._shown_at >= self._refresh_seconds:
            self._shown_at = now
            if self._display is not None and not self._display.is_live:
                self._refresh_seconds = min(
                    _LONGEST_LINE_SECONDS, max(_LINE_SECONDS, _LINE_SHARE * (now - self._began))
                )
            self._show(self._estimate.time_left(self._total))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._estimate.evaluation(step)
        numbers = "".join(f"  {name} {_number(value)}" for name, value in values.items())
        self.message(f"evaluation at step {step}/{self._total}{numbers}")

    def message(self, text: str) -> None:
        """Write permanent lines."""
        try:
            if self._display is not None:
                self._display.line(text)
        except OSError:
            self._end()

    def close(self) -> None:
        """Show the last update, and restore the terminal."""
        if self._has_update or (self._display is not None and self._display.is_live):
            self._show(f"after {_duration(self._clock() - self._began)}")
        self._end()

    def _show(self, time_text: str) -> None:
        self._has_update = False
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


class _TimeEstimate:
    """Estimates the remaining time from a mean in which step n has weight n. The first interval
    includes the warm-up, so it is used only until the second interval ends, with a "~"."""

    def __init__(self, step: int, now: float) -> None:
        self._start = self._step = step
        self._time = now
        self._counted = self._intervals = 0
        self._seconds_per_step = math.nan
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
            self._evaluation_seconds += max(0.0, seconds - steps * self._seconds_per_step)
            return
        if self._intervals == 1:
            self._counted = 0
        self._intervals += 1
        # With weights proportional to n, the share of the newest `steps` of n steps is 1 - ((n -
        # steps) / n)².
        share = 1 - (self._counted / (self._counted + steps)) ** 2
        usual = seconds / steps if share == 1 else self._seconds_per_step
        self._seconds_per_step = usual + share * (seconds / steps - usual)
        self._counted += steps

    def time_left(self, total: int) -> str:
        if self._intervals == 0 or (self._intervals == 1 and self._counted < _WARM_UP_STEPS):
            return ""
        seconds = (total - self._step) * self._seconds_per_step
        if (evaluated := self._last_evaluation - self._start) > 0:
            seconds += (total - self._last_evaluation) * self._evaluation_seconds / evaluated
        return ("~" if self._intervals == 1 else "") + f"{_duration(seconds)} left"


_LOSS, _LR, _RATE, _TIME, _EXTRA = range(5)
"""The numbers on the progress line, in display order."""
_IMPORTANCE = {
    _LOSS: 0,
    _TIME: 0,
    _RATE: _MIN_BAR_COLUMNS + 1,
    _LR: _MIN_BAR_COLUMNS + 1,
    _EXTRA: 2 * _MIN_BAR_COLUMNS + 1,
}


def _numbers(
    loss: float | None,
    lr: float | None,
    samples_per_second: float | None,
    extra: Mapping[str, float],
    time_text: str,
) -> list[tuple[int, str]]:
    rate = ""
    if samples_per_second is not None and math.isfinite(samples_per_second):
        digits = 0 if samples_per_second >= 100 else 1 if samples_per_second >= 10 else 2
        rate = f"{samples_per_second:,.{digits}f} samples/s"
    texts = {
        _LOSS: "" if loss is None else f"loss {_number(loss)}",
        _LR: "" if lr is None else f"lr {lr:.1e}",
        _RATE: rate,
        _TIME: time_text,
        _EXTRA: "  ".join(f"{name} {_number(value)}" for name, value in extra.items()),
    }
    return [(kind, text) for kind, text in texts.items() if text]


def _number(value: float) -> str:
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.3e}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    minutes = round(seconds / 60)
    if minutes < 1440:
        return f"{minutes // 60}h {minutes % 60:02d}m"
    return f"{minutes // 1440}d {minutes % 1440 // 60:02d}h"


class _Display(Protocol):
    is_live: bool
    """True if the next status replaces the previous status."""

    def status(self, step: int, total: int, parts: list[tuple[int, str]]) -> None: ...

    def line(self, text: str) -> None: ...

    def close(self) -> None: ...


class _PlainLines:
    is_live = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def status(self, step: int, total: int, parts: list[tuple[int, str]]) -> None:
        self.line("  ".join([f"step {step}/{total}", *(text for _, text in parts)]))

    def line(self, text: str) -> None:
        self._stream.write(_encodable(text, self._stream.encoding) + "\n")
        self._stream.flush()

    def close(self) -> None:
        pass


class _Bar:
    def __init__(self, width: int, encoding: str | None) -> None:
        self._done, self._left = "━─" if _encodable("━─", encoding) == "━─" else "=-"
        self._encoding = encoding
        self._width, self._columns = width, _MAX_BAR_COLUMNS

    def pieces(
        self, step: int, total: int, parts: list[tuple[int, str]], width: int
    ) -> list[tuple[str, str]]:
        pieces = [(f"{step:>{len(str(total))}}/{total}", "")]
        room = width - len(pieces[0][0])
        taken = []
        importance = list(_IMPORTANCE)
        for kind, text in sorted(parts, key=lambda part: importance.index(part[0])):
            if len(text) + 2 + _IMPORTANCE[kind] > room:
                break
            room -= len(text) + 2
            taken.append((kind, text))
        if width != self._width:
            self._width, self._columns = width, _MAX_BAR_COLUMNS
        if room > _MIN_BAR_COLUMNS:
            # If a number gets longer, the bar shrinks; it does not grow back, because that would
            # flicker.
            self._columns = min(self._columns, room - 1)
            done = round(self._columns * min(1.0, step / max(1, total)))
            pieces += [
                (" ", ""),
                (self._done * done, "cyan"),
                (self._left * (self._columns - done), "bright_black"),
            ]
        texts = ("  " + _encodable(text, self._encoding) for _, text in sorted(taken))
        return [*pieces, *((text, "") for text in texts)]


class _LiveLine:
    is_live = True

    def __init__(self, console: Console) -> None:
        from rich.live import Live
        from rich.text import Text

        self._text = Text
        self._console = console
        self._bar = _Bar(console.width, console.encoding)
        # Redirect a stream only if it goes to the terminal: `script.py > file` must still write the
        # file.
        self._live = Live(
            console=console,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()
        console.show_cursor(True)  # a process that is killed could not restore it

    def status(self, step: int, total: int, parts: list[tuple[int, str]]) -> None:
        pieces = self._bar.pieces(step, total, parts, self._console.width)
        self._live.update(self._text.assemble(*pieces, no_wrap=True, overflow="crop"), refresh=True)

    def line(self, text: str) -> None:
        self._console.print(
            self._text(_encodable(text, self._console.encoding), "bold"), soft_wrap=True
        )

    def close(self) -> None:
        self._live.stop()


class _NotebookLine:
    """A line that a carriage return overwrites. After output of the script, the line is written
    again."""

    is_live = True

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar = _Bar(_NOTEBOOK_COLUMNS, stream.encoding)
        self._shown = ""

    def status(self, step: int, total: int, parts: list[tuple[int, str]]) -> None:
        pieces = self._bar.pieces(step, total, parts, _NOTEBOOK_COLUMNS)
        self._write("".join(text for text, _ in pieces))

    def line(self, text: str) -> None:
        shown = self._shown
        self._write(_encodable(text, self._stream.encoding), "\n")
        self._shown = ""
        self._write(shown)

    def close(self) -> None:
        self._stream.write("\n")
        self._stream.flush()

    def _write(self, text: str, end: str = "") -> None:
        self._stream.write("\r" + text.ljust(len(self._shown)) + end)
        self._stream.flush()
        self._shown = text


def _terminal(stream: TextIO) -> Console | None:
    """Return rich's console. The import of rich takes 80 ms."""
    if not stream.isatty():
        return None
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    return console if console.is_terminal and not console.is_dumb_terminal else None


def _encodable(text: str, encoding: str | None) -> str:
    encoding = encoding or "utf-8"
    return printable(text).encode(encoding, "replace").decode(encoding)
