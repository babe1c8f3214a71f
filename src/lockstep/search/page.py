"""The HTML page of a search, in one file that loads no other. Pure, but for reading style and
script from packages."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from lockstep.base.foreign_text import escape
from lockstep.report.event_timeline import clock
from lockstep.report.page import document
from lockstep.search.figures import plot, tables
from lockstep.search.figures.best_so_far import best_so_far
from lockstep.search.figures.curves import curves
from lockstep.search.figures.parallel import parallel_coordinates
from lockstep.search.results import SearchResults


def page(results: SearchResults, importance: Mapping[str, float], made: float) -> str:
    """Return the HTML document. `importance`: share of each parameter; empty if it cannot be
    computed. `made`: time of creation, in seconds since 1970."""
    brand = f'<p class="brand">lockstep search<span>made {clock(made)}</span></p>'
    over_time = best_so_far(results) + curves(results)
    names = results.varied
    body = [
        f"<header>{brand}{tables.headline(results)}</header>",
        _section("best", "Best trial", tables.best_trial(results)),
        _section(
            "progress",
            "Progress",
            (
                f'<div class="grid">{over_time}</div>'
                if over_time
                else _note("No trial was evaluated.")
            ),
        ),
        _section(
            "parameters",
            "Parameters",
            parallel_coordinates(results) + tables.importance_bars(importance),
        ),
        _section(
            "trials",
            "Trials",
            tables.trial_table(results) if results.trials else _note("No trial has begun."),
        ),
    ]
    tips = {str(trial.number): plot.tip(trial, results.metric, names) for trial in results.trials}
    style, script = (
        files("lockstep.search.figures").joinpath(name).read_text(encoding="utf-8")
        for name in ("search.css", "search.js")
    )
    return document(
        f"lockstep search: {results.name}",
        "".join(body),
        {"trials": tips},
        script=script,
        style=plot.style() + style,
    )


def _section(name: str, title: str, inside: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>{inside}</section>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'
