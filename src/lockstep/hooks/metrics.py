"""What the steps came to: found out, told and written down at logging steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lockstep.base.errors import LossError
from lockstep.logging.recorder import Pace, Recorder
from lockstep.train.step import Step
from lockstep.train.step_result import Outcome
from lockstep.train.train_module import Pair

_OVERFLOWS_TO_TELL = 8
"""In a row. Fewer are fp16's way to find its scale, and no more than events."""


class Reports:
    """Of a session's loop of steps; the same on every rank."""

    def __init__(self, pairs: Sequence[Pair], recorder: Recorder, event: Callable[..., None]) -> None:
        self.pace = Pace()
        self._pairs = pairs
        self._processes = pairs[0].mesh.world.size
        self._recorder = recorder
        self._event = event
        self._unread: list[Outcome] = []
        self._told: list[Pair] = []

    def add(self, step: Step) -> None:
        """A step is committed."""
        self.pace.count(step.samples, step.source.weights)
        self._unread += step.committed.values()

    def read(self) -> None:
        """Find out what the steps since the last time came to. Raises `LossError`."""
        outcomes, self._unread = self._unread, []
        for outcome in outcomes:
            outcome.check()
            if outcome.applied is False:
                reason = "the scaled gradient overflowed; the loss scale was halved"
                self._event("step-skipped", outcome.layout.step, reason=reason)
        for pair in self._pairs:
            if pair.overflows >= _OVERFLOWS_TO_TELL and pair not in self._told:
                self._told.append(pair)
                self._recorder.message(
                    f"warning: {pair.overflows} steps in a row were skipped, because the fp16 gradient overflowed even at a loss scale of "
                    f"{pair.overflowed_at:g}; where that falls below 1, the run ends"
                )

    def log(self, step: Step, extra: Mapping[str, float]) -> None:
        """Write a line for a step. `extra`: what else is in it."""
        outcome = step.committed[0]
        speed = self.pace.restart()
        values = {"loss": outcome.loss(), "lr": outcome.pair.schedule.rate(), "gradient_norm": float(outcome.norm), **speed, **extra}
        if (mfu := outcome.pair.flops.utilisation(speed["samples_per_second"], self._processes)) is not None:
            values["mfu"] = mfu
        terms = {f"loss/{name}": value for name, value in outcome.term_losses().items()}
        self._recorder.step(step.index + 1, values, {**terms, **step.logged})

    def check_any_applied(self, steps_done: int) -> None:
        """After the last step. Raises `LossError` where none changed the model."""
        for pair in self._pairs:
            if pair.overflows and pair.overflows == steps_done:
                raise LossError(
                    f"none of the {steps_done} steps was applied: the fp16 gradient overflowed in each, at last at a loss scale of "
                    f"{pair.overflowed_at:g}; each such step halves the scale; take more steps, or precision='bf16' or 'fp32'"
                )
