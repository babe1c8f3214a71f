"""Scales of axes, and numbers as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from lockstep.base.units import ROUNDS, size

Unit = Literal["", "bytes", "share", "seconds"]

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_DURATIONS = (
    *(1, 2, 5, 10, 15, 30),
    *(_MINUTE * minutes for minutes in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * hours for hours in (1, 2, 3, 6, 12)),
    *(_DAY * days for days in (1, 2, 7)),
)
_TICKS = 5
_SKEWED = 20.0
"""Ratio of the largest value to the median above which an axis is logarithmic."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to positions between 0 and 1."""

    low: float
    high: float
    logarithmic: bool
    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    def position(self, value: float) -> float:
        if self.logarithmic:
            low = math.log(self.low)
            return (math.log(max(value, self.low)) - low) / (math.log(self.high) - low)
        return (value - self.low) / (self.high - self.low)


def scale_of(
    values: Sequence[float],
    unit: Unit = "",
    *,
    from_zero: bool = False,
    may_be_logarithmic: bool = True,
) -> Scale:
    ordered = sorted(values) or [0.0, 1.0]
    low, high, median = ordered[0], ordered[-1], ordered[len(ordered) // 2]
    if may_be_logarithmic and low > 0 and high > _SKEWED * median and not from_zero:
        return _logarithmic(low, high, unit, _TICKS)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(high) / 10 or 1.0
        low, high = (low if from_zero and low == 0 else low - room), high + room
    step = nice_step(high - low, _TICKS)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    ticks = tuple(low + step * number for number in range(round((high - low) / step) + 1))
    largest = max(abs(low), abs(high))
    return Scale(low, high, False, ticks, tuple(_tick(each, step, unit, largest) for each in ticks))


def logarithmic_scale(values: Sequence[float], unit: Unit = "") -> Scale:
    low = min(values, default=1e-8)
    return _logarithmic(low, max([10 * low, *values]), unit, 4)


def nice_step(span: float, most: int) -> float:
    """Return 1, 2 or 5 times a power of ten, such that at most `most` steps cover `span`."""
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    return next(f * power for f in (1, 2, 5, 10) if f * power >= rough * (1 - 1e-9) or f == 10)


def step_scale(last: int) -> Scale:
    last = max(last, 1)
    ticks = range(0, last + 1, max(1, round(nice_step(last, 6))))
    return Scale(0.0, float(last), False, tuple(map(float, ticks)), tuple(map(format_count, ticks)))


def short_time_scale(microseconds: int) -> Scale:
    step = nice_step(microseconds, 6)
    ticks = tuple(step * number for number in range(math.floor(microseconds / step + 1e-9) + 1))
    labels = tuple(_seconds(tick / 1e6) for tick in ticks)
    return Scale(0.0, float(microseconds), False, ticks, labels)


def time_scale(seconds: float) -> Scale:
    seconds = max(seconds, 1.0)
    step = next(
        (duration for duration in _DURATIONS if duration * 7 >= seconds),
        math.ceil(seconds / 7 / 604800) * 604800,
    )
    ticks = tuple(map(float, range(0, math.floor(seconds) + 1, step)))
    return Scale(0.0, seconds, False, ticks, tuple(map(format_duration, ticks)))


def format_number(value: float, unit: Unit = "") -> str:
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if unit == "bytes":
        return _bytes(value)
    if unit == "share":
        return f"{100 * value:.3g} %"
    if unit == "seconds":
        return _seconds(value)
    if value == 0 or 1e-3 <= abs(value) < 1e9:
        if value == round(value) or abs(value) >= 1e4:
            return f"{value:,.0f}".replace("-", "−")
        return _trimmed(f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))))}f}")
    return _scientific(value, 3)


def format_count(value: int) -> str:
    return f"{value // 10**6}M" if value >= 10**6 and value % 10**6 == 0 else f"{value:,}"


def format_duration(seconds: float) -> str:
    """Return a duration as text: 0.5 s, 45 s, 12:30, 3 h 05 m, 2 d 4 h."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    minutes = round(seconds / 60)
    if minutes < 2880:
        return f"{minutes // 60} h {minutes % 60:02d} m"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def format_date(seconds: float, *, to_the_second: bool = False) -> str:
    time = "%H:%M:%S" if to_the_second else "%H:%M"
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d {time} UTC}"


def _logarithmic(low: float, high: float, unit: Unit, most: int) -> Scale:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    apart = -(-(last - first) // most)
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last + 1, apart) for factor in factors]
    bottom = max(tick for tick in ticks if tick <= low)
    top = min((tick for tick in ticks if tick >= high), default=10.0**last)
    shown = tuple(tick for tick in ticks if bottom <= tick <= top)
    return Scale(bottom, top, True, shown, tuple(_tick(tick, tick, unit, tick) for tick in shown))


def _tick(value: float, step: float, unit: Unit, largest: float) -> str:
    """Return a tick's label, with enough digits to differ from the labels of its neighbours."""
    if abs(value) < step / 2:
        return "0"
    if unit == "bytes":
        return _bytes(value)
    if unit == "share":
        return f"{100 * value:.{_decimals(100 * step)}f} %"
    if unit == "seconds":
        return _seconds(value)
    if largest >= 1e4:
        for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if factor <= abs(value) < 1e12:
                return f"{value / factor:.{_decimals(step / factor)}f}{letter}".replace("-", "−")
    if largest < 1e-3 or step < 1e-5 or largest >= 1e12:
        power, last = math.log10(abs(value)), math.log10(step)
        return _scientific(value, max(0, math.floor(power) - math.floor(last + 1e-9)))
    return f"{value:.{_decimals(step)}f}".replace("-", "−")


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


def _scientific(value: float, digits: int) -> str:
    mantissa, _, power = f"{value:.{digits}e}".partition("e")
    return f"{_trimmed(mantissa)}e{int(power)}".replace("-", "−")


def _trimmed(text: str) -> str:
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")


def _bytes(value: float) -> str:
    return f"{'−' if value < 0 else ''}{size(abs(value))}"


def _seconds(value: float) -> str:
    if value == 0:
        return "0"
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= ROUNDS * unit:
            return f"{value / unit:.3g} {name}" if abs(value) < 600 else format_duration(value)
    return f"{value / 1e-9:.3g} ns"
