"""A figure of curves over steps, as HTML. The picture is stretched to any size; lines and words keep theirs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from lockstep.report.history import Series
from lockstep.report.scale import Scale, Unit, number, scale_of, step_scale
from lockstep.report.thin import Point, thinned

GRAIN = 10_000
"""Units of a picture's width and height."""
DOTS = 60
"""A line of no more points than this shows each as a dot."""
COLOURS = 8
"""Of lines, in page.css: --line-0 and so on."""

Kind = Literal["line", "dashed"]


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    colour: int
    series: Series
    kind: Kind = "line"
    run: int = 0
    """Place of its run among those on the page."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened in the run at a step."""

    step: int
    grave: bool
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    title: str
    lines: Sequence[Line]
    unit: Unit = ""
    from_zero: bool = False
    may_be_logarithmic: bool = True
    note: str = ""
    marks: Sequence[Mark] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    html: str
    data: dict[str, Any]
    """What page.js shows beside the pointer."""


def draw(chart: Chart, *, place: int, last_step: int, columns: int) -> Drawn:
    """`place`: among the charts of the page. `columns`: points that a line may have."""
    points = [thinned(line.series, last_step, columns) for line in chart.lines]
    numbers = [value for each in points for point in each for value in (point.low, point.high) if math.isfinite(value)]
    across = step_scale(last_step)
    up = scale_of(numbers, chart.unit, from_zero=chart.from_zero, may_be_logarithmic=chart.may_be_logarithmic)
    layers = [*_grid(across, up), *_marks(chart.marks, across)]
    for line, each in zip(chart.lines, points, strict=True):
        layers += _line(line, each, across, up)
    svg = f'<svg viewBox="0 0 {GRAIN} {GRAIN}" preserveAspectRatio="none" aria-hidden="true">{"".join(layers)}</svg>'
    spoken = escape(f"{chart.title} over steps. {' '.join(map(_spoken, chart.lines))}", quote=True)
    plot = f'<div class="plot" data-chart="{place}" role="img" aria-label="{spoken}">{svg}{labels(across, "step", up)}</div>'
    caption = f'<figcaption><span class="title">{escape(chart.title)}</span>{_legend(chart, up)}{_latest(chart)}</figcaption>'
    data = {
        "unit": chart.unit,
        "up": [up.low, up.high, int(up.logarithmic)],
        "marks": [[mark.step, mark.text] for mark in chart.marks],
        "lines": [_data(line, each) for line, each in zip(chart.lines, points, strict=True)],
    }
    return Drawn(f'<figure class="chart">{caption}{plot}</figure>', data)


def labels(across: Scale, axis: str, up: Scale | None) -> str:
    """The words at the axes, as HTML beside the picture. `axis`: what goes across."""
    said = [f'<i class="axis">{axis}</i>'] if axis else []
    for tick, label in zip(across.ticks, across.labels, strict=True):
        said.append(f'<i class="x" style="left:{100 * across.place(tick):.2f}%">{label}</i>')
    if up is not None:
        for tick, label in zip(up.ticks, up.labels, strict=True):
            said.append(f'<i class="y" style="bottom:{100 * up.place(tick):.2f}%">{label}</i>')
    return "".join(said)


def summary(series: Series) -> dict[str, Any]:
    """A series in a few numbers. Those of its values are None where no value is finite."""
    finite = [(value, step) for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)]
    least, greatest = min(finite, default=(None, None)), max(finite, default=(None, None))
    return {
        "values": len(series.values),
        "not_finite": len(series.values) - len(finite),
        "first": finite[0][0] if finite else None,
        "last": series.values[-1] if series.values and math.isfinite(series.values[-1]) else None,
        "last_step": series.steps[-1] if series.steps else None,
        "mean": math.fsum(value for value, _ in finite) / len(finite) if finite else None,
        "min": least[0],
        "min_step": least[1],
        "max": greatest[0],
        "max_step": greatest[1],
    }


def _grid(across: Scale, up: Scale) -> Iterator[str]:
    lines = [f"M0 {_y(up.place(tick))}h{GRAIN}" for tick in up.ticks]
    yield f'<path class="grid" d="{"".join(lines)}"/>'


def _marks(marks: Sequence[Mark], across: Scale) -> Iterator[str]:
    for grave in (False, True):
        lines = [f"M{_x(across.place(mark.step))} 0v{GRAIN}" for mark in marks if mark.grave == grave]
        if lines:
            yield f'<path class="mark {"grave" if grave else ""}" d="{"".join(lines)}"/>'


