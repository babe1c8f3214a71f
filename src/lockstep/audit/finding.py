"""The findings of an audit: cause, evidence, line of the user's script, and remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from lockstep.audit.remedies import Cause as Cause
from lockstep.base.words import counted
from lockstep.evidence.rows import Row

_NUMBER = re.compile(r"\d[\d.]*(?:e[+-]?\d+)?")


class Area(Enum):
    """The subjects of an audit. Each area is a row in the report."""

    SAMPLES = "samples"
    GRADIENTS = "gradients"
    LOSS = "weights of the loss"
    EXPERTS = "mixtures of experts"
    DOCUMENTS = "packed documents"
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
    """A fault of the audited script."""

    cause: Cause
    area: Area
    evidence: str
    """The observed facts, with numbers, ranks and samples."""
    line: str = ""
    """File and line of the user's script, such as `train.py:12`. Empty if no line is at fault."""
    step: int | None = None
    """The first optimizer step with the fault, counted from 0."""
    names: Sequence[str] = ()
    """Names of the parameters, buffers or files with the fault."""

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
        return asdict(self) | {
            "cause": self.cause.name.lower(),
            "area": self.area.value,
            "names": list(self.names),
            "title": self.title,
            "law": self.law,
            "remedy": self.remedy,
        }


@dataclass(slots=True)
class AreaResult:
    """The result of the checks in one area."""

    area: Area
    findings: list[Finding] = field(default_factory=list)
    right: str = ""
    unseen: list[str] = field(default_factory=list)
    _badness: dict[Cause, float] = field(default_factory=dict)

    def find(
        self,
        cause: Cause,
        evidence: str,
        at: Row | None = None,
        *,
        line: str = "",
        step: int | None = None,
        names: Sequence[str] = (),
        badness: float = 0.0,
    ) -> None:
        """Add a finding. Only the worst finding of each cause is kept."""
        known = next((each for each in self.findings if each.cause is cause), None)
        if known is not None:
            if badness <= self._badness[cause]:
                return
            self.findings.remove(known)
        if at is not None:
            step, line = at["index"], line or at["line"]
            evidence = f"step {step}: {evidence}"
        self._badness[cause] = badness
        self.findings.append(
            Finding(
                cause=cause, area=self.area, evidence=evidence, line=line, step=step, names=names
            )
        )

    def miss(self, reason: str) -> None:
        if all(_NUMBER.sub("", each) != _NUMBER.sub("", reason) for each in self.unseen):
            self.unseen.append(reason)


@dataclass(kw_only=True, slots=True)
class Audit:
    """The result of an audit."""

    script: str
    processes: int
    steps: int
    """Number of optimizer steps that every rank took."""
    findings: list[Finding] = field(default_factory=list)
    right: dict[Area, str] = field(default_factory=dict)
    """Text about the facts that are right, for each area without a fault."""
    unseen: dict[Area, list[str]] = field(default_factory=dict)
    """Reasons why checks could not be made, by area."""
    notes: list[str] = field(default_factory=list)
    error: str = ""
    """Last lines of the output of a script that failed."""
    status: int = 0
    """Exit status of the script; 0 if the audit ended the script after the requested steps."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.findings

    @property
    def extent(self) -> str:
        return f"{counted(self.processes, 'process')}, {counted(self.steps, 'step')}"

    @property
    def verdict(self) -> str:
        found = counted(len(self.findings), "finding") if self.findings else "nothing found"
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
