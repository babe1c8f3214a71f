"""Findings of an audit: the cause, the evidence, the line of the user's script, and the remedy.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from lockstep.audit.remedies import Cause


class Area(Enum):
    """The things that an audit looks at: a row of the report each, also where all is right."""

    SAMPLES = "samples"
    GRADIENTS = "gradients"
    LOSS = "weights of the loss"
    REPLICAS = "replicas"
    RANDOM = "random numbers"
    SCHEDULE = "learning rate"
    COLLECTIVES = "collectives"
    MODE = "training and evaluation mode"
    FILES = "files"
    RESUME = "resume"
    COMPARE = "number of processes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault."""

    cause: Cause
    area: Area
    evidence: str
    """The facts that were seen, with their numbers, ranks and samples."""
    line: str = ""
    """File and line of the user's script, as `train.py:12`. Empty if no line of it is concerned."""
    step: int | None = None
    """The first optimizer step at which it was seen, from 0."""
    names: Sequence[str] = ()
    """The parameters, buffers or files concerned."""

    @property
    def title(self) -> str:
        return self.cause.title

    @property
    def law(self) -> str:
        return self.cause.law

    @property
    def remedy(self) -> str:
        return self.cause.remedy

    def as_json(self) -> dict[str, Any]:
        row = asdict(self) | {
            "cause": self.cause.name.lower(),
            "area": self.area.value,
            "names": list(self.names),
        }
        return row | {"title": self.title, "law": self.law, "remedy": self.remedy}


@dataclass(kw_only=True, slots=True)
class Audit:
    """The result of an audit."""

    script: str
    processes: int
    steps: int
    """Optimizer steps that every rank took."""
    findings: list[Finding] = field(default_factory=list)
    right: dict[Area, str] = field(default_factory=dict)
    """Areas in which all that was seen is right, and what was seen."""
    unseen: dict[Area, list[str]] = field(default_factory=dict)
    """Areas of which something could not be seen, and why."""
    notes: list[str] = field(default_factory=list)
    error: str = ""
    """Last lines of a script that failed; empty if it did not."""
    status: int = 0
    """Exit status of the script. 0 also if the audit ended it after the requested steps."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.findings

    @property
    def extent(self) -> str:
        """The processes and steps that were looked at."""
        processes = _count(self.processes, "process", "processes")
        return f"{processes}, {_count(self.steps, 'step', 'steps')}"

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        count = len(self.findings)
        found = _count(count, "finding", "findings") if count else "nothing found"
        return f"{found}; the script failed" if self.error else found

    def as_json(self) -> dict[str, Any]:
        return {
            "script": self.script,
            "passed": self.passed,
            "processes": self.processes,
            "steps": self.steps,
            "findings": [each.as_json() for each in self.findings],
            "right": {area.value: text for area, text in self.right.items()},
            "unseen": {area.value: texts for area, texts in self.unseen.items()},
            "notes": self.notes,
            "error": self.error,
            "exit_status": self.status,
            "seconds": self.seconds,
        }


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
