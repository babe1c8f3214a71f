"""The figures on the page of a search: the best value over time, curves of the metric, and parallel
coordinates."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeGuard

from lockstep.pages.chart import (
    GRAIN,
    Point,
    Series,
    axis_labels,
    coordinates,
    downsample,
    drawing,
    figure,
    grid,
    legend,
    legend_note,
)
from lockstep.pages.heatmap import RAMP
from lockstep.pages.markup import Content, Html, element, joined, legend_key
from lockstep.pages.scale import Scale, format_number, nice_step, scale_of, step_scale, time_scale
from lockstep.recipe.parameters import Parameter, Value
from lockstep.search.results import ENDED, SearchResults, State, TrialResult

_SHADES = len(RAMP) - 2
_FAINT_FROM = 60
_POINTS = 60_000
_MOST_COLUMNS, _LEAST_COLUMNS = 400, 20
_NARROWEST_REM = 7.5
_LONGEST_NAME = 24
_STATE_COLOURS: dict[State, str] = {"pruned": "faint", "failed": "bad", "running": "live"}
_LARGEST = 1e290
_MOST_TICKS, _MOST_CHOICES = 6, 12
_LONGEST_LABEL = 16
_WITH_VALUE: tuple[State, ...] = ("complete", "pruned")
_ENOUGH = 10
_USUAL = 0.9
_FEWEST = 3
_FAR = 5.0


def best_so_far(results: SearchResults) -> Html | None:
    ended = [(trial, trial.ended) for trial in in_front(results) if is_number(trial.ended)]
    if not ended:
        return None
    began = min(
        moment
        for trial, ended_at in ended
        for moment in (ended_at, trial.started)
        if is_number(moment)
    )
    x_scale = time_scale(max(moment for _, moment in ended) - began)
    y_scale, values = end_scale(results)
    worse = 1.0 if results.sign > 0 else 0.0
    marks: list[Html] = []
    for trial, moment in ended:
        # a trial without a value is drawn at the worse edge
        height = _end_height(trial, y_scale)
        path = polyline([(place_on(x_scale, moment - began), worse if height is None else height)])
        has_value = trial.state == "failed" or is_number(trial.value)
        kind = "trial mark" if has_value else "trial mark nan"
        marks.append(trial_path(trial, kind, path, {}, results.best))
        if trial.state == "pruned":
            marks.append(element("path", kind="hole", d=path))
    improved = results.best_over_time()
    steps = [
        (place_on(x_scale, moment - began), place_on(y_scale, value))
        for moment, value, _ in improved
    ]
    line = element("path", kind="line", d=polyline(_stairs(steps)))
    told = [f"{format_number(value)} of trial {number}" for _, value, number in improved[-20:]]
    latest, best = None, results.best
    if best is not None and best.value is not None:
        latest = element("span", format_number(best.value), kind="latest")
    return _trial_figure(
        f"best {results.metric} so far, over time",
        [*_mark_legend(results), *_scale_notes(y_scale, values)],
        [drawing([grid(y_scale), *marks, line]), axis_labels(x_scale, "", y_scale)],
        kind="best-so-far",
        spoken=f"best {results.metric} over time. {'; '.join(told) or 'No trial is complete.'}",
        lines=1,
        latest=latest,
    )


def trial_curves(results: SearchResults) -> Html | None:
    trials = [trial for trial in in_front(results) if trial.values]
    if not trials:
        return None
    x_scale = step_scale(max(trial.steps for trial in trials))
    columns = max(_LEAST_COLUMNS, min(_MOST_COLUMNS, _POINTS // len(trials)))
    series = [_downsampled(trial, round(x_scale.high), columns) for trial in trials]
    numbers = [value for each in series for _, value in each if value is not None]
    y_scale = metric_scale(numbers, results.sign)
    shade, best = shades(results), results.best
    layers = [grid(y_scale)]
    for trial, each in zip(trials, series, strict=True):
        points = [
            None if value is None else _place_nearby(step, value, x_scale, y_scale)
            for step, value in each
        ]
        layers.append(trial_path(trial, "trial", polyline(points), shade, best))
        if trial.state == "pruned" and points[-1] is not None:
            layers.append(element("path", kind="end", d=polyline([points[-1]])))
    return _trial_figure(
        f"{results.metric} by step",
        [*_line_legend(results, "pruned", "failed", "running"), *_scale_notes(y_scale, numbers)],
        [drawing(layers), axis_labels(x_scale, "step", y_scale)],
        kind="curves",
        spoken=f"{results.metric} over steps of {len(trials)} trials, of which "
        f"{results.count('pruned')} were pruned.",
        lines=len(trials),
    )


def parallel_coordinates(results: SearchResults) -> Html | None:
    axes = parameter_axes(results)
    trials = [trial for trial in in_front(results) if trial.state in ENDED]
    if not axes or not trials:
        return None
    scale, values = end_scale(results)
    shade, best = shades(results), results.best
    layers = [
        trial_path(trial, "trial", polyline(_axis_places(trial, axes, scale)), shade, best)
        for trial in trials
    ]
    bars = "".join(
        f"M{coordinates((place / len(axes), 0.0))}v{-GRAIN}" for place in range(len(axes) + 1)
    )
    labels = [
        _axis_head(place / len(axes), axis.name, axis.ticks, axis.remark)
        for place, axis in enumerate(axes)
    ]
    better = "smaller is better" if results.sign > 0 else "larger is better"
    names = ", ".join(axis.name for axis in axes)
    inside = element(
        "div",
        drawing([*layers, element("path", kind="axis", d=bars)]),
        labels,
        _axis_head(1.0, results.metric, _ticks_of(scale), better),
        kind="axes",
        style=f"min-width:{_NARROWEST_REM * len(axes)}rem",
    )
    return _trial_figure(
        "parallel coordinates",
        [*_line_legend(results, "pruned", "failed"), *_scale_notes(scale, values)],
        inside,
        kind="parallel",
        spoken=f"Parallel coordinates of {names} and {results.metric}; {len(trials)} trials.",
        lines=len(trials),
    )


def _trial_figure(
    title: str,
    notes: Iterable[Content],
    inside: Content,
    *,
    kind: str,
    spoken: str,
    lines: int,
    latest: Content = None,
) -> Html:
    strength = min(1.0, max(0.35, _FAINT_FROM / max(1, lines)))
    return figure(
        title,
        [legend(notes), latest],
        inside,
        kind=f"trials {kind}",
        scrolls=True,
        style=f"--strength:{strength:.2f}",
        spoken=spoken,
    )


def shades(results: SearchResults) -> dict[int, int]:
    """Return the colour index of each complete trial. Better trials have larger indices."""
    ranked = results.ranked
    return {
        trial.number: _SHADES - 1 - place * _SHADES // len(ranked)
        for place, trial in enumerate(ranked)
    }


def polyline(points: Sequence[Point | None]) -> str:
    """Return the `d` attribute of an SVG path. The path has a gap at each None."""
    runs = [
        [point for point in run if point is not None]
        for is_there, run in groupby(points, lambda each: each is not None)
        if is_there
    ]
    return "".join(
        "M" + "L".join(map(coordinates, run if len(run) > 1 else run * 2)) for run in runs
    )


def trial_path(
    trial: TrialResult, kind: str, d: str, shade: Mapping[int, int], best: TrialResult | None
) -> Html:
    if not d:
        return Html()
    place = shade.get(trial.number)
    chosen = " best" if trial is best else ""
    return element(
        "path",
        kind=f"{kind} {trial.state}{chosen}",
        style=None if place is None else f"--colour:var(--value-{place})",
        data_trial=trial.number,
        d=d,
    )


def in_front(results: SearchResults) -> list[TrialResult]:
    ranked = results.ranked
    numbers = {trial.number for trial in ranked}
    order: dict[State, int] = {"pruned": 0, "failed": 1, "running": 2, "waiting": 3, "complete": 4}
    others = [trial for trial in results.trials if trial.number not in numbers]
    return [*sorted(others, key=lambda trial: order[trial.state]), *reversed(ranked)]


def _line_legend(results: SearchResults, *states: State) -> list[Html]:
    entries = []
    if len(results.ranked) > 1:
        ramp = element("span", "worse", element("b", kind="ramp"), "better", kind="key")
        entries += [ramp, legend_key("best", "line", "line-1")]
    shown = [state for state in states if results.count(state)]
    return [*entries, *(legend_key(state, "line", _STATE_COLOURS[state]) for state in shown)]


def trial_tip(trial: TrialResult, metric: str, names: Sequence[str]) -> str:
    after = f" after step {trial.steps:,}" if trial.state == "pruned" else ""
    value = [] if trial.value is None else [f"{metric} {format_value(float(trial.value))}"]
    given = [
        f"{name} {format_value(trial.parameters[name])}"
        for name in names
        if name in trial.parameters
    ]
    return "\n".join([f"trial {trial.number}, {trial.state}{after}", *value, *given])


def _scale_notes(scale: Scale, values: Sequence[float]) -> list[Html]:
    outside = beyond(scale, values)
    notes = ["logarithmic"] if scale.logarithmic else []
    return [
        legend_note(text)
        for text in [*notes, *([f"{outside:,} beyond the axis"] if outside else [])]
    ]


def _end_height(trial: TrialResult, scale: Scale) -> float | None:
    if trial.state == "failed" or not is_number(trial.value):
        return None
    return place_on(scale, trial.value)


def _stairs(steps: Sequence[Point]) -> list[Point]:
    ends = [x for x, _ in steps[1:]] + [1.0] * bool(steps)
    return [
        corner for (x, y), end in zip(steps, ends, strict=True) for corner in ((x, y), (end, y))
    ]


def _mark_legend(results: SearchResults) -> list[Html]:
    no_value = any(
        trial.state in ("complete", "pruned") and not is_number(trial.value)
        for trial in results.trials
    )
    shown = {
        "complete": ("complete", results.best is not None),
        "pruned": ("pruned, at its last evaluation", results.count("pruned") > 0),
        "failed": ("failed" + " or not finite" * no_value, results.count("failed") > 0 or no_value),
    }
    return [
        legend_key(words, f"mark {state}") for state, (words, is_shown) in shown.items() if is_shown
    ]


def _downsampled(trial: TrialResult, last: int, columns: int) -> list[tuple[float, float | None]]:
    """Return at most about `columns` points of a trial's curve. A point has the value None if the
    value is not finite."""
    steps = sorted(trial.values)
    values = (float(trial.values[step]) for step in steps)
    series = Series(
        array("q", steps),
        array("d", (value if is_number(value) else float("nan") for value in values)),
    )
    return [
        (point.step, point.mean if is_number(point.mean) else None)
        for point in downsample(series, last, columns)
    ]


def _place_nearby(step: float, value: float, x_scale: Scale, y_scale: Scale) -> Point:
    low, high = y_scale.low, y_scale.high
    least = low if y_scale.logarithmic else low - (high - low)
    return x_scale.position(step), y_scale.position(min(max(value, least), high + (high - low)))


def _axis_places(
    trial: TrialResult, axes: Sequence[ParameterAxis], scale: Scale
) -> list[Point | None]:
    given = trial.parameters
    heights = [axis.position(given[axis.name]) if axis.name in given else None for axis in axes]
    heights.append(_end_height(trial, scale))
    return [
        None if height is None else (place / len(axes), height)
        for place, height in enumerate(heights)
    ]


def _axis_head(
    place: float, name: str, ticks: Sequence[tuple[float, str]], remark: str
) -> list[Html]:
    left = f"left:{100 * place:.2f}%"
    short = Html(re.sub(r"([/._-])", r"\1<wbr>", joined(shorten(name, _LONGEST_NAME))))
    small = element("small", remark) if remark else None
    head = element("i", short, small, kind="name", style=left, title=name)
    marks = [
        element("i", label, kind="tick", style=f"{left};bottom:{100 * height:.2f}%")
        for height, label in ticks
    ]
    return [head, *marks]


@dataclass(frozen=True, slots=True)
class ParameterAxis:
    name: str
    ticks: tuple[tuple[float, str], ...]
    scale: Scale | None = None
    choices: tuple[Value, ...] = ()

    @property
    def remark(self) -> str:
        return "logarithmic" if self.scale is not None and self.scale.logarithmic else ""

    def position(self, value: Value) -> float | None:
        if self.scale is not None:
            is_inside = is_number(value) and self.scale.low <= value <= self.scale.high
            return self.scale.position(float(value)) if is_inside else None  # type: ignore[arg-type]
        places = [place for place, each in enumerate(self.choices) if _same(each, value)]
        return (places[0] + 0.5) / len(self.choices) if places else None


def is_number(value: Any) -> TypeGuard[float]:
    """Return True for a finite number whose differences do not overflow."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def metric_scale(values: Sequence[float], sign: float) -> Scale:
    """Return a scale that may exclude a few values much worse than the rest. `sign` is -1 if larger
    values are better."""
    ordered = sorted(values, key=lambda value: sign * value)
    if len(ordered) >= _ENOUGH:
        best, usual = ordered[0], ordered[int(_USUAL * (len(ordered) - 1))]
        span = abs(usual - best)
        if abs(ordered[-1] - best) > _FAR * span > 0:
            ordered = [value for value in ordered if abs(value - best) <= 1.5 * span]
    return scale_of(ordered)


