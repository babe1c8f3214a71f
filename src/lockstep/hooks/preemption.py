"""The hook that ends a run at a signal, or at a given time."""

from __future__ import annotations

import time

from lockstep.launch.termination import Preempted, Termination
from lockstep.training.consensus import NOTHING, Request
from lockstep.training.hook import ControlHook, Run


class Preemption(ControlHook):
    """Asks all ranks to save and to end; raises `Preempted` once they have."""

    def __init__(self, termination: Termination, *, stop_at: float | None) -> None:
        """`stop_at`: the time at which the run ends, in seconds since 1970; None: no limit."""
        self._termination = termination
        self._stop_at = stop_at

    def request(self, run: Run) -> Request:
        if self._stop_at is not None and time.time() >= self._stop_at:
            return Request(end="the time that it was given is over")
        return NOTHING if self._termination.asked is None else Request(end=self._termination.asked)

    def on_agreement(self, run: Run, agreed: Request) -> None:
        if agreed.end is not None:
            raise Preempted(agreed.end)
