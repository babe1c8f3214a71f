"""The hook that saves a run and resumes it."""

from __future__ import annotations

from functools import partial

from lockstep.base.errors import DivergenceError
from lockstep.checkpoint.storage import Storage
from lockstep.hooks.checkpointer import Checkpointer
from lockstep.hooks.replica_audit import ReplicaAudit
from lockstep.launch.termination import Terminated
from lockstep.launch.worker_files import defer_kill
from lockstep.plan import Plan
from lockstep.recipe import keeps_rest
from lockstep.saving import Resume, Saving
from lockstep.training.consensus import NOTHING, Request
from lockstep.training.hook import ControlHook, Run


class Checkpointing(ControlHook):
    """Saves the run behind the training, after an error, and when it is asked to end; loads the newest checkpoint at the start."""

    def __init__(self, saving: Saving, resume: Resume, folder: Storage, *, allow_change: frozenset[str], audit: ReplicaAudit) -> None:
        """`folder` has the run's checkpoints. `audit` compares the replicas before each save."""
        self.rescued = False
        """True if the last whole step was saved after an error."""
        self._saving = saving
        self._resume = resume
        self._folder = folder
        self._allow_change = allow_change
        self._audit = audit
        self._checkpointer: Checkpointer | None = None

    def resume(self, run: Run) -> None:
        """Load the newest checkpoint, if there is one. Every rank calls it once, before the first step. Raises `CheckpointError`."""
        context = run.context
        checkpointer = self._checkpointer = Checkpointer(run, self._folder, self._saving, compare=partial(self._audit.compare, run))
        found = checkpointer.restore(self._resume, allow_change=self._allow_change)
        step = 0 if found is None else found.manifest.step
        context.recorder.go_on(step, str(checkpointer.folder))
        checkpointer.begin(step)
        if found is None:
            return
        run.loop.resumed = {**found.manifest.values, "step": step}
        if keeps_rest(context.gradient_compression) and Plan.parse(found.manifest.metadata["plan"]).replicate != 1:
            run.event(
                "unsent-rest-dropped",
                gradient_compression=context.gradient_compression,
                reason="the checkpoint does not hold the error feedback, which was not sent before the save",
            )

    def request(self, run: Run) -> Request:
        due = self._checkpointer is not None and self._checkpointer.time_is_up()
        return Request(save=True) if due else NOTHING

    def on_agreement(self, run: Run, agreed: Request) -> None:
        if self._checkpointer is None:
            return
        if agreed.end is not None:
            with defer_kill():
                self._checkpointer.save_now(run.step)
        else:
            run.context.phases.enter("saving")
            self._checkpointer.after(run.step, asked=agreed.save)

    def on_finish(self, run: Run) -> None:
        if self._checkpointer is not None and run.recipe is None and run.is_committed:  # `train` writes the model itself
            assert run.source is not None, "a step was committed"
            run.end_step(run.source)
            self._checkpointer.save_now(run.step)

    def wait(self) -> None:
        """Wait for the save under way. Every rank calls it."""
        if self._checkpointer is not None:
            self._checkpointer.finish()

    def on_error(self, run: Run, error: BaseException) -> None:
        self.rescue(run, error)

    def rescue(self, run: Run, error: BaseException) -> bool:
        """If this rank's state is that of a whole step, save it without the other ranks' help. Returns True if it is saved."""
        by_the_script = isinstance(error, SystemExit) and not isinstance(error, Terminated)
        is_whole = run.source is not None and run.is_whole and run.is_whole_in_a_step
        if self._checkpointer is None or by_the_script or isinstance(error, DivergenceError) or not is_whole:
            return False
        if run.source is not None and run.source.positions is not None and run.context.mesh.axis("replicate").size > 1:
            return False  # only the other replicas know where their shards of the stream stand
        try:
            with defer_kill():
                name = self._checkpointer.rescue(run.step)
        except Exception as failure:  # no failure here may hide the error that ended the run
            run.event("rescue-failed", reason=f"{type(failure).__name__}: {failure}")
            return False
        self.rescued = True
        if name is not None:
            run.event("rescued", checkpoint=name)
        return True

    def on_end(self, run: Run) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
