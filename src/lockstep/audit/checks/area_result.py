"""The result of looking at one area: findings, what is right, and what could not be seen."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.audit.finding import Area, Cause, Finding


@dataclass(slots=True)
class AreaResult:
    area: Area
    findings: list[Finding] = field(default_factory=list)
    right: str = ""
    """What was seen and is right. Empty if nothing was seen."""
    unseen: list[str] = field(default_factory=list)

    def find(self, cause: Cause, evidence: str, *, line: str = "", step: int | None = None, names: list[str] | None = None) -> None:
        """Add a finding; only the first of each cause is kept, which is the earliest."""
        if all(each.cause is not cause for each in self.findings):
            self.findings.append(Finding(cause=cause, area=self.area, evidence=evidence, line=line, step=step, names=names or []))

    def has(self, *causes: Cause) -> bool:
        return any(each.cause in causes for each in self.findings)
