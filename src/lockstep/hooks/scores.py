"""The value of `Saving.best` for each checkpoint, and the best so far."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lockstep.checkpoint.manifest import UnreadableError, read_manifest
from lockstep.checkpoint.storage import CheckpointName, Storage
from lockstep.comm.world import World
from lockstep.saving import Best, Saving
from lockstep.training.run import Run


@dataclass(slots=True)
class Scores:
    """The same on all ranks."""

    saving: Saving
    by_name: dict[CheckpointName, float] = field(default_factory=dict)

    def now(self, run: Run) -> float | None:
        """Return the value after the latest step, if any. Raises `RecipeError` if no evaluation has
        the metric."""
        metric = self.saving.best
        return (
            None
            if metric is None or not run.metrics
            else run.training.metric(metric, f"Saving(best={metric!r})")
        )

    def improves(self, value: float) -> bool:
        """True if `value` is better than every checkpoint's."""
        name = self.best_checkpoint()
        return self.saving.improves(value, None if name is None else self.by_name[name])

    def best_checkpoint(self) -> CheckpointName | None:
        """Return the earliest checkpoint with the best value."""
        best: CheckpointName | None = None
        for name, value in self.by_name.items():
            if self.saving.improves(value, None if best is None else self.by_name[best]):
                best = name
        return best

    def best(self, run: Run, folder: Storage) -> Best | None:
        """Return the best evaluation so far, the latest step's included. `folder`: of the
        checkpoints."""
        metric, value, name = self.saving.best, self.now(run), self.best_checkpoint()
        if metric is not None and value is not None and self.improves(value):
            return Best(
                metric=metric,
                value=value,
                step=run.step,
                checkpoint=None,
                weights=str(run.dir / "model.safetensors"),
            )
        if metric is None or name is None:
            return None
        return Best(
            metric=metric,
            value=self.by_name[name],
            step=name.step,
            checkpoint=str(name),
            weights=f"{folder}/{name}",
        )

    def note(self, name: CheckpointName, run: Run) -> dict[str, Any] | None:
        """Note the latest step's value for its checkpoint. Returns what the checkpoint records."""
        value = self.now(run)
        if value is None:
            return None
        self.by_name[name] = value
        return {"metric": self.saving.best, "mode": self.saving.mode, "value": value}

    def read(self, folder: Storage, names: Sequence[CheckpointName], world: World) -> None:
        """Read the values of existing checkpoints. Every rank calls it."""
        if self.saving.best is None:
            return
        found = []
        if world.rank == 0:
            for name in names:
                with suppress(UnreadableError):
                    score = read_manifest(folder, name).metadata.get("score")
                    if score is not None and score["metric"] == self.saving.best:
                        found.append([name.step, name.attempt, score["value"]])
        self.by_name = {
            CheckpointName(step, attempt): value
            for step, attempt, value in world.value_of(0, found)
        }
