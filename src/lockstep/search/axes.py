"""Axes of the metric and of the parameters. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from lockstep.pages.scale import Scale, format_number, nice_step, scale_of
from lockstep.recipe.parameters import Parameter, Value
from lockstep.search.results import SearchResults, State

_LARGEST = 1e290
_MOST_TICKS, _MOST_CHOICES = 6, 12
_LONGEST_LABEL = 16
_WITH_VALUE: tuple[State, ...] = ("complete", "pruned")
_ENOUGH = 10
"""Number of values from which on the worst ones may lie beyond the axis."""
_USUAL = 0.9
"""Share of the values that are always on the axis."""
_FEWEST = 3
"""Number of complete trials from which on their values alone decide what is on the axis."""
_FAR = 5.0
"""The axis ends before the worst value if that is this many times further from the best one than
the usual ones."""


@dataclass(frozen=True, slots=True)
class ParameterAxis:
    """An axis of parallel coordinates."""

    name: str
    ticks: tuple[tuple[float, str], ...]
    """Position, from 0 to 1, and label of each."""
    scale: Scale | None = None
    """None: its values are choices."""
    choices: tuple[Value, ...] = ()

    def position(self, value: Value) -> float | None:
        """Return the value's position, from 0 to 1. None if it has none."""
        if self.scale is not None:
            return (
                self.scale.position(value)
                if is_number(value) and self.scale.low <= value <= self.scale.high
                else None
            )
        places = [place for place, each in enumerate(self.choices) if _same(each, value)]
        return (places[0] + 0.5) / len(self.choices) if places else None


def is_number(value: Any) -> TypeGuard[float]:
    """True for a number that can be drawn: finite, and not so large that differences overflow."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def metric_scale(values: Sequence[float], sign: float) -> Scale:
    """Return the axis of the metric. A few values that are far worse than the others are beyond it.
    `sign`: -1 if a larger value is better."""
    ordered = sorted(values, key=lambda value: sign * value)
    if len(ordered) >= _ENOUGH:
        best, usual = ordered[0], ordered[int(_USUAL * (len(ordered) - 1))]
        span = abs(usual - best)
        if abs(ordered[-1] - best) > _FAR * span > 0:
            ordered = [value for value in ordered if abs(value - best) <= 1.5 * span]
    return scale_of(ordered)


def end_scale(results: SearchResults) -> tuple[Scale, list[float]]:
    """Return the axis of the values at the end of trials, and these values. Those of pruned trials
    may be beyond it."""
    values = {
        state: [
            trial.value
            for trial in results.trials
            if trial.state == state and is_number(trial.value)
        ]
        for state in _WITH_VALUE
    }
    everything = [value for each in values.values() for value in each]
    return metric_scale(
        values["complete"] if len(values["complete"]) >= _FEWEST else everything, results.sign
    ), everything


def place_on(scale: Scale, value: float) -> float:
    """Return a value's position, from 0 to 1: the end of the axis for those beyond it."""
    return min(1.0, max(0.0, scale.position(min(scale.high, max(scale.low, value)))))


def beyond(scale: Scale, values: Sequence[float]) -> int:
    """Return the number of values that are not on the axis."""
    return sum(not scale.low <= value <= scale.high for value in values)


def parameter_axes(results: SearchResults) -> list[ParameterAxis]:
    """Return an axis for each parameter that differs between trials, or could."""
    declared = {parameter.name: parameter for parameter in results.parameters}
    found = []
    for name in results.varied:
        values = [trial.parameters[name] for trial in results.trials if name in trial.parameters]
        found.append(_axis(name, declared.get(name), values))
    return found


def _axis(name: str, parameter: Parameter | None, values: Sequence[Value]) -> ParameterAxis:
    choices = parameter.choices if parameter is not None else ()
    bounds = (
        []
        if parameter is None or parameter.low is None or parameter.high is None
        else [parameter.low, parameter.high]
    )
    numbers = [value for value in (*bounds, *values) if is_number(value)]
    if choices or not numbers or (not bounds and len(numbers) < len(values)):
        return _axis_of_choices(name, choices, values)
    low, high = min(numbers), max(numbers)
    logarithmic = parameter is not None and parameter.log and low > 0
    ticks = (
        _powers(low, high)
        if logarithmic
        else _multiples(low, high, whole=all(isinstance(value, int) for value in numbers))
    )
    if low == high:
        low, high = (
            (low / 2, high * 2)
            if logarithmic
            else (low - (abs(low) or 1.0), high + (abs(high) or 1.0))
        )
    scale = Scale(low, high, logarithmic, tuple(ticks), tuple(map(format_number, ticks)))
    return ParameterAxis(
        name,
        tuple(
            (scale.position(tick), label) for tick, label in zip(ticks, scale.labels, strict=True)
        ),
        scale,
    )


def _axis_of_choices(name: str, choices: Sequence[Value], values: Sequence[Value]) -> ParameterAxis:
    known = list(choices)
    for value in values:
        if not any(_same(each, value) for each in known):
            known.append(value)
    apart = -(-len(known) // _MOST_CHOICES)
    ticks = [
        ((place + 0.5) / len(known), shorten(format_value(known[place])))
        for place in range(0, len(known), apart)
    ]
    return ParameterAxis(name, tuple(ticks), choices=tuple(known))


def _powers(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    apart = -(-(last - first) // _MOST_TICKS) or 1
    powers = [factor * 10.0**power for power in range(first, last + 1, apart) for factor in factors]
    return [power for power in powers if low * (1 - 1e-9) <= power <= high * (1 + 1e-9)] or [low]


def _multiples(low: float, high: float, *, whole: bool) -> list[float]:
    if low == high:
        return [low]
    step = nice_step(high - low, _MOST_TICKS - 1)
    if whole:
        step = max(1.0, step)
    multiples = [
        step * number
        for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]
    return [min(high, max(low, multiple)) for multiple in multiples] or [low]


def format_value(value: Value) -> str:
    """Return a parameter's value as text: four digits of a float."""
    return format_number(value) if isinstance(value, float) else str(value)


def shorten(text: str, longest: int = _LONGEST_LABEL) -> str:
    """Return the text without its middle if it is longer."""
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[: longest - 1 - half]}…{text[-half:]}"


def _same(first: Value, second: Value) -> bool:
    return type(first) is type(second) and first == second
