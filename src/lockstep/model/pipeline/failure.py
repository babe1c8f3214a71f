"""An exchange that turns a failure on one rank of a pipeline into an error on every rank, so that
no rank waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.base import errors
from lockstep.base.errors import LockstepError, UserError
from lockstep.comm.world import World


class StageFailed(LockstepError):
    """Another rank of the pipeline failed with an error that is not a user's mistake."""


class PipelineFailure:
    """The first error on this rank since `clear`. Every rank of the pipeline has one."""

    def __init__(self, world: World) -> None:
        self.error: Exception | None = None
        self._world = world

    def raise_on_all_ranks(self, compute: Callable[[], Any]) -> Any:
        """Return `compute()`. If it fails on any rank, every rank raises. Every rank calls it."""
        self.error, result = None, None
        try:
            result = compute()
        except Exception as error:
            self.error = error
        self.raise_if_any()
        return result

    def raise_if_any(self) -> None:
        """Raise on every rank if any rank has an error. Every rank calls it."""
        # exchanged between hosts, which do not wait for their devices
        if self._world.any(self.error is not None):
            self.raise_known()

    def raise_known(self) -> None:
        """Raise this rank's error, or the first of another rank. Every rank calls it once all know
        of an error."""
        mine, self.error = self.error, None
        everyone = self._world.gather_values(
            None if mine is None else [type(mine).__name__, str(mine)]
        )
        if mine is not None:
            raise mine
        rank, (name, text) = next(
            (rank, described) for rank, described in enumerate(everyone) if described is not None
        )
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, UserError):
            raise kind(text)
        raise StageFailed(f"rank {rank} of the pipeline failed: {name}: {text}")
