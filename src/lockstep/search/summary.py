"""Formats the results of a search as text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from lockstep.base.errors import first_few
from lockstep.pages.scale import format_duration
from lockstep.recipe.parameters import Value
from lockstep.search.results import ENDED, SearchResults, State, TrialResult

STATES: tuple[State, ...] = (*ENDED, "running", "waiting")
_TOP = 5
_MOST_FAILURES = 5
_LONGEST_LINE = 200
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def summary_lines(results: SearchResults) -> list[str]:
    counts = ", ".join(
        f"{results.count(state)} {state}" for state in STATES if results.count(state)
    )
    lines = [
        f"{results.name}: {results.script}, {results.direction} {results.metric}",
        f"{len(results.trials)} of {results.wanted} trials" + (f": {counts}" if counts else ""),
    ]
    best = results.best
    if best is None:
        lines.append("no trial is complete, with a finite value")
    else:
        took = f" in {format_duration(best.seconds)}" if best.seconds is not None else ""
        lines += [
            f"best: trial {best.number}, {results.metric} {_text(best.value)} after {best.steps}"
            f" steps{took}"
        ]
        lines += [
            f"  {line}"
            for line in aligned_lines(
                [[name, _text(value)] for name, value in best.parameters.items()], left=2
            )
        ]
        lines += ["", *_top(results), "", f"train with the best: {train_command(results, best)}"]
    return [*lines, *_failed(results)]


def progress_line(results: SearchResults, seconds_left: float | None) -> str:
    parts = [
        f"{results.count('running')} running",
        f"{results.count('pruned')} pruned",
        f"{results.count('failed')} failed",
    ]
    best = results.best
    found = (
        "none complete"
        if best is None
        else f"best {results.metric} {_text(best.value)} (trial {best.number})"
    )
    left = [] if seconds_left is None else [f"about {format_duration(seconds_left)} left"]
    return "; ".join(
        [", ".join([f"{results.ended}/{results.wanted} trials done", *parts]), found, *left]
    )


def seconds_left(results: SearchResults, *, parallel: int, now: float) -> float | None:
    took = [
        trial.seconds
        for trial in results.trials
        if trial.state in ENDED and trial.seconds is not None
    ]
    if not took or results.ended >= results.wanted:
        return None
    mean = max(0.0, sum(took) / len(took))
    running = [
        max(0.0, mean - (now - trial.started))
        for trial in results.trials
        if trial.state == "running" and trial.started is not None
    ]
    to_start = max(0, results.wanted - results.ended - len(running))
    return max([(sum(running) + to_start * mean) / max(1, parallel), *running])


def train_command(results: SearchResults, trial: TrialResult) -> str:
    defaults = {
        parameter.name: parameter.default
        for parameter in results.parameters
        if not parameter.is_searched
    }
    given = {
        name: value
        for name, value in trial.parameters.items()
        if name not in defaults or defaults[name] != value
    }
    settings = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    return f"{shlex.join(['lockstep', 'run', *settings])} {results.script}"


def failures(results: SearchResults) -> list[tuple[str, list[int]]]:
    """Return the reasons of failures, the most frequent first. Failure messages that differ only in
    numbers count as one reason."""
    by_reason: dict[str, tuple[str, list[int]]] = {}
    for trial in results.trials:
        if trial.state == "failed":
            reason = next(iter((trial.reason or "").strip().splitlines()), "no reason is known")
            by_reason.setdefault(_NUMBER.sub("#", reason), (reason, []))[1].append(trial.number)
    return sorted(by_reason.values(), key=lambda pair: -len(pair[1]))


def numbers(trials: Sequence[int]) -> str:
    if len(trials) == 1:
        return f"trial {trials[0]}"
    return f"{len(trials)} trials ({first_few(trials)})"


def aligned_lines(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    marks = ["<" if place < left else ">" for place in range(len(widths))]
    return [
        "  ".join(
            f"{cell:{mark}{width}}" for cell, mark, width in zip(row, marks, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def _top(results: SearchResults) -> list[str]:
    names = results.varied
    head = ["trial", results.metric, "steps", "time", *names]
    rows = [_cells(trial, names) for trial in results.ranked[:_TOP]]
    return aligned_lines([head, *rows], left=0)


def _cells(trial: TrialResult, names: Iterable[str]) -> list[str]:
    took = "-" if trial.seconds is None else format_duration(trial.seconds)
    given = [_text(trial.parameters[name]) if name in trial.parameters else "-" for name in names]
    return [str(trial.number), _text(trial.value), str(trial.steps), took, *given]


def _failed(results: SearchResults) -> list[str]:
    by_reason = failures(results)
    lines = [
        f"  {numbers(trials)}: {reason[:_LONGEST_LINE]}"
        for reason, trials in by_reason[:_MOST_FAILURES]
    ]
    more = (
        [f"  {len(by_reason) - _MOST_FAILURES} more reasons"]
        if len(by_reason) > _MOST_FAILURES
        else []
    )
    return ["", "failed:", *lines, *more] if lines else []


def _text(value: Value) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
