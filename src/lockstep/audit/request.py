"""The settings that `lockstep audit` gives to every process of the script. This module does not
import torch."""

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
    """Number of optimizer steps after which each process ends."""
    roots: tuple[str, ...]
    runner: int = 0
    perturb: int = 0
    """Seed of noise of one unit in the last place on the initial parameters; 0 for no noise."""

    def die_with_launcher(self) -> None:
        """Make the kernel kill this process when its parent ends, if `lockstep audit` started the
        parent."""
        launcher = os.getppid()
        if self.runner and parents().get(launcher) == self.runner:
            die_with_parent(launcher)
