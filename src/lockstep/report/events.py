"""Shows the events of runs in a timeline, in charts and in a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.base.events import EVENTS, Severity, severity
from lockstep.pages.chart import EventMark
from lockstep.pages.markup import Column, Html, element, paragraph, table
from lockstep.pages.scale import format_count, format_date, format_duration
from lockstep.pages.timeline import TimeMark, timeline
from lockstep.report.history import RunEvent, RunHistory
from lockstep.report.losses import (
    how_it_went_on,
    loss_summary,
    loss_times,
    losses_of,
    what_was_lost,
)

MAX_ROWS = 200
_NEARBY = 0.004
_ON_CURVES = {"resumed", "recovered", "plan-changed", "preempted", *EVENTS["error"]}
_ORDER: tuple[Severity, ...] = ("info", "warning", "error")
_KEYS = (
    ("span", "running"),
    ("event error", "error"),
    ("event warning", "warning"),
    ("event info", "other"),
)
_LOSS_KEYS = (("loss in-place", "loss, recovered in place"), ("loss restart", "loss, restart"))
_REASONS = ("reason", "error", "text")
_MAIN_DETAILS = ("reason", "error", "change", "text", "checkpoint", "plan")


@dataclass(frozen=True, slots=True)
class EventGroup:
    events: Sequence[RunEvent]

    @property
    def kind(self) -> str:
        return self.events[0].kind

    @property
    def severity(self) -> Severity:
        return severity(self.kind)

    @property
    def text(self) -> str:
        return self.kind if len(self.events) == 1 else f"{len(self.events):,} × {self.kind}"


def group_consecutive(events: Iterable[RunEvent]) -> list[EventGroup]:
    groups: list[list[RunEvent]] = []
    for event in events:
        if groups and groups[-1][0].kind == event.kind and severity(event.kind) != "error":
            groups[-1].append(event)
        else:
            groups.append([event])
    return [EventGroup(each) for each in groups]


def curve_marks(events: Iterable[RunEvent]) -> list[EventMark]:
    return [
        EventMark(event.step, severity(event.kind) == "error", f"{event.kind}{_because(event)}")
        for event in events
        if event.kind in _ON_CURVES
    ]


def event_details(event: RunEvent) -> str:
    main = {name: event.details[name] for name in _MAIN_DETAILS if name in event.details}
    texts = {name: _text(value) for name, value in {**main, **event.details}.items()}
    return ", ".join(
        text if name in _REASONS else f"{name.replace('_', ' ')} {text}"
        for name, text in texts.items()
    )


def event_timeline(runs: Sequence[RunHistory]) -> Html:
    spans = [
        run.last_time - run.began
        for run in runs
        if run.last_time is not None and run.began is not None
    ]
    if not spans:
        return paragraph("No events were recorded.", kind="note")
    seconds = max(spans)
    kinds = {f"loss {loss.kind}" for run in runs for loss in losses_of(run)}
    return timeline(
        [(run.name, list(_time_marks(run, seconds))) for run in runs],
        seconds=seconds,
        keys=[*_KEYS, *(each for each in _LOSS_KEYS if each[0] in kinds)],
        spoken="Timeline of events. " + " ".join(map(_spoken, runs)),
    )


def _time_marks(run: RunHistory, seconds: float) -> Iterator[TimeMark]:
    began = run.began or 0.0
    for number, each in enumerate(run.attempts, 1):
        took = each.ended - each.began
        tip = f"attempt {number}: {each.end or 'end not recorded'}, after {format_duration(took)}"
        yield TimeMark(kind="span", at=each.began - began, seconds=took, tip=tip)
    for number, loss in enumerate(losses_of(run), 1):
        lost = what_was_lost(loss, run.ranks.hosts)
        yield TimeMark(
            kind=f"loss {loss.kind}",
            at=loss.time - began,
            seconds=loss.seconds,
            tip=f"loss {number}: {lost}; {how_it_went_on(loss)}; {loss_times(loss)}",
            label=str(number),
        )
    for group in _group_nearby(run.events, _NEARBY * max(seconds, 1.0)):
        first = group.events[0]
        after = format_duration(first.time - began)
        tip = f"{group.text} at step {format_count(first.step)}, after {after}{_because(first)}"
        yield TimeMark(kind=f"event {group.severity}", at=first.time - began, tip=tip)


def _group_nearby(events: Iterable[RunEvent], seconds: float) -> list[EventGroup]:
    """Group events of one kind that would overlap. The groups with the most severe events come
    last."""
    found: dict[str, list[list[RunEvent]]] = {}
    for event in events:
        groups = found.setdefault(event.kind, [])
        if groups and event.time - groups[-1][0].time < seconds:
            groups[-1].append(event)
        else:
            groups.append([event])
    made = (EventGroup(each) for groups in found.values() for each in groups)
    return sorted(made, key=lambda group: _ORDER.index(group.severity))


def event_table(run: RunHistory) -> Html:
    """Put consecutive events of one kind into one row. Of more than `MAX_ROWS` rows, show only the
    first and last."""
    groups = group_consecutive(run.events)
    left_out = len(groups) - MAX_ROWS
    half = MAX_ROWS // 2
    shown = groups if left_out <= 0 else [*groups[:half], *groups[-half:]]
    rows: list[list[Html]] = [list(_cells(group, run.began or 0.0)) for group in shown]
    if left_out > 0:
        more = f"… {left_out:,} more, in events.jsonl …"
        rows.insert(half, [element("td", more, colspan=4, kind="note")])
    heads: list[Column | str] = [Column("after"), Column("step"), "event", ""]
    return table(heads, rows, kind="events", box="wide")


def _cells(group: EventGroup, began: float) -> Iterator[Html]:
    first, last = group.events[0], group.events[-1]
    steps = list(dict.fromkeys(format_count(each.step) for each in (first, last)))
    when = list(dict.fromkeys(format_date(each.time, to_the_second=True) for each in (first, last)))
    after = format_duration(first.time - began)
    yield element("td", after, kind="number", title=" to ".join(when))
    yield element("td", "–".join(steps), kind="number")
    yield element("td", element("b", kind=f"event {group.severity}"), group.text, kind="kind")
    several = " (the last one)" if first is not last else ""
    yield element("td", event_details(last) + several, kind="details")


def _because(event: RunEvent) -> str:
    names = [name for name in (*_REASONS, "change") if name in event.details]
    return f": {_truncate(_text(event.details[names[0]]), 160)}" if names else ""


def _truncate(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _truncate(text, 2000)


def _spoken(run: RunHistory) -> str:
    counts = Counter(event.kind for event in run.events).items()
    text = ", ".join(kind if number == 1 else f"{number} times {kind}" for kind, number in counts)
    lost = loss_summary(run)
    return f"{run.name}: {text or 'no events'}.{f' {lost}.' if lost else ''}"
