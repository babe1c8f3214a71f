"""Makes the HTML page of `lockstep plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from lockstep.base.units import size
from lockstep.pages.chart import COLOURS
from lockstep.pages.document import document
from lockstep.pages.markup import Column, Html, bar, element, joined, legend_key, paragraph, table
from lockstep.planner.forecast import (
    HEAD,
    LEFT,
    SIDE_BY_SIDE,
    Forecast,
    limit_in_words,
    side_by_side,
    time_in_words,
)


def plan_page(forecasts: Sequence[Forecast]) -> str:
    first, several = forecasts[0], len(forecasts) > 1
    targets = ", ".join(each.target for each in forecasts)
    best = _plans(SIDE_BY_SIDE, side_by_side(forecasts)) if several else None
    return document(
        "lockstep plan",
        f"{first.script} on {targets}" if several else first.title,
        map(_forecast, forecasts),
        header=[element("h1", f"{first.script}: the best plan of each"), best] if several else None,
    )


def _forecast(forecast: Forecast) -> Html:
    lines, fitting = (*forecast.remarks, *forecast.lines(0)), forecast.fitting
    struck = [[each.plan, each.reason] for each in forecast.outcomes if each.reason is not None]
    return joined(
        element("h1", forecast.title),
        map(paragraph, lines),
        _plans(HEAD, forecast.rows(len(forecast.outcomes))),
        element("h2", "Where the time of a step goes"),
        _bars({each.plan: each.by_limit for each in fitting}, limit_in_words, time_in_words),
        element("h2", "What is in memory at the peak"),
        _bars({each.plan: each.peak.by_cause for each in fitting}, str, size),
        [element("h2", "Struck out"), table((), struck, kind="areas")] if struck else None,
    )


def _plans(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    return table([Column(name, number=name not in LEFT) for name in heads], rows)


def _bars(
    plans: Mapping[str, Mapping[str, float]],
    words: Callable[[str], str],
    quantity: Callable[[float], str],
) -> Html:
    names = list(dict.fromkeys(name for parts in plans.values() for name in parts))
    colours = {name: f"line-{place % COLOURS}" for place, name in enumerate(names)}
    longest = max((sum(parts.values()) for parts in plans.values()), default=1.0) or 1.0
    rows = []
    for plan, parts in plans.items():
        pieces = [
            (colours[name], each, f"{words(name)} {quantity(each)}") for name, each in parts.items()
        ]
        total = element("td", quantity(sum(parts.values())), kind="number")
        rows.append([plan, bar(pieces, longest), total])
    keys = [legend_key(words(name), "swatch", colour) for name, colour in colours.items()]
    return joined(element("p", keys, kind="legend"), table((), rows, kind="bars"))
