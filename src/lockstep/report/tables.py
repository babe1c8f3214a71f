"""Tables and texts about runs, as HTML, JSON and plain text. Pure."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lockstep.base.foreign_text import escape
from lockstep.report import repetitions
from lockstep.report.chart import COLOURS, summary
from lockstep.report.event_timeline import clock, details
from lockstep.report.heatmap import mean_times
from lockstep.report.history import RunHistory, RunState
from lockstep.report.losses import losses, summary as loss_summary
from lockstep.report.scale import Unit, format_count, format_duration, format_number

UNITS: dict[str, Unit] = {"memory_bytes": "bytes", "mfu": "share"}
SERIES = 400

_DIGITS = 12
_WORDS: dict[RunState, str] = {"unfinished": "interrupted", "preempted": "stopped, resumable"}
"""The states that are not shown by their own names."""


def state(run: RunHistory) -> str:
    """Return the run's state, as a coloured word."""
    return f'<span class="state {run.state}">{_WORDS.get(run.state, run.state)}</span>'


def state_reason(run: RunHistory) -> str:
    """Return the reason for the run's state; empty if there is none."""
    ends = {"failed": "run-failed", "preempted": "preempted", "ended": "stopped"}
    end = next((event for event in reversed(run.events) if event.kind == ends.get(run.state)), None)
    if end is not None:
        return details(end)
    if run.state == "running" and run.holder is not None:
        return f"process {run.holder.pid} on {run.holder.host} holds the directory"
    if run.state == "unfinished":
        if run.holder is not None and run.holder.alive is None:
            return (
                f"process {run.holder.pid} on {run.holder.host}, another host or container, held"
                " the directory: it may still be running"
            )
        return "it ended without a record: it was killed, or its machine failed"
    return ""


def running_seconds(run: RunHistory) -> float:
    """Return the seconds that the run was running, without the time between its attempts."""
    return sum(each.ended - each.began for each in run.attempts)


def planned_steps(run: RunHistory) -> int | None:
    """Return the number of steps of the recipe. None if it counts epochs, or if there is no
    recipe."""
    recipe = run.metadata.get("recipe")
    found = recipe.get("steps") if isinstance(recipe, Mapping) else None
    return found if isinstance(found, int) else None


def key_figures(run: RunHistory) -> list[tuple[str, str]]:
    """Return the most important numbers of a run, as name and HTML."""
    series = run.curves.series
    total = planned_steps(run)
    found = [
        (
            "steps",
            format_count(run.steps)
            + (f"<small> of {format_count(total)}</small>" if total and total > run.steps else ""),
        )
    ]
    if "loss" in series:
        found.append(("loss", format_number(series["loss"].values[-1])))
    for name in series:
        if name.startswith("evaluation/"):
            found.append((name.replace("/", " "), format_number(series[name].values[-1])))
    best = (run.result or {}).get("best") or {}
    if (value := best.get("value")) is not None:
        after = (
            f"<small> after step {format_count(best['step'])}</small>"
            if best.get("step") is not None
            else ""
        )
        found.append((f"best {best.get('metric')}", f"{format_number(value)}{after}"))
    for name, label in (
        ("samples_per_second", "samples/s"),
        ("weight_per_second", "weight/s"),
        ("mfu", "MFU"),
    ):
        if name in series and (values := series[name].finite()):
            found.append((f"{label}, median", format_number(median(values), UNITS.get(name, ""))))
    if "memory_bytes" in series and (values := series["memory_bytes"].finite()):
        found.append(("memory, peak", format_number(max(values), "bytes")))
    found.append(("running", format_duration(running_seconds(run))))
    if len(run.attempts) > 1:
        found.append(("attempts", format_count(len(run.attempts))))
    if isinstance(world_size := run.metadata.get("world_size"), int):
        found.append(("processes", format_count(world_size)))
    return found


def tiles(run: RunHistory) -> str:
    """Return the key figures as HTML."""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in key_figures(run)
    )
    return f'<dl class="tiles">{cells}</dl>'


def overview(runs: Sequence[RunHistory]) -> str:
    """Return a table with a row for each run."""
    columns: dict[str, None] = {}
    figures = [dict(key_figures(run)) for run in runs]
    for each in figures:
        columns.update(dict.fromkeys(each))
    heads = "".join(f'<th scope="col" class="number">{escape(name)}</th>' for name in columns)
    rows = []
    for index, (run, each) in enumerate(zip(runs, figures, strict=True)):
        cells = "".join(f'<td class="number">{each.get(name, "–")}</td>' for name in columns)
        fingerprint = (run.result or {}).get("fingerprint")
        digits = (
            "<td><code"
            f' title="{escape(fingerprint)}">{escape(str(fingerprint)[:_DIGITS])}</code></td>'
            if fingerprint
            else "<td>–</td>"
        )
        name = f'<th scope="row">{key(run, index)}</th><td>{state(run)}</td>'
        plan = f'<td class="plan"><code>{_breakable(run.plan)}</code></td>'
        rows.append(f'<tr data-run="{index}">{name}{cells}{plan}{digits}</tr>')
    head = (
        f'<tr><th scope="col">run</th><th scope="col"></th>{heads}<th scope="col">plan</th><th'
        ' scope="col">fingerprint</th></tr>'
    )
    return _table(head, rows) + _same_fingerprints(runs)


