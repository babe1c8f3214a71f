"""Makes the page of a run, or of several runs side by side."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from lockstep.pages.chart import Chart, Curve, EventMark, RenderedFigure, Series, render_charts
from lockstep.pages.document import document, generator_tag
from lockstep.pages.markup import (
    Column,
    Html,
    element,
    joined,
    paragraph,
    remark,
    section,
    table,
    tiles,
)
from lockstep.pages.scale import format_number
from lockstep.report import tables
from lockstep.report.events import curve_marks, event_table, event_timeline
from lockstep.report.experts import expert_heatmaps
from lockstep.report.history import MOST_SERIES, PHASES, MemoryProfile, RankMemory, RunHistory
from lockstep.report.losses import loss_list, loss_summary
from lockstep.report.ranks import mean_over_ranks, rank_bars, rank_heatmaps
from lockstep.report.repetitions import group_table, repeated_runs

GENERATOR = generator_tag("lockstep report")
"""A meta tag that identifies a page as a report."""
MEMORY_CHARTS = 8
MOST_COLUMNS, LEAST_COLUMNS = 600, 60
POINTS = 60_000

_SPEED = {
    "samples_per_second": "samples/s",
    "weight_per_second": "weight/s",
    "mfu": "MFU",
    "memory_bytes": "memory, peak so far",
}
_TITLES = {"loss": "loss", "lr": "learning rate", "gradient_norm": "gradient norm", **_SPEED}
_FIRST = ("loss", "lr", "gradient_norm")
_EVALUATION = "evaluation/"
_ABOUT_RANKS = (
    "A cell is the mean of its steps; each heatmap has its own colour scale. A straggler, a"
    " rank whose data or compute takes longer, makes the others wait: their communication takes"
    " longer, and the step is as long for all."
)
_ABOUT_LOADS = (
    "A load is the number of tokens that chose an expert, divided by the mean of its layer: 1"
    " is balanced, 0 is an expert that nothing trains. A cell is the mean of its logging steps;"
    " each heatmap has its own colour scale."
)


def report_page(runs: Sequence[RunHistory], *, made: float) -> str:
    title = "lockstep report: " + ", ".join(run.name for run in runs)
    curves = [run.curves.last_step for run in runs]
    logged = [steps for run in runs for steps in (run.ranks.steps, run.loads.steps)]
    last_step = max([1, *curves, *(step for steps in logged for step in steps[-1:])])
    learning, speed = run_charts(runs)
    shown = [*learning, *speed, *memory_charts(runs)]
    lines = sum(len(each.lines) for each in shown)
    columns = max(LEAST_COLUMNS, min(MOST_COLUMNS, POINTS // max(1, lines)))
    figures = render_charts(shown, last_step=last_step, columns=columns)
    timed = [(run, index) for index, run in enumerate(runs) if run.ranks.steps]
    heatmaps = [
        rank_heatmaps(run.ranks, index=place, last_step=last_step, title=run.name)
        for place, (run, _) in enumerate(timed)
    ]
    routed = [(run, place) for place, run in enumerate(runs) if run.loads.steps]
    of_experts: list[list[RenderedFigure]] = []
    for run, _ in routed:
        place = len(heatmaps) + sum(map(len, of_experts))
        of_experts.append(
            expert_heatmaps(run.loads, index=place, last_step=last_step, title=run.name)
        )
    several = len(runs) > 1
    first, second = len(learning), len(learning) + len(speed)
    empty = remark("The run has not reached a logging step.")
    return document(
        "lockstep report",
        title,
        section("means", "Mean of repeated runs", group_table(repeated_runs(runs))),
        section("differences", "Differences", tables.difference_table(runs) if several else None),
        section("learning", "Training", _grid(figures[:first]) or empty),
        section("speed", "Throughput", _grid(figures[first:second])),
        section("memory", "Memory of the profiled steps", _memory(runs, figures[second:])),
        section(
            "ranks",
            "Ranks",
            _heatmaps(
                _ABOUT_RANKS,
                timed,
                [[each] for each in heatmaps],
                several=several,
                below=lambda run: rank_bars(run.ranks),
            ),
        ),
        section("experts", "Experts", _heatmaps(_ABOUT_LOADS, routed, of_experts, several=several)),
        section("losses", "Losses and recoveries", _losses(runs)),
        section("events", "Events", event_timeline(runs), _event_tables(runs)),
        section(
            "facts",
            "Recipe, plan, environment",
            [tables.description(run, index, several=several) for index, run in enumerate(runs)],
        ),
        section("numbers", "All metrics", tables.metric_table(runs) if lines else None),
        header=_header(runs),
        made=made,
        data={
            "last": last_step,
            "charts": [each.data for each in figures],
            "heatmaps": [each.data for each in chain(heatmaps, *of_experts)],
            "runs": [run.name for run in runs],
        },
    )


def run_charts(runs: Sequence[RunHistory]) -> tuple[list[Chart], list[Chart]]:
    names = dict.fromkeys(name for run in runs for name in run.curves.series)
    base = dict.fromkeys(name.removeprefix(_EVALUATION) for name in names)
    same = _sole_term(runs, names)
    learned = [name for name in sorted(base, key=_order) if name not in _SPEED and name != same]
    note = f"one term, {same.removeprefix('loss/')}" if same else ""
    learning = [_metric(name, runs, note if name == "loss" else "") for name in learned]
    return learning, [*(_metric(name, runs) for name in _SPEED if name in base), *_step_times(runs)]


def _order(name: str) -> tuple[int, int]:
    if name in _FIRST:
        return _FIRST.index(name), 0
    return 0 if name.startswith("loss/") else len(_FIRST), 1


def _sole_term(runs: Sequence[RunHistory], names: Iterable[str]) -> str | None:
    """Return the name of the loss's term if the loss has exactly one term."""
    terms = [name for name in names if name.startswith("loss/")]
    series = [run.curves.series for run in runs]
    is_sole = len(terms) == 1 and all(each.get(terms[0]) == each.get("loss") for each in series)
    return terms[0] if is_sole else None


