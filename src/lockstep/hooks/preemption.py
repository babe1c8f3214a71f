"""The hook that saves and ends a run after a signal, or at a given time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lockstep.launch.termination import Termination, preempted
from lockstep.training.consensus import NOTHING, Request
from lockstep.training.hook import ControlHook
from lockstep.training.run import Run


@dataclass(eq=False)
class Preemption(ControlHook):
    """Makes all ranks save and end. Raises `Preempted`, or `Interrupted` after Ctrl-C."""

    termination: Termination
    stop_at: float | None  # the time at which the run ends, in seconds since 1970

    def request(self, run: Run) -> Request:
        if self.stop_at is not None and time.time() >= self.stop_at:
            return Request(end="the time that it was given is over")
        return NOTHING if self.termination.asked is None else Request(end=self.termination.asked)

    def on_agreement(self, run: Run, agreed: Request) -> None:
        if agreed.end is not None:
            self.termination.answer()
            raise preempted(agreed.end)
