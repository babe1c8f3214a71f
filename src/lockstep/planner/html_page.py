"""The HTML page of `lockstep plan`: all plans, what their time and memory go to, and what was struck out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lockstep.base.foreign_text import escape
from lockstep.base.units import size
from lockstep.planner.forecast import HEAD, Forecast, duration, limit_in_words
from lockstep.verify.document import document

COLORS = ("#0b57a4", "#c2571a", "#1a7f37", "#8a3ffc", "#b58900", "#c62828", "#0e7c86", "#6a737d", "#a15c8b", "#7a8f2a")
_STYLE = """
td.number { white-space: nowrap } .bar { display: flex; height: 1.1rem; min-width: 16rem; border-radius: 3px; overflow: hidden }
.bar span { display: block; height: 100% }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin: 0 .3rem 0 1rem }
"""


def page(forecast: Forecast) -> str:
    """Return the whole HTML document."""
    times = _colors(each.by_limit for each in forecast.fitting)
    memory = _colors(each.peak.by_cause for each in forecast.fitting)
    parts = [
        f"<h1>{escape(forecast.title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in forecast.lines(0)),
        _table(forecast),
        "<h2>Where the time of a step goes</h2>",
        _key({limit_in_words(name): color for name, color in times.items()}),
        _bars(forecast, {each.plan: each.by_limit for each in forecast.fitting}, times, is_time=True),
        "<h2>What is in memory at the peak</h2>",
        _key(memory),
        _bars(forecast, {each.plan: each.peak.by_cause for each in forecast.fitting}, memory, is_time=False),
        _struck(forecast),
    ]
    return document(forecast.title, parts, _STYLE)


def _table(forecast: Forecast) -> str:
    head = "".join(f'<th class="{"" if name in ("plan", "limited by") else "number"}">{name}</th>' for name in HEAD)
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td class="{"" if HEAD[place] in ("plan", "limited by") else "number"}">{escape(cell)}</td>' for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in forecast.rows(len(forecast.outcomes))
    )
    return f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>' if rows else ""


def _colors(shares: Iterable[Mapping[str, float]]) -> dict[str, str]:
    names: dict[str, None] = {}
    for each in shares:
        names.update(dict.fromkeys(each))
    return {name: COLORS[place % len(COLORS)] for place, name in enumerate(names)}


def _key(colors: Mapping[str, str]) -> str:
    return "<p>" + "".join(f'<span class="key" style="background:{color}"></span>{escape(name)}' for name, color in colors.items()) + "</p>"


def _bars(forecast: Forecast, shares: Mapping[str, Mapping[str, float]], colors: Mapping[str, str], *, is_time: bool) -> str:
    longest = max((sum(each.values()) for each in shares.values()), default=1.0) or 1.0
    rows = []
    for plan, parts in shares.items():
        spans = "".join(_part(name, value, value / longest, colors[name], is_time) for name, value in parts.items())
        total = _quantity(sum(parts.values()), is_time)
        rows.append(f'<tr><td>{escape(plan)}</td><td><div class="bar">{spans}</div></td><td class="number">{total}</td></tr>')
    return f'<div class="wide"><table>{"".join(rows)}</table></div>'


def _part(name: str, value: float, share: float, color: str, is_time: bool) -> str:
    title = f"{escape(name)} {_quantity(value, is_time)}"
    return f'<span style="width:{100 * share:.2f}%;background:{color}" title="{title}"></span>'


def _quantity(value: float, is_time: bool) -> str:
    return duration(value) if is_time else size(value)


def _struck(forecast: Forecast) -> str:
    rows = "".join(
        f"<tr><td>{escape(each.plan)}</td><td>{escape(each.reason)}</td></tr>" for each in forecast.outcomes if each.reason is not None
    )
    return f'<h2>Struck out</h2><div class="wide"><table>{rows}</table></div>' if rows else ""
