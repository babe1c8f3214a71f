"""Gradient reduction for the stages of a pipeline: tied parameters are summed along the pipeline, then all over the data axes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lockstep.training.reducers.fsdp import FsdpReducer
from lockstep.training.reducers.post_backward import PostBackwardReducer
from lockstep.training.reducers.step_stats import Number, StepStats
from lockstep.training.reducers.tied_gradients import TiedGradients


class PipelineReducer:
    """A `GradientReducer` for this rank's stages. `Pipeline.run` computes all backwards, between `begin_step` and `reduce`.

    Every rank of a pipeline passes the same values and weights to `reduce`: `Pipeline.run` has exchanged them.
    """

    def __init__(self, data_reducer: PostBackwardReducer | FsdpReducer, tied: TiedGradients) -> None:
        """`data_reducer` sums over the data axes."""
        self._data_reducer = data_reducer
        self._tied = tied

    def begin_step(self, count: int) -> None:
        self._data_reducer.begin_step(count)

    def backward(self, total: Tensor, grad_output: Tensor, *, own_parameters_only: bool, is_dummy: bool) -> None:
        raise AssertionError("the pipeline's schedule computes the backwards")

    def reduce(self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool) -> StepStats:
        used = self._data_reducer.used()
        self._tied.sum(used)
        return self._data_reducer.reduce_used(used, values, weights, flag=flag)

    def close(self) -> None:
        self._data_reducer.close()
