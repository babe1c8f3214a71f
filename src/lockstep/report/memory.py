"""Charts and tables of the memory in the profiled steps, by rank and by cause. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from lockstep.pages.chart import Chart, Curve, Series
from lockstep.pages.markup import Column, Html, element, joined, table
from lockstep.pages.scale import format_number
from lockstep.report.history import MemoryProfile, RankMemory, RunHistory
from lockstep.report.tables import run_key

MOST_CHARTS = 8
"""Number of ranks with a chart: those with the highest peaks. All ranks are in the table."""


def memory_charts(runs: Sequence[RunHistory]) -> list[Chart]:
    """Return a chart for each rank: the memory of each cause, and of all."""
    found = []
    for run in runs:
        if run.memory is None:
            continue
        last = max((rank.microseconds[-1] for rank in run.memory.ranks), default=0) or 1
        for rank in _shown(run.memory):
            sizes = list(rank.bytes_by_cause.values())
            total = [sum(column) for column in zip(*sizes, strict=True)]
            lines = [_curve("all", 0, rank, total)]
            lines += [
                _curve(cause, colour, rank, each)
                for colour, (cause, each) in enumerate(rank.bytes_by_cause.items(), 1)
            ]
            title = (
                f"{run.name}: memory of rank {rank.rank}"
                if len(runs) > 1
                else f"memory of rank {rank.rank}"
            )
            found.append(
                Chart(title=title, lines=lines, unit="bytes", from_zero=True, microseconds=last)
            )
    return found


def _shown(profile: MemoryProfile) -> list[RankMemory]:
    highest = sorted(profile.ranks, key=lambda rank: -rank.peak_bytes)[:MOST_CHARTS]
    return sorted(highest, key=lambda rank: rank.rank)


def _curve(name: str, colour: int, rank: RankMemory, values: Sequence[int]) -> Curve:
    return Curve(name, colour, Series(array("q", rank.microseconds), array("d", values)))


def memory_tables(runs: Sequence[RunHistory]) -> Html:
    """Return each run's memory at the peak by rank, and the largest allocations of the rank with
    the highest."""
    return joined(
        [
            element("h3", run_key(run, index)) if len(runs) > 1 else None,
            _peaks(run.memory),
            _largest(run.memory),
        ]
        for index, run in enumerate(runs)
        if run.memory is not None and run.memory.ranks
    )


def _peaks(profile: MemoryProfile) -> Html:
    causes = list(profile.ranks[0].bytes_by_cause)
    rows = []
    for rank in profile.ranks:
        sizes = [rank.peak_bytes, *(rank.at_peak.get(cause, 0) for cause in causes)]
        when = f"{format_number(rank.peak_seconds, 'seconds')}, {rank.peak_phase}"
        rows.append([str(rank.rank), *(format_number(size, "bytes") for size in sizes), when])
    first, stop = profile.steps
    return table(
        ["rank", *map(Column, ("all", *causes)), "when"],
        rows,
        caption=f"Memory at the peak of steps {first} to {stop - 1}",
        row_heads=True,
    )


def _largest(profile: MemoryProfile) -> Html:
    highest = max(profile.ranks, key=lambda rank: rank.peak_bytes)
    return table(
        [Column("size"), "cause", "tensor, module or operator"],
        [[format_number(size, "bytes"), cause, name] for size, cause, name in highest.largest],
        caption=f"The largest at the peak of rank {highest.rank}",
    )
