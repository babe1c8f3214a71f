"""Charts of curves over steps or time, as SVG. A chart stretches without changing the size of its
text and lines."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.pages.markup import Content, Html, element, legend_key
from lockstep.pages.scale import (
    Scale,
    Unit,
    format_number,
    logarithmic_scale,
    scale_of,
    short_time_scale,
    step_scale,
)

GRAIN = 10_000
DOTS = 60
COLOURS = 8

Point = tuple[float, float]
"""A position from the left and from the bottom, each from 0 to 1."""


@dataclass(slots=True)
class Series:
    """The values of a curve over ascending steps. A value may be NaN or infinite."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Append a value. Discards the values from `step` on, which a resumed run repeats."""
        self.truncate(step)
        self.steps.append(step)
        self.values.append(value)

    def truncate(self, step: int) -> None:
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()

    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve of a chart, or a band between `series` and `upper`."""

    name: str
    colour: int | str
    """Number of a curve colour, or the name of a colour in page.css."""
    series: Series
    kind: Literal["line", "dashed", "band"] = "line"
    run: int = 0
    upper: Series | None = None

    @property
    def css_colour(self) -> str:
        return f"line-{self.colour % COLOURS}" if isinstance(self.colour, int) else self.colour


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
    logarithmic: bool | None = None
    """True for a logarithmic axis with a zero at the lower edge, None to choose by the values."""
    note: str = ""
    marks: Sequence[EventMark] = ()
    microseconds: int | None = None
    """End of a time axis, on which steps are microseconds. None if the horizontal axis shows
    steps."""


@dataclass(frozen=True, slots=True)
class DownsampledPoint:
    """A point of a drawn curve: a value, or the mean, minimum and maximum of neighbouring
    values."""

    first: int
    last: int
    count: int
    mean: float
    low: float
    high: float
    not_finite: int

    @property
    def step(self) -> float:
        return (self.first + self.last) / 2


@dataclass(frozen=True, slots=True)
class RenderedFigure:
    html: Html
    data: dict[str, Any]


def render_chart(chart: Chart, *, index: int, last_step: int, columns: int) -> RenderedFigure:
    axis = "step" if chart.microseconds is None else "time"
    end = chart.microseconds or last_step
    points = [_points(line, end, columns) for line in chart.lines]
    ends = [value for each in points for point in each for value in (point.low, point.high)]
    numbers = list(filter(math.isfinite, ends))
    x_scale = step_scale(end) if chart.microseconds is None else short_time_scale(end)
    if chart.logarithmic:
        y_scale = logarithmic_scale([value for value in numbers if value > 0], chart.unit)
    else:
        y_scale = scale_of(
            numbers,
            chart.unit,
            from_zero=chart.from_zero,
            may_be_logarithmic=chart.logarithmic is None,
        )
    layers = [grid(y_scale), *_marks(chart.marks, x_scale)]
    for line, each in zip(chart.lines, points, strict=True):
        layers += _line(line, each, x_scale, y_scale)
    over = "steps" if axis == "step" else axis
    spoken = f"{chart.title} over {over}. {' '.join(_spoken(line, axis) for line in chart.lines)}"
    html = figure(
        chart.title,
        [_legend(chart, y_scale), _latest(chart)],
        [drawing(layers), axis_labels(x_scale, axis, y_scale)],
        data_chart=index,
        spoken=spoken,
    )
    data = {
        "unit": chart.unit,
        "up": [y_scale.low, y_scale.high, int(y_scale.logarithmic)],
        "marks": [[mark.step, mark.text] for mark in chart.marks],
        "lines": [_data(line, each) for line, each in zip(chart.lines, points, strict=True)],
        **({} if chart.microseconds is None else {"microseconds": chart.microseconds}),
    }
    return RenderedFigure(html, data)


def render_charts(charts: Sequence[Chart], *, last_step: int, columns: int) -> list[RenderedFigure]:
    return [
        render_chart(each, index=index, last_step=last_step, columns=columns)
        for index, each in enumerate(charts)
    ]


def figure(
    title: Content,
    caption: Content,
    inside: Content,
    *,
    spoken: str,
    kind: str = "",
    scrolls: bool = False,
    **attributes: Any,
) -> Html:
    """Return a figure with a drawing. `spoken` describes the figure to readers who cannot see
    it."""
    kinds = f"plot {kind}".strip()
    plot = element("div", inside, kind=kinds, role="img", aria_label=spoken, **attributes)
    head = element("figcaption", element("span", title, kind="title"), caption)
    box = element("div", plot, kind="wide") if scrolls else plot
    return element("figure", head, box, kind="chart")


def drawing(layers: Iterable[Content]) -> Html:
    return element(
        "svg",
        layers,
        viewBox=f"0 0 {GRAIN} {GRAIN}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def legend(items: Iterable[Content]) -> Html:
    return element("span", items, kind="legend")


def legend_note(text: str) -> Html:
    return element("span", text, kind="note")


def grid(y_scale: Scale) -> Html:
    starts = (coordinates((0.0, y_scale.position(tick))) for tick in y_scale.ticks)
    return element("path", kind="grid", d="".join(f"M{start}h{GRAIN}" for start in starts))


def coordinates(point: Point) -> str:
    return f"{round(GRAIN * point[0])} {round(GRAIN * (1 - point[1]))}"


def axis_labels(x_scale: Scale, axis: str, y_scale: Scale | None) -> Html:
    labels = [element("i", axis, kind="axis")] if axis else []
    scales = [("x", "left", x_scale), *([("y", "bottom", y_scale)] if y_scale else [])]
    for kind, side, scale in scales:
        for tick, label in zip(scale.ticks, scale.labels, strict=True):
            at = f"{side}:{100 * scale.position(tick):.2f}%"
            labels.append(element("i", label, kind=kind, style=at))
    return Html("".join(labels))


def downsample(series: Series, last: int, columns: int) -> list[DownsampledPoint]:
    """Return at most `columns` points, each for an equal part of the axis."""
    pairs = list(zip(series.steps, series.values, strict=True))
    if len(pairs) <= columns:
        return [_point([pair]) for pair in pairs]
    parts: dict[int, list[tuple[int, float]]] = {}
    for pair in pairs:
        parts.setdefault(min(columns - 1, pair[0] * columns // (last + 1)), []).append(pair)
    return [_point(part) for part in parts.values()]


def _points(line: Curve, last: int, columns: int) -> list[DownsampledPoint]:
    if line.upper is None:
        return downsample(line.series, last, columns)
    lower, upper = (downsample(each, last, columns) for each in (line.series, line.upper))
    return [
        DownsampledPoint(a.first, a.last, a.count, b.mean, a.low, b.high, 0)
        for a, b in zip(lower, upper, strict=True)
    ]


def _point(pairs: list[tuple[int, float]]) -> DownsampledPoint:
    finite = [value for _, value in pairs if math.isfinite(value)]
    mean = low = high = math.nan
    if finite:
        mean, low, high = math.fsum(finite) / len(finite), min(finite), max(finite)
    count, (first, _), (last, _) = len(pairs), pairs[0], pairs[-1]
    return DownsampledPoint(first, last, count, mean, low, high, count - len(finite))


def statistics_of(series: Series) -> dict[str, Any]:
    pairs = zip(series.values, series.steps, strict=True)
    finite = [(value, step) for value, step in pairs if math.isfinite(value)]
    lowest, highest = min(finite, default=(None, None)), max(finite, default=(None, None))
    last = series.values[-1] if series.values else math.nan
    return {
        "values": len(series.values),
        "not_finite": len(series.values) - len(finite),
        "first": finite[0][0] if finite else None,
        "last": last if math.isfinite(last) else None,
        "last_step": series.steps[-1] if series.steps else None,
        "mean": math.fsum(value for value, _ in finite) / len(finite) if finite else None,
        "min": lowest[0],
        "min_step": lowest[1],
        "max": highest[0],
        "max_step": highest[1],
    }


def _marks(marks: Sequence[EventMark], x_scale: Scale) -> Iterator[Html]:
    for error in (False, True):
        at = [x_scale.position(mark.step) for mark in marks if mark.error == error]
        if at:
            lines = "".join(f"M{coordinates((x, 1.0))}v{GRAIN}" for x in at)
            yield element("path", kind="mark error" if error else "mark", d=lines)


def _line(
    line: Curve, points: Sequence[DownsampledPoint], x_scale: Scale, y_scale: Scale
) -> Iterator[Html]:
    def path(kind: str, d: str) -> Iterator[Html]:
        if d:
            style = f"--colour:var(--{line.css_colour})"
            yield element("path", kind=kind, style=style, data_run=line.run, d=d)

    def place(point: DownsampledPoint, value: float) -> tuple[int, int]:
        x, y = coordinates((x_scale.position(point.step), y_scale.position(value))).split()
        return int(x), int(y)

    segments = _finite_segments(points)
    if any(point.low < point.high for point in points):
        edges = (
            [*(place(p, p.high) for p in part), *(place(p, p.low) for p in reversed(part))]
            for part in segments
        )
        yield from path("band", "".join(f"{_path(edge)}z" for edge in edges))
    if line.kind != "band":
        means = ([place(p, p.mean) for p in part] for part in segments)
        yield from path(line.kind, "".join(map(_path, means)))
        alone = [part[0] for part in segments if len(part) == 1]
        dots = points if len(points) <= DOTS else alone
        at = (place(p, p.mean) for p in dots if math.isfinite(p.mean))
        yield from path("dots", "".join(f"M{x} {y}h0" for x, y in at))
    broken = (p for p in points if p.not_finite)
    ends = ([round(GRAIN * x_scale.position(step)) for step in (p.first, p.last)] for p in broken)
    if d := "".join(f"M{first} 120H{last}" for first, last in ends):
        yield element("path", kind="broken", d=d)


def _finite_segments(points: Sequence[DownsampledPoint]) -> list[list[DownsampledPoint]]:
    segments: list[list[DownsampledPoint]] = [[]]
    for point in points:
        if math.isfinite(point.mean):
            segments[-1].append(point)
        elif segments[-1]:
            segments.append([])
    return [segment for segment in segments if segment]


def _path(points: Sequence[tuple[int, int]]) -> str:
    (x, y), *rest = points
    parts = [f"M{x} {y}l" if rest else f"M{x} {y}"]
    for to_x, to_y in rest:
        parts.append(f"{to_x - x} {to_y - y} ")
        x, y = to_x, to_y
    return "".join(parts).rstrip()


def _legend(chart: Chart, y_scale: Scale) -> Html:
    lines = chart.lines if len({line.name for line in chart.lines}) > 1 else ()
    items = [legend_key(each.name, each.kind, each.css_colour, data_run=each.run) for each in lines]
    items += [legend_note("logarithmic")] if y_scale.logarithmic and not chart.logarithmic else []
    items += [legend_note(chart.note)] if chart.note else []
    broken = sum(not math.isfinite(value) for line in chart.lines for value in line.series.values)
    items += [legend_key(f"{broken:,} not finite", "broken")] if broken else []
    return legend(items)


def _latest(chart: Chart) -> Html | None:
    lines = [line for line in chart.lines if line.kind != "band"]
    if len({line.run for line in lines}) > 1 or not lines or not lines[0].series.values:
        return None
    values = lines[0].series.values
    peak = chart.microseconds is not None
    text = format_number(max(values) if peak else values[-1], chart.unit)
    return element("span", f"peak {text}" if peak else text, kind="latest")


def _spoken(line: Curve, axis: str) -> str:
    values = statistics_of(line.series)
    if values["min"] is None:
        return f"{line.name}: {values['values']} values, none of them finite."
    last = "not finite" if values["last"] is None else format_number(values["last"])
    first, lowest, highest = (format_number(values[name]) for name in ("first", "min", "max"))
    last_at, low_at, high_at = (
        f"step {at}" if axis == "step" else format_number(at / 1e6, "seconds")
        for at in (values[f"{name}_step"] for name in ("last", "min", "max"))
    )
    return (
        f"{line.name}: {values['values']} values, first {first}, last {last} at {last_at},"
        f" minimum {lowest} at {low_at}, maximum {highest} at {high_at}."
    )


def _data(line: Curve, points: Sequence[DownsampledPoint]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": line.name,
        "colour": line.css_colour,
        "kind": line.kind,
        "steps": [point.last for point in points],
        "mean": [_short(point.mean) for point in points],
    }
    if any(point.count > 1 for point in points):
        data["first"] = [point.first for point in points]
    if line.kind == "band" or "first" in data:
        data["low"] = [_short(point.low) for point in points]
        data["high"] = [_short(point.high) for point in points]
    return data


def _short(value: float) -> float | str:
    """Round to five significant digits. NaN and infinity become text, because JSON has no such
    numbers."""
    return float(f"{value:.5g}") if math.isfinite(value) else format_number(value)
