"""The result of looking at one area: findings, what is right, and what could not be seen."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lockstep.audit.finding import Area, Finding
from lockstep.audit.remedies import Cause
from lockstep.evidence.rows import Row

_NUMBER = re.compile(r"\d[\d.]*(?:e[+-]?\d+)?")


@dataclass(slots=True)
class AreaResult:
    area: Area
    findings: list[Finding] = field(default_factory=list)
    right: str = ""
    """The facts that were seen and are right. Empty if nothing was seen."""
    unseen: list[str] = field(default_factory=list)
    _badness: dict[Cause, float] = field(default_factory=dict)

    def find(
        self,
        cause: Cause,
        evidence: str,
        *,
        line: str = "",
        step: int | None = None,
        names: list[str] | None = None,
    ) -> None:
        """Add a finding; only the first of each cause is kept, which is the earliest."""
        if all(each.cause is not cause for each in self.findings):
            self.findings.append(
                Finding(
                    cause=cause,
                    area=self.area,
                    evidence=evidence,
                    line=line,
                    step=step,
                    names=names or [],
                )
            )

    def find_at(
        self,
        step: Row,
        cause: Cause,
        evidence: str,
        *,
        line: str = "",
        names: list[str] | None = None,
    ) -> None:
        """Add a finding at a step. `line`: empty if it is the line of the step."""
        at = step["index"]
        self.find(cause, f"step {at}: {evidence}", line=line or step["line"], step=at, names=names)

    def miss(self, reason: str) -> None:
        """Add a reason why something was not seen; of those that differ by their numbers alone,
        only the first."""
        if all(_NUMBER.sub("", each) != _NUMBER.sub("", reason) for each in self.unseen):
            self.unseen.append(reason)

    def find_worst(
        self, cause: Cause, evidence: str, *, line: str, step: int, badness: float
    ) -> None:
        """Add a finding in place of one of the same cause that is less bad."""
        if badness > self._badness.get(cause, 0.0):
            self._badness[cause] = badness
            self.findings = [each for each in self.findings if each.cause is not cause]
            self.find(cause, evidence, line=line, step=step)