def _metric(name: str, runs: Sequence[RunHistory], note: str = "") -> Chart:
    several = len(runs) > 1
    lines = []
    for index, run in enumerate(runs):
        if (series := run.curves.series.get(name)) is not None:
            lines.append(Curve(run.name if several else "training", index, series, "line", index))
        if (series := run.curves.series.get(_EVALUATION + name)) is not None:
            label = f"{run.name}, evaluation" if several else "evaluation"
            colour = index if several else 1
            lines.append(Curve(label, colour, series, "dashed", index))
    title = _TITLES.get(name, name)
    if name != "loss" and all(line.kind == "dashed" for line in lines):
        title += ", evaluation"
    return Chart(
        title=title,
        lines=lines,
        unit=tables.UNITS.get(name, ""),
        from_zero=name in _SPEED,
        logarithmic=False if name == "lr" or name in _SPEED else None,
        note=note,
        marks=curve_marks(runs[0].events) if not several else (),
    )


def _step_times(runs: Sequence[RunHistory]) -> list[Chart]:
    timed = [(index, run) for index, run in enumerate(runs) if run.ranks.steps]
    if not timed:
        return []
    marks: Sequence[EventMark] = ()
    if len(runs) == 1:
        by_phase = [(phase, mean_over_ranks(runs[0].ranks, phase)) for phase in PHASES]
        lines = [
            Curve(phase, n, series) for n, (phase, series) in enumerate(by_phase) if series.values
        ]
        marks = curve_marks(runs[0].events)
    else:
        lines = [
            Curve(run.name, index, mean_over_ranks(run.ranks, "step"), run=index)
            for index, run in timed
        ]
    title = "step time, mean of ranks"
    return [Chart(title=title, lines=lines, unit="seconds", from_zero=True, marks=marks)]


def _header(runs: Sequence[RunHistory]) -> Html:
    if len(runs) > 1:
        name, about = element("h1", f"{len(runs)} runs"), tables.overview(runs)
        return joined(name, _unreadable(runs), about, _reasons(runs), _lost(runs))
    (run,) = runs
    name = element("h1", f"{run.name} ", tables.state_word(run))
    about = element("p", tables.subtitle(run), kind="sub")
    figures = tiles(tables.key_figures(run))
    return joined(name, about, _reasons(runs), _lost(runs), _unreadable(runs), figures)


