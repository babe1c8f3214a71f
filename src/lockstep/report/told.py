"""What happened to a run, in words, on a line of time and in a table. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any, Literal

from lockstep.report.chart import COLOURS, Mark, labels
from lockstep.report.history import Happened, Run
from lockstep.report.scale import Scale, count, duration, time_scale

Weight = Literal["grave", "warning", "plain"]

ROWS = 200
"""Of the table of one run, at most."""
_NEAR = 0.004
"""Events of one kind that are nearer to each other than this share of the line are drawn as one."""
_WEIGHTS: dict[str, Weight] = {
    **dict.fromkeys(
        ("run-failed", "rescue-failed", "out-of-memory", "hang", "divergence", "checkpoint-failed", "checkpoint-damaged"), "grave"
    ),
    **dict.fromkeys(("preempted", "restarted", "plan-changed", "step-skipped", "straggler", "launcher-overrides-script"), "warning"),
}
_ON_CURVES = frozenset({"resumed", "plan-changed", "preempted"}) | {kind for kind, weight in _WEIGHTS.items() if weight == "grave"}
_ORDER: tuple[Weight, ...] = ("plain", "warning", "grave")
_KEYS = (("span", "running"), ("event grave", "went wrong"), ("event warning", "to be noted"), ("event plain", "other"))
_TELLING = ("reason", "error", "change", "text", "checkpoint", "plan")
"""Details that say the most, and are told first."""


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring events of one kind."""

    events: Sequence[Happened]

    @property
    def kind(self) -> str:
        return self.events[0].kind

    @property
    def weight(self) -> Weight:
        return _WEIGHTS.get(self.kind, "plain")


def grouped(events: Iterable[Happened]) -> list[Group]:
    """Events of one kind that follow each other as one group, but for those that are grave."""
    found: list[list[Happened]] = []
    for event in events:
        if found and found[-1][0].kind == event.kind and _WEIGHTS.get(event.kind) != "grave":
            found[-1].append(event)
        else:
            found.append([event])
    return [Group(each) for each in found]


def marks(events: Iterable[Happened]) -> list[Mark]:
    """Those that change how a curve is to be read."""
    shown = (event for event in events if event.kind in _ON_CURVES)
    return [Mark(event.step, _WEIGHTS.get(event.kind) == "grave", f"{event.kind}{_because(event)}") for event in shown]


def details(event: Happened) -> str:
    """What the event says besides its kind, the most telling first."""
    names = sorted(event.details, key=lambda name: _TELLING.index(name) if name in _TELLING else len(_TELLING))
    return ", ".join(
        f"{name} {_value(event.details[name])}" if name not in ("reason", "error", "text") else _value(event.details[name])
        for name in names
    )


def lanes(runs: Sequence[Run]) -> str:
    """All runs on one line of time, each from its own beginning."""
    spans = [run.heard - run.began for run in runs if run.heard is not None and run.began is not None]
    if not spans:
        return '<p class="note">Nothing was written down.</p>'
    across = time_scale(max(spans))
    rows = "".join(_lane(run, place, across, several=len(runs) > 1) for place, run in enumerate(runs))
    grid = "".join(f'<i class="tick" style="left:{100 * across.place(tick):.2f}%"></i>' for tick in across.ticks)
    spoken = escape("What happened when. " + " ".join(map(_spoken, runs)), quote=True)
    keys = "".join(f'<span class="key"><b class="{look}"></b>{word}</span>' for look, word in _KEYS)
    caption = f'<figcaption><span class="title">time since the beginning</span><span class="legend">{keys}</span></figcaption>'
    kind = "plot time names" if len(runs) > 1 else "plot time"
    plot = f'<div class="{kind}" role="img" aria-label="{spoken}">{grid}{rows}{labels(across, "", None)}</div>'
    return f'<figure class="chart">{caption}{plot}</figure>'


def _lane(run: Run, place: int, across: Scale, *, several: bool) -> str:
    began = run.began or 0.0

    def left(time: float) -> str:
        return f"left:{100 * across.place(time - began):.2f}%"

    parts = [f'<span class="run">{escape(run.name)}</span>'] if several else []
    for number, each in enumerate(run.attempts, 1):
        tip = f"start {number}: {each.end or 'nothing was said of its end'}, after {duration(each.ended - each.began)}"
        width = f"width:{100 * across.place(each.ended - each.began):.2f}%"
        parts.append(f'<b class="span" data-tip="{escape(tip, quote=True)}" style="{left(each.began)};{width}"></b>')
    for group in _near(run.events, across):
        first = group.events[0]
        tip = f"{_many(group)} at step {count(first.step)}, after {duration(first.time - began)}{_because(first)}"
        parts.append(f'<b class="event {group.weight}" data-tip="{escape(tip, quote=True)}" style="{left(first.time)}"></b>')
    return f'<div class="lane" data-run="{place}" style="--colour:var(--line-{place % COLOURS})">{"".join(parts)}</div>'


def _near(events: Iterable[Happened], across: Scale) -> list[Group]:
    """Events of one kind that would be drawn over each other as one group, the gravest last."""
    found: dict[str, list[list[Happened]]] = {}
    for event in events:
        groups = found.setdefault(event.kind, [])
        if groups and across.place(event.time - groups[-1][0].time) < _NEAR:
            groups[-1].append(event)
        else:
            groups.append([event])
    return sorted((Group(each) for groups in found.values() for each in groups), key=lambda group: _ORDER.index(group.weight))


def table(run: Run) -> str:
    """Every event of a run; where there are too many, those in the middle are left out, and counted."""
    groups = grouped(run.events)
    left_out = len(groups) - ROWS
    shown = groups if left_out <= 0 else [*groups[: ROWS // 2], *groups[-ROWS // 2 :]]
    rows = [_row(group, run.began or 0.0) for group in shown]
    if left_out > 0:
        rows.insert(ROWS // 2, f'<tr><td colspan="4" class="note">… {left_out:,} more, in events.jsonl …</td></tr>')
    heads = (
        '<th scope="col" class="number">after</th><th scope="col" class="number">step</th><th scope="col">event</th><th scope="col"></th>'
    )
    return f'<div class="wide"><table class="events"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _row(group: Group, began: float) -> str:
    first, last = group.events[0], group.events[-1]
    steps = count(first.step) if first.step == last.step else f"{count(first.step)}–{count(last.step)}"
    when = _clock(first.time) if first is last else f"{_clock(first.time)} to {_clock(last.time)}"
    return (
        f'<tr><td class="number" title="{when}">{duration(first.time - began)}</td><td class="number">{steps}</td>'
        f'<td class="kind"><b class="event {group.weight}"></b>{escape(_many(group))}</td>'
        f'<td class="said">{escape(details(last)) + (" (the last)" if first is not last else "")}</td></tr>'
    )


def clock(seconds: float) -> str:
    """Date and time of day, in UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _many(group: Group) -> str:
    return group.kind if len(group.events) == 1 else f"{len(group.events):,} × {group.kind}"


def _because(event: Happened) -> str:
    telling = next((event.details[name] for name in ("reason", "error", "text", "change") if name in event.details), None)
    return "" if telling is None else f": {_cut(_value(telling), 160)}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _value(value: Any) -> str:
    return _cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 2000)


def _spoken(run: Run) -> str:
    counts: dict[str, int] = {}
    for event in run.events:
        counts[event.kind] = counts.get(event.kind, 0) + 1
    said = ", ".join(kind if number == 1 else f"{number} times {kind}" for kind, number in counts.items())
    return f"{run.name}: {said or 'no events'}."
