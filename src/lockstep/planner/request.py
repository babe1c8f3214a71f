"""The request of `lockstep plan` to the process that runs the script, and the files with its
answer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from lockstep.scripts.request import ScriptRequest

OUTCOMES = "outcomes.jsonl"
ENDED = "ended.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a search, as JSON in a file: without it the script has failed."""

    devices: int | None = None
    """Devices that the plans use, if they cannot use all."""
    why: str | None = None
    """Why they cannot, and what to change."""

    def write(self, folder: Path) -> None:
        (folder / ENDED).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Ended | None:
        """Return the end; None if the search has not ended."""
        path = folder / ENDED
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest(ScriptRequest):
    """The plans that are to be predicted for the recipe."""

    answered_by: ClassVar[str] = "lockstep.planner.worker"
    calls: str = "train"
    target: str
    """The devices: `64 x H100`."""
    plans: tuple[str, ...]
    """Empty: search."""
    memory_bytes: int | None
    slots: int
    """Plans that are predicted at once."""
    folder: str
    is_here: bool
    """True if the devices are this machine, on which the loader is measured too."""
