"""Tracks which steps an accelerator has computed.

The host may run several steps ahead of an accelerator. The step number on the host may not match
the device's tensors. One event is recorded at the end of each step, and another before the next
change of the model. Between the two events, the device's tensors have the values of the ended step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.base import accelerator
from lockstep.training.step_result import StepResult
from lockstep.training.train_module import HostValues

_KEPT = 3
"""Number of ended steps that are kept in memory, because the device may still be at any of them."""
_POLL_SECONDS = 0.005


class StreamMark:
    """A point in the work that is queued on the current streams of some devices."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._events = [(accelerator.event(device), device) for device in devices]
        self.is_recorded = False

    def record(self) -> None:
        for event, device in self._events:
            event.record(accelerator.current_stream(device))
        self.is_recorded = True

    def is_reached(self) -> bool:
        return self.is_recorded and all(event.query() for event, _ in self._events)

    def may_be_passed(self) -> bool:
        return self.is_recorded and any(event.query() for event, _ in self._events)


@dataclass(eq=False, slots=True)
class EndedStep:
    """A step whose kernels are all queued, with the host's values after the step."""

    step: int
    metrics: dict[str, float]
    metrics_at: dict[str, int]
    latest: StepResult | None
    saved_loss: float
    loop: dict[str, Any]
    modules: list[HostValues]
    end: StreamMark = field(init=False)
    change: StreamMark = field(init=False)
    """Recorded before the first change of models or optimizers after the step."""

    def is_certain(self) -> bool:
        return self.end.is_reached() and not self.change.may_be_passed()

    def state_dict(self) -> dict[str, Any]:
        loss = self.saved_loss if self.latest is None else self.latest.loss()
        return {
            "step": self.step,
            "metrics": self.metrics,
            "metrics_at": self.metrics_at,
            "loss": loss,
        }

    def load_state_dict(self, state_dict: Any) -> None:
        raise NotImplementedError("this state is only saved, never loaded")


class DeviceProgress:
    """The latest steps of a run on accelerators. The training thread records the steps, and any
    thread may query them."""

    def __init__(self) -> None:
        self._ended: deque[EndedStep] = deque()
        self._marks: list[StreamMark] = []
        self._devices: Sequence[torch.device] = ()

    def end_step(self, ended: EndedStep, devices: Sequence[torch.device]) -> None:
        if devices != self._devices:
            self._devices, self._marks = devices, []
        if len(self._ended) == _KEPT:
            oldest = self._ended.popleft()
            self._marks += [oldest.end, oldest.change]
        ended.end, ended.change = (
            self._marks.pop() if self._marks else StreamMark(devices) for _ in range(2)
        )
        ended.change.is_recorded = False
        ended.end.record()
        self._ended.append(ended)

    def begin_change(self) -> None:
        if self._ended and not (latest := self._ended[-1]).change.is_recorded:
            latest.change.record()

    @property
    def is_at_start(self) -> bool:
        return not self._ended

    def is_latest(self, ended: EndedStep) -> bool:
        return self._ended[-1] is ended

    def is_certain(self, ended: EndedStep) -> bool:
        # the marks of an older step, which is no longer kept, are used again for a later one
        return ended.is_certain() and ended in self._ended

    def newest(self, within_seconds: float) -> EndedStep | None:
        """Return the newest step after which the device's tensors have not changed, or None. Waits
        up to `within_seconds` for the device to reach the latest step."""
        deadline = time.monotonic() + within_seconds
        while self._ended:
            ended = list(self._ended)
            if self.is_certain(ended[-1]):
                return ended[-1]
            if ended[-1].change.may_be_passed():
                return None
            if time.monotonic() >= deadline:
                return next((each for each in reversed(ended) if self.is_certain(each)), None)
            time.sleep(_POLL_SECONDS)
        return None
