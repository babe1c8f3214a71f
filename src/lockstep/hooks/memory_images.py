"""The hook that keeps copies of the training state in memory. Recovery in place restores the state
of a lost process from the copies."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from lockstep.checkpoint.image_writer import ImageWriter, image_interval
from lockstep.training.consensus import Request
from lockstep.training.hook import ControlHook
from lockstep.training.recovery import Recovery, values_to_hold
from lockstep.training.run import Run
from lockstep.training.state import KnownTensors, state_of

MOST_TIME = 0.01
"""Largest share of the run time that copies of the training state may take."""
MOST_TIME_WITH_REPLICAS = 0.002
"""Largest share of the run time that copies of the training state may take, if every process has
the whole state. With replicas, the copies are needed only if all processes are lost."""


@dataclass(eq=False)
class MemoryImages(ControlHook):
    """Copies this rank's part of the training state into memory that outlives the process. A copy
    costs twice its duration, because it evicts the processor's caches."""

    recovery: Recovery | None
    """None if the run cannot recover in place."""
    _writer: ImageWriter | None = None
    _known: KnownTensors = field(default_factory=KnownTensors)
    _count: int = 0
    _written: int = -1  # steps done at the last copy
    _next: int = 0  # steps done at the next copy
    _since: float = 0.0
    _cost: float = 0.0  # seconds of the last copy, without waits for slower ranks

    def before_steps(self, run: Run) -> None:
        # after a recovery, the images that restored the state are kept, and other ranks wait for
        # the first step
        recovers = run.context.recovered_from is not None
        if (
            self.recovery is not None
            and self.recovery.can_replace
            and not recovers
            and run.step > self._written
        ):
            self._write(run, self.recovery)

    def on_agreement(self, run: Run, agreed: Request) -> None:
        if self.recovery is not None:
            # a process that waits in no collective would not notice the loss of another
            self.recovery.rejoin.raise_if_lost()
            if self.recovery.can_replace and run.step >= self._next:
                self._write(run, self.recovery)

    def on_end(self, run: Run) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _write(self, run: Run, recovery: Recovery) -> None:
        run.context.phases.enter("saving")
        if self._writer is None:
            self._writer = ImageWriter(run.context.world, run.context.recorder.attempt, {})
            self._writer.prepare(
                state_of(run.training.modules, run.training.stateful, self._known).tensors
            )
        began = time.thread_time()
        step_seconds = (time.perf_counter() - self._since) / max(1, run.step - self._written)
        state = state_of(run.training.modules, run.training.stateful, self._known)
        values = values_to_hold(run.training, state.values)
        copy, step = self._writer.write(run.step, state.tensors, values, [self._cost, step_seconds])
        self._since, self._cost = (
            time.perf_counter(),
            time.thread_time() - began + self._writer.sending_seconds,
        )
        self._count, self._written = self._count + 1, run.step
        limit = MOST_TIME_WITH_REPLICAS if recovery.is_replica else MOST_TIME
        # the first image takes longer than later images
        self._next = run.step + (image_interval(copy, step, limit) if self._count > 2 else 1)
        if self._count == 1:
            recovery.rejoin.offer_images(self._writer.descriptors)
        elif self._count == 2:
            recovery.rejoin.note_all_offered()
