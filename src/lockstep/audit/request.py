"""The request of an audit to every process that the script starts. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lockstep.base.processes import die_with_parent, parents
from lockstep.scripts.request import ScriptRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRequest(ScriptRequest):
    answered_by: ClassVar[str] = "lockstep.audit.probes.begin"
    folder: Path
    steps: int
    """Optimizer steps after which each process ends, with status 0."""
    roots: tuple[str, ...]
    runner: int = 0
    perturb: int = 0
    """Seed of noise of one unit in the last place on the initial parameters; 0: no noise."""

    def die_with_launcher(self) -> None:
        """Have the kernel end this process together with its parent, if `lockstep audit` has
        started the parent (Linux only).

        Processes that ranks start are not tied to the audit: the kernel would end them with the
        thread that started them.
        """
        launcher = os.getppid()
        if self.runner and parents().get(launcher) == self.runner:
            die_with_parent(launcher)
