"""The events of runs, as a timeline and as a table in HTML. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from lockstep.base.foreign_text import escape
from lockstep.report.chart import COLOURS, EventMark, axis_labels
from lockstep.report.history import RunEvent, RunHistory
from lockstep.report.loss_list import how_it_went_on, times, what_was_lost
from lockstep.report.losses import WorkerLoss, losses, summary
from lockstep.report.scale import Scale, format_count, format_duration, time_scale

Severity = Literal["error", "warning", "info"]

MAX_ROWS = 200
_NEARBY = 0.004
"""Events of one kind that are closer together than this share of the timeline are drawn as one."""
_SEVERITIES: dict[str, Severity] = {
    **dict.fromkeys(
        (
            "run-failed",
            "rescue-failed",
            "out-of-memory",
            "hang",
            "divergence",
            "checkpoint-failed",
            "checkpoint-damaged",
        ),
        "error",
    ),
    **dict.fromkeys(("preempted", "restarted", "recovered", "plan-changed"), "warning"),
    **dict.fromkeys(("step-skipped", "straggler", "launcher-overrides-script"), "warning"),
}
_ON_CURVES = frozenset({"resumed", "recovered", "plan-changed", "preempted"}) | {
    kind for kind, severity in _SEVERITIES.items() if severity == "error"
}
_ORDER: tuple[Severity, ...] = ("info", "warning", "error")
_KEYS = (
    ("span", "running"),
    ("event error", "error"),
    ("event warning", "warning"),
    ("event info", "other"),
)
_LOSS_KEYS = (("loss in-place", "loss, recovered in place"), ("loss restart", "loss, restart"))
_APART = 0.06
"""Numbers of losses that are closer together than this share of the timeline are left out."""
_MAIN_DETAILS = ("reason", "error", "change", "text", "checkpoint", "plan")


@dataclass(frozen=True, slots=True)
class EventGroup:
    """Consecutive events of one kind."""

    events: Sequence[RunEvent]

    @property
    def kind(self) -> str:
        return self.events[0].kind

    @property
    def severity(self) -> Severity:
        return _SEVERITIES.get(self.kind, "info")


def group_consecutive(events: Iterable[RunEvent]) -> list[EventGroup]:
    """Return consecutive events of one kind as one group. Each error is a group of its own."""
    groups: list[list[RunEvent]] = []
    for event in events:
        if groups and groups[-1][0].kind == event.kind and _SEVERITIES.get(event.kind) != "error":
            groups[-1].append(event)
        else:
            groups.append([event])
    return [EventGroup(each) for each in groups]


def marks(events: Iterable[RunEvent]) -> list[EventMark]:
    """Return marks for the events that explain a change in a curve: errors, resumptions and changes
    of the plan."""
    shown = (event for event in events if event.kind in _ON_CURVES)
    return [
        EventMark(
            event.step, _SEVERITIES.get(event.kind) == "error", f"{event.kind}{_because(event)}"
        )
        for event in shown
    ]


def details(event: RunEvent) -> str:
    """Return the event's details as text, the most informative first."""
    names = sorted(
        event.details,
        key=lambda name: _MAIN_DETAILS.index(name) if name in _MAIN_DETAILS else len(_MAIN_DETAILS),
    )
    return ", ".join(
        (
            f"{name} {_value(event.details[name])}"
            if name not in ("reason", "error", "text")
            else _value(event.details[name])
        )
        for name in names
    )


def lanes(runs: Sequence[RunHistory]) -> str:
    """Return the timeline, with a lane for each run. Each lane begins at the start of its run."""
    spans = [
        run.last_time - run.began
        for run in runs
        if run.last_time is not None and run.began is not None
    ]
    if not spans:
        return '<p class="note">No events were recorded.</p>'
    x_scale = time_scale(max(spans))
    rows = "".join(
        _lane(run, index, x_scale, several=len(runs) > 1) for index, run in enumerate(runs)
    )
    grid = "".join(
        f'<i class="tick" style="left:{100 * x_scale.position(tick):.2f}%"></i>'
        for tick in x_scale.ticks
    )
    aria_text = escape("Timeline of events. " + " ".join(map(_aria_text, runs)))
    kinds = {f"loss {_loss_kind(loss)}" for run in runs for loss in losses(run)}
    shown = [*_KEYS, *(key for key in _LOSS_KEYS if key[0] in kinds)]
    keys = "".join(f'<span class="key"><b class="{look}"></b>{word}</span>' for look, word in shown)
    caption = (
        '<figcaption><span class="title">time since the start</span><span'
        f' class="legend">{keys}</span></figcaption>'
    )
    kind = "plot time names" if len(runs) > 1 else "plot time"
    plot = (
        f'<div class="{kind}" role="img"'
        f' aria-label="{aria_text}">{grid}{rows}{axis_labels(x_scale, "", None)}</div>'
    )
    return f'<figure class="chart">{caption}{plot}</figure>'


