"""The page of a run, or of several side by side. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.pages.chart import Chart, Curve, RenderedFigure, render_charts
from lockstep.pages.document import document, generator_tag
from lockstep.pages.markup import Html, element, joined, paragraph, remark, section, tiles
from lockstep.report import tables
from lockstep.report.events import curve_marks, event_table, event_timeline
from lockstep.report.history import MOST_SERIES, PHASES, RunHistory
from lockstep.report.losses import loss_list, loss_summary
from lockstep.report.memory import memory_charts, memory_tables
from lockstep.report.ranks import mean_over_ranks, rank_bars, rank_heatmaps
from lockstep.report.repetitions import group_table, repeated_runs

GENERATOR = generator_tag("lockstep report")
"""The tag that identifies a page as a report."""
MOST_COLUMNS, LEAST_COLUMNS = 600, 60
POINTS = 60_000
"""Approximate number of points on the page. If there are many curves, each has fewer points."""

_SPEED = {
    "samples_per_second": "samples/s",
    "weight_per_second": "weight/s",
    "mfu": "MFU",
    "memory_bytes": "memory, peak so far",
}
_TITLES = {"loss": "loss", "lr": "learning rate", "gradient_norm": "gradient norm", **_SPEED}
_FIRST = ("loss", "lr", "gradient_norm")
_EVALUATION = "evaluation/"


def report_page(runs: Sequence[RunHistory], *, made: float) -> str:
    """Return the HTML document. `made`: time of creation, in seconds since 1970."""
    title = "lockstep report: " + ", ".join(run.name for run in runs)
    curves = [run.curves.last_step for run in runs]
    last_step = max([1, *curves, *(step for run in runs for step in run.ranks.steps[-1:])])
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
        section("ranks", "Ranks", _ranks(timed, heatmaps, several=several)),
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
            "heatmaps": [each.data for each in heatmaps],
            "runs": [run.name for run in runs],
        },
    )


def run_charts(runs: Sequence[RunHistory]) -> tuple[list[Chart], list[Chart]]:
    """Return the charts of training, and those of throughput. A metric and its evaluation share a
    chart."""
    names = dict.fromkeys(name for run in runs for name in run.curves.series)
    base = dict.fromkeys(name.removeprefix(_EVALUATION) for name in names)
    same = _sole_term(runs, names)
    learned = [name for name in sorted(base, key=_order) if name not in _SPEED and name != same]
    learning = [
        _metric(
            name,
            runs,
            note=f"one term, {same.removeprefix('loss/')}" if same and name == "loss" else "",
        )
        for name in learned
    ]
    return learning, [*(_metric(name, runs) for name in _SPEED if name in base), *_step_times(runs)]


def _order(name: str) -> tuple[int, int]:
    return (
        (_FIRST.index(name), 0)
        if name in _FIRST
        else (0 if name.startswith("loss/") else len(_FIRST), 1)
    )


def _sole_term(runs: Sequence[RunHistory], names: Sequence[str] | dict[str, None]) -> str | None:
    """Return the name of the loss's only term, if its values are those of the loss in every run."""
    terms = [name for name in names if name.startswith("loss/")]
    if len(terms) == 1 and all(
        run.curves.series.get(terms[0]) == run.curves.series.get("loss") for run in runs
    ):
        return terms[0]
    return None


def _metric(name: str, runs: Sequence[RunHistory], note: str = "") -> Chart:
    several = len(runs) > 1
    lines = []
    for index, run in enumerate(runs):
        for full, kind, word in (
            (name, "line", "training"),
            (_EVALUATION + name, "dashed", "evaluation"),
        ):
            if full in run.curves.series:
                colour = index if several else int(kind == "dashed")
                label = (
                    run.name
                    if several and kind == "line"
                    else f"{run.name}, {word}"
                    if several
                    else word
                )
                lines.append(Curve(label, colour, run.curves.series[full], kind, index))  # type: ignore[arg-type]
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
    """Return the chart of step times: of one run by phase, of several runs the whole steps
    alone."""
    timed = [(index, run) for index, run in enumerate(runs) if run.ranks.steps]
    if not timed:
        return []
    if len(runs) == 1:
        ranks = runs[0].ranks
        found = [(phase, mean_over_ranks(ranks, phase)) for phase in PHASES]
        lines = [
            Curve(phase, index, series)
            for index, (phase, series) in enumerate(found)
            if series.values
        ]
    else:
        lines = [
            Curve(run.name, index, mean_over_ranks(run.ranks, "step"), run=index)
            for index, run in timed
        ]
    marks = curve_marks(runs[0].events) if len(runs) == 1 else ()
    return [
        Chart(
            title="step time, mean of ranks",
            lines=lines,
            unit="seconds",
            from_zero=True,
            marks=marks,
        )
    ]


def _header(runs: Sequence[RunHistory]) -> Html:
    if len(runs) > 1:
        name, about = element("h1", f"{len(runs)} runs"), tables.overview(runs)
        return joined(name, _unreadable(runs), about, _reasons(runs), _lost(runs))
    (run,) = runs
    name = element("h1", f"{run.name} ", tables.state_word(run))
    about = element("p", tables.subtitle(run), kind="sub")
    figures = tiles(tables.key_figures(run))
    return joined(name, about, _reasons(runs), _lost(runs), _unreadable(runs), figures)


def _named(run: RunHistory, runs: Sequence[RunHistory]) -> Html | None:
    return joined(element("strong", run.name), ": ") if len(runs) > 1 else None


def _reasons(runs: Sequence[RunHistory]) -> Html:
    return joined(
        paragraph(_named(run, runs), reason, kind=f"reason {run.state}")
        for run in runs
        if (reason := tables.state_reason(run))
    )


def _lost(runs: Sequence[RunHistory]) -> Html:
    return joined(
        paragraph(_named(run, runs), f"{text}.", kind="reason lost")
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
        f"{run.name}: {len(run.curves.left_out):,} more metrics are in metrics.jsonl; "
        f"a page has the first {MOST_SERIES:,}"
        for run in runs
        if run.curves.left_out
    ]
    return joined(paragraph(f"{text}.", kind="reason failed") for text in texts)


def _grid(figures: Sequence[RenderedFigure]) -> Html | None:
    return element("div", [each.html for each in figures], kind="grid") if figures else None


def _ranks(
    timed: Sequence[tuple[RunHistory, int]], heatmaps: Sequence[RenderedFigure], *, several: bool
) -> Html | None:
    if not timed:
        return None
    explanation = remark(
        "A cell is the mean of its steps; each heatmap has its own colour scale. A straggler, a "
        "rank whose data or "
        "compute takes longer, makes the others wait: their communication takes longer, and the "
        "step is as long for "
        "all."
    )
    return joined(
        explanation,
        (
            [
                element("h3", tables.run_key(run, index)) if several else None,
                _grid([figure]),
                rank_bars(run.ranks),
            ]
            for (run, index), figure in zip(timed, heatmaps, strict=True)
        ),
    )


def _memory(runs: Sequence[RunHistory], figures: Sequence[RenderedFigure]) -> Html | None:
    if not figures:
        return None
    explanation = remark(
        "Memory of tensors on the rank's device. Activations are what a forward leaves for the "
        "backward; the rest is "
        "temporary: gradients of activations, what is computed again, batches, buffers of "
        "exchanges."
    )
    return joined(explanation, _grid(figures), memory_tables(runs))


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
