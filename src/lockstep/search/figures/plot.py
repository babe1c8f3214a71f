"""Parts of a figure of trials: its frame, the path of each trial, and what a colour means. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from lockstep.base.foreign_text import escape
from lockstep.report.chart import GRAIN
from lockstep.report.heatmap import RAMP
from lockstep.search.figures.axes import format_value
from lockstep.search.results import SearchResults, State, TrialResult

_SHADES = RAMP[2:]
"""Colours from worse to better on a light ground; the two palest of the ramp are no colours of
lines."""
_FAINT_FROM = 60
"""Number of lines from which on each is paler."""

Point = tuple[float, float]
"""A position to the right and upwards, each from 0 to 1."""


def style() -> str:
    """Return the rules with the colours of values, for light and dark."""
    light, dark = (
        "".join(f"--value-{place}:{colour};" for place, colour in enumerate(colours))
        for colours in (_SHADES, RAMP[::-1][2:])
    )
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def shades(results: SearchResults) -> dict[int, int]:
    """Return the colour of each complete trial by its number: its rank, of as many as there are
    colours."""
    ranked = results.ranked
    return {
        trial.number: len(_SHADES) - 1 - place * len(_SHADES) // len(ranked)
        for place, trial in enumerate(ranked)
    }


def figure(
    title: str,
    legend: Iterable[str],
    inside: str,
    *,
    kind: str,
    description: str,
    lines: int,
    latest: str = "",
) -> str:
    """Return a figure as HTML. `kind`: class of its plot. `inside`: SVG elements between `<svg>`
    tags, and labels."""
    strength = min(1.0, max(0.35, _FAINT_FROM / max(1, lines)))
    caption = (
        f'<span class="title">{escape(title)}</span><span'
        f' class="legend">{"".join(legend)}</span>{latest}'
    )
    plot = (
        f'<div class="plot trials {kind}" style="--strength:{strength:.2f}" role="img"'
        f' aria-label="{escape(description)}">{inside}</div>'
    )
    return (
        f'<figure class="chart"><figcaption>{caption}</figcaption><div'
        f' class="wide">{plot}</div></figure>'
    )


def drawing(layers: Iterable[str]) -> str:
    """Return an SVG that stretches over its plot."""
    return (
        f'<svg viewBox="0 0 {GRAIN} {GRAIN}" preserveAspectRatio="none"'
        f' aria-hidden="true">{"".join(layers)}</svg>'
    )


def coordinates(point: Point) -> str:
    """Return a point as in the `d` of a path."""
    return f"{round(GRAIN * point[0])} {round(GRAIN * (1 - point[1]))}"


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
) -> str:
    """Return the SVG path of a trial. `kind`: its class beside those of its state. Empty if `d`
    is."""
    if not d:
        return ""
    place = shade.get(trial.number)
    colour = "" if place is None else f' style="--colour:var(--value-{place})"'
    chosen = " best" if trial is best else ""
    return (
        f'<path class="{kind} {trial.state}{chosen}"{colour} data-trial="{trial.number}" d="{d}"/>'
    )


def in_front(results: SearchResults) -> list[TrialResult]:
    """Return the trials in the order in which they are drawn: the best one last."""
    ranked = results.ranked
    numbers = {trial.number for trial in ranked}
    order: dict[State, int] = {"pruned": 0, "failed": 1, "running": 2, "waiting": 3, "complete": 4}
    others = [trial for trial in results.trials if trial.number not in numbers]
    return [*sorted(others, key=lambda trial: order[trial.state]), *reversed(ranked)]


def legend(results: SearchResults, *states: State) -> list[str]:
    """Return what the colours of lines mean: of values, and of these states if there are such
    trials."""
    ramp = (
        '<span class="key">worse<b class="ramp"></b>better</span><span class="key"><b class="line'
        ' best"></b>best</span>'
    )
    keys = [
        f'<span class="key"><b class="line {state}"></b>{state}</span>'
        for state in states
        if results.count(state)
    ]
    return [ramp if len(results.ranked) > 1 else "", *keys]


def tip(trial: TrialResult, metric: str, names: Sequence[str]) -> str:
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
