"""What is said of runs in numbers and words, beside the curves. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from lockstep.report.chart import COLOURS, summary
from lockstep.report.heat import means
from lockstep.report.history import Run, State
from lockstep.report.scale import Unit, count, duration, number
from lockstep.report.told import clock, details

UNITS: dict[str, Unit] = {"memory_bytes": "bytes", "mfu": "share"}
"""Of the metrics that have one."""
SERIES = 400
"""In the table of numbers, at most."""

_DIGITS = 12
"""Of a fingerprint."""
_WORDS: dict[State, str] = {
    "ended": "ended",
    "running": "running",
    "unfinished": "cut off",
    "preempted": "stopped, can go on",
    "failed": "failed",
}


def state(run: Run) -> str:
    """How the run stands, as a coloured word."""
    return f'<span class="state {run.state}">{_WORDS[run.state]}</span>'


def why(run: Run) -> str:
    """More about how the run stands, in words; empty where there is nothing to say."""
    ends = {"failed": "run-failed", "preempted": "preempted", "ended": "stopped"}
    told = next((event for event in reversed(run.events) if event.kind == ends.get(run.state)), None)
    if told is not None:
        return details(told)
    if run.state == "running" and run.holder is not None:
        return f"process {run.holder.pid} on {run.holder.host} holds the directory"
    if run.state == "unfinished":
        if run.holder is not None and run.holder.alive is None:
            return f"process {run.holder.pid} on {run.holder.host}, another host, held the directory: it may still be running"
        return "no word of its end was written: it was killed, or its machine went away"
    return ""


def seconds(run: Run) -> float:
    """That it ran, without what lies between its attempts."""
    return sum(each.ended - each.began for each in run.attempts)


def wanted(run: Run) -> int | None:
    """Steps that the recipe has; None where it counts epochs, or is none."""
    recipe = run.facts.get("recipe")
    found = recipe.get("steps") if isinstance(recipe, Mapping) else None
    return found if isinstance(found, int) else None


def facts(run: Run) -> list[tuple[str, str]]:
    """The few numbers that are asked for first, as name and HTML."""
    series = run.curves.series
    total = wanted(run)
    found = [("steps", count(run.steps) + (f"<small> of {count(total)}</small>" if total and total != run.steps else ""))]
    if "loss" in series:
        found.append(("loss", number(series["loss"].values[-1])))
    for name in series:
        if name.startswith("evaluation/"):
            found.append((name.replace("/", " "), number(series[name].values[-1])))
    for name, label in (("samples_per_second", "samples/s"), ("weight_per_second", "weight/s"), ("mfu", "MFU")):
        if name in series and (values := series[name].finite()):
            found.append((f"{label}, median", number(median(values), UNITS.get(name, ""))))
    if "memory_bytes" in series and (values := series["memory_bytes"].finite()):
        found.append(("memory, peak", number(max(values), "bytes")))
    found.append(("running", duration(seconds(run))))
    if len(run.attempts) > 1:
        found.append(("starts", count(len(run.attempts))))
    if isinstance(world_size := run.facts.get("world_size"), int):
        found.append(("processes", count(world_size)))
    return found


def tiles(run: Run) -> str:
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in facts(run))
    return f'<dl class="tiles">{cells}</dl>'


def overview(runs: Sequence[Run]) -> str:
    """All runs, one a row."""
    columns: dict[str, None] = {}
    told = [dict(facts(run)) for run in runs]
    for each in told:
        columns.update(dict.fromkeys(each))
    heads = "".join(f'<th scope="col" class="number">{escape(name)}</th>' for name in columns)
    rows = []
    for place, (run, each) in enumerate(zip(runs, told, strict=True)):
        cells = "".join(f'<td class="number">{each.get(name, "–")}</td>' for name in columns)
        print_ = (run.result or {}).get("fingerprint")
        digits = f'<td><code title="{print_}">{escape(str(print_)[:_DIGITS])}</code></td>' if print_ else "<td>–</td>"
        name = f'<th scope="row">{key(run, place)}</th><td>{state(run)}</td>'
        plan = f'<td class="plan"><code>{_breakable(run.plan)}</code></td>'
        rows.append(f'<tr data-run="{place}">{name}{cells}{plan}{digits}</tr>')
    head = f'<tr><th scope="col">run</th><th scope="col"></th>{heads}<th scope="col">plan</th><th scope="col">fingerprint</th></tr>'
    return _table(head, rows) + _alike(runs)


def key(run: Run, place: int) -> str:
    """The run's name, with the colour of its curves."""
    return (
        f'<span class="key" data-run="{place}"><b class="line" style="--colour:var(--line-{place % COLOURS})"></b>{escape(run.name)}</span>'
    )


