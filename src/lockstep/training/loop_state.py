"""The position of a run in its loops of steps."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.data.fetch import ShardPosition


@dataclass(slots=True)
class LoopState:
    """The position of a run in its loops of steps: saved in checkpoints as JSON."""

    loops: int = 0
    steps_before: int = 0  # optimizer steps done in earlier loops
    shards: dict[str, ShardPosition] = field(default_factory=dict)  # each stream shard that this rank reads
    data: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    """Digests of the parts of some samples, by the samples' names, for each loop, by its number."""
    resumed: Mapping[str, Any] | None = None  # the JSON of the checkpoint that the run was resumed from, with `step`

    def begin_loop(self, steps_done: int) -> int:
        """Begin another loop. Returns its first step: `sys.maxsize` if the loop had ended before the checkpoint."""
        self.loops += 1
        self.steps_before = steps_done
        saved = 0 if self.resumed is None else self.resumed["loop"]
        if self.resumed is None or self.loops != saved:
            return 0 if self.loops > saved else sys.maxsize
        self.steps_before = self.resumed["steps_before"]
        return int(self.resumed["step"]) - self.steps_before

    def values(self) -> dict[str, Any]:
        return {"loop": self.loops, "steps_before": self.steps_before, "shards": self.shards, "data": self.data}
