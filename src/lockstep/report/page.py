"""The whole HTML page, in one file that loads no other. Its content security policy forbids
requests. Pure, but for reading its own style and script from the package."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from lockstep.base.foreign_text import escape, printable
from lockstep.report import event_timeline, heatmap, losses, repetitions, tables
from lockstep.report.chart import Chart, Curve, RenderedFigure, render
from lockstep.report.history import MOST_SERIES, PHASES, RunHistory
from lockstep.report.loss_list import loss_list
from lockstep.report.memory import memory_charts, memory_tables

GENERATOR = '<meta name="generator" content="lockstep report">'
"""A tag near the beginning of each page, which identifies it as a report."""
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


def page(runs: Sequence[RunHistory], *, made: float) -> str:
    """Return the HTML document. `made`: time of creation, in seconds since 1970."""
    title = "lockstep report: " + ", ".join(run.name for run in runs)
    last_step = max(
        [
            1,
            *(run.curves.last_step for run in runs),
            *(step for run in runs for step in run.ranks.steps[-1:]),
        ]
    )
    learning, speed = charts(runs)
    memory = memory_charts(runs)
    shown = [*learning, *speed, *memory]
    lines = sum(len(each.lines) for each in shown)
    columns = max(LEAST_COLUMNS, min(MOST_COLUMNS, POINTS // max(1, lines)))
    figures = [
        render(each, index=index, last_step=last_step, columns=columns)
        for index, each in enumerate(shown)
    ]
    heatmaps = [
        heatmap.render(run.ranks, index=index, last_step=last_step, title=run.name)
        for index, run in enumerate(_timed(runs))
    ]
    descriptions = [
        tables.description(run, index, several=len(runs) > 1) for index, run in enumerate(runs)
    ]
    body = [
        _head(runs, made),
        *_section("means", "Mean of repeated runs", repetitions.table(repetitions.groups(runs))),
        *_section(
            "differences", "Differences", tables.difference_table(runs) if len(runs) > 1 else ""
        ),
        *_section(
            "learning",
            "Training",
            _grid(figures[: len(learning)])
            or '<p class="note">The run has not reached a logging step.</p>',
        ),
        *_section(
            "speed", "Throughput", _grid(figures[len(learning) : len(learning) + len(speed)])
        ),
        *_section(
            "memory",
            "Memory of the profiled steps",
            _memory(runs, figures[len(learning) + len(speed) :]),
        ),
        *_section("ranks", "Ranks", _ranks(runs, heatmaps)),
        *_section("losses", "Losses and recoveries", _losses(runs)),
        *_section("events", "Events", _events(runs)),
        *_section("facts", "Recipe, plan, environment", "".join(descriptions)),
        *_section("numbers", "All metrics", tables.metric_table(runs) if lines else ""),
    ]
    data = {
        "last": last_step,
        "charts": [each.data for each in figures],
        "heatmaps": [each.data for each in heatmaps],
        "runs": [run.name for run in runs],
    }
    return document(title, "".join(body), data, script=_own("page.js"))


def charts(runs: Sequence[RunHistory]) -> tuple[list[Chart], list[Chart]]:
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
        may_be_logarithmic=name != "lr" and name not in _SPEED,
        note=note,
        marks=event_timeline.marks(runs[0].events) if not several else (),
    )


def _step_times(runs: Sequence[RunHistory]) -> list[Chart]:
    """Return the chart of step times: of one run by phase, of several runs the whole steps
    alone."""
    timed = [(index, run) for index, run in enumerate(runs) if run.ranks.steps]
    if not timed:
        return []
    if len(runs) == 1:
        ranks = runs[0].ranks
        found = [(phase, heatmap.mean_over_ranks(ranks, phase)) for phase in PHASES]
        lines = [
            Curve(phase, index, series)
            for index, (phase, series) in enumerate(found)
            if series.values
        ]
    else:
        lines = [
            Curve(run.name, index, heatmap.mean_over_ranks(run.ranks, "step"), run=index)
            for index, run in timed
        ]
    marks = event_timeline.marks(runs[0].events) if len(runs) == 1 else ()
    return [
        Chart(
            title="step time, mean of ranks",
            lines=lines,
            unit="seconds",
            from_zero=True,
            marks=marks,
        )
    ]


def _timed(runs: Sequence[RunHistory]) -> list[RunHistory]:
    return [run for run in runs if run.ranks.steps]


def _head(runs: Sequence[RunHistory], made: float) -> str:
    if len(runs) == 1:
        (run,) = runs
        reason = tables.state_reason(run)
        paragraph = f'<p class="reason {run.state}">{escape(reason)}</p>' if reason else ""
        paragraph += _lost(runs)
        name = f"<h1>{escape(run.name)} {tables.state(run)}</h1>"
        top = (
            f"{name}<p"
            f' class="sub">{tables.subtitle(run)}</p>{paragraph}{_unreadable(runs)}{tables.tiles(run)}'
        )
    else:
        reasons = "".join(
            f'<p class="reason {run.state}"><strong>{escape(run.name)}</strong>:'
            f" {escape(tables.state_reason(run))}</p>"
            for run in runs
            if tables.state_reason(run)
        )
        top = (
            f"<h1>{len(runs)}"
            f" runs</h1>{_unreadable(runs)}{tables.overview(runs)}{reasons}{_lost(runs)}"
        )
    return (
        '<header><p class="brand">lockstep report<span>made'
        f" {event_timeline.clock(made)}</span></p>{top}</header>"
    )


def _lost(runs: Sequence[RunHistory]) -> str:
    found = [
        (f"<strong>{escape(run.name)}</strong>: " if len(runs) > 1 else "", losses.summary(run))
        for run in runs
    ]
    return "".join(
        f'<p class="reason lost">{name}{escape(text)}.</p>' for name, text in found if text
    )


def _unreadable(runs: Sequence[RunHistory]) -> str:
    texts = [
        f"{run.name}: {lines:,} lines of {name} are invalid, and are left out"
        for run in runs
        for name, lines in run.unreadable.items()
    ]
    texts += [
        f"{run.name}: {len(run.curves.left_out):,} more metrics are in metrics.jsonl; a page has"
        f" the first {MOST_SERIES:,}"
        for run in runs
        if run.curves.left_out
    ]
    return "".join(f'<p class="reason failed">{escape(text)}.</p>' for text in texts)


def _grid(figures: Sequence[RenderedFigure]) -> str:
    return f'<div class="grid">{"".join(each.html for each in figures)}</div>' if figures else ""


def _ranks(runs: Sequence[RunHistory], heatmaps: Sequence[RenderedFigure]) -> str:
    found = []
    for run, figure in zip(_timed(runs), heatmaps, strict=True):
        name = f"<h3>{tables.key(run, runs.index(run))}</h3>" if len(runs) > 1 else ""
        found.append(f'{name}<div class="grid">{figure.html}</div>{heatmap.rank_bars(run.ranks)}')
    note = (
        '<p class="note">A cell is the mean of its steps; each heatmap has its own colour scale. A'
        " straggler, a rank whose data or compute takes longer, makes the others wait: their"
        " communication takes longer, and the step is as long for all.</p>"
    )
    return "".join([note, *found]) if found else ""


def _memory(runs: Sequence[RunHistory], figures: Sequence[RenderedFigure]) -> str:
    note = (
        '<p class="note">Memory of tensors on the rank\'s device. Activations are what a forward'
        " leaves for the backward; the rest is temporary: gradients of activations, what is"
        " computed again, batches, buffers of exchanges.</p>"
    )
    return f"{note}{_grid(figures)}{memory_tables(runs)}" if figures else ""


def _losses(runs: Sequence[RunHistory]) -> str:
    found = [(run, index, loss_list(run)) for index, run in enumerate(runs)]
    return "".join(
        (f"<h3>{tables.key(run, index)}</h3>" if len(runs) > 1 else "") + text
        for run, index, text in found
        if text
    )


def _events(runs: Sequence[RunHistory]) -> str:
    found = [event_timeline.lanes(runs)]
    for index, run in enumerate(runs):
        if run.events:
            table = event_timeline.table(run)
            name = f"<details><summary>{tables.key(run, index)}</summary>{table}</details>"
            found.append(name if len(runs) > 1 else f'<div class="card">{table}</div>')
    return "".join(found)


def _section(name: str, title: str, inside: str) -> list[str]:
    return [f'<section id="{name}"><h2>{title}</h2>{inside}</section>'] if inside else []


def document(
    title: str, body: str, data: Mapping[str, Any], *, script: str, style: str = ""
) -> str:
    """Return the HTML document. `data`: values that `script` reads from the element `data`.
    `style`: rules beside page.css."""
    themes = (("light", heatmap.RAMP), ("dark", heatmap.RAMP[::-1]))
    ramps = "".join(
        f"--ramp-{name}:linear-gradient(90deg,{','.join(colours)});" for name, colours in themes
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src"
        f" 'sha256-{digest}'"
    )
    json_data = json.dumps(
        _printable(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).replace("<", "\\u003c")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{GENERATOR}'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><meta'
        f' name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>:root{{{ramps}}}{_own('page.css')}{style}</style></head><body><main>{body}</main>"
        '<script type="application/json"'
        f' id="data">{json_data}</script><script>{script}</script></body></html>\n'
    )


def _printable(value: Any) -> Any:
    """Return JSON whose texts a page may show."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {name: _printable(each) for name, each in value.items()}
    return list(map(_printable, value)) if isinstance(value, list | tuple) else value


def _own(name: str) -> str:
    return files("lockstep.report").joinpath(name).read_text(encoding="utf-8")
