"""Makes timelines: a lane for each run, with spans and marks over the time since the run's
start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.pages.chart import COLOURS, axis_labels, figure, legend
from lockstep.pages.markup import Html, element, legend_key
from lockstep.pages.scale import Scale, time_scale

_APART = 0.06


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeMark:
    kind: str
    at: float
    tip: str
    seconds: float | None = None
    label: str = ""


def timeline(
    lanes: Sequence[tuple[str, Sequence[TimeMark]]],
    *,
    seconds: float,
    keys: Sequence[tuple[str, str]],
    spoken: str,
) -> Html:
    x_scale = time_scale(seconds)
    named = len(lanes) > 1
    rows = [
        element(
            "div",
            element("span", name, kind="run") if named else None,
            _marks(marks, x_scale, labelled=not named),
            kind="lane",
            data_run=index,
            style=f"--colour:var(--line-{index % COLOURS})",
        )
        for index, (name, marks) in enumerate(lanes)
    ]
    ticks = [
        element("i", kind="tick", style=f"left:{100 * x_scale.position(tick):.2f}%")
        for tick in x_scale.ticks
    ]
    return figure(
        "time since the start",
        legend(legend_key(words, kind) for kind, words in keys),
        [ticks, rows, axis_labels(x_scale, "", None)],
        kind="time names" if named else "time",
        spoken=spoken,
    )


def _marks(marks: Sequence[TimeMark], x_scale: Scale, *, labelled: bool) -> Iterator[Html]:
    above = -1.0
    for mark in marks:
        at = max(0.0, x_scale.position(mark.at))
        style = f"left:{100 * at:.2f}%"
        if mark.seconds is not None:
            style += f";width:{100 * min(1 - at, x_scale.position(mark.seconds)):.2f}%"
        yield element("b", kind=mark.kind, data_tip=mark.tip, style=style)
        if mark.label and labelled and at - above > _APART:
            above = at
            yield element("i", mark.label, kind="above", style=f"left:{100 * at:.2f}%")
