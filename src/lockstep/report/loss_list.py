"""A list of a run's losses and recoveries in HTML, each with its time as a bar. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lockstep.base.foreign_text import escape
from lockstep.report.history import RunHistory
from lockstep.report.losses import WorkerLoss, losses, summary
from lockstep.report.scale import format_count, format_duration

MAX_LOSSES = 100
_PARTS = (("wait", "wait"), ("open", "open"), ("again", "steps again"))
"""Parts of the time, by their names in page.css."""


def loss_list(run: RunHistory) -> str:
    """Return the list; empty if there were no losses. Beyond `MAX_LOSSES`, those in the middle are
    only counted."""
    found = losses(run)
    if not found:
        return ""
    longest = max(each.seconds for each in found) or 1.0
    items = [_item(number, each, run, longest) for number, each in enumerate(found, 1)]
    left_out = len(items) - MAX_LOSSES
    if left_out > 0:
        items[MAX_LOSSES // 2 : -MAX_LOSSES // 2] = [
            f'<li class="note">… {left_out:,} more, in events.jsonl …</li>'
        ]
    keys = "".join(
        f'<span class="key"><b class="swatch {look}"></b>{word}</span>' for look, word in _PARTS
    )
    head = f'<p>{escape(summary(run))}</p><p class="legend">{keys}</p>'
    return f'<div class="card">{head}<ol class="losses">{"".join(items)}</ol></div>'


def what_was_lost(loss: WorkerLoss, hosts: Sequence[str]) -> str:
    """Return the reason, with the rank's host if there are several."""
    named = re.match(r"rank (\d{1,6})\b", loss.reason)
    if named is None or len(set(hosts)) < 2 or int(named[1]) >= len(hosts):
        return loss.reason
    return f"{named[0]} on {hosts[int(named[1])]}{loss.reason[named.end() :]}"


def how_it_went_on(loss: WorkerLoss) -> str:
    """Return whether the run recovered in place, from which state, and why if not."""
    if loss.in_place:
        state = {"replica": "that of a replica", "image": "the image in memory"}.get(
            loss.state, loss.state
        )
        return f"recovered in place, from {state} after step {format_count(loss.step)}"
    state = f"from {loss.state}" if loss.state else "from the beginning"
    return f"restarted, {state}" + (
        f"; not in place: {loss.not_in_place}" if loss.not_in_place else ""
    )


def times(loss: WorkerLoss) -> str:
    """Return the time that the loss took, and its parts."""
    steps = (
        "steps"
        if loss.repeated_steps is None
        else f"{format_count(loss.repeated_steps)} step{'s' * (loss.repeated_steps != 1)}"
    )
    again = (
        f"{steps} again {_seconds(loss.repeated_seconds)}"
        if loss.repeated_steps != 0
        else "no step again"
    )
    more = "" if loss.is_known else " or more"
    return (
        f"{format_duration(loss.seconds)}{more}: wait {_seconds(loss.wait_seconds)}, open"
        f" {_seconds(loss.open_seconds)}, {again}"
    )


def _item(number: int, loss: WorkerLoss, run: RunHistory, longest: float) -> str:
    kind = "in-place" if loss.in_place else "restart"
    when = f"after {format_duration(max(0.0, loss.time - (run.began or 0.0)))}"
    if loss.repeated_steps is not None:
        when += f", step {format_count(loss.step + loss.repeated_steps)}"
    sizes = (loss.wait_seconds, loss.open_seconds, loss.repeated_seconds)
    bars = "".join(
        f'<b class="{look}" style="width:{100 * size / longest:.2f}%"></b>'
        for (look, _), size in zip(_PARTS, sizes, strict=True)
        if size
    )
    lost, then = escape(what_was_lost(loss, run.ranks.hosts)), escape(how_it_went_on(loss))
    took = f'<div class="took" aria-hidden="true">{bars}</div><small>{times(loss)}</small>'
    head = f'<span class="when"><b class="loss {kind}">{number}</b>{when}</span>'
    return f"<li>{head}<div><strong>{lost}</strong><div>{then}</div>{took}</div></li>"


def _seconds(value: float | None) -> str:
    return "not recorded" if value is None else format_duration(value)
