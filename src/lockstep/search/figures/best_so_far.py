"""The best value so far over time, with a mark for each trial that has ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.report.chart import GRAIN, axis_labels
from lockstep.report.scale import Scale, format_number, time_scale
from lockstep.search.figures.axes import beyond, end_scale, is_number, place_on
from lockstep.search.figures.plot import (
    Point,
    coordinates,
    drawing,
    figure,
    in_front,
    polyline,
    trial_path,
)
from lockstep.search.results import SearchResults, TrialResult


def best_so_far(results: SearchResults) -> str:
    """Return the figure as HTML. Empty if no trial has ended."""
    ended = [(trial, trial.ended) for trial in in_front(results) if is_number(trial.ended)]
    if not ended:
        return ""
    began = min(
        [moment for _, moment in ended]
        + [trial.started for trial, _ in ended if is_number(trial.started)]
    )
    x_scale = time_scale(max(moment for _, moment in ended) - began)
    y_scale, values = end_scale(results)
    placed = [
        (trial, _place(trial, moment - began, x_scale, y_scale, results.sign))
        for trial, moment in ended
    ]
    steps = [
        (place_on(x_scale, moment - began), place_on(y_scale, value))
        for moment, value, _ in results.best_over_time()
    ]
    grid = "".join(
        f"M{coordinates((0.0, y_scale.position(tick)))}h{GRAIN}" for tick in y_scale.ticks
    )
    layers = [
        f'<path class="grid" d="{grid}"/>',
        *_marks(placed, results.best),
        f'<path class="line" d="{polyline(_stairs(steps))}"/>',
    ]
    best = results.best
    latest = (
        ""
        if best is None or best.value is None
        else f'<span class="latest">{format_number(best.value)}</span>'
    )
    return figure(
        f"best {results.metric} so far, over time",
        [*_legend(results), *scale_notes(y_scale, values)],
        drawing(layers) + axis_labels(x_scale, "", y_scale),
        kind="best-so-far",
        description=_description(results),
        lines=1,
        latest=latest,
    )


def scale_notes(scale: Scale, values: Sequence[float]) -> list[str]:
    """Return notes on an axis: that it is logarithmic, and the number of values that are not on
    it."""
    outside = beyond(scale, values)
    notes = ["logarithmic"] if scale.logarithmic else []
    return [
        f'<span class="note">{note}</span>'
        for note in [*notes, *([f"{outside:,} beyond the axis"] if outside else [])]
    ]


def _place(
    trial: TrialResult, seconds: float, x_scale: Scale, y_scale: Scale, sign: float
) -> Point:
    """Return the place of a trial's mark: at the worse edge if it has no value."""
    worse = 1.0 if sign > 0 else 0.0
    has_value = trial.state != "failed" and is_number(trial.value)
    return place_on(x_scale, seconds), (
        place_on(y_scale, trial.value) if has_value and is_number(trial.value) else worse
    )


def _marks(placed: Sequence[tuple[TrialResult, Point]], best: TrialResult | None) -> list[str]:
    """Return the marks, and what makes those of pruned trials hollow."""
    found = []
    for trial, place in placed:
        kind = (
            "trial mark" if trial.state == "failed" or is_number(trial.value) else "trial mark nan"
        )
        found.append(trial_path(trial, kind, polyline([place]), {}, best))
        if trial.state == "pruned":
            found.append(f'<path class="hole" d="{polyline([place])}"/>')
    return found


def _stairs(steps: Sequence[Point]) -> list[Point]:
    """Return the corners of a line that keeps each value until the next one."""
    ends = [x for x, _ in steps[1:]] + [1.0]
    return (
        [corner for (x, y), end in zip(steps, ends, strict=True) for corner in ((x, y), (end, y))]
        if steps
        else []
    )


def _legend(results: SearchResults) -> list[str]:
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
        f'<span class="key"><b class="mark {state}"></b>{words}</span>'
        for state, (words, is_shown) in shown.items()
        if is_shown
    ]


def _description(results: SearchResults) -> str:
    found = results.best_over_time()
    best = "; ".join(
        f"{format_number(value)} of trial {number}" for _, value, number in found[-20:]
    )
    return f"best {results.metric} over time. {best or 'No trial is complete.'}"
