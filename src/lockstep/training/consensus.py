"""Consensus of the ranks, between two steps, on stopping, on saving, and on saving and ending."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.mesh import Mesh
from lockstep.training.step_result import StepResult


@dataclass(frozen=True, slots=True)
class Request:
    """The stop and save that one rank asks for, or that all ranks have agreed on."""

    stop: str | None = None
    """Why no further step is to be taken."""
    save: bool = False
    end: str | None = None
    """Why the run is to save and to end."""

    def __bool__(self) -> bool:
        return self.save or self.stop is not None or self.end is not None


NOTHING = Request()


def merge(requests: Sequence[Request]) -> Request:
    """Combine requests: everything that any of them asks for, with the first reason."""
    return Request(
        next((each.stop for each in requests if each.stop is not None), None),
        any(each.save for each in requests),
        next((each.end for each in requests if each.end is not None), None),
    )


class Consensus:
    """One rank's side of it. A flag that rides on the gradients' exchange says whether any rank asks for something."""

    def __init__(self, mesh: Mesh, request: Callable[[], Request]) -> None:
        """`request` returns what this rank asks for now."""
        self._mesh = mesh
        self._request = request
        self._flags = _FlagReader()

    def flag(self, *, may_stop: bool) -> bool:
        """True if this rank asks for something. `may_stop`: a request to stop counts in this step."""
        return bool(self._mine(may_stop))

    def agree(self, results: Sequence[StepResult], *, may_stop: bool) -> Request:
        """Agree after a step. The flags in its results tell each data rank if any rank asks for something. Every rank calls it."""
        any_asks = self._flags.raised(results, wait=may_stop)
        if self._mesh.data.size < self._mesh.world.size:
            any_asks = self._mesh.world.any(any_asks)
        return self._exchange(may_stop) if any_asks else NOTHING

    def agree_to_stop(self) -> str | None:
        """Why any rank asks to stop; None if none does. Every rank calls it, at a moment when no flag was exchanged."""
        everyone = self._mesh.world.gather_values(self._request().stop)
        return next((reason for reason in everyone if reason is not None), None)

    def _mine(self, may_stop: bool) -> Request:
        mine = self._request()
        return mine if may_stop or mine.stop is None else Request(None, mine.save, mine.end)

    def _exchange(self, may_stop: bool) -> Request:
        mine = self._mine(may_stop)
        return merge([Request(*each) for each in self._mesh.world.gather_values([mine.stop, mine.save, mine.end])])


class _FlagReader:
    """Reads the flags of steps without waiting for a GPU that is still computing."""

    def __init__(self) -> None:
        self._before: tuple[Tensor, torch.cuda.Event] | None = None

    def raised(self, results: Sequence[StepResult], *, wait: bool) -> bool:
        """True if any flag was raised. On a GPU it is the answer for the step before; with `wait`, for this one."""
        flags = [result.flags for result in results]
        on_gpu = [flag for flag in flags if isinstance(flag, Tensor) and flag.is_cuda]
        if wait or not on_gpu:
            self._before = None
            return any(map(bool, flags))
        before = self._before
        copied = torch.stack(on_gpu).to("cpu", non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._before = copied, event
        if before is None:
            return False
        before[1].synchronize()
        return bool(before[0].any())
