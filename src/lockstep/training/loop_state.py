"""The position of a run in its loops of steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.data.digests import Digests
from lockstep.data.fetch import ShardPosition


@dataclass(slots=True)
class LoopState:
    """The position of a run in its loops of steps: saved in checkpoints as JSON."""

    loops: int = 0
    steps_before: int = 0  # optimizer steps done in earlier loops
    # each stream shard that this rank reads
    shards: dict[str, ShardPosition] = field(default_factory=dict)
    data: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    """Digests of the parts of some samples, by the samples' names, for each loop, by its number."""
    digest: Callable[[], Digests] | None = None
    """Returns the digests of the samples of the loop as they are now. None: nothing can have
    changed them, or they are with loader workers."""
    # the JSON of the checkpoint that the run was resumed from, with `step`
    resumed: Mapping[str, Any] | None = None

    def begin_loop(self, steps_done: int) -> int:
        """Begin another loop. Returns its first step: `sys.maxsize` if the loop had ended before
        the checkpoint."""
        self.loops += 1
        self.steps_before = steps_done
        saved = 0 if self.resumed is None else self.resumed["loop"]
        if self.resumed is None or self.loops != saved:
            return 0 if self.loops > saved else sys.maxsize
        self.steps_before = self.resumed["steps_before"]
        return int(self.resumed["step"]) - self.steps_before

    def refresh_data(self) -> None:
        """Take the digests again, for a save: a hook may have changed the dataset since."""
        if self.digest is not None and str(self.loops) in self.data:
            self.data[str(self.loops)] = dict(self.digest().samples)

    @staticmethod
    def check(values: Mapping[str, Any], step: int) -> None:
        """Raise `ValueError`, `LookupError`, `TypeError` or `AttributeError` unless `values` has
        what a run saves after `step` steps."""
        positions = {
            int(shard): ShardPosition(*position) for shard, position in values["shards"].items()
        }
        numbers = [
            values["loop"],
            values["steps_before"],
            *(each for position in positions.values() for each in position),
        ]
        if (
            not all(type(each) is int and each >= 0 for each in numbers)
            or values["steps_before"] > step
        ):
            raise ValueError("the position in the data is not made of numbers of steps and samples")
        if not all(
            isinstance(parts, dict)
            for samples in values["data"].values()
            for parts in samples.values()
        ):
            raise TypeError("the digests of the data are no objects")

    def values(self) -> dict[str, Any]:
        return {
            "loop": self.loops,
            "steps_before": self.steps_before,
            "shards": self.shards,
            "data": self.data,
        }