def key(run: RunHistory, index: int) -> str:
    """Return the run's name with the colour of its curves."""
    return (
        f'<span class="key" data-run="{index}"><b class="line"'
        f' style="--colour:var(--line-{index % COLOURS})"></b>{escape(run.name)}</span>'
    )


def _same_fingerprints(runs: Sequence[RunHistory]) -> str:
    found: dict[str, list[str]] = {}
    for run in runs:
        if fingerprint := (run.result or {}).get("fingerprint"):
            found.setdefault(str(fingerprint), []).append(run.name)
    texts = [
        f"The same model, bit for bit: {', '.join(names)}."
        for names in found.values()
        if len(names) > 1
    ]
    return "".join(f'<p class="note">{escape(text)}</p>' for text in texts)


def flatten(value: Any, path: str = "") -> dict[str, str]:
    """Flatten JSON to text by dotted path. Null and empty values are left out."""
    if isinstance(value, Mapping):
        found = {}
        for name, item in value.items():
            found.update(flatten(item, f"{path}.{name}" if path else str(name)))
        return found
    if value is None or value == []:
        return {}
    return {path: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}


def sections(run: RunHistory) -> dict[str, dict[str, str]]:
    """Return the contents of run.json and result.json, by section."""
    metadata = run.metadata
    plan = {name: value for name, value in (metadata.get("plan") or {}).items() if name != "text"}
    environment = dict(metadata.get("environment") or {})
    command = environment.pop("command_line", None)
    command_line = (
        {"command line": shlex.join(map(str, command))} if isinstance(command, list) else {}
    )
    others = {
        name: value
        for name, value in metadata.items()
        if name not in ("recipe", "plan", "environment", "not_finite")
    }
    return {
        "Recipe": flatten(metadata.get("recipe") or {}),
        "Plan": flatten(plan),
        "Environment": {**flatten(others), **command_line, **flatten(environment)},
        "Result": flatten(
            {name: value for name, value in (run.result or {}).items() if name != "run_dir"}
        ),
    }


def differences(runs: Sequence[RunHistory]) -> list[tuple[str, str, list[str | None]]]:
    """Return the fields that differ between runs: section, field, and the value in each run or
    None."""
    described = [sections(run) for run in runs]
    found: list[tuple[str, str, list[str | None]]] = []
    for about in ("Recipe", "Plan", "Environment"):
        names = dict.fromkeys(name for each in described for name in each[about])
        for name in names:
            values = [each[about].get(name) for each in described]
            if len(set(values)) > 1 and name != "started":
                found.append((about, name, values))
    return found


def difference_table(runs: Sequence[RunHistory]) -> str:
    """Return the table of differences between runs."""
    found = differences(runs)
    heads = "".join(f'<th scope="col">{key(run, index)}</th>' for index, run in enumerate(runs))
    rows, before = [], ""
    for about, name, values in found:
        if about != before:
            rows.append(
                f'<tr class="about"><th colspan="{len(runs) + 1}"'
                f' scope="rowgroup">{about}</th></tr>'
            )
            before = about
        cells = "".join(
            _code(value, whole=False) if value is not None else "<td>–</td>" for value in values
        )
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    same = [
        about.lower() for about in ("Recipe", "Plan") if about not in {each[0] for each in found}
    ]
    note = (
        f'<p class="note">The {" and the ".join(same)} {"are" if len(same) > 1 else "is"} the'
        " same.</p>"
        if same
        else ""
    )
    if not rows:
        return note
    return _table(f'<tr><th scope="col"></th>{heads}</tr>', rows, "wide card differences") + note


def description(run: RunHistory, index: int, *, several: bool) -> str:
    """Return the tables of a run's recipe, plan, environment and result."""
    blocks = []
    for about, values in sections(run).items():
        if values:
            rows = "".join(
                f'<tr><th scope="row">{escape(name)}</th>{_code(value)}</tr>'
                for name, value in values.items()
            )
            blocks.append(
                f'<section class="card"><h3>{about}</h3><table'
                f' class="facts"><tbody>{rows}</tbody></table></section>'
            )
    body = f'<div class="columns">{"".join(blocks)}</div>'
    return f"<details><summary>{key(run, index)}</summary>{body}</details>" if several else body


