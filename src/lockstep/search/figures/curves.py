"""The metric of each trial by step. Pure."""

from __future__ import annotations

from array import array

from lockstep.report.chart import GRAIN, axis_labels, downsample
from lockstep.report.history import Series
from lockstep.report.scale import Scale, step_scale
from lockstep.search.figures.axes import is_number, metric_scale
from lockstep.search.figures.best_so_far import scale_notes
from lockstep.search.figures.plot import (
    Point,
    coordinates,
    drawing,
    figure,
    in_front,
    legend,
    polyline,
    shades,
    trial_path,
)
from lockstep.search.results import SearchResults, TrialResult

_POINTS = 60_000
"""Approximate number of points of all curves. If there are many, each has fewer."""
_MOST_COLUMNS, _LEAST_COLUMNS = 400, 20


def curves(results: SearchResults) -> str:
    """Return the figure as HTML. Empty if no trial was evaluated."""
    trials = [trial for trial in in_front(results) if trial.values]
    if not trials:
        return ""
    x_scale = step_scale(max(trial.steps for trial in trials))
    columns = max(_LEAST_COLUMNS, min(_MOST_COLUMNS, _POINTS // len(trials)))
    series = [_downsampled(trial, round(x_scale.high), columns) for trial in trials]
    numbers = [value for each in series for _, value in each if value is not None]
    y_scale = metric_scale(numbers, results.sign)
    shade, best = shades(results), results.best
    grid = "".join(
        f"M{coordinates((0.0, y_scale.position(tick)))}h{GRAIN}" for tick in y_scale.ticks
    )
    layers = [f'<path class="grid" d="{grid}"/>']
    for trial, each in zip(trials, series, strict=True):
        points = [
            None if value is None else _place(step, value, x_scale, y_scale) for step, value in each
        ]
        layers.append(trial_path(trial, "trial", polyline(points), shade, best))
        if trial.state == "pruned" and points[-1] is not None:
            layers.append(f'<path class="end" d="{polyline([points[-1]])}"/>')
    return figure(
        f"{results.metric} by step",
        [*legend(results, "pruned", "failed", "running"), *scale_notes(y_scale, numbers)],
        drawing(layers) + axis_labels(x_scale, "step", y_scale),
        kind="curves",
        description=(
            f"{results.metric} over steps of {len(trials)} trials, of which"
            f" {results.count('pruned')} were pruned."
        ),
        lines=len(trials),
    )


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


def _place(step: float, value: float, x_scale: Scale, y_scale: Scale) -> Point:
    """Return a place that may be beyond the axis, which hides it, but not by much."""
    low, high = y_scale.low, y_scale.high
    least = low if y_scale.logarithmic else low - (high - low)
    return x_scale.position(step), y_scale.position(min(max(value, least), high + (high - low)))
