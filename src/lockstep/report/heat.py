"""Who took how long: step time by rank and step, as a picture of small cells, and each rank's mean by part. Pure."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import zip_longest
from statistics import median

from lockstep.report.chart import Drawn, labels
from lockstep.report.history import PARTS, RankTimes, Series
from lockstep.report.scale import number, step_scale

CELLS = 12_000
"""Of one picture, at most."""
MOST_COLUMNS, MOST_ROWS = 300, 128
BARS = 16
"""Ranks whose mean times are shown as bars, at most."""
SHADES = 63
_NARROWEST = 0.2
"""Least width of a colour scale, as a share of its middle: below it, differences are noise, and are to look calm."""
RAMP = ("#f3f6d9", "#d5ecb9", "#9fd8b5", "#5fc0c0", "#329bc2", "#2470b1", "#22489b", "#182a6b")
"""From little to much on a light ground; the other way round on a dark one."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells by row (a rank, or neighbouring ranks, of which the slowest counts) and column (steps, of which the mean counts)."""

    ranks: list[tuple[int, int]]
    """First and last rank of each row."""
    last_step: int
    columns: int
    mean: dict[str, list[list[float]]]
    """By part: rows of seconds, NaN where nothing was measured. A part that never was is not there."""
    most: list[list[float]]
    """Of the step as a whole: the longest that was written down."""

    def steps(self, column: int) -> tuple[int, int]:
        """First and last step of a column."""
        first = column * self.last_step // self.columns + 1
        return first, max(first, (column + 1) * self.last_step // self.columns)


@dataclass(slots=True)
class _Cells:
    """What falls into one column."""

    means: dict[str, list[float]] = field(default_factory=dict)
    most: list[float] = field(default_factory=list)


def grid(times: RankTimes, last_step: int) -> Grid:
    """The times on the axis of steps from 0 to `last_step`, in `CELLS` cells at most."""
    world = max((len(row) for rows in times.parts.values() for row in rows), default=0)
    together = -(-world // MOST_ROWS) or 1
    ranks = [(first, min(first + together, world) - 1) for first in range(0, world, together)]
    gaps = [after - before for before, after in zip([0, *times.steps], times.steps, strict=False)]
    usual = max(1, round(median(gaps))) if gaps else 1
    columns = max(1, min(MOST_COLUMNS, CELLS // max(1, len(ranks)), round(last_step / usual)))
    lines = _dealt(times.steps, last_step, columns)
    parts = [part for part in PARTS if any(times.parts[part])]
    cells = [_cells(times, parts, mine, together) for mine in lines]
    mean = {part: [[_at(each.means.get(part, []), row) for each in cells] for row in range(len(ranks))] for part in parts}
    return Grid(ranks, last_step, columns, mean, [[_at(each.most, row) for each in cells] for row in range(len(ranks))])


def _dealt(steps: Sequence[int], last_step: int, columns: int) -> list[list[int]]:
    """For each column the lines (places in `steps`) that it shows: a line tells of the steps since the one before it."""
    found: list[list[int]] = [[] for _ in range(columns)]
    before = 0
    for place, step in enumerate(steps):
        first = math.ceil(before * columns / last_step - 0.5)
        end = math.ceil(step * columns / last_step - 0.5)
        for column in range(first, end) if end > first else [min(columns - 1, (step - 1) * columns // last_step)]:
            found[min(column, columns - 1)].append(place)
        before = step
    return found


def _cells(times: RankTimes, parts: Sequence[str], lines: Sequence[int], together: int) -> _Cells:
    found = _Cells()
    if lines:
        for part in parts:
            found.means[part] = _slowest([_mean(each) for each in _by_rank([times.parts[part][line] for line in lines])], together)
        found.most = _slowest([max(each, default=math.nan) for each in _by_rank([times.parts["step"][line] for line in lines])], together)
    return found


def _by_rank(rows: Sequence[array[float]]) -> list[list[float]]:
    return [[value for value in each if value == value] for each in zip_longest(*rows, fillvalue=math.nan)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _slowest(values: Sequence[float], together: int) -> list[float]:
    if together == 1:
        return list(values)
    groups = (values[first : first + together] for first in range(0, len(values), together))
    return [max((value for value in group if value == value), default=math.nan) for group in groups]


def _at(values: Sequence[float], place: int) -> float:
    return values[place] if place < len(values) else math.nan


def limits(rows: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Of the colours: from the 1st to the 99th of 100 cells, but never so narrow that noise looks like a difference."""
    values = sorted(value for row in rows for value in row if math.isfinite(value))
    if not values:
        return 0.0, 1.0
    low, middle, high = values[len(values) // 100], values[len(values) // 2], values[-1 - len(values) // 100]
    room = max(0.0, _NARROWEST * middle - (high - low)) / 2
    return max(0.0, low - room), max(high + room, low + 1e-9)


def _beyond(rows: Sequence[Sequence[float]], *, below: float = -math.inf, above: float = math.inf) -> bool:
    return any(value < below or value > above for row in rows for value in row)


def shade(value: float, low: float, high: float) -> int:
    """Between 1 and `SHADES`; 0 where there is no value."""
    if not math.isfinite(value):
        return 0
    return 1 + round((SHADES - 1) * min(1.0, max(0.0, (value - low) / (high - low))))


def palette(*, dark: bool) -> bytes:
    """Red, green and blue of each shade, after one for no value."""
    stops = [tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5)) for colour in (reversed(RAMP) if dark else RAMP)]
    found = bytearray(3)
    for each in range(SHADES):
        whole, part = divmod(each * (len(stops) - 1) / (SHADES - 1), 1)
        here, there = stops[int(whole)], stops[min(int(whole) + 1, len(stops) - 1)]
        found += bytes(round(a + (b - a) * part) for a, b in zip(here, there, strict=True))
    return bytes(found)


def png(rows: Sequence[Sequence[int]], colours: bytes) -> bytes:
    """A PNG file of places in a palette, of which 0 is transparent."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 9)
    parts = (chunk(b"IHDR", header), chunk(b"PLTE", colours), chunk(b"tRNS", b"\0"), chunk(b"IDAT", pixels), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def draw(times: RankTimes, *, place: int, last_step: int, title: str) -> Drawn:
    """The pictures of a run, one a part, each with the scale of its colours. `place`: among those of the page."""
    cells = grid(times, last_step)
    data = {
        "last": last_step,
        "columns": cells.columns,
        "ranks": [f"rank {name}" if first == last else f"ranks {name}, the slowest" for (first, last), name in _all_named(cells, times)],
        "mean": {part: [[_short(value) for value in row] for row in rows] for part, rows in cells.mean.items()},
        "most": [[_short(value) for value in row] for row in cells.most],
    }
    return Drawn("".join(_picture(part, cells, times, place, title) for part in cells.mean), data)


def _picture(part: str, cells: Grid, times: RankTimes, place: int, title: str) -> str:
    rows = cells.mean[part]
    low, high = limits(rows)
    shades = [[shade(value, low, high) for value in row] for row in rows]
    light, dark = (base64.b64encode(png(shades, palette(dark=each))).decode() for each in (False, True))
    picture = f'<picture><source srcset="data:image/png;base64,{dark}" media="(prefers-color-scheme: dark)">'
    picture += f'<img src="data:image/png;base64,{light}" alt=""></picture>'
    least, most = ("≤ " if _beyond(rows, below=low) else ""), ("≥ " if _beyond(rows, above=high) else "")
    ends = f"{least}{number(low, 'seconds')}</span><b></b><span>{most}{number(high, 'seconds')}"
    ramp = f'<span class="ramp"><span>{ends}</span></span>'
    named = "time of a step, by rank" if part == "step" else f"of that: {part}"
    names = ""
    for row, name in _named(cells, times):
        names += f'<i class="y" style="top:{100 * (row + 0.5) / len(rows):.2f}%">{name}</i>'
    spoken = escape(f"{title}: {named}, and step. {_spoken(cells, rows)}", quote=True)
    height = min(260, max(44, 13 * len(rows)))
    plot = f'<div class="plot heat" data-heat="{place}" role="img" aria-label="{spoken}" style="height:{height}px">'
    plot += f"{picture}{labels(step_scale(cells.last_step), 'step', None)}{names}</div>"
    return f'<figure class="chart"><figcaption><span class="title">{named}</span>{ramp}</figcaption>{plot}</figure>'


def means(times: RankTimes) -> list[dict[str, float]]:
    """Of each rank, mean seconds of a step by part, over all of its lines."""
    found: list[dict[str, float]] = []
    for part in PARTS:
        for rank, values in enumerate(_by_rank(times.parts[part])):
            found += [{} for _ in range(rank + 1 - len(found))]
            if values:
                found[rank][part] = _mean(values)
    return found


def over_steps(times: RankTimes, part: str) -> Series:
    """The mean over the ranks at each logging step."""
    found = Series()
    for step, row in zip(times.steps, times.parts[part], strict=True):
        values = [value for value in row if value == value]
        if values:
            found.add(step, _mean(values))
    return found


def bars(times: RankTimes) -> str:
    """Each rank's mean step, by part; where there are too many ranks, those whose own work (data and computing) takes longest."""
    everyone = [(rank, each) for rank, each in enumerate(means(times)) if "step" in each]
    shown = sorted(everyone, key=lambda pair: -(pair[1].get("data", 0.0) + pair[1].get("compute", 0.0)))[:BARS]
    if not everyone:
        return ""
    longest = max(max(each["step"], sum(each.values()) - each["step"]) for _, each in everyone) or 1.0
    rows = "".join(_bar(_name(rank, times), each, longest) for rank, each in sorted(shown, key=lambda pair: pair[0]))
    parts = "".join(f'<th class="number" scope="col"><b class="swatch {part}"></b>{part}</th>' for part in (*PARTS[1:], "other"))
    head = f'<tr><th scope="col">rank</th><th></th><th class="number" scope="col">step</th>{parts}</tr>'
    more = f", {len(shown)} of {len(everyone)}: those whose data and compute take longest" if len(shown) < len(everyone) else ""
    caption = f"<caption>Mean time of a step, by rank{more}</caption>"
    return f'<div class="wide card"><table class="bars">{caption}<thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _bar(name: str, each: dict[str, float], longest: float) -> str:
    parts = {part: each[part] for part in PARTS[1:] if part in each}
    parts["other"] = max(0.0, each["step"] - sum(parts.values()))
    pieces = "".join(f'<b class="{part}" style="width:{100 * value / longest:.2f}%"></b>' for part, value in parts.items())
    said = [number(parts[part], "seconds") if part in parts else "–" for part in (*PARTS[1:], "other")]
    cells = "".join(f'<td class="number">{text}</td>' for text in (f"<strong>{number(each['step'], 'seconds')}</strong>", *said))
    return f'<tr><th scope="row">{escape(name)}</th><td class="bar"><div>{pieces}</div></td>{cells}</tr>'


def _name(rank: int, times: RankTimes) -> str:
    return f"{rank} · {times.hosts[rank]}" if rank < len(times.hosts) and len(set(times.hosts)) > 1 else str(rank)


def _all_named(cells: Grid, times: RankTimes) -> list[tuple[tuple[int, int], str]]:
    return [((first, last), _name(first, times) if first == last else f"{first}–{last}") for first, last in cells.ranks]


def _named(cells: Grid, times: RankTimes) -> list[tuple[int, str]]:
    """Rows whose names are written beside the picture: as many as have room."""
    every = -(-len(cells.ranks) // 16)
    return [(row, name.partition(" ")[0]) for row, (_, name) in enumerate(_all_named(cells, times)) if row % every == 0]


def _spoken(cells: Grid, rows: Sequence[Sequence[float]]) -> str:
    ranked = [(_mean([value for value in row if math.isfinite(value)]), first) for row, (first, _) in zip(rows, cells.ranks, strict=True)]
    ranked = [pair for pair in ranked if math.isfinite(pair[0])]
    if not ranked:
        return "Nothing was measured."
    (most, slowest), (least, fastest) = max(ranked), min(ranked)
    return f"Slowest is rank {slowest}, mean {number(most, 'seconds')}; fastest is rank {fastest}, mean {number(least, 'seconds')}."


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
