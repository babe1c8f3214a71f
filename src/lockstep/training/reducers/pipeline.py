"""Gradient reduction for the stages of a pipeline: tied parameters over the stages, then all over
the data axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.assignment import MicrobatchAssignment
from lockstep.comm.mesh import to_local
from lockstep.comm.world import World
from lockstep.model.pipeline.stages import SharedParameter
from lockstep.training.reducers.fsdp import FsdpReducer
from lockstep.training.reducers.post_backward import PostBackwardReducer
from lockstep.training.reducers.step_stats import Number, StepStats


class TiedGradients:
    """Parameters of this rank's stages that other stages share. They count in the norm on the first
    of their ranks."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        tied: Sequence[SharedParameter],
        pipeline: World,
    ) -> None:
        """`parameters`: the trainable ones of this rank's stages, by name, in the reducer's
        order."""
        self._pipeline = pipeline
        places = {name: place for place, name in enumerate(parameters)}
        mine = [each for each in tied if pipeline.rank in each.ranks and each.name in parameters]
        self._mine = [(places[each.name], parameters[each.name], each.ranks) for each in mine]
        self._elsewhere = {
            id(parameter) for _, parameter, ranks in self._mine if ranks[0] != pipeline.rank
        }

    def counts(self, parameter: nn.Parameter) -> bool:
        """True if the parameter counts in the gradient's norm on this rank."""
        return id(parameter) not in self._elsewhere

    def sum(self, used: list[float]) -> None:
        """Sum each tied `.grad` over its stages, and set `used` if any stage used it. Every rank of
        the pipeline calls it, once a step."""
        for at, parameter, ranks in self._mine:
            local = to_local(parameter.detach())
            mine = torch.zeros(local.numel() + 1, dtype=local.dtype, device=self._pipeline.device)
            if used[at] and parameter.grad is not None:
                mine[:-1] = to_local(parameter.grad).reshape(-1)
                mine[-1] = 1.0
            self._sum(mine, ranks)
            used[at] = float(mine[-1] > 0)
            if not used[at]:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            to_local(parameter.grad).copy_(mine[:-1].view_as(local))

    def _sum(self, mine: Tensor, ranks: Sequence[int]) -> None:
        """Sum over `ranks`: the first one adds in their order, and sends the result to the
        others."""
        group = self._pipeline.group or dist.group.WORLD
        if self._pipeline.rank != ranks[0]:
            dist.send(mine, group=group, group_dst=ranks[0])
            dist.recv(mine, group=group, group_src=ranks[0])
            return
        other = torch.empty_like(mine)
        for rank in ranks[1:]:
            dist.recv(other, group=group, group_src=rank)
            mine += other
        for rank in ranks[1:]:
            dist.send(mine, group=group, group_dst=rank)


class PipelineReducer:
    """A `GradientReducer` for this rank's stages. `Pipeline.run` computes, and exchanges values and
    weights."""

    def __init__(
        self, data_reducer: PostBackwardReducer | FsdpReducer, tied: TiedGradients
    ) -> None:
        self._data_reducer = data_reducer
        self._tied = tied

    def begin_step(self, count: int, assignment: MicrobatchAssignment) -> None:
        self._data_reducer.begin_step(count, assignment)

    def backward(
        self, total: Tensor, grad_output: Tensor, *, own_parameters_only: bool, is_dummy: bool
    ) -> None:
        raise AssertionError("the pipeline's schedule computes the backwards")

    def reduce(
        self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool
    ) -> StepStats:
        used = self._data_reducer.used()
        self._tied.sum(used)
        return self._data_reducer.reduce_used(used, values, weights, flag=flag)

    def gradient_versions(self) -> list[Any]:
        return self._data_reducer.gradient_versions()

    def close(self) -> None:
        self._data_reducer.close()
