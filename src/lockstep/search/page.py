"""Makes the HTML page of a search, with the best trial, figures and a table of all trials."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.pages.document import document
from lockstep.pages.markup import (
    Column,
    Content,
    Html,
    Row,
    bar,
    element,
    joined,
    paragraph,
    remark,
    section,
    table,
    tiles,
)
from lockstep.pages.scale import format_count, format_duration, format_number
from lockstep.search.figures import (
    best_so_far,
    format_value,
    is_number,
    parallel_coordinates,
    shorten,
    trial_curves,
    trial_tip,
)
from lockstep.search.results import SearchResults, TrialResult
from lockstep.search.summary import STATES, failures, numbers, train_command

_LONGEST_REASON = 400
_MOST_FAILURES = 3
_LONG = 40
"""Number of rows from which the table of trials scrolls."""


def search_page(results: SearchResults, importance: Mapping[str, float], made: float) -> str:
    over_time = joined(best_so_far(results), trial_curves(results))
    tips = {
        str(trial.number): trial_tip(trial, results.metric, results.varied)
        for trial in results.trials
    }
    return document(
        "lockstep search",
        f"lockstep search: {results.name}",
        section("best", "Best trial", _best_trial(results)),
        section(
            "progress",
            "Progress",
            element("div", over_time, kind="grid")
            if over_time
            else remark("No trial was evaluated."),
        ),
        section(
            "parameters", "Parameters", parallel_coordinates(results), _importance_bars(importance)
        ),
        section("trials", "Trials", _trial_table(results) or remark("No trial has begun.")),
        header=_headline(results),
        data={"trials": tips},
        made=made,
        maker="lockstep report",
    )


def _headline(results: SearchResults) -> Html:
    metric = element("strong", results.metric)
    about = [element("code", results.script), f" · {results.direction} ", metric]
    return joined(
        element("h1", results.name),
        element("p", about, kind="sub"),
        _tiles(results),
        [
            paragraph(
                element("strong", numbers(trials)),
                f": {shorten(reason, _LONGEST_REASON)}",
                kind="reason failed",
            )
            for reason, trials in failures(results)[:_MOST_FAILURES]
        ],
    )


def _best_trial(results: SearchResults) -> Html:
    best = results.best
    if best is None:
        return remark("No trial is complete, with a finite value.")
    about: list[Content] = [f"Trial {best.number} · {format_count(best.steps)} steps"]
    about += [f" · {format_duration(best.seconds)}"] if is_number(best.seconds) else []
    about += [" · ", element("code", best.run_dir)] if best.run_dir else []
    parent = ""
    if best.parent is not None:
        parent = (
            f" It went on from a checkpoint of trial {best.parent};"
            " the command trains from the start."
        )
    return joined(
        element("p", about, kind="sub"),
        tiles((name, format_value(value)) for name, value in best.parameters.items()),
        element("p", f"To train with these values:{parent}", kind="note command"),
        element("pre", element("code", train_command(results, best))),
    )


def _importance_bars(importance: Mapping[str, float]) -> Html:
    shown = sorted(
        ((value, name) for name, value in importance.items() if is_number(value) and value >= 0),
        key=lambda pair: -pair[0],
    )
    if not shown:
        return remark(
            "The importance of parameters cannot be computed: that takes several complete trials"
            " whose parameters and"
            " values differ."
        )
    longest = shown[0][0] or 1.0
    return table(
        (),
        [
            [
                name,
                bar([("line-0", value, "")], longest),
                element("td", format_number(value, "share"), kind="number"),
            ]
            for value, name in shown
        ],
        caption="Importance: share of the metric's variance that a parameter explains",
        kind="bars importance",
        box="card wide",
        row_heads=True,
    )


def _trial_table(results: SearchResults) -> Html:
    given = (name for trial in results.trials for name in trial.parameters)
    names = list(dict.fromkeys([*results.searched, *given]))
    numeric = {
        name: all(is_number(trial.parameters.get(name, 0)) for trial in results.trials)
        for name in names
    }
    has_parents = any(trial.parent is not None for trial in results.trials)
    heads = [("trial", True), ("state", False)]
    heads += [(name, True) for name in (results.metric, "steps", "time")] + [*numeric.items()]
    heads += [("went on from", True)] if has_parents else []
    return table(
        [
            Column(element("button", name, type="button"), is_numeric)
            for name, is_numeric in [*heads, ("reason", False)]
        ],
        [_row(trial, numeric, trial is results.best, has_parents) for trial in results.trials],
        kind="all",
        box="card wide long" if len(results.trials) > _LONG else "card wide",
    )


def _tiles(results: SearchResults) -> Html:
    found: list[tuple[str, Content]] = []
    best = results.best
    if best is not None and best.value is not None:
        trial = element("small", f" trial {best.number}")
        found.append((f"best {results.metric}", [format_number(best.value), trial]))
    goal = element("small", f" of {results.wanted:,}")
    found.append(("trials", [f"{len(results.trials):,}", goal]))
    found += [
        (state, format_count(results.count(state)))
        for state in STATES
        if results.count(state) or state == "complete"
    ]
    steps = sum(trial.steps for trial in results.trials)
    seconds = sum(trial.seconds for trial in results.trials if is_number(trial.seconds))
    found.append(("steps of all trials", format_count(steps)))
    found.append(("time of all trials", format_duration(seconds)))
    return tiles(found)


def _row(trial: TrialResult, numeric: Mapping[str, bool], is_best: bool, has_parents: bool) -> Row:
    value = "–" if trial.value is None else format_number(float(trial.value))
    time = format_duration(trial.seconds) if is_number(trial.seconds) else "–"
    cells = [
        element("td", str(trial.number), kind="number", title=trial.run_dir),
        element("td", element("span", trial.state, kind=f"state {trial.state}")),
        _number(value, trial.value),
        _number(f"{trial.steps:,}", trial.steps),
        _number(time, trial.seconds),
    ]
    for name, is_numeric in numeric.items():
        given = trial.parameters.get(name)
        text = format_value(given) if name in trial.parameters else "–"
        cells.append(_number(text, given) if is_numeric else element("td", text))
    if has_parents:
        cells.append(_number("–" if trial.parent is None else str(trial.parent), trial.parent))
    cells.append(element("td", _why(trial), kind="why"))
    return Row(cells, data_trial=trial.number, kind="best" if is_best else "")


def _number(text: str, value: object) -> Html:
    return element("td", text, kind="number", data_value=value if is_number(value) else "")


def _why(trial: TrialResult) -> str:
    reason = shorten(trial.reason or "", _LONGEST_REASON)
    ended_early = trial.state in ("pruned", "failed") and trial.values
    after = [f"after step {trial.steps:,}"] if ended_early else []
    return ": ".join([*after, *([reason] if reason else [])])