def metric_table(runs: Sequence[RunHistory]) -> str:
    """Return a table with statistics of every curve, for readers who cannot see the charts."""
    heads = "".join(
        f'<th scope="col" class="number">{name}</th>'
        for name in (
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
    )
    rows = []
    names = dict.fromkeys(name for run in runs for name in run.curves.series)
    pairs = [
        (name, index, run)
        for name in names
        for index, run in enumerate(runs)
        if name in run.curves.series
    ]
    for name, index, run in pairs[:SERIES]:
        values = summary(run.curves.series[name])
        unit = UNITS.get(name, "")
        texts = [
            format_count(values["values"]),
            *(_optional(values[each], unit) for each in ("first", "last", "mean", "min")),
        ]
        texts += [
            _optional(values["min_step"]),
            _optional(values["max"], unit),
            _optional(values["max_step"]),
        ]
        texts += [format_count(values["not_finite"]) if values["not_finite"] else ""]
        cells = "".join(f'<td class="number">{cell}</td>' for cell in texts)
        of = f"<td>{key(run, index)}</td>" if len(runs) > 1 else ""
        rows.append(f'<tr data-run="{index}"><th scope="row">{escape(name)}</th>{of}{cells}</tr>')
    of = '<th scope="col">run</th>' if len(runs) > 1 else ""
    more = (
        f'<p class="note">{len(pairs) - SERIES:,} more are in metrics.jsonl.</p>'
        if len(pairs) > SERIES
        else ""
    )
    return _table(f'<tr><th scope="col">metric</th>{of}{heads}</tr>', rows) + more


def _optional(value: float | None, unit: Unit = "") -> str:
    return "–" if value is None else format_number(value, unit)


def _table(head: str, rows: Sequence[str], kind: str = "wide card") -> str:
    return (
        "<div"
        f' class="{kind}"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _code(text: str, *, whole: bool = True) -> str:
    """Return a cell. `whole`: False if the page may cut the text off; it is then in the tooltip."""
    title = "" if whole else f' title="{escape(text)}"'
    return f"<td><code{title}>{_breakable(text)}</code></td>"


def _breakable(text: str) -> str:
    """Escape a text, and allow line breaks after commas, dots and slashes."""
    return escape(text).replace(",", ",<wbr>").replace("/", "/<wbr>").replace("._", ".<wbr>_")


def as_json(runs: Sequence[RunHistory]) -> dict[str, Any]:
    """Return the report for programs. NaN and infinity become null."""
    found: dict[str, Any] = _finite(_as_json(runs))
    return found


def _as_json(runs: Sequence[RunHistory]) -> dict[str, Any]:
    return {
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
                "series": {name: summary(series) for name, series in run.curves.series.items()},
                "ranks": [
                    {"host": host, **each}
                    for host, each in zip(_hosts(run), mean_times(run.ranks), strict=True)
                ],
                "losses": [each.as_json() for each in losses(run)],
                "events": [
                    {"time": event.time, "event": event.kind, "step": event.step, **event.details}
                    for event in run.events
                ],
                "unreadable_lines": dict(run.unreadable),
            }
            for run in runs
        ],
        "groups": repetitions.as_json(repetitions.groups(runs)),
        "differences": [
            {"about": about.lower(), "field": name, "values": values}
            for about, name, values in differences(runs)
        ],
    }


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _hosts(run: RunHistory) -> list[str | None]:
    world = len(mean_times(run.ranks))
    return [*run.ranks.hosts[:world], *[None] * (world - len(run.ranks.hosts))]


def summary_lines(runs: Sequence[RunHistory]) -> list[str]:
    """Return a line of plain text for each run and each group of repeated runs, for a terminal."""
    found = []
    for run in runs:
        loss = run.curves.series.get("loss")
        last_loss = (
            f", loss {format_number(loss.values[-1])}" if loss is not None and loss.values else ""
        )
        reason = state_reason(run) if run.state != "running" else ""
        because, lost = (
            f" ({reason})" if reason else "",
            (f"; {loss_summary(run)}" if losses(run) else ""),
        )
        found.append(
            f"{run.name}: {_WORDS.get(run.state, run.state)}, step"
            f" {run.steps}{last_loss}{because}{lost}"
        )
    return [*found, *repetitions.summary_lines(repetitions.groups(runs))]


def subtitle(run: RunHistory) -> str:
    """Return the start time, host, device, plan and fingerprint, as a line below the title."""
    environment = run.metadata.get("environment") or {}
    device = (environment.get("device") or {}).get("name", "")
    began = f"began {clock(run.began)}" if run.began is not None else ""
    parts = [
        escape(text) for text in (began, str(environment.get("host", "")), str(device)) if text
    ]
    plan = f"<code>{_breakable(run.plan)}</code>" if run.plan else ""
    fingerprint = (run.result or {}).get("fingerprint")
    digits = (
        "fingerprint <code"
        f' title="{escape(str(fingerprint))}">{escape(str(fingerprint)[:_DIGITS])}…</code>'
        if fingerprint
        else ""
    )
    return " · ".join(part for part in (*parts, plan, digits) if part)
