"""What ranks ask of one another between two steps: to stop training, to save, to save and end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.comm.mesh import Mesh
from lockstep.launch.termination import Termination
from lockstep.train.step_result import Flag, Outcome


@dataclass(frozen=True, slots=True)
class Asked:
    """Of all ranks, by any of them."""

    stop: str | None = None
    """Why no further step is to be taken."""
    save: bool = False
    end: str | None = None
    """Why the run is to save and end."""


class Wishes:
    """Of one rank; every rank has one."""

    def __init__(
        self,
        mesh: Mesh,
        termination: Termination,
        *,
        stop_at: float | None,
        save_is_due: Callable[[], bool],
    ) -> None:
        """`stop_at`: when the run is to save and end, by the clock. `save_is_due`: whether it is time for a save."""
        self.stop: str | None = None
        """Why this rank wants no further step."""
        self._mesh = mesh
        self._termination = termination
        self._stop_at = stop_at
        self._save_is_due = save_is_due
        self._flag = Flag()

    def there_are(self, *, stops: bool) -> bool:
        """Whether this rank has something to tell the others. `stops`: whether a wish to stop counts in this step."""
        return (stops and self.stop is not None) or self._end() is not None or self._save_is_due()

    def exchanged(self, outcomes: Sequence[Outcome], *, stops: bool) -> Asked:
        """After a step, with its outcomes, which say on each rank of a data axis whether any has a wish. Every rank calls it."""
        any_asks = self._flag.raised(outcomes, now=stops)
        if self._mesh.data.size < self._mesh.world.size:
            any_asks = self._mesh.world.any(any_asks)
        if not any_asks:
            return Asked()
        everyone = self._mesh.world.gather_values([self.stop if stops else None, self._save_is_due(), self._end()])
        stop, save, end = zip(*everyone, strict=True)
        return Asked(_first(stop), any(save), _first(end))

    def agree_to_stop(self) -> str | None:
        """Why any rank wants to stop, if one does. Every rank calls it."""
        return _first(self._mesh.world.gather_values(self.stop))

    def _end(self) -> str | None:
        if self._stop_at is not None and time.time() >= self._stop_at:
            return "the time that it was given is over"
        return self._termination.asked


def _first(reasons: Sequence[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)
