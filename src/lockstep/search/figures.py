"""Figures of a search: the best value so far, the metric of each trial by step, parallel
coordinates. Pure."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

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
from lockstep.pages.scale import Scale, format_number, step_scale, time_scale
from lockstep.search.axes import (
    ParameterAxis,
    beyond,
    end_scale,
    format_value,
    is_number,
    metric_scale,
    parameter_axes,
    place_on,
    shorten,
)
from lockstep.search.results import SearchResults, State, TrialResult

_SHADES = len(RAMP) - 2
"""Number of colours from worse to better; the two palest of the ramp are no colours of lines."""
_FAINT_FROM = 60
"""Number of lines from which on each is paler."""
_POINTS = 60_000
"""Approximate number of points of all curves. If there are many, each has fewer."""
_MOST_COLUMNS, _LEAST_COLUMNS = 400, 20
_NARROWEST_REM = 7.5
"""Smallest distance between two parallel axes."""
_LONGEST_NAME = 24
_STATE_COLOURS: dict[State, str] = {"pruned": "faint", "failed": "bad", "running": "live"}


def best_so_far(results: SearchResults) -> Html | None:
    """Return the best value so far over time, with a mark for each trial that has ended. None if
    none has."""
    ended = [(trial, trial.ended) for trial in in_front(results) if is_number(trial.ended)]
    if not ended:
        return None
    began = min(
        [moment for _, moment in ended]
        + [trial.started for trial, _ in ended if is_number(trial.started)]
    )
    x_scale = time_scale(max(moment for _, moment in ended) - began)
    y_scale, values = end_scale(results)
    placed = [
        (trial, _mark_place(trial, moment - began, x_scale, y_scale, results.sign))
        for trial, moment in ended
    ]
    steps = [
        (place_on(x_scale, moment - began), place_on(y_scale, value))
        for moment, value, _ in results.best_over_time()
    ]
    line = element("path", kind="line", d=polyline(_stairs(steps)))
    best = results.best
    latest = None
    if best is not None and best.value is not None:
        latest = element("span", format_number(best.value), kind="latest")
    found = results.best_over_time()
    told = "; ".join(
        f"{format_number(value)} of trial {number}" for _, value, number in found[-20:]
    )
    return _trial_figure(
        f"best {results.metric} so far, over time",
        [*_mark_legend(results), *_scale_notes(y_scale, values)],
        [
            drawing([grid(y_scale), *_trial_marks(placed, results.best), line]),
            axis_labels(x_scale, "", y_scale),
        ],
        kind="best-so-far",
        spoken=f"best {results.metric} over time. {told or 'No trial is complete.'}",
        lines=1,
        latest=latest,
    )


def trial_curves(results: SearchResults) -> Html | None:
    """Return the metric of each trial by step. None if no trial was evaluated."""
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
    """Return an axis for each parameter and one for the metric, and a line for each trial. None if
    there is no parameter, or no trial has ended."""
    axes = parameter_axes(results)
    trials = [
        trial for trial in in_front(results) if trial.state in ("complete", "pruned", "failed")
    ]
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
        _axis_head(
            place / len(axes),
            axis.name,
            axis.ticks,
            "logarithmic" if axis.scale is not None and axis.scale.logarithmic else "",
        )
        for place, axis in enumerate(axes)
    ]
    ticks = [
        (scale.position(tick), label) for tick, label in zip(scale.ticks, scale.labels, strict=True)
    ]
    better = "smaller is better" if results.sign > 0 else "larger is better"
    names = ", ".join(axis.name for axis in axes)
    inside = element(
        "div",
        drawing([*layers, element("path", kind="axis", d=bars)]),
        labels,
        _axis_head(1.0, results.metric, ticks, better),
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
    """Return the colour of each complete trial by its number: its rank, of as many as there are
    colours."""
    ranked = results.ranked
    return {
        trial.number: _SHADES - 1 - place * _SHADES // len(ranked)
        for place, trial in enumerate(ranked)
    }


def polyline(points: Sequence[Point | None]) -> str:
    """Return the `d` of a path. None: a gap. A point between two gaps is a dot."""
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
    """Return the SVG path of a trial. `kind`: its class beside those of its state. Empty if `d`
    is."""
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
    """Return the trials in the order in which they are drawn: the best one last."""
    ranked = results.ranked
    numbers = {trial.number for trial in ranked}
    order: dict[State, int] = {"pruned": 0, "failed": 1, "running": 2, "waiting": 3, "complete": 4}
    others = [trial for trial in results.trials if trial.number not in numbers]
    return [*sorted(others, key=lambda trial: order[trial.state]), *reversed(ranked)]


def _line_legend(results: SearchResults, *states: State) -> list[Html]:
    """Return what the colours of lines mean: of values, and of these states if there are such
    trials."""
    found = []
    if len(results.ranked) > 1:
        ramp = element("span", "worse", element("b", kind="ramp"), "better", kind="key")
        found += [ramp, legend_key("best", "line", "line-1")]
    shown = [state for state in states if results.count(state)]
    return [*found, *(legend_key(state, "line", _STATE_COLOURS[state]) for state in shown)]


def trial_tip(trial: TrialResult, metric: str, names: Sequence[str]) -> str:
    """Return the lines of text about a trial that are shown beside the pointer. `names`: the
    parameters that are."""
    after = f" after step {trial.steps:,}" if trial.state == "pruned" else ""
    value = [] if trial.value is None else [f"{metric} {format_value(float(trial.value))}"]
    given = [
        f"{name} {format_value(trial.parameters[name])}"
        for name in names
        if name in trial.parameters
    ]
    return "\n".join([f"trial {trial.number}, {trial.state}{after}", *value, *given])


def _scale_notes(scale: Scale, values: Sequence[float]) -> list[Html]:
    """Return notes on an axis: that it is logarithmic, and the number of values that are not on
    it."""
    outside = beyond(scale, values)
    notes = ["logarithmic"] if scale.logarithmic else []
    return [
        legend_note(text)
        for text in [*notes, *([f"{outside:,} beyond the axis"] if outside else [])]
    ]


def _mark_place(
    trial: TrialResult, seconds: float, x_scale: Scale, y_scale: Scale, sign: float
) -> Point:
    """Return the place of a trial's mark: at the worse edge if it has no value."""
    worse = 1.0 if sign > 0 else 0.0
    has_value = trial.state != "failed" and is_number(trial.value)
    return place_on(x_scale, seconds), place_on(y_scale, trial.value) if has_value and is_number(
        trial.value
    ) else worse


