"""What a session does where memory runs out: it remembers another plan for the next start (`ladder`), and has itself started again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.base.errors import RecipeError
from lockstep.comm.mesh import Mesh
from lockstep.hooks.fallbacks import Remembered, changes, climb, more_to_change, next_plan, recall, said
from lockstep.launch.environment import Environment
from lockstep.launch.failure import out_of_memory
from lockstep.launch.grace import ask_again
from lockstep.logging.recorder import Recorder
from lockstep.model.sync_batchnorm import training_batchnorms
from lockstep.plan import Plan
from lockstep.recipe import Stream
from lockstep.saving import OutOfMemory, check_out_of_memory


@dataclass(slots=True)
class Memory:
    """Of one session, on one rank."""

    mesh: Mesh
    plan: Plan
    """The given one, with what the run remembers."""
    event: Callable[..., None]
    """`Session.event`."""
    _folder: Path
    _remembered: Remembered
    _setting: OutOfMemory
    _is_started_again: bool
    """Whether the launcher does so where it is asked to."""
    _largest: int | None = None
    """Samples of the largest microbatch. None before there is one."""
    _whole: str | None = None
    """Why no microbatch can be halved, in words."""

    @classmethod
    def of(cls, mesh: Mesh, given: Plan, environment: Environment, recorder: Recorder, event: Callable[..., None]) -> Memory:
        """Every rank calls it. Raises `RunDirectoryError` and `CheckpointError`."""
        setting = check_out_of_memory(environment.out_of_memory or "retry", "LOCKSTEP_OUT_OF_MEMORY")
        remembered = recall(mesh.world, recorder.path, goes_on=recorder.goes_on)
        plan = remembered.over(given, mesh.world.device.type)
        return cls(mesh, plan, event, recorder.path, remembered, setting, environment.launcher == "lockstep")

    def tell(self, given: Plan, message: Callable[[str], None]) -> None:
        """Where what is remembered changes the `given` plan, say so."""
        if self.plan == given:
            return
        last, change = self._remembered.failures[-1], changes(given, self.plan)
        reason = f"memory ran out in step {last['step']} on rank {last['rank']}: {last['error']}"
        halved = "random streams belong to microbatches: with smaller ones dropout masks are others, and so is rounding"
        note: dict[str, Any] = {"note": halved} if self.plan.halvings > given.halvings else {}
        self.event("plan-changed", last["step"], reason=reason, change=change, given=str(given), plan=str(self.plan), **note)
        message(f"goes on with {change}: {reason}")

    def begin(self, models: Sequence[nn.Module], data: Any, *, largest: int) -> None:
        """Before a loop of steps whose microbatches have at most `largest` samples. Every rank calls it.

        Raises `RecipeError` where the plan halves microbatches that cannot be.
        """
        self._largest = largest
        mine = [name for name, _ in training_batchnorms(models)]
        layers = [name for theirs in self.mesh.axis("pipeline").gather_values(mine) for name in theirs]
        if layers:
            self._whole = f"BatchNorm ({layers[0]!r}) takes its statistics over what is computed at once, so that halves are another model"
        elif isinstance(data, Stream):
            self._whole = "an ls.Stream reads each microbatch from a shard of its own, so that halves are other samples"
        if self.plan.halvings and self._whole is not None:
            raise RecipeError(f"halvings={self.plan.halvings}, and {self._whole}; leave halvings out, or give a smaller microbatch")

    def after(self, error: BaseException, step: int, *, in_a_step: bool) -> Plan | str | None:
        """After the error that ends the run, with `step` steps done: where memory ran out, remember the next plan.

        Returns it, or why there is none; None: it is another error. Where any rank has remembered one, the launcher is asked to start the
        run again. `in_a_step`: whether the first step of this process had begun.
        """
        found: Plan | str | None = None
        if isinstance(error, Exception) and out_of_memory(error):
            largest = self._largest if in_a_step else None
            found = next_plan(self.plan, self.mesh.world.device.type, self._setting, largest=largest, whole=self._whole)
            found = climb(self.plan, found, self._remembered, error, folder=self._folder, step=step, rank=self.mesh.world.rank)
            told: dict[str, Any] = {"why_not": found} if isinstance(found, str) else {"then": changes(self.plan, found)}
            self.event("out-of-memory", **told)
        if self._is_started_again and (why := more_to_change(self._remembered, self._folder)):
            ask_again(why)
        return found

    def advice(self, found: Plan | str, *, step: int | None) -> str:
        """What is said beside the error. `found`: what `after` gave. `step`: those done and kept; None: the last step is not."""
        return said(self.plan, found, folder=self._folder, step=step)
