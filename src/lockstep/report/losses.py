"""Finds lost worker processes in the events of a run, and computes the time that each loss cost."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from lockstep.base.words import counted, enumerated
from lockstep.pages.markup import Html, bar, element, swatch
from lockstep.pages.scale import format_count, format_duration
from lockstep.report.history import RunEvent, RunHistory, seconds_of

_Progress = Sequence[tuple[float, int]]
_NO_LOSS = frozenset({"preempted", "out-of-memory"})
"""Kinds of events after which a restart does not count as the loss of a worker."""

MAX_LOSSES = 100
_MOST_STEPS = 2**53
_PARTS = {"wait": "line-1", "open": "line-0", "steps again": "line-4"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLoss:
    """The loss of a worker process after which the run continued. A field is None if its value was
    not recorded."""

    time: float
    reason: str
    in_place: bool
    not_in_place: str = ""
    """Reason why the run did not recover in place, or empty."""
    state: str
    """Source of the restored state: "replica", "image", the name of a checkpoint, or empty for
    none."""
    step: int
    wait_seconds: float | None
    """Time from the loss of the worker until all processes were ready."""
    open_seconds: float
    """Time to restore the state after all processes were ready."""
    repeated_steps: int | None
    repeated_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """Time from the loss until the lost steps were repeated, as far as it is known."""
        return (self.wait_seconds or 0.0) + self.open_seconds + (self.repeated_seconds or 0.0)

    @property
    def kind(self) -> str:
        return "in-place" if self.in_place else "restart"

    @property
    def is_known(self) -> bool:
        return self.wait_seconds is not None and self.repeated_seconds is not None

    @property
    def end(self) -> float:
        """Time at which the lost steps had been repeated."""
        return self.time + self.seconds

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds}


def losses_of(run: RunHistory) -> list[WorkerLoss]:
    begins = [index for index, event in enumerate(run.events) if event.kind == "run-started"]
    starts = [run.events[begin:end] for begin, end in pairwise([*begins, len(run.events)])]
    steps = ((event.time, event.step) for event in run.events if event.step)
    progress = sorted([*run.curves.progress, *steps])
    losses = []
    for before, after, following in zip(starts, starts[1:], [*starts[2:], []], strict=False):
        own = _between(progress, before[0].time, following[0].time if following else math.inf)
        loss = _loss(before, after, _between(own, -math.inf, after[0].time))
        if loss is not None:
            seconds = _repetition(loss, own, goes_on=not following)
            losses.append(replace(loss, repeated_seconds=seconds))
    return losses


def loss_summary(run: RunHistory) -> str:
    losses = losses_of(run)
    if not losses:
        return ""
    in_place, others = (
        [each for each in losses if each.in_place is kind] for kind in (True, False)
    )
    parts = [f"{len(in_place)} recovered in place in {_durations(in_place)}"] if in_place else []
    parts += [f"{counted(len(others), 'restart')} ({_durations(others)})"] if others else []
    again = sum(each.repeated_steps or 0 for each in losses)
    more = "" if all(each.repeated_steps is not None for each in losses) else " or more"
    steps = f"{counted(again, 'step')}{more}" if again or more else "no step"
    return f"{counted(len(losses), 'loss')}: {', '.join(parts)}, {steps} computed again"


def _durations(found: Sequence[WorkerLoss]) -> str:
    if len(found) > 3:
        return " to ".join(
            format_duration(pick(each.seconds for each in found)) for pick in (min, max)
        )
    texts = [
        format_duration(each.seconds) + ("" if each.is_known else " or more") for each in found
    ]
    return enumerated(texts)


def _between(progress: _Progress, begin: float, end: float) -> _Progress:
    return progress[bisect_left(progress, (begin, 0)) : bisect_left(progress, (end, 0))]


def _loss(
    before: Sequence[RunEvent], after: Sequence[RunEvent], progress: _Progress
) -> WorkerLoss | None:
    if (recovered := _first(after, "recovered")) is not None:
        wait, opening = seconds_of(recovered, "wait_seconds"), seconds_of(recovered, "open_seconds")
        repeated = recovered.details.get("repeated_steps")
        is_count = type(repeated) is int and 0 <= repeated < _MOST_STEPS
        return WorkerLoss(
            time=recovered.time - wait - opening,
            reason=str(recovered.details.get("reason", "")),
            in_place=True,
            state=str(recovered.details.get("state", "")),
            step=recovered.step,
            wait_seconds=wait,
            open_seconds=opening,
            repeated_steps=repeated if is_count else None,
        )
    if (restarted := _first(after, "restarted")) is not None and _first(before, *_NO_LOSS) is None:
        return _restart(restarted, before, after, progress)
    return None


def _restart(
    restarted: RunEvent, before: Sequence[RunEvent], after: Sequence[RunEvent], progress: _Progress
) -> WorkerLoss:
    started, resumed, failed = after[0].time, _first(after, "resumed"), _first(before, "run-failed")
    opened = resumed or restarted
    state = str(resumed.details.get("checkpoint", "")) if resumed is not None else ""
    saves = (event for event in before if event.kind == "checkpoint-saved")
    saved = [event.details.get("checkpoint") for event in saves]
    seen: tuple[float, int] | None = None
    if failed is not None:
        seen = failed.time, failed.step
    # rank 0, which writes the events, was lost; another rank saved its state
    elif state and state not in saved and progress:
        seen = min(started, _time_of(opened.step, progress)), opened.step
    last = max([before[-1].time, *(time for time, _ in progress[-1:])])
    return WorkerLoss(
        time=last if seen is None else seen[0],
        reason=str(restarted.details.get("reason", "")),
        in_place=False,
        not_in_place=str(restarted.details.get("not_in_place", "")),
        state=state,
        step=opened.step,
        wait_seconds=None if seen is None else started - seen[0],
        open_seconds=opened.time - started,
        repeated_steps=None if seen is None else max(0, seen[1] - opened.step),
    )


def _repetition(loss: WorkerLoss, progress: _Progress, *, goes_on: bool) -> float | None:
    if not loss.repeated_steps:
        return None if loss.repeated_steps is None else 0.0
    reached, opened = loss.step + loss.repeated_steps, loss.end
    later = [(opened, loss.step), *(each for each in progress if each[0] > opened)]
    if later[-1][1] < reached:
        return None if goes_on else later[-1][0] - opened
    return _time_of(reached, later) - opened


def _time_of(step: int, progress: _Progress) -> float:
    place = next(
        (place for place, (_, done) in enumerate(progress) if done >= step), len(progress) - 1
    )
    (earlier, first), (later, last) = progress[max(0, place - 1)], progress[place]
    return later if last <= first else earlier + (later - earlier) * (step - first) / (last - first)


def _first(events: Sequence[RunEvent], *kinds: str) -> RunEvent | None:
    return next((event for event in events if event.kind in kinds), None)


def loss_list(run: RunHistory) -> Html | None:
    losses = losses_of(run)
    if not losses:
        return None
    longest = max(each.seconds for each in losses) or 1.0
    items = [_item(number, each, run, longest) for number, each in enumerate(losses, 1)]
    left_out = len(items) - MAX_LOSSES
    if left_out > 0:
        more = element("li", f"… {left_out:,} more, in events.jsonl …", kind="note")
        items[MAX_LOSSES // 2 : -MAX_LOSSES // 2] = [more]
    keys = [element("span", swatch(colour), part, kind="key") for part, colour in _PARTS.items()]
    return element(
        "div",
        element("p", loss_summary(run)),
        element("p", keys, kind="legend"),
        element("ol", items, kind="losses"),
        kind="card",
    )


def what_was_lost(loss: WorkerLoss, hosts: Sequence[str]) -> str:
    named = re.match(r"rank (\d{1,6})\b", loss.reason)
    if named is None or len(set(hosts)) < 2 or int(named[1]) >= len(hosts):
        return loss.reason
    return f"{named[0]} on {hosts[int(named[1])]}{loss.reason[named.end() :]}"


def how_it_went_on(loss: WorkerLoss) -> str:
    if loss.in_place:
        names = {"replica": "a replica's state", "image": "the image in memory"}
        state = names.get(loss.state, loss.state)
        return f"recovered in place, from {state} after step {format_count(loss.step)}"
    why = f"; not in place: {loss.not_in_place}" if loss.not_in_place else ""
    return f"restarted, from {loss.state or 'the beginning'}{why}"


def loss_times(loss: WorkerLoss) -> str:
    steps = "steps" if loss.repeated_steps is None else counted(loss.repeated_steps, "step")
    again = f"{steps} again {_seconds(loss.repeated_seconds)}"
    if loss.repeated_steps == 0:
        again = "no step again"
    more = "" if loss.is_known else " or more"
    wait, opening = _seconds(loss.wait_seconds), _seconds(loss.open_seconds)
    return f"{format_duration(loss.seconds)}{more}: wait {wait}, open {opening}, {again}"


def _item(number: int, loss: WorkerLoss, run: RunHistory, longest: float) -> Html:
    when = f"after {format_duration(max(0.0, loss.time - (run.began or 0.0)))}"
    if loss.repeated_steps is not None:
        when += f", step {format_count(loss.step + loss.repeated_steps)}"
    sizes = (loss.wait_seconds, loss.open_seconds, loss.repeated_seconds)
    coloured = zip(_PARTS.values(), sizes, strict=True)
    parts = [(colour, size, "") for colour, size in coloured if size]
    return element(
        "li",
        element("span", element("b", str(number), kind=f"loss {loss.kind}"), when, kind="when"),
        element(
            "div",
            element("strong", what_was_lost(loss, run.ranks.hosts)),
            element("div", how_it_went_on(loss)),
            bar(parts, longest),
            element("small", loss_times(loss)),
        ),
    )


def _seconds(value: float | None) -> str:
    return "not recorded" if value is None else format_duration(value)