def _trial_marks(
    placed: Sequence[tuple[TrialResult, Point]], best: TrialResult | None
) -> list[Html]:
    found = []
    for trial, place in placed:
        kind = (
            "trial mark" if trial.state == "failed" or is_number(trial.value) else "trial mark nan"
        )
        found.append(trial_path(trial, kind, polyline([place]), {}, best))
        if trial.state == "pruned":
            found.append(element("path", kind="hole", d=polyline([place])))
    return found


def _stairs(steps: Sequence[Point]) -> list[Point]:
    """Return the corners of a line that keeps each value until the next one."""
    ends = [x for x, _ in steps[1:]] + [1.0]
    return (
        [corner for (x, y), end in zip(steps, ends, strict=True) for corner in ((x, y), (end, y))]
        if steps
        else []
    )


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
    """Return step and value of each point. None: no value there is finite."""
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
    """Return a place that may be beyond the axis, which hides it, but not by much."""
    low, high = y_scale.low, y_scale.high
    least = low if y_scale.logarithmic else low - (high - low)
    return x_scale.position(step), y_scale.position(min(max(value, least), high + (high - low)))


def _axis_places(
    trial: TrialResult, axes: Sequence[ParameterAxis], scale: Scale
) -> list[Point | None]:
    """Return the trial's places on all axes. None: it has no such parameter, or no value."""
    heights = [
        axis.position(trial.parameters[axis.name]) if axis.name in trial.parameters else None
        for axis in axes
    ]
    has_value = trial.state != "failed" and is_number(trial.value)
    heights.append(place_on(scale, trial.value) if has_value and is_number(trial.value) else None)
    return [
        None if height is None else (place / len(axes), height)
        for place, height in enumerate(heights)
    ]


def _axis_head(
    place: float, name: str, ticks: Sequence[tuple[float, str]], remark: str
) -> list[Html]:
    """Return an axis's name, remark and ticks, over the picture."""
    left = f"left:{100 * place:.2f}%"
    short = Html(re.sub(r"([/._-])", r"\1<wbr>", joined(shorten(name, _LONGEST_NAME))))
    small = element("small", remark) if remark else None
    head = element("i", short, small, kind="name", style=left, title=name)
    marks = [
        element("i", label, kind="tick", style=f"{left};bottom:{100 * height:.2f}%")
        for height, label in ticks
    ]
    return [head, *marks]
