"""The HTML page of `lockstep plan`: all plans, what their time and memory go to, and what was
struck out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lockstep.base.foreign_text import escape
from lockstep.base.units import size
from lockstep.planner.forecast import (
    HEAD,
    LEFT,
    SIDE_BY_SIDE,
    Forecast,
    duration,
    limit_in_words,
    side_by_side,
)
from lockstep.verify.document import document

COLORS = (
    "#0b57a4",
    "#c2571a",
    "#1a7f37",
    "#8a3ffc",
    "#b58900",
    "#c62828",
    "#0e7c86",
    "#6a737d",
    "#a15c8b",
    "#7a8f2a",
)
_STYLE = """
td.number { white-space: nowrap } .bar { display: flex; height: 1.1rem; min-width: 16rem; border-radius: 3px; overflow: hidden }
.bar span { display: block; height: 100% }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin: 0 .3rem 0 1rem }
"""


def page(forecasts: Sequence[Forecast]) -> str:
    """Return the whole HTML document; of several targets, the best plan of each side by side
    first."""
    several = len(forecasts) > 1
    parts: list[str] = []
    if several:
        parts += [
            f"<h1>{escape(forecasts[0].script)}: the best plan of each</h1>",
            _table(SIDE_BY_SIDE, side_by_side(forecasts)),
        ]
    for forecast in forecasts:
        parts += _parts(forecast)
    title = (
        f"{forecasts[0].script} on {', '.join(each.target for each in forecasts)}"
        if several
        else forecasts[0].title
    )
    return document(title, parts, _STYLE)


def _parts(forecast: Forecast) -> list[str]:
    times = _colors(each.by_limit for each in forecast.fitting)
    memory = _colors(each.peak.by_cause for each in forecast.fitting)
    return [
        f"<h1>{escape(forecast.title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in (*forecast.remarks, *forecast.lines(0))),
        _table(HEAD, forecast.rows(len(forecast.outcomes))),
        "<h2>Where the time of a step goes</h2>",
        _key({limit_in_words(name): color for name, color in times.items()}),
        _bars(
            forecast, {each.plan: each.by_limit for each in forecast.fitting}, times, is_time=True
        ),
        "<h2>What is in memory at the peak</h2>",
        _key(memory),
        _bars(
            forecast,
            {each.plan: each.peak.by_cause for each in forecast.fitting},
            memory,
            is_time=False,
        ),
        _struck(forecast),
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    kinds = ["" if name in LEFT else "number" for name in head]
    titles = "".join(
        f'<th class="{kind}">{name}</th>' for kind, name in zip(kinds, head, strict=True)
    )
    cells = [
        "".join(
            f'<td class="{kind}">{escape(cell)}</td>' for kind, cell in zip(kinds, row, strict=True)
        )
        for row in rows
    ]
    body = "".join(f"<tr>{each}</tr>" for each in cells)
    return f'<div class="wide"><table><tr>{titles}</tr>{body}</table></div>' if cells else ""


def _colors(shares: Iterable[Mapping[str, float]]) -> dict[str, str]:
    names: dict[str, None] = {}
    for each in shares:
        names.update(dict.fromkeys(each))
    return {name: COLORS[place % len(COLORS)] for place, name in enumerate(names)}


def _key(colors: Mapping[str, str]) -> str:
    return (
        "<p>"
        + "".join(
            f'<span class="key" style="background:{color}"></span>{escape(name)}'
            for name, color in colors.items()
        )
        + "</p>"
    )


def _bars(
    forecast: Forecast,
    shares: Mapping[str, Mapping[str, float]],
    colors: Mapping[str, str],
    *,
    is_time: bool,
) -> str:
    longest = max((sum(each.values()) for each in shares.values()), default=1.0) or 1.0
    rows = []
    for plan, parts in shares.items():
        spans = "".join(
            _part(name, value, value / longest, colors[name], is_time)
            for name, value in parts.items()
        )
        total = _quantity(sum(parts.values()), is_time)
        rows.append(
            f'<tr><td>{escape(plan)}</td><td><div class="bar">{spans}</div></td><td'
            f' class="number">{total}</td></tr>'
        )
    return f'<div class="wide"><table>{"".join(rows)}</table></div>'


def _part(name: str, value: float, share: float, color: str, is_time: bool) -> str:
    title = f"{escape(name)} {_quantity(value, is_time)}"
    return f'<span style="width:{100 * share:.2f}%;background:{color}" title="{title}"></span>'


def _quantity(value: float, is_time: bool) -> str:
    return duration(value) if is_time else size(value)


def _struck(forecast: Forecast) -> str:
    rows = "".join(
        f"<tr><td>{escape(each.plan)}</td><td>{escape(each.reason)}</td></tr>"
        for each in forecast.outcomes
        if each.reason is not None
    )
    return f'<h2>Struck out</h2><div class="wide"><table>{rows}</table></div>' if rows else ""
