"""Reads a trial's result from its run directory, and detects failures that the script causes."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch.termination import HUNG_STATUS, PREEMPTED_STATUS
from lockstep.search.fork_server import LaunchEnding
from lockstep.search.request import PRUNED
from lockstep.search.results import State

MOST_ALIKE = 3
_KILLED = 128 + 9
_OF_THE_TRIAL = ("LossError", "MemoryError", "OutOfMemoryError", "HangError")
"""Exceptions that the values of hyper-parameters may cause."""

_MISTAKES = ("LaunchError", "PlanError", "RecipeError")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialOutcome:
    """The state in which a trial ended. An interrupted trial keeps the state `running`, so that a
    search resumes it."""

    state: State
    value: float | None = None
    steps: int | None = None
    reason: str | None = None
    is_mistake: bool = False
    """True for a mistake in the script or the command line. Every trial would fail with the same
    mistake."""
    alike: str | None = None
    """A text that is equal for all failures with the same cause in the script. None if the failure
    has another cause than the script."""


def finished_outcome(folder: Path, metric: str) -> TrialOutcome | None:
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    value = result["metrics"].get(metric)
    steps = None
    if metric == "loss" and not result["metrics"]:
        value, steps = result["loss"], result["steps"]
    pruned = _reason_of_pruning(folder)
    if pruned is not None:
        return TrialOutcome(state="pruned", value=value, reason=pruned)
    if value is None or not math.isfinite(value):
        return TrialOutcome(state="failed", reason=f"{metric} is not finite")
    return TrialOutcome(state="complete", value=value, steps=steps)


def outcome_of(folder: Path, status: int, metric: str) -> TrialOutcome:
    """Return the outcome of a trial whose launcher ended with `status`. A negative `status` is the
    number of a signal."""
    ending = LaunchEnding.read(folder)
    if status == 0:
        reason, alike = "the script ended and did not train", "did not train"
        done = finished_outcome(folder, metric)
        return done or TrialOutcome(state="failed", reason=reason, alike=alike)
    if status == PREEMPTED_STATUS:
        return TrialOutcome(state="running")
    if ending is None:
        by = f"signal {-status}"
        return TrialOutcome(state="failed", reason=f"its launcher was killed by {by}", alike=by)
    name = ending.kind.rpartition(":")[2]
    first = ending.message.partition("\n")[0]
    reason = f"{name}: {first}" if name else ending.report.partition("\n")[0].rstrip(":")
    if status in (HUNG_STATUS, _KILLED) or name in _OF_THE_TRIAL:
        return TrialOutcome(state="failed", reason=reason)
    return TrialOutcome(
        state="failed",
        reason=reason,
        is_mistake=name in _MISTAKES,
        alike=f"{status} {ending.kind} {ending.where}",
    )


def _reason_of_pruning(folder: Path) -> str | None:
    try:
        lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for event in (json.loads(line) for line in lines if '"stopped"' in line):
        reason = str(event.get("reason")) if event.get("event") == "stopped" else ""
        if reason.startswith(PRUNED):
            return reason.removeprefix(PRUNED)
    return None


class FailuresAlike:
    """Counts failures with the same cause in the script, until a trial succeeds."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._is_right = False

    def note(self, outcome: TrialOutcome) -> bool:
        """Return True if so many trials have failed with one cause that the search should end."""
        self._is_right |= outcome.state in ("complete", "pruned")
        if outcome.alike is None or self._is_right:
            return False
        self._counts[outcome.alike] += 1
        return self._counts[outcome.alike] >= MOST_ALIKE
