"""Losses of workers, and what the run did until it had as many steps as before. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep.report.history import RunEvent, RunHistory, seconds_of
from lockstep.report.scale import format_count, format_duration

_Progress = Sequence[tuple[float, int]]
"""Times, rising, and the optimizer steps done then."""
_NO_LOSS = frozenset({"preempted", "out-of-memory"})
"""A start after one of these follows from no loss: another machine joined, or the plan was
changed."""

_MOST_STEPS = 2**53


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLoss:
    """A loss after which the run went on. None: the run did not record it."""

    time: float
    """When it was seen, in seconds since 1970. If that was not recorded: the time of the last
    record before it."""
    reason: str
    in_place: bool
    not_in_place: str = ""
    """Why all had to start again, if the run was to recover in place; else empty."""
    state: str
    """Source of the state: replica, image, the name of a checkpoint, or empty if the run began with
    step 0 again."""
    step: int
    """The optimizer steps done in that state."""
    wait_seconds: float | None
    """From the loss until all processes were ready, the new ones too."""
    open_seconds: float
    """From then until the run was open, with its state."""
    repeated_steps: int | None
    """Steps that were done before, and computed again."""
    repeated_seconds: float | None = None
    """From then until these were done."""

    @property
    def seconds(self) -> float:
        """All that is known of the time that it took."""
        return (self.wait_seconds or 0.0) + self.open_seconds + (self.repeated_seconds or 0.0)

    @property
    def is_known(self) -> bool:
        """True if each part of the time is."""
        return self.wait_seconds is not None and self.repeated_seconds is not None

    @property
    def end(self) -> float:
        """When the run had done as many steps as before."""
        return self.time + self.seconds

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds}


def losses(run: RunHistory) -> list[WorkerLoss]:
    """Return the losses after which the run went on, in their order."""
    places = [place for place, event in enumerate(run.events) if event.kind == "run-started"]
    starts = [
        run.events[place:following]
        for place, following in zip(places, [*places, len(run.events)][1:], strict=False)
    ]
    progress = sorted(
        [*run.curves.progress, *((event.time, event.step) for event in run.events if event.step)]
    )
    found = []
    for before, after, following in zip(starts, starts[1:], [*starts[2:], []], strict=False):
        own = _between(progress, before[0].time, following[0].time if following else math.inf)
        loss = _loss(before, after, _between(own, -math.inf, after[0].time))
        if loss is not None:
            found.append(
                replace(loss, repeated_seconds=_repetition(loss, own, goes_on=not following))
            )
    return found


def summary(run: RunHistory) -> str:
    """Return the run's losses in one line; empty if there were none."""
    found = losses(run)
    if not found:
        return ""
    in_place, others = (
        [each for each in found if each.in_place],
        [each for each in found if not each.in_place],
    )
    parts = [f"{len(in_place)} recovered in place in {_durations(in_place)}"] if in_place else []
    parts += [f"{_count(len(others), 'restart')} ({_durations(others)})"] if others else []
    again = sum(each.repeated_steps or 0 for each in found)
    more = "" if all(each.repeated_steps is not None for each in found) else " or more"
    steps = f"{_count(again, 'step')}{more}" if again or more else "no step"
    return f"{_count(len(found), 'loss', 'losses')}: {', '.join(parts)}, {steps} computed again"


def _count(number: int, one: str, several: str = "") -> str:
    return f"{format_count(number)} {one if number == 1 else several or one + 's'}"


def _durations(found: Sequence[WorkerLoss]) -> str:
    texts = [
        format_duration(each.seconds) + ("" if each.is_known else " or more") for each in found
    ]
    if len(texts) > 3:
        least, most = (pick(found, key=lambda each: each.seconds) for pick in (min, max))
        return f"{format_duration(least.seconds)} to {format_duration(most.seconds)}"
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def _between(progress: _Progress, begin: float, end: float) -> _Progress:
    return progress[bisect_left(progress, (begin, 0)) : bisect_left(progress, (end, 0))]


def _loss(
    before: Sequence[RunEvent], after: Sequence[RunEvent], progress: _Progress
) -> WorkerLoss | None:
    """Return the loss between two starts, without the time of the repeated steps; None if there was
    none.

    `progress`: that of the start before.
    """
    if (recovered := _first(after, "recovered")) is not None:
        wait, opening = seconds_of(recovered, "wait_seconds"), seconds_of(recovered, "open_seconds")
        repeated = recovered.details.get("repeated_steps")
        return WorkerLoss(
            time=recovered.time - wait - opening,
            reason=str(recovered.details.get("reason", "")),
            in_place=True,
            state=str(recovered.details.get("state", "")),
            step=recovered.step,
            wait_seconds=wait,
            open_seconds=opening,
            repeated_steps=(
                repeated if type(repeated) is int and 0 <= repeated < _MOST_STEPS else None
            ),
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
    saved = [
        event.details.get("checkpoint") for event in before if event.kind == "checkpoint-saved"
    ]
    seen: tuple[float, int] | None = None
    if failed is not None:
        seen = failed.time, failed.step
    # rank 0, which writes the events, was lost; another one saved what it had
    elif state and state not in saved and progress:
        seen = min(started, _time_of(opened.step, progress)), opened.step
    return WorkerLoss(
        time=(
            max([before[-1].time, *(time for time, _ in progress[-1:])])
            if seen is None
            else seen[0]
        ),
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
    """Return the seconds that the repeated steps took. None if that is not known, or they are not
    done.

    `goes_on`: this was the latest start.
    """
    if not loss.repeated_steps:
        return None if loss.repeated_steps is None else 0.0
    reached, opened = loss.step + loss.repeated_steps, loss.end
    later = [(opened, loss.step), *(each for each in progress if each[0] > opened)]
    if later[-1][1] < reached:
        return None if goes_on else later[-1][0] - opened
    return _time_of(reached, later) - opened


def _time_of(step: int, progress: _Progress) -> float:
    """Return when that many steps were done, on the line through the two nearest records."""
    place = next(
        (place for place, (_, done) in enumerate(progress) if done >= step), len(progress) - 1
    )
    (earlier, first), (later, last) = progress[max(0, place - 1)], progress[place]
    return later if last <= first else earlier + (later - earlier) * (step - first) / (last - first)


def _first(events: Sequence[RunEvent], *kinds: str) -> RunEvent | None:
    return next((event for event in events if event.kind in kinds), None)