def _line(line: Line, points: Sequence[Point], across: Scale, up: Scale) -> Iterator[str]:
    stretches = _stretches(points)
    style = f'style="--colour:var(--line-{line.colour % COLOURS})" data-run="{line.run}"'
    if any(point.low < point.high for point in points):
        edges = "".join(_band(stretch, across, up) for stretch in stretches)
        yield f'<path class="band" {style} d="{edges}"/>'
    path = "".join(_path([(_x(across.place(point.step)), _y(up.place(point.mean))) for point in stretch]) for stretch in stretches)
    yield f'<path class="{line.kind}" {style} d="{path}"/>'
    lonely = points if len(points) <= DOTS else [stretch[0] for stretch in stretches if len(stretch) == 1]
    dots = "".join(f"M{_x(across.place(p.step))} {_y(up.place(p.mean))}h0" for p in lonely if math.isfinite(p.mean))
    if dots:
        yield f'<path class="dots" {style} d="{dots}"/>'
    broken = "".join(f"M{_x(across.place(p.first))} 120H{_x(across.place(p.last))}" for p in points if p.not_finite)
    if broken:
        yield f'<path class="broken" d="{broken}"/>'


def _stretches(points: Sequence[Point]) -> list[list[Point]]:
    """The points without those that have no finite value, cut where such stand."""
    found: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point.mean):
            found[-1].append(point)
        elif found[-1]:
            found.append([])
    return [stretch for stretch in found if stretch]


def _band(points: Sequence[Point], across: Scale, up: Scale) -> str:
    over = [(_x(across.place(point.step)), _y(up.place(point.high))) for point in points]
    under = [(_x(across.place(point.step)), _y(up.place(point.low))) for point in reversed(points)]
    return _path([*over, *under]) + "z"


def _path(places: Sequence[tuple[int, int]]) -> str:
    (x, y), *rest = places
    parts = [f"M{x} {y}l" if rest else f"M{x} {y}"]
    for to_x, to_y in rest:
        parts.append(f"{to_x - x} {to_y - y} ")
        x, y = to_x, to_y
    return "".join(parts).rstrip()


def _x(place: float) -> int:
    return round(GRAIN * place)


def _y(place: float) -> int:
    return round(GRAIN * (1 - place))


def _legend(chart: Chart, up: Scale) -> str:
    named = len({line.name for line in chart.lines}) > 1
    items = []
    for line in chart.lines if named else ():
        style = f'style="--colour:var(--line-{line.colour % COLOURS})"'
        items.append(f'<span class="key" data-run="{line.run}"><b class="{line.kind}" {style}></b>{escape(line.name)}</span>')
    if up.logarithmic:
        items.append('<span class="note">logarithmic</span>')
    if chart.note:
        items.append(f'<span class="note">{escape(chart.note)}</span>')
    broken = sum(not math.isfinite(value) for line in chart.lines for value in line.series.values)
    if broken:
        items.append(f'<span class="key bad"><b class="broken"></b>{broken:,} not finite</span>')
    return f'<span class="legend">{"".join(items)}</span>'


def _latest(chart: Chart) -> str:
    """The last value, where there is one line of which to say it."""
    if len({line.run for line in chart.lines}) > 1 or not chart.lines or not chart.lines[0].series.values:
        return ""
    return f'<span class="latest">{number(chart.lines[0].series.values[-1], chart.unit)}</span>'


def _spoken(line: Line) -> str:
    told = summary(line.series)
    if told["min"] is None:
        return f"{line.name}: {told['values']} values, none of them finite."
    last = "not finite" if told["last"] is None else number(told["last"])
    return (
        f"{line.name}: {told['values']} values, first {number(told['first'])}, last {last} at step {told['last_step']}, "
        f"least {number(told['min'])} at step {told['min_step']}, greatest {number(told['max'])} at step {told['max_step']}."
    )


def _data(line: Line, points: Sequence[Point]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": line.name,
        "colour": line.colour % COLOURS,
        "kind": line.kind,
        "steps": [point.last for point in points],
        "mean": [_short(point.mean) for point in points],
    }
    if any(point.count > 1 for point in points):
        data["first"] = [point.first for point in points]
        data["low"], data["high"] = ([_short(value) for value in each] for each in zip(*((p.low, p.high) for p in points), strict=True))
    return data


def _short(value: float) -> float | str:
    """To five digits; what JSON has no number for in words."""
    return float(f"{value:.5g}") if math.isfinite(value) else number(value)
