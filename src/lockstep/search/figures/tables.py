"""Texts and tables of a search's page: the headline, the best trial, importance, and all trials.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.base.foreign_text import escape
from lockstep.report.scale import format_count, format_duration, format_number
from lockstep.search.figures.axes import format_value, is_number, shorten
from lockstep.search.results import SearchResults, State, TrialResult
from lockstep.search.summary import STATES, failures, numbers, train_command

_LONGEST_REASON = 400
_MOST_FAILURES = 3
_LONG = 40
"""Number of rows from which on the table scrolls in a box of its own."""


def headline(results: SearchResults) -> str:
    """Return what was searched, and what has become of it."""
    direction = f"{results.direction} <strong>{escape(results.metric)}</strong>"
    failed = "".join(
        f'<p class="reason failed"><strong>{escape(numbers(trials))}</strong>:'
        f" {escape(shorten(reason, _LONGEST_REASON))}</p>"
        for reason, trials in failures(results)[:_MOST_FAILURES]
    )
    return (
        f'<h1>{escape(results.name)}</h1><p class="sub"><code>{escape(results.script)}</code> ·'
        f" {direction}</p>{_tiles(results)}{failed}"
    )


def best_trial(results: SearchResults) -> str:
    """Return the best trial: its parameters, and the command to train with them. A note if no trial
    is complete."""
    best = results.best
    if best is None:
        return '<p class="note">No trial is complete, with a finite value.</p>'
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(format_value(value))}</dd></div>"
        for name, value in best.parameters.items()
    )
    about = [f"Trial {best.number}", f"{format_count(best.steps)} steps"]
    about += [format_duration(best.seconds)] if is_number(best.seconds) else []
    run_dir = f" · <code>{escape(best.run_dir)}</code>" if best.run_dir else ""
    parent = (
        f" It went on from a checkpoint of trial {best.parent}; the command trains from the start."
        if best.parent is not None
        else ""
    )
    return (
        f'<p class="sub">{" · ".join(about)}{run_dir}</p><dl class="tiles">{tiles}</dl><p'
        ' class="note command">To train with these'
        f" values:{parent}</p><pre><code>{escape(train_command(results, best))}</code></pre>"
    )


def importance_bars(importance: Mapping[str, float]) -> str:
    """Return a bar for the importance of each parameter. A note if it could not be computed."""
    shown = sorted(
        ((value, name) for name, value in importance.items() if is_number(value) and value >= 0),
        key=lambda pair: -pair[0],
    )
    if not shown:
        return (
            '<p class="note">The importance of parameters cannot be computed: that takes several'
            " complete trials whose parameters and values differ.</p>"
        )
    longest = shown[0][0] or 1.0
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="bar"><div><b'
        f' style="width:{100 * value / longest:.2f}%"></b></div></td><td'
        f' class="number">{format_number(value, "share")}</td></tr>'
        for value, name in shown
    )
    caption = (
        "<caption>Importance: share of the metric's variance that a parameter explains</caption>"
    )
    return (
        '<div class="card wide"><table class="bars'
        f' importance">{caption}<tbody>{rows}</tbody></table></div>'
    )


def trial_table(results: SearchResults) -> str:
    """Return a table of all trials. A click on a column's head sorts it."""
    names = list(
        dict.fromkeys(
            [*results.searched, *(name for trial in results.trials for name in trial.parameters)]
        )
    )
    numeric = {
        name: all(is_number(trial.parameters.get(name, 0)) for trial in results.trials)
        for name in names
    }
    has_parents = any(trial.parent is not None for trial in results.trials)
    heads = [
        ("trial", True),
        ("state", False),
        (results.metric, True),
        ("steps", True),
        ("time", True),
        *numeric.items(),
    ]
    heads += [("went on from", True)] if has_parents else []
    head = "".join(_head(name, numeric=each) for name, each in [*heads, ("reason", False)])
    best = results.best
    rows = [_row(trial, numeric, trial is best, has_parents) for trial in results.trials]
    long = " long" if len(rows) > _LONG else ""
    return (
        f'<div class="card wide{long}"><table'
        f' class="all"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _tiles(results: SearchResults) -> str:
    best = results.best
    found = [("trials", f"{len(results.trials):,}<small> of {results.wanted:,}</small>")]
    if best is not None and best.value is not None:
        found.insert(
            0,
            (
                f"best {results.metric}",
                f"{format_number(best.value)}<small> trial {best.number}</small>",
            ),
        )
    found += [
        (state, format_count(results.count(state)))
        for state in STATES
        if results.count(state) or state == "complete"
    ]
    found.append(
        ("steps of all trials", format_count(sum(trial.steps for trial in results.trials)))
    )
    seconds = sum(trial.seconds for trial in results.trials if is_number(trial.seconds))
    found.append(("time of all trials", format_duration(seconds)))
    return (
        '<dl class="tiles">'
        + "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in found)
        + "</dl>"
    )


def _head(name: str, *, numeric: bool) -> str:
    kind = ' class="number"' if numeric else ""
    return f'<th scope="col"{kind}><button type="button">{escape(name)}</button></th>'


def _row(trial: TrialResult, numeric: Mapping[str, bool], is_best: bool, has_parents: bool) -> str:
    value = "–" if trial.value is None else format_number(float(trial.value))
    time = format_duration(trial.seconds) if is_number(trial.seconds) else "–"
    cells = [
        f'<td class="number" title="{escape(trial.run_dir)}">{trial.number}</td>',
        f'<td><span class="state {trial.state}">{trial.state}</span></td>',
        _number(value, trial.value),
        _number(f"{trial.steps:,}", trial.steps),
        _number(time, trial.seconds),
    ]
    for name, is_numeric in numeric.items():
        given = trial.parameters.get(name)
        text = escape(format_value(given)) if name in trial.parameters else "–"
        cells.append(_number(text, given) if is_numeric else f"<td>{text}</td>")
    if has_parents:
        cells.append(_number("–" if trial.parent is None else str(trial.parent), trial.parent))
    cells.append(f'<td class="why">{escape(_why(trial))}</td>')
    best = ' class="best"' if is_best else ""
    return f'<tr data-trial="{trial.number}"{best}>{"".join(cells)}</tr>'


def _number(text: str, value: object) -> str:
    """Return a cell that is sorted by a number. Without one it is last."""
    return f'<td class="number" data-value="{value if is_number(value) else ""}">{text}</td>'


def _why(trial: TrialResult) -> str:
    reason = shorten(trial.reason or "", _LONGEST_REASON)
    after: Sequence[str] = (
        [f"after step {trial.steps:,}"] if _ended_early(trial.state) and trial.values else []
    )
    return ": ".join([*after, *([reason] if reason else [])])


def _ended_early(state: State) -> bool:
    return state in ("pruned", "failed")
