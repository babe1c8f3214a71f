"""Lets all ranks agree between two steps to stop, to save a checkpoint, or to end the run and
resume it later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.base import accelerator
from lockstep.comm.mesh import Mesh
from lockstep.logging.phases import Phases
from lockstep.training.step_result import StepResult


@dataclass(frozen=True, slots=True)
class Request:
    """Requests to stop training, to save a checkpoint, or to end the run."""

    stop: str | None = None  # the reason why training stops after this step
    save: bool = False
    end: str | None = None  # the reason why the run saves and ends now, to be resumed later

    def __bool__(self) -> bool:
        return self.save or self.stop is not None or self.end is not None


NOTHING = Request()


def merge(requests: Sequence[Request]) -> Request:
    if not requests:
        return NOTHING
    return Request(
        next((each.stop for each in requests if each.stop is not None), None),
        any(each.save for each in requests),
        next((each.end for each in requests if each.end is not None), None),
    )


@dataclass(slots=True)
class Consensus:
    """Lets the ranks agree on requests after each step. Each rank's flag is exchanged with the
    gradients. Only if a flag is set, all ranks exchange their requests."""

    mesh: Mesh
    phases: Phases
    request: Callable[[], Request]  # returns this rank's current request
    # flags of the previous step, while they are copied from the GPU
    _before: tuple[Tensor, torch.Event] | None = None
    _flags_reach_all_ranks: bool = field(init=False)

    def __post_init__(self) -> None:
        self._flags_reach_all_ranks = self.mesh.summed().size == self.mesh.world.size

    def flag(self, *, may_stop: bool) -> bool:
        return bool(self._mine(may_stop))

    def agree(self, results: Sequence[StepResult], *, may_stop: bool) -> Request:
        """Every rank must call this method."""
        if results:
            raised = self._any_flag([result.flags for result in results], wait=may_stop)
        else:  # all models have skipped the step
            raised = self.mesh.world.any(self.flag(may_stop=may_stop))
        if not raised:
            return NOTHING
        mine = self._mine(may_stop)
        everyone = self.mesh.world.gather_values([mine.stop, mine.save, mine.end])
        return merge([Request(*each) for each in everyone])

    def agree_to_stop(self) -> str | None:
        """Every rank must call this method."""
        everyone = self.mesh.world.gather_values(self.request().stop)
        return next((reason for reason in everyone if reason is not None), None)

    def _mine(self, may_stop: bool) -> Request:
        mine = self.request()
        return mine if may_stop or mine.stop is None else Request(None, mine.save, mine.end)

    def _any_flag(self, flags: Sequence[Tensor | bool], *, wait: bool) -> bool:
        """Return True if any rank set its flag. On a GPU with `wait=False`, return the flags of the
        previous step, which the host can read without waiting."""
        on_gpu = [
            flag
            for flag in flags
            if isinstance(flag, Tensor) and accelerator.has_streams(flag.device)
        ]
        if not on_gpu:
            raised = any(map(bool, flags))
            return raised if self._flags_reach_all_ranks else self.mesh.world.any(raised)
        raised_by = torch.stack(on_gpu)
        for axis in self.mesh.larger:
            # over the other axes, the flags were already summed together with the gradients
            if not self.mesh.sums_over(axis):
                self.mesh.axis(axis.name).all_reduce(raised_by)
        before, self._before = self._before, None
        if wait:
            with self.phases.waiting_for_device():
                return bool(raised_by.any())
        copied = raised_by.to("cpu", non_blocking=True)
        self._before = copied, accelerator.recorded_event(raised_by.device)
        if before is None:
            return False
        with self.phases.waiting_for_device():
            before[1].synchronize()
        return bool(before[0].any())
