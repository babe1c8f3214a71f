"""Shows the step times of ranks as heat maps and bars."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import TypeVar

from lockstep.pages.chart import RenderedFigure, Series
from lockstep.pages.heatmap import render_heatmap
from lockstep.pages.markup import Column, Html, bar, element, joined, swatch, table
from lockstep.pages.scale import format_number
from lockstep.report.history import PHASES, RankTimes

CELLS = 12_000
MOST_COLUMNS, MOST_ROWS = 300, 128
BARS = 16
Name = TypeVar("Name", int, str)
_COLOURS = {"data": "line-1", "compute": "line-2", "communication": "line-3", "other": "line"}


@dataclass(frozen=True, slots=True)
class Axes:
    rows: list[tuple[int, int]]
    """The first and last rank, or expert, of each row."""
    columns: list[list[int]]

    @classmethod
    def of(
        cls,
        steps: Sequence[int],
        kinds: Iterable[Sequence[array[float]]],
        last_step: int,
        *,
        most_cells: int = CELLS,
    ) -> Axes:
        size = max((len(row) for rows in kinds for row in rows), default=0)
        per_row = -(-size // MOST_ROWS) or 1
        rows = [(first, min(first + per_row, size) - 1) for first in range(0, size, per_row)]
        gaps = [after - before for before, after in zip([0, *steps], steps, strict=False)]
        interval = max(1, round(median(gaps))) if gaps else 1
        columns = min(MOST_COLUMNS, most_cells // max(1, len(rows)), round(last_step / interval))
        return cls(rows, _rows_by_column(steps, last_step, max(1, columns)))

    def cells(
        self, values: Sequence[array[float]], combine: Callable[[Sequence[float]], float]
    ) -> list[list[float]]:
        by_number = (_by_rank([values[place] for place in places]) for places in self.columns)
        first, last = self.rows[0] if self.rows else (0, 0)
        per_row = last - first + 1
        cells = [_slowest([combine(each) for each in column], per_row) for column in by_number]
        return [[_at(each, row) for each in cells] for row in range(len(self.rows))]


def _rows_by_column(steps: Sequence[int], last_step: int, columns: int) -> list[list[int]]:
    columns_of_rows: list[list[int]] = [[] for _ in range(columns)]
    before = 0
    for index, step in enumerate(steps):
        first = math.ceil(before * columns / last_step - 0.5)
        end = math.ceil(step * columns / last_step - 0.5)
        for column in range(first, end) if end > first else [(step - 1) * columns // last_step]:
            columns_of_rows[min(column, columns - 1)].append(index)
        before = step
    return columns_of_rows


def _by_rank(rows: Sequence[array[float]]) -> list[list[float]]:
    return [
        [value for value in each if value == value]
        for each in zip_longest(*rows, fillvalue=math.nan)
    ]


def mean_of(values: Sequence[float]) -> float:
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


def rank_heatmaps(times: RankTimes, *, index: int, last_step: int, title: str) -> RenderedFigure:
    axes = Axes.of(times.steps, times.phases.values(), last_step)
    phases = {phase: rows for phase in PHASES if any(rows := times.phases[phase])}
    means = {phase: axes.cells(rows, mean_of) for phase, rows in phases.items()}
    names = [
        _name(first, times) if first == last else f"{first}–{last}" for first, last in axes.rows
    ]
    data = {
        "last": last_step,
        "columns": len(axes.columns),
        "ranks": [
            f"rank {name}" if first == last else f"ranks {name}, the slowest"
            for (first, last), name in zip(axes.rows, names, strict=True)
        ],
        "mean": {phase: list(map(rounded, rows)) for phase, rows in means.items()},
        "most": list(map(rounded, axes.cells(times.phases["step"], _longest))),
        "unit": "seconds",
    }
    pictures = []
    for phase, cells in means.items():
        what = "step time by rank" + ("" if phase == "step" else f": {phase}")
        pictures.append(
            render_heatmap(
                what,
                cells,
                [name.partition(" ")[0] for name in names],
                index=index,
                last_step=last_step,
                spoken=f"{title}: {what} and step. {_extremes(cells, axes)}",
            )
        )
    return RenderedFigure(joined(pictures), data)


def mean_times(times: RankTimes) -> list[dict[str, float]]:
    means: list[dict[str, float]] = []
    for phase in PHASES:
        for rank, values in enumerate(_by_rank(times.phases[phase])):
            means += [{} for _ in range(rank + 1 - len(means))]
            if values:
                means[rank][phase] = mean_of(values)
    return means


def mean_over_ranks(times: RankTimes, phase: str) -> Series:
    series = Series()
    for step, row in zip(times.steps, times.phases[phase], strict=True):
        values = [value for value in row if value == value]
        if values:
            series.add(step, mean_of(values))
    return series


def rank_bars(times: RankTimes) -> Html | None:
    everyone = [(rank, each) for rank, each in enumerate(mean_times(times)) if "step" in each]
    if not everyone:
        return None
    longest = max(max(each["step"], sum(each.values()) - each["step"]) for _, each in everyone)

    def work(pair: tuple[int, dict[str, float]]) -> float:
        return pair[1].get("data", 0.0) + pair[1].get("compute", 0.0)

    shown = sorted(sorted(everyone, key=work, reverse=True)[:BARS], key=lambda pair: pair[0])
    rows = []
    for rank, each in shown:
        phases = {phase: each[phase] for phase in PHASES[1:] if phase in each}
        phases["other"] = max(0.0, each["step"] - sum(phases.values()))
        parts = [(_COLOURS[phase], value, "") for phase, value in phases.items()]
        texts = [
            format_number(phases[name], "seconds") if name in phases else "–" for name in _COLOURS
        ]
        step = element("strong", format_number(each["step"], "seconds"))
        rows.append([_name(rank, times), bar(parts, longest or 1.0), step, *texts])
    heads = [Column([swatch(colour), phase]) for phase, colour in _COLOURS.items()]
    more = ""
    if len(shown) < len(everyone):
        more = f", {len(shown)} of {len(everyone)}: those whose data and compute take longest"
    return table(
        ["rank", "", Column("step"), *heads],
        rows,
        caption=f"Mean step time by rank{more}",
        kind="bars",
        row_heads=True,
    )


def _name(rank: int, times: RankTimes) -> str:
    several = rank < len(times.hosts) and len(set(times.hosts)) > 1
    return f"{rank} · {times.hosts[rank]}" if several else str(rank)


def _extremes(rows: Sequence[Sequence[float]], axes: Axes) -> str:
    found = extremes(rows, [first for first, _ in axes.rows])
    if found is None:
        return "Nothing was measured."
    (highest, slowest), (lowest, fastest) = found
    high, low = format_number(highest, "seconds"), format_number(lowest, "seconds")
    return f"Slowest is rank {slowest}, mean {high}; fastest is rank {fastest}, mean {low}."


def extremes(
    rows: Sequence[Sequence[float]], names: Sequence[Name]
) -> tuple[tuple[float, Name], tuple[float, Name]] | None:
    finite = ([value for value in row if math.isfinite(value)] for row in rows)
    means = [(mean_of(row), name) for row, name in zip(finite, names, strict=True) if row]
    return (max(means), min(means)) if means else None


def rounded(row: Sequence[float]) -> list[float | None]:
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in row]
