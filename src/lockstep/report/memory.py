"""Charts and tables of the memory in the profiled steps, by rank and by cause. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from lockstep.base.foreign_text import escape
from lockstep.report.chart import Chart, Curve
from lockstep.report.history import MemoryProfile, RankMemory, RunHistory, Series
from lockstep.report.scale import format_number
from lockstep.report.tables import key

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


def memory_tables(runs: Sequence[RunHistory]) -> str:
    """Return each run's memory at the peak by rank, and the largest allocations of the rank with
    the highest."""
    found = []
    for index, run in enumerate(runs):
        if run.memory is not None and run.memory.ranks:
            name = f"<h3>{key(run, index)}</h3>" if len(runs) > 1 else ""
            found.append(f"{name}{_peaks(run.memory)}{_largest(run.memory)}")
    return "".join(found)


def _peaks(profile: MemoryProfile) -> str:
    causes = list(profile.ranks[0].bytes_by_cause)
    heads = "".join(
        f'<th class="number" scope="col">{escape(name)}</th>' for name in ("all", *causes)
    )
    rows = []
    for rank in profile.ranks:
        sizes = [rank.peak_bytes, *(rank.at_peak.get(cause, 0) for cause in causes)]
        cells = "".join(f'<td class="number">{format_number(size, "bytes")}</td>' for size in sizes)
        when = f"{format_number(rank.peak_seconds, 'seconds')}, {rank.peak_phase}"
        rows.append(f'<tr><th scope="row">{rank.rank}</th>{cells}<td>{escape(when)}</td></tr>')
    first, stop = profile.steps
    caption = f"Memory at the peak of steps {first} to {stop - 1}"
    head = f'<tr><th scope="col">rank</th>{heads}<th scope="col">when</th></tr>'
    return _card(caption, head, rows)


def _largest(profile: MemoryProfile) -> str:
    highest = max(profile.ranks, key=lambda rank: rank.peak_bytes)
    rows = [
        "<tr><td"
        f' class="number">{format_number(size, "bytes")}</td><td>{escape(cause)}</td><td>{escape(name)}</td></tr>'
        for size, cause, name in highest.largest
    ]
    head = (
        '<tr><th class="number" scope="col">size</th><th scope="col">cause</th><th'
        ' scope="col">tensor, module or operator</th></tr>'
    )
    return _card(f"The largest at the peak of rank {highest.rank}", head, rows)


def _card(caption: str, head: str, rows: Sequence[str]) -> str:
    body = f"<caption>{caption}</caption><thead>{head}</thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="wide card"><table>{body}</table></div>'