def _run_name(run: RunHistory, runs: Sequence[RunHistory]) -> Html | None:
    return joined(element("strong", run.name), ": ") if len(runs) > 1 else None


def _reasons(runs: Sequence[RunHistory]) -> Html:
    return joined(
        paragraph(_run_name(run, runs), reason, kind=f"reason {run.state}")
        for run in runs
        if (reason := tables.state_reason(run))
    )


def _lost(runs: Sequence[RunHistory]) -> Html:
    return joined(
        paragraph(_run_name(run, runs), f"{text}.", kind="reason lost")
        for run in runs
        if (text := loss_summary(run))
    )


def _unreadable(runs: Sequence[RunHistory]) -> Html:
    texts = [
        f"{run.name}: {lines:,} lines of {name} are invalid, and are left out"
        for run in runs
        for name, lines in run.unreadable.items()
    ]
    texts += [
        f"{run.name}: {len(run.curves.left_out):,} more metrics are in metrics.jsonl;"
        f" a page has the first {MOST_SERIES:,}"
        for run in runs
        if run.curves.left_out
    ]
    return joined(paragraph(f"{text}.", kind="reason failed") for text in texts)


def _grid(figures: Sequence[RenderedFigure]) -> Html | None:
    return element("div", [each.html for each in figures], kind="grid") if figures else None


def _heatmaps(
    explanation: str,
    runs: Sequence[tuple[RunHistory, int]],
    figures: Sequence[Sequence[RenderedFigure]],
    *,
    several: bool,
    below: Callable[[RunHistory], Html | None] = lambda run: None,
) -> Html | None:
    if not runs:
        return None
    return joined(
        remark(explanation),
        (
            [
                element("h3", tables.run_key(run, index)) if several else None,
                _grid(each),
                below(run),
            ]
            for (run, index), each in zip(runs, figures, strict=True)
        ),
    )


def _memory(runs: Sequence[RunHistory], figures: Sequence[RenderedFigure]) -> Html | None:
    if not figures:
        return None
    explanation = remark(
        "Memory of tensors on the rank's device. Activations are what a forward leaves for the"
        " backward; the rest is temporary: gradients of activations, what is computed again,"
        " batches, buffers of exchanges."
    )
    tables_of_runs = (
        [
            element("h3", tables.run_key(run, index)) if len(runs) > 1 else None,
            _peaks(run.memory),
            _largest(run.memory),
        ]
        for index, run in enumerate(runs)
        if run.memory is not None and run.memory.ranks
    )
    return joined(explanation, _grid(figures), tables_of_runs)


def memory_charts(runs: Sequence[RunHistory]) -> list[Chart]:
    charts = []
    for run in runs:
        if run.memory is None:
            continue
        last = max((rank.microseconds[-1] for rank in run.memory.ranks), default=0) or 1
        highest = sorted(run.memory.ranks, key=lambda rank: -rank.peak_bytes)[:MEMORY_CHARTS]
        for rank in sorted(highest, key=lambda rank: rank.rank):
            total = [sum(column) for column in zip(*rank.bytes_by_cause.values(), strict=True)]
            curves = {"all": total, **rank.bytes_by_cause}.items()
            lines = [_curve(name, n, rank, sizes) for n, (name, sizes) in enumerate(curves)]
            title = f"{f'{run.name}: ' if len(runs) > 1 else ''}memory of rank {rank.rank}"
            charts.append(
                Chart(title=title, lines=lines, unit="bytes", from_zero=True, microseconds=last)
            )
    return charts


def _curve(name: str, colour: int, rank: RankMemory, values: Sequence[int]) -> Curve:
    return Curve(name, colour, Series(array("q", rank.microseconds), array("d", values)))


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


def _losses(runs: Sequence[RunHistory]) -> Html:
    return joined(
        [element("h3", tables.run_key(run, index)) if len(runs) > 1 else None, text]
        for index, run in enumerate(runs)
        if (text := loss_list(run))
    )


def _event_tables(runs: Sequence[RunHistory]) -> Html:
    if len(runs) == 1:
        return element("div", event_table(runs[0]), kind="card") if runs[0].events else Html()
    return joined(
        element("details", element("summary", tables.run_key(run, index)), event_table(run))
        for index, run in enumerate(runs)
        if run.events
    )
