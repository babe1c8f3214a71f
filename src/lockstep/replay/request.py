"""The request to the processes that replay a step. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lockstep.scripts.request import ScriptRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRequest(ScriptRequest):
    """Request to begin at a checkpoint and end after a step."""

    answered_by: ClassVar[str] = "lockstep.replay.probe"
    calls: str = "install"

    folder: Path
    step: int
    """Number, in metrics.jsonl, of the step to end after."""
    checkpoints: str = ""
    """The folder of the run's checkpoints: a path or a URL."""
    before: int
    """The processes begin at the newest checkpoint with fewer steps done."""
    begins_anew: bool = False
    without: Sequence[int] = ()
    by_sample: int | None = None
    """Number of the microbatch whose gradient is divided among its samples."""
