"""The request to the processes that replay a step. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lockstep.scripts.request import ScriptRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRequest(ScriptRequest):
    """The request to begin at a checkpoint and to end after a step."""

    answered_by: ClassVar[str] = "lockstep.replay.probe"
    calls: str = "install"

    folder: Path
    step: int
    """Number of the step in metrics.jsonl."""
    checkpoints: str = ""
    """The folder of the run's checkpoints, a path or a URL."""
    before: int
    """Begin at the newest checkpoint with fewer steps than this."""
    begins_anew: bool = False
    without: Sequence[int] = ()
    by_sample: int | None = None
    """Number of the microbatch in which each sample's gradient is measured."""