def end_scale(results: SearchResults) -> tuple[Scale, list[float]]:
    """Return the trials' final metric values, with a scale for them. The scale may exclude values
    of pruned trials."""
    values = {
        state: [
            each.value for each in results.trials if each.state == state and is_number(each.value)
        ]
        for state in _WITH_VALUE
    }
    everything = [value for each in values.values() for value in each]
    complete = values["complete"]
    shown = complete if len(complete) >= _FEWEST else everything
    return metric_scale(shown, results.sign), everything


def place_on(scale: Scale, value: float) -> float:
    return min(1.0, max(0.0, scale.position(min(scale.high, max(scale.low, value)))))


def beyond(scale: Scale, values: Sequence[float]) -> int:
    return sum(not scale.low <= value <= scale.high for value in values)


def parameter_axes(results: SearchResults) -> list[ParameterAxis]:
    declared = {parameter.name: parameter for parameter in results.parameters}
    axes = []
    for name in results.varied:
        values = [trial.parameters[name] for trial in results.trials if name in trial.parameters]
        axes.append(_axis(name, declared.get(name), values))
    return axes


def _axis(name: str, parameter: Parameter | None, values: Sequence[Value]) -> ParameterAxis:
    choices = parameter.choices if parameter is not None else ()
    bounds = [] if parameter is None else [parameter.low, parameter.high]
    bounds = [] if None in bounds else bounds
    numbers = [value for value in (*bounds, *values) if is_number(value)]
    if choices or not numbers or (not bounds and len(numbers) < len(values)):
        return _axis_of_choices(name, choices, values)
    low, high = min(numbers), max(numbers)
    logarithmic = parameter is not None and parameter.log and low > 0
    if logarithmic:
        ticks = _powers(low, high)
        low, high = (low / 2, high * 2) if low == high else (low, high)
    else:
        ticks = _multiples(low, high, whole=all(isinstance(value, int) for value in numbers))
        apart = abs(low) or 1.0
        low, high = (low - apart, high + apart) if low == high else (low, high)
    scale = Scale(low, high, logarithmic, tuple(ticks), tuple(map(format_number, ticks)))
    return ParameterAxis(name, _ticks_of(scale), scale)


def _ticks_of(scale: Scale) -> tuple[tuple[float, str], ...]:
    return tuple(zip(map(scale.position, scale.ticks), scale.labels, strict=True))


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
    return format_number(value) if isinstance(value, float) else str(value)


def shorten(text: str, longest: int = _LONGEST_LABEL) -> str:
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[: longest - 1 - half]}…{text[-half:]}"


def _same(first: Value, second: Value) -> bool:
    return type(first) is type(second) and first == second
