"""A chart of curves over steps: HTML with an SVG that stretches to any size, but not its text and
lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.base.foreign_text import escape
from lockstep.report.history import Series
from lockstep.report.scale import Scale, Unit, format_number, scale_of, short_time_scale, step_scale

GRAIN = 10_000
DOTS = 60
"""Largest number of points that are all drawn as dots."""
COLOURS = 8
"""Number of curve colours in page.css: --line-0 and so on."""

Kind = Literal["line", "dashed"]


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve of a chart."""

    name: str
    colour: int
    series: Series
    kind: Kind = "line"
    run: int = 0
    """Index of its run on the page."""


@dataclass(frozen=True, slots=True)
class EventMark:
    """A vertical line at the step of an event."""

    step: int
    error: bool
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """The content of a chart, before it is rendered."""

    title: str
    lines: Sequence[Curve]
    unit: Unit = ""
    from_zero: bool = False
    may_be_logarithmic: bool = True
    note: str = ""
    marks: Sequence[EventMark] = ()
    microseconds: int | None = None
    """The end of the horizontal axis if it is time: the steps of the curves are then
    microseconds."""


@dataclass(frozen=True, slots=True)
class DownsampledPoint:
    """One value, or the mean, minimum and maximum of neighbouring values."""

    first: int
    last: int
    count: int
    mean: float
    """Mean of the finite values; NaN if there are none. The same holds for `low` and `high`."""
    low: float
    high: float
    not_finite: int

    @property
    def step(self) -> float:
        return (self.first + self.last) / 2


@dataclass(frozen=True, slots=True)
class RenderedFigure:
    """A figure as HTML."""

    html: str
    data: dict[str, Any]
    """Values that page.js shows in the tooltip."""


def render(chart: Chart, *, index: int, last_step: int, columns: int) -> RenderedFigure:
    """Render a chart. `index`: its index on the page. `columns`: largest number of points of a
    curve."""
    axis = "step" if chart.microseconds is None else "time"
    points = [
        downsample(line.series, chart.microseconds or last_step, columns) for line in chart.lines
    ]
    numbers = [
        value
        for each in points
        for point in each
        for value in (point.low, point.high)
        if math.isfinite(value)
    ]
    x_scale = (
        step_scale(last_step)
        if chart.microseconds is None
        else short_time_scale(chart.microseconds)
    )
    y_scale = scale_of(
        numbers, chart.unit, from_zero=chart.from_zero, may_be_logarithmic=chart.may_be_logarithmic
    )
    grid = "".join(f"M0 {_y(y_scale.position(tick))}h{GRAIN}" for tick in y_scale.ticks)
    layers = [f'<path class="grid" d="{grid}"/>', *_marks(chart.marks, x_scale)]
    for line, each in zip(chart.lines, points, strict=True):
        layers += _line(line, each, x_scale, y_scale)
    svg = (
        f'<svg viewBox="0 0 {GRAIN} {GRAIN}" preserveAspectRatio="none"'
        f' aria-hidden="true">{"".join(layers)}</svg>'
    )
    aria_text = escape(
        f"{chart.title} over {'steps' if axis == 'step' else axis}."
        f" {' '.join(_aria_text(line, axis) for line in chart.lines)}"
    )
    plot = (
        f'<div class="plot" data-chart="{index}" role="img"'
        f' aria-label="{aria_text}">{svg}{axis_labels(x_scale, axis, y_scale)}</div>'
    )
    caption = (
        "<figcaption><span"
        f' class="title">{escape(chart.title)}</span>{_legend(chart, y_scale)}{_latest(chart)}</figcaption>'
    )
    data = {
        "unit": chart.unit,
        "up": [y_scale.low, y_scale.high, int(y_scale.logarithmic)],
        "marks": [[mark.step, mark.text] for mark in chart.marks],
        "lines": [_data(line, each) for line, each in zip(chart.lines, points, strict=True)],
        **({} if chart.microseconds is None else {"microseconds": chart.microseconds}),
    }
    return RenderedFigure(f'<figure class="chart">{caption}{plot}</figure>', data)


