"""Makes tables and texts about runs, as HTML, JSON and plain text."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from lockstep.base.files import finite
from lockstep.pages.chart import COLOURS, statistics_of
from lockstep.pages.markup import (
    Column,
    Content,
    Html,
    Row,
    element,
    joined,
    legend_key,
    remark,
    table,
)
from lockstep.pages.scale import Unit, format_count, format_date, format_duration, format_number
from lockstep.report.events import event_details
from lockstep.report.history import RunHistory, RunState
from lockstep.report.losses import loss_summary, losses_of
from lockstep.report.ranks import mean_times
from lockstep.report.repetitions import group_json, group_lines, repeated_runs

UNITS: dict[str, Unit] = {"memory_bytes": "bytes", "mfu": "share"}
SERIES = 400

_DIGITS = 12
_WORDS: dict[RunState, str] = {"unfinished": "interrupted", "preempted": "stopped, resumable"}


def state_word(run: RunHistory) -> Html:
    return element("span", _WORDS.get(run.state, run.state), kind=f"state {run.state}")


def state_reason(run: RunHistory) -> str:
    ends = {"failed": "run-failed", "preempted": "preempted", "ended": "stopped"}
    end = next((event for event in reversed(run.events) if event.kind == ends.get(run.state)), None)
    if end is not None:
        return event_details(end)
    if run.state == "running" and run.holder is not None:
        return f"process {run.holder.pid} on {run.holder.host} holds the directory"
    if run.state == "unfinished":
        if run.holder is not None and run.holder.alive is None:
            return (
                f"process {run.holder.pid} on {run.holder.host}, another host or container,"
                " held the directory: it may still be running"
            )
        return "it ended without a record: it was killed, or its machine failed"
    return ""


def running_seconds(run: RunHistory) -> float:
    return sum(each.ended - each.began for each in run.attempts)


def planned_steps(run: RunHistory) -> int | None:
    recipe = run.metadata.get("recipe")
    steps = recipe.get("steps") if isinstance(recipe, Mapping) else None
    return steps if isinstance(steps, int) else None


def key_figures(run: RunHistory) -> list[tuple[str, Content]]:
    series = run.curves.series
    total = planned_steps(run)
    goal = element("small", f" of {format_count(total)}") if total and total > run.steps else None
    figures: list[tuple[str, Content]] = [("steps", [format_count(run.steps), goal])]
    if "loss" in series:
        figures.append(("loss", format_number(series["loss"].values[-1])))
    for name in series:
        if name.startswith("evaluation/"):
            figures.append((name.replace("/", " "), format_number(series[name].values[-1])))
    best = (run.result or {}).get("best") or {}
    if (value := best.get("value")) is not None:
        step = best.get("step")
        after = None if step is None else element("small", f" after step {format_count(step)}")
        figures.append((f"best {best.get('metric')}", [format_number(value), after]))
    for name, label in (
        ("samples_per_second", "samples/s"),
        ("weight_per_second", "weight/s"),
        ("mfu", "MFU"),
    ):
        if name in series and (values := series[name].finite()):
            figures.append((f"{label}, median", format_number(median(values), UNITS.get(name, ""))))
    if "memory_bytes" in series and (values := series["memory_bytes"].finite()):
        figures.append(("memory, peak", format_number(max(values), "bytes")))
    figures.append(("running", format_duration(running_seconds(run))))
    if len(run.attempts) > 1:
        figures.append(("attempts", format_count(len(run.attempts))))
    if isinstance(world_size := run.metadata.get("world_size"), int):
        figures.append(("processes", format_count(world_size)))
    return figures


def overview(runs: Sequence[RunHistory]) -> Html:
    figures = [dict(key_figures(run)) for run in runs]
    names = list(dict.fromkeys(name for each in figures for name in each))
    rows = []
    for index, (run, each) in enumerate(zip(runs, figures, strict=True)):
        plan = element("td", element("code", breakable(run.plan)), kind="plan")
        cells = [run_key(run, index), state_word(run), *(each.get(name, "–") for name in names)]
        rows.append(Row([*cells, plan, _digits(run) or "–"], data_run=index))
    heads: list[Column | str] = ["run", "", *map(Column, names), "plan", "fingerprint"]
    rows_by_name: dict[str, list[str]] = {}
    for run in runs:
        rows_by_name.setdefault(_fingerprint(run), []).append(run.name)
    notes = [
        remark(f"The same model, bit for bit: {', '.join(names)}.")
        for fingerprint, names in rows_by_name.items()
        if fingerprint and len(names) > 1
    ]
    return joined(table(heads, rows, row_heads=True), notes)


def run_key(run: RunHistory, index: int) -> Html:
    return legend_key(run.name, "line", f"line-{index % COLOURS}", data_run=index)


def _fingerprint(run: RunHistory) -> str:
    return str((run.result or {}).get("fingerprint") or "")


def _digits(run: RunHistory, after: str = "") -> Html | None:
    whole = _fingerprint(run)
    return element("code", whole[:_DIGITS] + after, title=whole) if whole else None


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        flat = {}
        for name, item in value.items():
            flat.update(flatten(item, f"{path}.{name}" if path else str(name)))
        return flat
    if value is None or value == []:
        return {}
    return {path: value}


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def described_fields(run: RunHistory) -> dict[str, dict[str, Any]]:
    metadata = run.metadata
    plan = {name: value for name, value in (metadata.get("plan") or {}).items() if name != "text"}
    environment = dict(metadata.get("environment") or {})
    command = environment.pop("command_line", None)
    command_line = (
        {"command line": shlex.join(map(str, command))} if isinstance(command, list) else {}
    )
    shown = ("recipe", "plan", "environment", "not_finite")
    others = {name: value for name, value in metadata.items() if name not in shown}
    result = {name: value for name, value in (run.result or {}).items() if name != "run_dir"}
    return {
        "Recipe": flatten(metadata.get("recipe") or {}),
        "Plan": flatten(plan),
        "Environment": {**flatten(others), **command_line, **flatten(environment)},
        "Result": flatten(result),
    }


def run_differences(runs: Sequence[RunHistory]) -> list[tuple[str, str, list[Any]]]:
    """Return the recipe and plan fields that differ between runs. Each entry has a section, a field
    and the value of each run."""
    described = [described_fields(run) for run in runs]
    differences: list[tuple[str, str, list[Any]]] = []
    for about in ("Recipe", "Plan", "Environment"):
        names = dict.fromkeys(name for each in described for name in each[about])
        for name in names:
            values = [each[about].get(name) for each in described]
            if len(set(map(as_text, values))) > 1 and name != "started":
                differences.append((about, name, values))
    return differences


def _code(value: Any) -> Content:
    if value is None:
        return "–"
    text = as_text(value)
    return element("code", breakable(text), title=text)


def difference_table(runs: Sequence[RunHistory]) -> Html:
    found = run_differences(runs)
    rows: list[Sequence[Content]] = []
    for about, differences in groupby(found, key=lambda each: each[0]):
        head = element("th", about, colspan=len(runs) + 1, scope="rowgroup")
        rows.append(Row([head], kind="about"))
        for _, name, values in differences:
            rows.append([name, *map(_code, values)])
    different = {about for about, _, _ in found}
    same = [about.lower() for about in ("Recipe", "Plan") if about not in different]
    verb = "are" if len(same) > 1 else "is"
    text = remark(f"The {' and the '.join(same)} {verb} the same.") if same else None
    heads: list[Column | str] = [""]
    heads += (Column(run_key(run, index), number=False) for index, run in enumerate(runs))
    return joined(table(heads, rows, box="wide card differences", row_heads=True), text)


def description(run: RunHistory, index: int, *, several: bool) -> Html:
    blocks = []
    for about, values in described_fields(run).items():
        rows = [[name, element("code", breakable(as_text(each)))] for name, each in values.items()]
        if rows:
            facts = table((), rows, kind="facts", box="", row_heads=True)
            blocks.append(element("section", element("h3", about), facts, kind="card"))
    body = element("div", blocks, kind="columns")
    return element("details", element("summary", run_key(run, index)), body) if several else body


def metric_table(runs: Sequence[RunHistory]) -> Html:
    heads = (
        "values",
        "first",
        "last",
        "mean",
        "minimum",
        "at step",
        "maximum",
        "at step",
        "not finite",
    )
    rows = []
    names = dict.fromkeys(name for run in runs for name in run.curves.series)
    found = [
        (name, index, run, series)
        for name in names
        for index, run in enumerate(runs)
        if (series := run.curves.series.get(name)) is not None
    ]
    for name, index, run, series in found[:SERIES]:
        values = statistics_of(series)
        unit = UNITS.get(name, "")
        cells = [
            format_count(values["values"]),
            *(_optional(values[each], unit) for each in ("first", "last", "mean", "min")),
            _optional(values["min_step"]),
            _optional(values["max"], unit),
            _optional(values["max_step"]),
            format_count(values["not_finite"]) if values["not_finite"] else "",
        ]
        owner = [run_key(run, index)] if len(runs) > 1 else []
        rows.append(Row([name, *owner, *cells], data_run=index))
    owner_head = ["run"] if len(runs) > 1 else []
    left_out = len(found) - SERIES
    more = remark(f"{left_out:,} more are in metrics.jsonl.") if left_out > 0 else None
    return joined(table(["metric", *owner_head, *map(Column, heads)], rows, row_heads=True), more)


def _optional(value: float | None, unit: Unit = "") -> str:
    return "–" if value is None else format_number(value, unit)


def breakable(text: str) -> Html:
    return Html(joined(text).replace(",", ",<wbr>").replace("/", "/<wbr>").replace("._", ".<wbr>_"))


def report_json(runs: Sequence[RunHistory]) -> dict[str, Any]:
    page = {
        "runs": [
            {
                "name": run.name,
                "path": run.path,
                "state": run.state,
                "reason": state_reason(run),
                "steps": run.steps,
                "seconds": running_seconds(run),
                "attempts": len(run.attempts),
                "plan": run.plan,
                "world_size": run.metadata.get("world_size"),
                "fingerprint": (run.result or {}).get("fingerprint"),
                "series": {
                    name: statistics_of(series) for name, series in run.curves.series.items()
                },
                "ranks": [
                    {"host": host, **each}
                    for host, each in zip(_hosts(run), mean_times(run.ranks), strict=True)
                ],
                "losses": [each.as_json() for each in losses_of(run)],
                "events": [
                    {"time": event.time, "event": event.kind, "step": event.step, **event.details}
                    for event in run.events
                ],
                "unreadable_lines": dict(run.unreadable),
            }
            for run in runs
        ],
        "groups": group_json(repeated_runs(runs)),
        "differences": [
            {"about": about.lower(), "field": name, "values": values}
            for about, name, values in run_differences(runs)
        ],
    }
    report: dict[str, Any] = finite(page)
    return report


def _hosts(run: RunHistory) -> list[str | None]:
    world = len(mean_times(run.ranks))
    return [*run.ranks.hosts[:world], *[None] * (world - len(run.ranks.hosts))]


def report_lines(runs: Sequence[RunHistory]) -> list[str]:
    lines = []
    for run in runs:
        text = f"{run.name}: {_WORDS.get(run.state, run.state)}, step {run.steps}"
        loss = run.curves.series.get("loss")
        if loss is not None and loss.values:
            text += f", loss {format_number(loss.values[-1])}"
        if run.state != "running" and (reason := state_reason(run)):
            text += f" ({reason})"
        if lost := loss_summary(run):
            text += f"; {lost}"
        lines.append(text)
    return [*lines, *group_lines(repeated_runs(runs))]


def subtitle(run: RunHistory) -> Html:
    environment = run.metadata.get("environment") or {}
    device = (environment.get("device") or {}).get("name", "")
    began = f"began {format_date(run.began)}" if run.began is not None else ""
    plan = element("code", breakable(run.plan)) if run.plan else ""
    digits = _digits(run, "…")
    parts: list[Content] = [began, str(environment.get("host", "")), str(device), plan]
    parts += [["fingerprint ", digits]] if digits else []
    return Html(" · ".join(joined(part) for part in parts if part))
