"""The hook for a run that ran out of memory: it remembers another plan for the next start, and has the run started again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lockstep.base.errors import RecipeError
from lockstep.hooks.fallbacks import TakenFallbacks, changes, fallback_since, next_plan, remember_fallback, said
from lockstep.launch.failures import out_of_memory
from lockstep.launch.worker_files import request_restart
from lockstep.model.sync_batchnorm import training_batchnorms
from lockstep.plan import Plan
from lockstep.recipe import Stream
from lockstep.saving import OutOfMemory as Setting
from lockstep.training.hook import ControlHook, Run


class OutOfMemory(ControlHook):
    """One a rank."""

    def __init__(self, given: Plan, remembered: TakenFallbacks, setting: Setting, *, is_restarted: bool) -> None:
        """`given`: the plan that was asked for. `remembered`: what earlier failures changed in it. `setting`: what may change.

        `is_restarted`: the launcher starts the run again if asked to.
        """
        self._given = given
        self._remembered = remembered
        self._setting = setting
        self._is_restarted = is_restarted
        self._largest: int | None = None
        """Samples of the largest microbatch. None before the first loop."""
        self._unsplittable: str | None = None
        """Why no microbatch can be split, in words."""
        self._fallback: Plan | str | None = None
        """The next plan after the error that ends the run, or why there is none. None: it is another error."""

    def report_change(self, run: Run) -> None:
        """Say how the plan differs from the one that was asked for, if it does."""
        given = self._given
        plan = self._remembered.over(given, run.context.device.type)
        if plan == given:
            return
        last, change = self._remembered.failures[-1], changes(given, plan)
        reason = f"memory ran out in step {last['step']} on rank {last['rank']}: {last['error']}"
        split = "random streams belong to microbatches: with smaller ones dropout masks are others, and so is rounding"
        note: dict[str, Any] = {"note": split} if plan.microbatch_splits > given.microbatch_splits else {}
        run.event("plan-changed", last["step"], reason=reason, change=change, given=str(given), plan=str(plan), **note)
        run.context.recorder.message(f"goes on with {change}: {reason}")

    def begin_loop(self, run: Run, models: Sequence[nn.Module], data: Any, *, largest: int) -> None:
        """Raise `RecipeError` if the plan splits microbatches, of at most `largest` samples, that cannot be split. Every rank calls it."""
        mine = [name for name, _ in training_batchnorms(models)]
        layers = [name for theirs in run.context.mesh.axis("pipeline").gather_values(mine) for name in theirs]
        if layers:
            self._unsplittable = (
                f"BatchNorm ({layers[0]!r}) takes its statistics over what is computed at once, so that halves are another model"
            )
        elif isinstance(data, Stream):
            self._unsplittable = "an ls.Stream reads each microbatch from a shard of its own, so that halves are other samples"
        splits = run.context.plan.microbatch_splits
        if splits and self._unsplittable is not None:
            raise RecipeError(
                f"microbatch_splits={splits}, and {self._unsplittable}; leave microbatch_splits out, or give a smaller microbatch"
            )
        self._largest = largest

    def on_error(self, run: Run, error: BaseException) -> None:
        context = run.context
        if isinstance(error, Exception) and out_of_memory(error):
            largest = self._largest if run.source is not None else None
            found = next_plan(context.plan, context.device.type, self._setting, largest=largest, whole=self._unsplittable)
            rank, folder = context.world.rank, context.run_dir
            found = remember_fallback(context.plan, found, self._remembered, error, folder=folder, step=run.step, rank=rank)
            details: dict[str, Any] = {"why_not": found} if isinstance(found, str) else {"then": changes(context.plan, found)}
            run.event("out-of-memory", **details)
            self._fallback = found
        if self._is_restarted and (why := fallback_since(self._remembered, context.run_dir)):
            request_restart(why)

    def advise(self, run: Run, error: BaseException, *, saved: bool) -> None:
        """Add to the error what the user can do. `saved`: the last step was saved after the error."""
        if self._fallback is not None:
            step = run.step if saved else None
            error.add_note(said(run.context.plan, self._fallback, folder=run.context.run_dir, step=step))
