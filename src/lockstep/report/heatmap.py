"""Heatmaps of step time by rank and step, and a bar chart of each rank's mean step time by phase.
Pure."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median

from lockstep.base.foreign_text import escape
from lockstep.report.chart import RenderedFigure, axis_labels
from lockstep.report.history import PHASES, RankTimes, Series
from lockstep.report.scale import format_number, step_scale

CELLS = 12_000
MOST_COLUMNS, MOST_ROWS = 300, 128
BARS = 16
"""Largest number of ranks in the bar chart."""
SHADES = 63
_NARROWEST = 0.2
"""Minimum width of a colour scale, as a share of its median. Smaller differences are noise, and
must not stand out."""
RAMP = ("#f3f6d9", "#d5ecb9", "#9fd8b5", "#5fc0c0", "#329bc2", "#2470b1", "#22489b", "#182a6b")
"""Colours from low to high on a light background. They are reversed on a dark one."""


@dataclass(frozen=True, slots=True)
class HeatmapGrid:
    """Step times. A row is a rank, or the slowest of several neighbours; a column is a mean over
    steps."""

    ranks: list[tuple[int, int]]
    last_step: int
    columns: int
    mean: dict[str, list[list[float]]]
    """Rows of seconds by phase, NaN if not measured. A phase that was never measured is missing."""
    most: list[list[float]]
    """Longest recorded time of the whole step, for each cell."""

    def steps(self, column: int) -> tuple[int, int]:
        """Return the first and last step of a column."""
        first = column * self.last_step // self.columns + 1
        return first, max(first, (column + 1) * self.last_step // self.columns)


def make_grid(times: RankTimes, last_step: int) -> HeatmapGrid:
    """Arrange the times on an axis from step 0 to `last_step`, in `CELLS` cells at most."""
    world = max((len(row) for rows in times.phases.values() for row in rows), default=0)
    ranks_per_row = -(-world // MOST_ROWS) or 1
    ranks = [
        (first, min(first + ranks_per_row, world) - 1) for first in range(0, world, ranks_per_row)
    ]
    gaps = [after - before for before, after in zip([0, *times.steps], times.steps, strict=False)]
    interval = max(1, round(median(gaps))) if gaps else 1
    columns = max(1, min(MOST_COLUMNS, CELLS // max(1, len(ranks)), round(last_step / interval)))
    rows_by_column = _rows_by_column(times.steps, last_step, columns)
    phases = [phase for phase in PHASES if any(times.phases[phase])]

    def grid(phase: str, combine: Callable[[Sequence[float]], float]) -> list[list[float]]:
        by_rank = (_by_rank([times.phases[phase][row] for row in rows]) for rows in rows_by_column)
        cells = [_slowest([combine(values) for values in each], ranks_per_row) for each in by_rank]
        return [[_at(each, row) for each in cells] for row in range(len(ranks))]

    return HeatmapGrid(
        ranks,
        last_step,
        columns,
        {phase: grid(phase, _mean) for phase in phases},
        grid("step", _longest),
    )


def _rows_by_column(steps: Sequence[int], last_step: int, columns: int) -> list[list[int]]:
    """Return for each column its rows' indices in `steps`. A row covers the steps since the row
    before it."""
    found: list[list[int]] = [[] for _ in range(columns)]
    before = 0
    for index, step in enumerate(steps):
        first = math.ceil(before * columns / last_step - 0.5)
        end = math.ceil(step * columns / last_step - 0.5)
        for column in (
            range(first, end)
            if end > first
            else [min(columns - 1, (step - 1) * columns // last_step)]
        ):
            found[min(column, columns - 1)].append(index)
        before = step
    return found


def _by_rank(rows: Sequence[array[float]]) -> list[list[float]]:
    return [
        [value for value in each if value == value]
        for each in zip_longest(*rows, fillvalue=math.nan)
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _longest(values: Sequence[float]) -> float:
    return max(values, default=math.nan)


def _slowest(values: Sequence[float], ranks_per_row: int) -> list[float]:
    if ranks_per_row == 1:
        return list(values)
    groups = (
        values[first : first + ranks_per_row] for first in range(0, len(values), ranks_per_row)
    )
    return [max((value for value in group if value == value), default=math.nan) for group in groups]


def _at(values: Sequence[float], index: int) -> float:
    return values[index] if index < len(values) else math.nan


def color_limits(rows: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the range of the colour scale: the 1st to the 99th percentile of the cells, widened to
    `_NARROWEST`."""
    values = sorted(value for row in rows for value in row if math.isfinite(value))
    if not values:
        return 0.0, 1.0
    low, middle, high = (
        values[len(values) // 100],
        values[len(values) // 2],
        values[-1 - len(values) // 100],
    )
    room = max(0.0, _NARROWEST * middle - (high - low)) / 2
    return max(0.0, low - room), max(high + room, low + 1e-9)


def _has_beyond(
    rows: Sequence[Sequence[float]], *, below: float = -math.inf, above: float = math.inf
) -> bool:
    return any(value < below or value > above for row in rows for value in row)


def shade(value: float, low: float, high: float) -> int:
    """Return the index of a value's colour, from 1 to `SHADES`; 0 if there is no value."""
    if not math.isfinite(value):
        return 0
    return 1 + round((SHADES - 1) * min(1.0, max(0.0, (value - low) / (high - low))))


def palette(*, dark: bool) -> bytes:
    """Return red, green and blue of each colour. The first colour, of index 0, stands for no
    value."""
    stops = [
        tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))
        for colour in (reversed(RAMP) if dark else RAMP)
    ]
    found = bytearray(3)
    for each in range(SHADES):
        whole, fraction = divmod(each * (len(stops) - 1) / (SHADES - 1), 1)
        here, there = stops[int(whole)], stops[min(int(whole) + 1, len(stops) - 1)]
        found += bytes(round(a + (b - a) * fraction) for a, b in zip(here, there, strict=True))
    return bytes(found)


def png(rows: Sequence[Sequence[int]], colours: bytes) -> bytes:
    """Return a PNG file with a palette. `rows`: palette indices; 0 is transparent."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 9)
    chunks = (
        chunk(b"IHDR", header),
        chunk(b"PLTE", colours),
        chunk(b"tRNS", b"\0"),
        chunk(b"IDAT", pixels),
        chunk(b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def render(times: RankTimes, *, index: int, last_step: int, title: str) -> RenderedFigure:
    """Render a run's heatmaps, one for each phase, with their colour scales. `index`: their index
    on the page."""
    cells = make_grid(times, last_step)
    data = {
        "last": last_step,
        "columns": cells.columns,
        "ranks": [
            f"rank {name}" if first == last else f"ranks {name}, the slowest"
            for (first, last), name in _row_names(cells, times)
        ],
        "mean": {
            phase: [[_short(value) for value in row] for row in rows]
            for phase, rows in cells.mean.items()
        },
        "most": [[_short(value) for value in row] for row in cells.most],
    }
    return RenderedFigure(
        "".join(_picture(phase, cells, times, index, title) for phase in cells.mean), data
    )


def _picture(phase: str, cells: HeatmapGrid, times: RankTimes, index: int, title: str) -> str:
    rows = cells.mean[phase]
    low, high = color_limits(rows)
    shades = [[shade(value, low, high) for value in row] for row in rows]
    light, dark = (
        base64.b64encode(png(shades, palette(dark=each))).decode() for each in (False, True)
    )
    picture = (
        f'<picture><source srcset="data:image/png;base64,{dark}" media="(prefers-color-scheme:'
        ' dark)">'
    )
    picture += f'<img src="data:image/png;base64,{light}" alt=""></picture>'
    below, above = (
        ("≤ " if _has_beyond(rows, below=low) else ""),
        ("≥ " if _has_beyond(rows, above=high) else ""),
    )
    ends = f"{below}{format_number(low, 'seconds')}</span><b></b><span>{above}{format_number(high, 'seconds')}"
    ramp = f'<span class="ramp"><span>{ends}</span></span>'
    named = "step time by rank" if phase == "step" else f"step time by rank: {phase}"
    names = ""
    for row, name in _visible_row_names(cells, times):
        names += f'<i class="y" style="top:{100 * (row + 0.5) / len(rows):.2f}%">{name}</i>'
    aria_text = escape(f"{title}: {named} and step. {_aria_text(cells, rows)}")
    height = min(260, max(44, 13 * len(rows)))
    plot = (
        f'<div class="plot heatmap" data-heatmap="{index}" role="img" aria-label="{aria_text}"'
        f' style="height:{height}px">'
    )
    plot += f"{picture}{axis_labels(step_scale(cells.last_step), 'step', None)}{names}</div>"
    return (
        '<figure class="chart"><figcaption><span'
        f' class="title">{named}</span>{ramp}</figcaption>{plot}</figure>'
    )


def mean_times(times: RankTimes) -> list[dict[str, float]]:
    """Return each rank's mean seconds per step by phase, over all rows."""
    found: list[dict[str, float]] = []
    for phase in PHASES:
        for rank, values in enumerate(_by_rank(times.phases[phase])):
            found += [{} for _ in range(rank + 1 - len(found))]
            if values:
                found[rank][phase] = _mean(values)
    return found


def mean_over_ranks(times: RankTimes, phase: str) -> Series:
    """Return the mean over the ranks at each logging step."""
    found = Series()
    for step, row in zip(times.steps, times.phases[phase], strict=True):
        values = [value for value in row if value == value]
        if values:
            found.add(step, _mean(values))
    return found


def rank_bars(times: RankTimes) -> str:
    """Return step times by rank and phase; of more than `BARS` ranks, those with the longest data
    and compute."""
    everyone = [(rank, each) for rank, each in enumerate(mean_times(times)) if "step" in each]
    shown = sorted(
        everyone, key=lambda pair: -(pair[1].get("data", 0.0) + pair[1].get("compute", 0.0))
    )[:BARS]
    if not everyone:
        return ""
    longest = (
        max(max(each["step"], sum(each.values()) - each["step"]) for _, each in everyone) or 1.0
    )
    rows = "".join(
        _bar(_name(rank, times), each, longest)
        for rank, each in sorted(shown, key=lambda pair: pair[0])
    )
    heads = "".join(
        f'<th class="number" scope="col"><b class="swatch {phase}"></b>{phase}</th>'
        for phase in (*PHASES[1:], "other")
    )
    head = (
        '<tr><th scope="col">rank</th><th></th><th class="number"'
        f' scope="col">step</th>{heads}</tr>'
    )
    more = (
        f", {len(shown)} of {len(everyone)}: those whose data and compute take longest"
        if len(shown) < len(everyone)
        else ""
    )
    caption = f"<caption>Mean step time by rank{more}</caption>"
    return (
        '<div class="wide card"><table'
        f' class="bars">{caption}<thead>{head}</thead><tbody>{rows}</tbody></table></div>'
    )


def _bar(name: str, each: dict[str, float], longest: float) -> str:
    phases = {phase: each[phase] for phase in PHASES[1:] if phase in each}
    phases["other"] = max(0.0, each["step"] - sum(phases.values()))
    pieces = "".join(
        f'<b class="{phase}" style="width:{100 * value / longest:.2f}%"></b>'
        for phase, value in phases.items()
    )
    texts = [
        format_number(phases[phase], "seconds") if phase in phases else "–"
        for phase in (*PHASES[1:], "other")
    ]
    cells = "".join(
        f'<td class="number">{text}</td>'
        for text in (f"<strong>{format_number(each['step'], 'seconds')}</strong>", *texts)
    )
    return (
        f'<tr><th scope="row">{escape(name)}</th><td'
        f' class="bar"><div>{pieces}</div></td>{cells}</tr>'
    )


def _name(rank: int, times: RankTimes) -> str:
    return (
        f"{rank} · {times.hosts[rank]}"
        if rank < len(times.hosts) and len(set(times.hosts)) > 1
        else str(rank)
    )


def _row_names(cells: HeatmapGrid, times: RankTimes) -> list[tuple[tuple[int, int], str]]:
    return [
        ((first, last), _name(first, times) if first == last else f"{first}–{last}")
        for first, last in cells.ranks
    ]


def _visible_row_names(cells: HeatmapGrid, times: RankTimes) -> list[tuple[int, str]]:
    """Return the rows whose names fit beside the heatmap."""
    every = -(-len(cells.ranks) // 16)
    return [
        (row, name.partition(" ")[0])
        for row, (_, name) in enumerate(_row_names(cells, times))
        if row % every == 0
    ]


def _aria_text(cells: HeatmapGrid, rows: Sequence[Sequence[float]]) -> str:
    ranked = [
        (_mean([value for value in row if math.isfinite(value)]), first)
        for row, (first, _) in zip(rows, cells.ranks, strict=True)
    ]
    ranked = [pair for pair in ranked if math.isfinite(pair[0])]
    if not ranked:
        return "Nothing was measured."
    (highest, slowest), (lowest, fastest) = max(ranked), min(ranked)
    high, low = format_number(highest, "seconds"), format_number(lowest, "seconds")
    return f"Slowest is rank {slowest}, mean {high}; fastest is rank {fastest}, mean {low}."


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