def _lane(run: RunHistory, index: int, x_scale: Scale, *, several: bool) -> str:
    began = run.began or 0.0

    def left(time: float) -> str:
        return f"left:{100 * x_scale.position(time - began):.2f}%"

    parts = [f'<span class="run">{escape(run.name)}</span>'] if several else []
    for number, each in enumerate(run.attempts, 1):
        tip = (
            f"attempt {number}: {each.end or 'end not recorded'}, after"
            f" {format_duration(each.ended - each.began)}"
        )
        width = f"width:{100 * x_scale.position(each.ended - each.began):.2f}%"
        parts.append(
            f'<b class="span" data-tip="{escape(tip)}" style="{left(each.began)};{width}"></b>'
        )
    parts += _losses(run, x_scale, numbered=not several)
    for group in _group_nearby(run.events, x_scale):
        first = group.events[0]
        tip = (
            f"{_many(group)} at step {format_count(first.step)}, after"
            f" {format_duration(first.time - began)}{_because(first)}"
        )
        parts.append(
            f'<b class="event {group.severity}" data-tip="{escape(tip)}"'
            f' style="{left(first.time)}"></b>'
        )
    return (
        f'<div class="lane" data-run="{index}"'
        f' style="--colour:var(--line-{index % COLOURS})">{"".join(parts)}</div>'
    )


def _losses(run: RunHistory, x_scale: Scale, *, numbered: bool) -> Iterator[str]:
    """Return a band for each loss, until the run had done as many steps as before, and the loss's
    number above it."""
    above = -1.0
    for number, loss in enumerate(losses(run), 1):
        at = max(0.0, x_scale.position(loss.time - (run.began or 0.0)))
        tip = (
            f"loss {number}: {what_was_lost(loss, run.ranks.hosts)}; {how_it_went_on(loss)};"
            f" {times(loss)}"
        )
        place = (
            f"left:{100 * at:.2f}%;width:{100 * min(1 - at, x_scale.position(loss.seconds)):.2f}%"
        )
        yield f'<b class="loss {_loss_kind(loss)}" data-tip="{escape(tip)}" style="{place}"></b>'
        if numbered and at - above > _APART:
            above = at
            yield f'<i class="above" style="left:{100 * at:.2f}%">{number}</i>'


def _loss_kind(loss: WorkerLoss) -> str:
    return "in-place" if loss.in_place else "restart"


def _group_nearby(events: Iterable[RunEvent], x_scale: Scale) -> list[EventGroup]:
    """Return events of one kind that would overlap as one group. The most severe groups come last,
    and so on top."""
    found: dict[str, list[list[RunEvent]]] = {}
    for event in events:
        groups = found.setdefault(event.kind, [])
        if groups and x_scale.position(event.time - groups[-1][0].time) < _NEARBY:
            groups[-1].append(event)
        else:
            groups.append([event])
    return sorted(
        (EventGroup(each) for groups in found.values() for each in groups),
        key=lambda group: _ORDER.index(group.severity),
    )


def table(run: RunHistory) -> str:
    """Return the table of a run's events. Beyond `MAX_ROWS` groups, those in the middle are only
    counted."""
    groups = group_consecutive(run.events)
    left_out = len(groups) - MAX_ROWS
    shown = groups if left_out <= 0 else [*groups[: MAX_ROWS // 2], *groups[-MAX_ROWS // 2 :]]
    rows = [_row(group, run.began or 0.0) for group in shown]
    if left_out > 0:
        rows.insert(
            MAX_ROWS // 2,
            f'<tr><td colspan="4" class="note">… {left_out:,} more, in events.jsonl …</td></tr>',
        )
    heads = (
        '<th scope="col" class="number">after</th><th scope="col" class="number">step</th><th'
        ' scope="col">event</th>'
    )
    head = f'<thead><tr>{heads}<th scope="col"></th></tr></thead>'
    return (
        '<div class="wide"><table'
        f' class="events">{head}<tbody>{"".join(rows)}</tbody></table></div>'
    )


def _row(group: EventGroup, began: float) -> str:
    first, last = group.events[0], group.events[-1]
    steps = (
        format_count(first.step)
        if first.step == last.step
        else f"{format_count(first.step)}–{format_count(last.step)}"
    )
    when = _clock(first.time) if first is last else f"{_clock(first.time)} to {_clock(last.time)}"
    return (
        f'<tr><td class="number" title="{when}">{format_duration(first.time - began)}</td><td'
        f' class="number">{steps}</td>'
        f'<td class="kind"><b class="event {group.severity}"></b>{escape(_many(group))}</td>'
        f'<td class="details">{escape(details(last)) + (" (the last one)" if first is not last else "")}</td></tr>'
    )


def clock(seconds: float) -> str:
    """Return date and time of day, in UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _many(group: EventGroup) -> str:
    return group.kind if len(group.events) == 1 else f"{len(group.events):,} × {group.kind}"


def _because(event: RunEvent) -> str:
    reason = next(
        (
            event.details[name]
            for name in ("reason", "error", "text", "change")
            if name in event.details
        ),
        None,
    )
    return "" if reason is None else f": {_truncate(_value(reason), 160)}"


def _truncate(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _value(value: Any) -> str:
    return _truncate(
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 2000
    )


def _aria_text(run: RunHistory) -> str:
    counts: dict[str, int] = {}
    for event in run.events:
        counts[event.kind] = counts.get(event.kind, 0) + 1
    text = ", ".join(
        kind if number == 1 else f"{number} times {kind}" for kind, number in counts.items()
    )
    lost = f" {summary(run)}." if summary(run) else ""
    return f"{run.name}: {text or 'no events'}.{lost}"
