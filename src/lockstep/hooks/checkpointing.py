"""The hook that saves checkpoints of a run, and resumes a run from a checkpoint."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lockstep.base.errors import CheckpointError, DivergenceError, WrongResultError
from lockstep.base.torch_private import accelerator_groups_failed
from lockstep.checkpoint.emergency_save import StateChangedError
from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.manifest import UnreadableError, read_manifest
from lockstep.checkpoint.storage import Storage
from lockstep.comm.regroup import is_aborted
from lockstep.comm.world import World
from lockstep.hooks.checkpointer import Checkpointer
from lockstep.hooks.metrics import check_metric
from lockstep.hooks.replica_audit import ReplicaAudit
from lockstep.launch.termination import Terminated
from lockstep.launch.worker_files import defer_kill, note_saved
from lockstep.logging.phases import Phases
from lockstep.model.shard import reset_after_error
from lockstep.options import STEP_PHASES
from lockstep.plan import Plan
from lockstep.recipe.checks import has_error_feedback
from lockstep.saving import Best, Resume, Saving
from lockstep.training.consensus import NOTHING, Request
from lockstep.training.device_progress import DeviceProgress
from lockstep.training.hook import ControlHook
from lockstep.training.left_out import LeftOut
from lockstep.training.recovery import Recovery
from lockstep.training.run import Run

DEVICE_SECONDS = (5.0, 60.0)
"""Bounds of the time that the host waits for the device after an error."""
_TRIES = 3


def device_seconds(phases: Phases) -> float:
    """Return the time to wait for the device, which may be two steps behind the host."""
    step = sum(phases.usual(name) or 0.0 for name in STEP_PHASES)
    return min(max(2 * step, DEVICE_SECONDS[0]), DEVICE_SECONDS[1])


def saved_recipe(folder: Storage, world: World) -> dict[str, Any]:
    """Return the recipe in the newest readable checkpoint, as JSON. Every rank must call this
    function."""
    found: dict[str, Any] = {}
    if world.rank == 0:
        with suppress(OSError):  # `restore` reports the error
            for name in reversed(folder.names()):
                with suppress(UnreadableError):
                    found = read_manifest(folder, name).metadata["recipe"] or {}
                    break
    recipe: dict[str, Any] = world.value_of(0, found)
    return recipe


@dataclass(eq=False)
class Checkpointing(ControlHook):
    """Loads the newest checkpoint. Saves during training, after an error, and before the run ends
    on request."""

    saving: Saving
    resume_option: Resume
    folder: Storage
    allow_change: frozenset[str]
    audit: ReplicaAudit
    rescued: bool = False  # True if the last complete step was saved after an error
    _checkpointer: Checkpointer | None = None

    def resume(self, run: Run, recovery: Recovery | None, data: Any) -> None:
        """Load the newest checkpoint. In a recovery in place, load the state that the run's
        processes hold in memory. Every rank must call this method once, before the first step."""
        self._load(run, recovery)
        if recovery is not None:
            recovery.announce(run, data)

    def _load(self, run: Run, recovery: Recovery | None) -> None:
        context, loop = run.context, run.training.loop
        reason = context.recovered_from
        for module in run.training.modules:
            module.left_out = LeftOut(module.model, module.held)
        checkpointer = self._checkpointer = Checkpointer(
            run, self.folder, self.saving, compare=partial(self.audit.compare, run)
        )
        if recovery is not None and recovery.is_under_way:
            recovery.check_recipe(run.training)
            in_memory = recovery.reader(context.world, context.plan)
            if in_memory is not None:
                state, reader = in_memory
                step = reader.manifest.step
                saved = checkpointer.restore_from_memory(reader, allow_change=self.allow_change)
                context.recorder.resume(step, None)
                checkpointer.begin(saved, again=True)
                loop.resumed = reader.manifest.values
                details = recovery.restored(step)
                run.event("recovered", step, reason=reason, state=state, **details)
                context.recorder.message(f"goes on after step {step}")
                return
        newest = checkpointer.restore(self.resume_option, allow_change=self.allow_change)
        step = 0 if newest is None else newest.manifest.step
        context.recorder.resume(step, str(checkpointer.folder))
        checkpointer.begin(step)
        if recovery is not None:
            if recovery.is_under_way:
                why_not = recovery.why_no_state
                run.event("restarted", step, reason=reason, not_in_place=why_not)
            recovery.restored(step)
        if newest is None:
            return
        self._continue_data(run, newest)
        saved_under = newest.manifest.metadata["plan"]
        if (
            has_error_feedback(context.gradient_compression)
            and Plan.parse(saved_under).replicate != 1
        ):
            run.event(
                "error-feedback-dropped",
                gradient_compression=context.gradient_compression,
                reason=(
                    "the checkpoint does not hold the error feedback, which was not sent before the"
                    " save"
                ),
            )

    def _continue_data(self, run: Run, reader: CheckpointReader) -> None:
        changed: dict[str, Any] = {"data": {}} if "data" in self.allow_change else {}
        manifest = reader.manifest
        run.training.loop.resumed = {**manifest.values, "step": manifest.step, **changed}

    def begin_before(self, run: Run, step: int) -> None:
        """Load the newest checkpoint with fewer than `step` steps, and disable saving. Every rank
        must call this method."""
        for module in run.training.modules:
            module.left_out = LeftOut(module.model, module.held)
        checkpointer = Checkpointer(run, self.folder, self.saving, compare=lambda: None)
        reader = checkpointer.restore("must", allow_change=self.allow_change, before=step)
        checkpointer.close()
        assert reader is not None, "resume=must"
        run.context.recorder.resume(reader.manifest.step, None)
        self._continue_data(run, reader)

    def on_start(self, run: Run) -> None:
        if self.saving.best is not None:
            check_metric(run, self.saving.best, f"Saving(best={self.saving.best!r})")

    def before_steps(self, run: Run) -> None:
        if self.saving.each_epoch and run.epoch is None:
            raise CheckpointError(
                "Saving(every='epoch') and data without a length, which has no epochs; give a"
                " number of steps, or a time such as '10m'"
            )

    def request(self, run: Run) -> Request:
        is_time = self._checkpointer is not None and self._checkpointer.is_time()
        return Request(save=True) if is_time else NOTHING

    def on_agreement(self, run: Run, agreed: Request) -> None:
        if self._checkpointer is None:
            return
        if agreed.end is not None:
            with defer_kill():
                self._checkpointer.save_now(run.step)
        else:
            run.context.phases.enter("saving")
            self._checkpointer.after_step(run.step, is_time=agreed.save)

    def on_finish(self, run: Run) -> None:
        # with a recipe, `ls.train` writes the final model
        if self._checkpointer is not None and run.recipe is None and run.training.is_committed:
            run.training.end_step(run.training.current)
            self._checkpointer.save_now(run.step)

    def wait(self) -> None:
        """Wait for a save in progress. Every rank must call this method."""
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def delete_after(self, step: int) -> tuple[list[str], str | None]:
        """Delete the checkpoints after `step`. Returns the deleted names, and the reason if a
        checkpoint could not be deleted. Every rank must call this method."""
        return ([], None) if self._checkpointer is None else self._checkpointer.delete_after(step)

    def best(self) -> Best | None:
        if self._checkpointer is None:
            return None
        return self._checkpointer.scores.best(self._checkpointer.run, self.folder)

    def on_error(self, run: Run, error: BaseException) -> None:
        for module in run.training.modules:
            # raised by a collective in flight with a rank that has ended
            with suppress(RuntimeError):
                # after a failed forward the model holds gathered parameters
                reset_after_error(module.model)
        if not self.rescue(run, error) and self._checkpointer is not None:
            self._checkpointer.await_last()

    def rescue(self, run: Run, error: BaseException) -> bool:
        """Save this rank's state without the other ranks, if it is the state after a complete step.
        Returns True if the state was saved."""
        training = run.training
        source, progress = training.source, training.progress
        by_the_script = isinstance(error, SystemExit) and not isinstance(error, Terminated)
        if by_the_script or isinstance(error, DivergenceError | WrongResultError):
            return False
        on_device = progress is not None and not progress.is_at_start
        is_whole = training.is_consistent_in_steps and (training.is_consistent or on_device)
        if self._checkpointer is None or source is None or not is_whole:
            return False
        if source.positions is not None and run.context.mesh.replicas.size > 1:
            # each replica's position in its shards of the dataset is known to that replica only
            return False
        try:
            with defer_kill():
                if on_device and progress is not None:
                    step, name = self._rescue_from_device(run, progress)
                else:
                    step, name = run.step, self._checkpointer.rescue(run.step)
        except Exception as failure:  # an error here must not hide the error that ended the run
            run.event("rescue-failed", reason=f"{type(failure).__name__}: {failure}")
            return False
        self.rescued = True
        if self._checkpointer.has_saved(step):
            note_saved()
        if name is not None:
            run.event("rescued", step, checkpoint=name)
        return True

    def _rescue_from_device(self, run: Run, progress: DeviceProgress) -> tuple[int, str | None]:
        """Save the state after the newest step that the device has completed."""
        assert self._checkpointer is not None
        if is_aborted() or accelerator_groups_failed():
            raise CheckpointError(
                "collectives of the accelerator were aborted, or have failed: they ended with wrong"
                " numbers, which the steps queued behind them have used"
            )
        for _ in range(_TRIES):
            ended = progress.newest(device_seconds(run.context.phases))
            if ended is None:
                break
            is_now = progress.is_latest(ended)
            if len(run.training.stateful) > 1 and not (is_now and run.training.is_consistent):
                raise CheckpointError(
                    f"the device has done {ended.step} steps, and hooks with a state have seen"
                    " later steps, so their states belong to another step"
                )
            # not on the current stream, which may wait for ever for a collective
            with suppress(StateChangedError), torch.Stream(run.context.device):
                return ended.step, self._checkpointer.rescue(ended.step, ended, on_host=is_now)
        raise CheckpointError(
            "the device is in the middle of a step, and may have changed a part of the state"
        )

    def on_end(self, run: Run) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