def downsample(series: Series, last: int, columns: int) -> list[DownsampledPoint]:
    """Return the series as `columns` points at most, each of an equal part of the axis. Empty parts
    are left out."""
    pairs = list(zip(series.steps, series.values, strict=True))
    if len(pairs) <= columns:
        return [_point([pair]) for pair in pairs]
    points: list[DownsampledPoint] = []
    collected: list[tuple[int, float]] = []
    column = -1
    for pair in pairs:
        index = min(columns - 1, pair[0] * columns // (last + 1))
        if index != column and collected:
            points.append(_point(collected))
            collected = []
        column = index
        collected.append(pair)
    return [*points, _point(collected)]


def _point(pairs: list[tuple[int, float]]) -> DownsampledPoint:
    finite = [value for _, value in pairs if math.isfinite(value)]
    mean, low, high = (
        (math.fsum(finite) / len(finite), min(finite), max(finite)) if finite else (math.nan,) * 3
    )
    return DownsampledPoint(
        pairs[0][0], pairs[-1][0], len(pairs), mean, low, high, len(pairs) - len(finite)
    )


def axis_labels(x_scale: Scale, axis: str, y_scale: Scale | None) -> str:
    """Return the labels of the axes, as HTML over the picture. `axis`: name of the horizontal
    axis."""
    labels = [f'<i class="axis">{axis}</i>'] if axis else []
    for tick, label in zip(x_scale.ticks, x_scale.labels, strict=True):
        labels.append(f'<i class="x" style="left:{100 * x_scale.position(tick):.2f}%">{label}</i>')
    if y_scale is not None:
        for tick, label in zip(y_scale.ticks, y_scale.labels, strict=True):
            labels.append(
                f'<i class="y" style="bottom:{100 * y_scale.position(tick):.2f}%">{label}</i>'
            )
    return "".join(labels)


def summary(series: Series) -> dict[str, Any]:
    """Return statistics of a series. Those of its values are None if no value is finite."""
    finite = [
        (value, step)
        for step, value in zip(series.steps, series.values, strict=True)
        if math.isfinite(value)
    ]
    lowest, highest = min(finite, default=(None, None)), max(finite, default=(None, None))
    return {
        "values": len(series.values),
        "not_finite": len(series.values) - len(finite),
        "first": finite[0][0] if finite else None,
        "last": series.values[-1] if series.values and math.isfinite(series.values[-1]) else None,
        "last_step": series.steps[-1] if series.steps else None,
        "mean": math.fsum(value for value, _ in finite) / len(finite) if finite else None,
        "min": lowest[0],
        "min_step": lowest[1],
        "max": highest[0],
        "max_step": highest[1],
    }


def _marks(marks: Sequence[EventMark], x_scale: Scale) -> Iterator[str]:
    for error in (False, True):
        lines = [
            f"M{_x(x_scale.position(mark.step))} 0v{GRAIN}" for mark in marks if mark.error == error
        ]
        if lines:
            yield f'<path class="mark {"error" if error else ""}" d="{"".join(lines)}"/>'


def _line(
    line: Curve, points: Sequence[DownsampledPoint], x_scale: Scale, y_scale: Scale
) -> Iterator[str]:
    segments = _finite_segments(points)
    style = f'style="--colour:var(--line-{line.colour % COLOURS})" data-run="{line.run}"'
    if any(point.low < point.high for point in points):
        edges = "".join(_band(segment, x_scale, y_scale) for segment in segments)
        yield f'<path class="band" {style} d="{edges}"/>'
    path = "".join(
        _path(
            [
                (_x(x_scale.position(point.step)), _y(y_scale.position(point.mean)))
                for point in segment
            ]
        )
        for segment in segments
    )
    yield f'<path class="{line.kind}" {style} d="{path}"/>'
    single = (
        points if len(points) <= DOTS else [segment[0] for segment in segments if len(segment) == 1]
    )
    dots = "".join(
        f"M{_x(x_scale.position(p.step))} {_y(y_scale.position(p.mean))}h0"
        for p in single
        if math.isfinite(p.mean)
    )
    if dots:
        yield f'<path class="dots" {style} d="{dots}"/>'
    broken = "".join(
        f"M{_x(x_scale.position(p.first))} 120H{_x(x_scale.position(p.last))}"
        for p in points
        if p.not_finite
    )
    if broken:
        yield f'<path class="broken" d="{broken}"/>'


def _finite_segments(points: Sequence[DownsampledPoint]) -> list[list[DownsampledPoint]]:
    """Split the points at those that have no finite value, and drop these."""
    found: list[list[DownsampledPoint]] = [[]]
    for point in points:
        if math.isfinite(point.mean):
            found[-1].append(point)
        elif found[-1]:
            found.append([])
    return [segment for segment in found if segment]


def _band(points: Sequence[DownsampledPoint], x_scale: Scale, y_scale: Scale) -> str:
    over = [
        (_x(x_scale.position(point.step)), _y(y_scale.position(point.high))) for point in points
    ]
    under = [
        (_x(x_scale.position(point.step)), _y(y_scale.position(point.low)))
        for point in reversed(points)
    ]
    return _path([*over, *under]) + "z"


def _path(points: Sequence[tuple[int, int]]) -> str:
    (x, y), *rest = points
    parts = [f"M{x} {y}l" if rest else f"M{x} {y}"]
    for to_x, to_y in rest:
        parts.append(f"{to_x - x} {to_y - y} ")
        x, y = to_x, to_y
    return "".join(parts).rstrip()


def _x(position: float) -> int:
    return round(GRAIN * position)


def _y(position: float) -> int:
    return round(GRAIN * (1 - position))


def _legend(chart: Chart, y_scale: Scale) -> str:
    named = len({line.name for line in chart.lines}) > 1
    items = []
    for line in chart.lines if named else ():
        style = f'style="--colour:var(--line-{line.colour % COLOURS})"'
        items.append(
            f'<span class="key" data-run="{line.run}"><b class="{line.kind}"'
            f" {style}></b>{escape(line.name)}</span>"
        )
    if y_scale.logarithmic:
        items.append('<span class="note">logarithmic</span>')
    if chart.note:
        items.append(f'<span class="note">{escape(chart.note)}</span>')
    broken = sum(not math.isfinite(value) for line in chart.lines for value in line.series.values)
    if broken:
        items.append(f'<span class="key bad"><b class="broken"></b>{broken:,} not finite</span>')
    return f'<span class="legend">{"".join(items)}</span>'


def _latest(chart: Chart) -> str:
    """Return the latest value of the first curve, or over time its largest. Empty if the chart
    shows several runs."""
    if (
        len({line.run for line in chart.lines}) > 1
        or not chart.lines
        or not chart.lines[0].series.values
    ):
        return ""
    values = chart.lines[0].series.values
    text = (
        format_number(values[-1], chart.unit)
        if chart.microseconds is None
        else f"peak {format_number(max(values), chart.unit)}"
    )
    return f'<span class="latest">{text}</span>'


def _aria_text(line: Curve, axis: str) -> str:
    values = summary(line.series)
    if values["min"] is None:
        return f"{line.name}: {values['values']} values, none of them finite."
    last = "not finite" if values["last"] is None else format_number(values["last"])
    first, lowest, highest = (format_number(values[name]) for name in ("first", "min", "max"))
    places = [values[f"{name}_step"] for name in ("last", "min", "max")]
    last_at, low_at, high_at = (
        f"step {at}" if axis == "step" else format_number(at / 1e6, "seconds") for at in places
    )
    return (
        f"{line.name}: {values['values']} values, first {first}, last {last} at {last_at}, "
        f"minimum {lowest} at {low_at}, maximum {highest} at {high_at}."
    )


def _data(line: Curve, points: Sequence[DownsampledPoint]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": line.name,
        "colour": line.colour % COLOURS,
        "kind": line.kind,
        "steps": [point.last for point in points],
        "mean": [_short(point.mean) for point in points],
    }
    if any(point.count > 1 for point in points):
        data["first"] = [point.first for point in points]
        data["low"], data["high"] = (
            [_short(value) for value in each]
            for each in zip(*((p.low, p.high) for p in points), strict=True)
        )
    return data


def _short(value: float) -> float | str:
    """Round to five digits. NaN and infinity, for which JSON has no number, become text."""
    return float(f"{value:.5g}") if math.isfinite(value) else format_number(value)
