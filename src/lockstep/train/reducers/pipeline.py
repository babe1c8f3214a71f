"""The gradients of a pipeline's stages: those of tied parameters are summed along the pipeline, then all over the data axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lockstep.train.reducers.step_stats import Number, Told
from lockstep.train.reducers.tied_gradients import TiedGradients


class Inner(Protocol):
    """An `Engine` that says in between which parameters were used."""

    def begin(self, count: int) -> None: ...

    def used(self) -> list[float]:
        """After the last backward, of each parameter: 0 where no microbatch of this rank used it."""

    def sum_up(self, used: Sequence[float], values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool) -> Told:
        """The rest of `Engine.finish`."""

    def close(self) -> None: ...


class Piped:
    """An `Engine` whose microbatches are computed all at once, by `Pipeline.run`, between `begin` and `finish`.

    Every rank of a pipeline is given the same values and weights: `run` has told them.
    """

    def __init__(self, inner: Inner, tied: TiedGradients) -> None:
        """`inner`: for this rank's stages."""
        self._inner = inner
        self._tied = tied

    def begin(self, count: int) -> None:
        self._inner.begin(count)

    def backward(self, total: Tensor, seed: Tensor, *, only_these: bool, is_dummy: bool) -> None:
        raise AssertionError("the backwards of a pipeline are its schedule's")

    def finish(self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool) -> Told:
        used = self._inner.used()
        self._tied.sum(used)
        return self._inner.sum_up(used, values, weights, flag=flag)

    def close(self) -> None:
        self._inner.close()