def _alike(runs: Sequence[Run]) -> str:
    found: dict[str, list[str]] = {}
    for run in runs:
        if print_ := (run.result or {}).get("fingerprint"):
            found.setdefault(str(print_), []).append(run.name)
    said = [f"The same model, bit for bit: {', '.join(names)}." for names in found.values() if len(names) > 1]
    return "".join(f'<p class="note">{escape(text)}</p>' for text in said)


def flat(value: Any, path: str = "") -> dict[str, str]:
    """JSON as text by dotted path. What is null or empty is left out."""
    if isinstance(value, Mapping):
        found = {}
        for name, item in value.items():
            found.update(flat(item, f"{path}.{name}" if path else str(name)))
        return found
    if value is None or value == []:
        return {}
    return {path: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}


def sections(run: Run) -> dict[str, dict[str, str]]:
    """What run.json says, by what it is about."""
    facts = run.facts
    plan = {name: value for name, value in (facts.get("plan") or {}).items() if name != "text"}
    environment = dict(facts.get("environment") or {})
    command = environment.pop("command_line", None)
    said = {"command line": shlex.join(map(str, command))} if isinstance(command, list) else {}
    others = {name: value for name, value in facts.items() if name not in ("recipe", "plan", "environment", "not_finite")}
    return {
        "Recipe": flat(facts.get("recipe") or {}),
        "Plan": flat(plan),
        "Environment": {**flat(others), **said, **flat(environment)},
        "Result": flat({name: value for name, value in (run.result or {}).items() if name != "run_dir"}),
    }


def differences(runs: Sequence[Run]) -> list[tuple[str, str, list[str | None]]]:
    """What is not the same in all runs: what it is of (recipe, plan, environment), the field, its value in each; None: it has none."""
    told = [sections(run) for run in runs]
    found: list[tuple[str, str, list[str | None]]] = []
    for about in ("Recipe", "Plan", "Environment"):
        names = dict.fromkeys(name for each in told for name in each[about])
        for name in names:
            values = [each[about].get(name) for each in told]
            if len(set(values)) > 1 and name != "started":
                found.append((about, name, values))
    return found


def differing(runs: Sequence[Run]) -> str:
    """The table of what differs."""
    found = differences(runs)
    heads = "".join(f'<th scope="col">{key(run, place)}</th>' for place, run in enumerate(runs))
    rows, before = [], ""
    for about, name, values in found:
        if about != before:
            rows.append(f'<tr class="about"><th colspan="{len(runs) + 1}" scope="rowgroup">{about}</th></tr>')
            before = about
        cells = "".join(_code(value) if value is not None else "<td>–</td>" for value in values)
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    same = [about.lower() for about in ("Recipe", "Plan") if about not in {each[0] for each in found}]
    note = f'<p class="note">The {" and the ".join(same)} {"are" if len(same) > 1 else "is"} the same.</p>' if same else ""
    if not rows:
        return note
    return _table(f'<tr><th scope="col"></th>{heads}</tr>', rows) + note


def described(run: Run, place: int, *, several: bool) -> str:
    """Recipe, plan, environment and result of a run."""
    blocks = []
    for about, values in sections(run).items():
        if values:
            rows = "".join(f'<tr><th scope="row">{escape(name)}</th>{_code(value)}</tr>' for name, value in values.items())
            blocks.append(f'<section class="card"><h3>{about}</h3><table class="facts"><tbody>{rows}</tbody></table></section>')
    body = f'<div class="columns">{"".join(blocks)}</div>'
    return f"<details><summary>{key(run, place)}</summary>{body}</details>" if several else body


