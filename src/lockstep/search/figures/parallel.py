"""Parallel coordinates: an axis for each parameter and one for the metric, and a line for each
trial. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lockstep.base.foreign_text import escape
from lockstep.report.chart import GRAIN
from lockstep.report.scale import Scale
from lockstep.search.figures.axes import (
    ParameterAxis,
    end_scale,
    is_number,
    parameter_axes,
    place_on,
    shorten,
)
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

_NARROWEST_REM = 7.5
"""Smallest distance between two axes."""
_LONGEST_NAME = 24


def parallel_coordinates(results: SearchResults) -> str:
    """Return the figure as HTML. Empty if there is no parameter, or no trial has ended."""
    axes = parameter_axes(results)
    trials = [
        trial for trial in in_front(results) if trial.state in ("complete", "pruned", "failed")
    ]
    if not axes or not trials:
        return ""
    scale, values = end_scale(results)
    shade, best = shades(results), results.best
    layers = [
        trial_path(trial, "trial", polyline(_points(trial, axes, scale)), shade, best)
        for trial in trials
    ]
    bars = "".join(
        f"M{coordinates((place / len(axes), 0.0))}v{-GRAIN}" for place in range(len(axes) + 1)
    )
    labels = [
        _labels(place / len(axes), axis.name, axis.ticks, _kind(axis))
        for place, axis in enumerate(axes)
    ]
    ticks = [
        (scale.position(tick), label) for tick, label in zip(scale.ticks, scale.labels, strict=True)
    ]
    better = "smaller is better" if results.sign > 0 else "larger is better"
    inside = (
        drawing([*layers, f'<path class="axis" d="{bars}"/>'])
        + "".join(labels)
        + _labels(1.0, results.metric, ticks, better)
    )
    described = (
        f"Parallel coordinates of {', '.join(axis.name for axis in axes)} and {results.metric};"
        f" {len(trials)} trials."
    )
    return figure(
        "parallel coordinates",
        [*legend(results, "pruned", "failed"), *scale_notes(scale, values)],
        f'<div class="axes" style="min-width:{_NARROWEST_REM * len(axes)}rem">{inside}</div>',
        kind="parallel",
        description=described,
        lines=len(trials),
    )


def _points(trial: TrialResult, axes: Sequence[ParameterAxis], scale: Scale) -> list[Point | None]:
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


def _kind(axis: ParameterAxis) -> str:
    return "logarithmic" if axis.scale is not None and axis.scale.logarithmic else ""


def _labels(place: float, name: str, ticks: Sequence[tuple[float, str]], note: str) -> str:
    """Return an axis's name, note and ticks as HTML over the picture."""
    small = f"<small>{note}</small>" if note else ""
    left = f"left:{100 * place:.2f}%"
    short = re.sub(r"([/._-])", r"\1<wbr>", escape(shorten(name, _LONGEST_NAME)))
    head = f'<i class="name" style="{left}" title="{escape(name)}">{short}{small}</i>'
    marks = "".join(
        f'<i class="tick" style="{left};bottom:{100 * height:.2f}%">{escape(label)}</i>'
        for height, label in ticks
    )
    return head + marks
