"""Where a run stands among its loops of steps. Pure: saved with the run as JSON, and restored from it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.data.shards import Position


@dataclass(slots=True)
class LoopState:
    """The same on every rank."""

    loops: int = 0
    """Loops begun."""
    steps_before: int = 0
    """Optimizer steps done in earlier loops."""
    shards: dict[str, Position] = field(default_factory=dict)
    """Where each shard of a stream that this rank reads goes on."""
    resumed: Mapping[str, Any] | None = None
    """The JSON values of the checkpoint that the run was resumed from, with `step`; None if it was not."""

    def begin_loop(self, steps_done: int) -> int:
        """Begin another loop. Returns its first step: a huge number if the whole loop was done before the checkpoint."""
        self.loops += 1
        self.steps_before = steps_done
        saved = 0 if self.resumed is None else self.resumed["loop"]
        if self.resumed is None or self.loops != saved:
            return 0 if self.loops > saved else sys.maxsize
        self.steps_before = self.resumed["steps_before"]
        return int(self.resumed["step"]) - self.steps_before

    def values(self) -> dict[str, Any]:
        """The JSON that is saved."""
        return {"loop": self.loops, "steps_before": self.steps_before, "shards": self.shards}