def numbers(runs: Sequence[Run]) -> str:
    """Every curve in numbers: what the pictures show, for whom cannot see them."""
    heads = "".join(
        f'<th scope="col" class="number">{name}</th>'
        for name in ("values", "first", "last", "mean", "least", "at step", "greatest", "at step", "not finite")
    )
    rows = []
    names = dict.fromkeys(name for run in runs for name in run.curves.series)
    pairs = [(name, place, run) for name in names for place, run in enumerate(runs) if name in run.curves.series]
    for name, place, run in pairs[:SERIES]:
        told = summary(run.curves.series[name])
        unit = UNITS.get(name, "")
        said = [count(told["values"]), *(_said(told[each], unit) for each in ("first", "last", "mean", "min")), _said(told["min_step"])]
        said += [_said(told["max"], unit), _said(told["max_step"]), count(told["not_finite"]) if told["not_finite"] else ""]
        cells = "".join(f'<td class="number">{cell}</td>' for cell in said)
        of = f"<td>{key(run, place)}</td>" if len(runs) > 1 else ""
        rows.append(f'<tr data-run="{place}"><th scope="row">{escape(name)}</th>{of}{cells}</tr>')
    of = '<th scope="col">run</th>' if len(runs) > 1 else ""
    more = f'<p class="note">{len(pairs) - SERIES:,} more are in metrics.jsonl.</p>' if len(pairs) > SERIES else ""
    return _table(f'<tr><th scope="col">metric</th>{of}{heads}</tr>', rows) + more


def _said(value: float | None, unit: Unit = "") -> str:
    return "–" if value is None else number(value, unit)


def _table(head: str, rows: Sequence[str]) -> str:
    return f'<div class="wide card"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _code(text: str) -> str:
    return f"<td><code>{_breakable(text)}</code></td>"


def _breakable(text: str) -> str:
    """Long words may be broken after commas, dots and slashes."""
    return escape(text).replace(",", ",<wbr>").replace("/", "/<wbr>").replace("._", ".<wbr>_")


def as_json(runs: Sequence[Run]) -> dict[str, Any]:
    """The report for programs. A number that is NaN or infinite is null."""
    return {
        "runs": [
            {
                "name": run.name,
                "path": run.path,
                "state": run.state,
                "why": why(run),
                "steps": run.steps,
                "seconds": seconds(run),
                "starts": len(run.attempts),
                "plan": run.plan,
                "world_size": run.facts.get("world_size"),
                "fingerprint": (run.result or {}).get("fingerprint"),
                "series": {name: summary(series) for name, series in run.curves.series.items()},
                "ranks": [{"host": host, **each} for host, each in zip(_hosts(run), means(run.ranks), strict=True)],
                "events": [{"time": event.time, "event": event.kind, "step": event.step, **event.details} for event in run.events],
                "unreadable_lines": dict(run.unreadable),
            }
            for run in runs
        ],
        "differences": [{"about": about.lower(), "field": name, "values": values} for about, name, values in differences(runs)],
    }


def _hosts(run: Run) -> list[str | None]:
    world = len(means(run.ranks))
    return [*run.ranks.hosts[:world], *[None] * (world - len(run.ranks.hosts))]


def lines(runs: Sequence[Run]) -> list[str]:
    """Each run in one line of plain text, for a terminal."""
    found = []
    for run in runs:
        loss = run.curves.series.get("loss")
        told = f", loss {number(loss.values[-1])}" if loss is not None and loss.values else ""
        reason = why(run) if run.state != "running" else ""
        found.append(f"{run.name}: {_WORDS[run.state]}, step {run.steps}{told}{f' ({reason})' if reason else ''}")
    return found


def subtitle(run: Run) -> str:
    """Where and when, below the title."""
    environment = run.facts.get("environment") or {}
    device = (environment.get("device") or {}).get("name", "")
    began = f"began {clock(run.began)}" if run.began is not None else ""
    parts = [escape(text) for text in (began, str(environment.get("host", "")), str(device)) if text]
    plan = f"<code>{_breakable(run.plan)}</code>" if run.plan else ""
    print_ = (run.result or {}).get("fingerprint")
    digits = f'fingerprint <code title="{escape(str(print_))}">{escape(str(print_)[:_DIGITS])}…</code>' if print_ else ""
    return " · ".join(part for part in (*parts, plan, digits) if part)
