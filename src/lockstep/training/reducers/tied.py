"""Gradients of parameters that several stages of a pipeline share, summed over these stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.mesh import to_local
from lockstep.comm.world import World
from lockstep.model.pipeline.stages import SharedParameter


class TiedGradients:
    """The parameters of this rank's stages that other stages share. Only the first of their ranks
    counts them in the norm."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        tied: Sequence[SharedParameter],
        pipeline: World,
    ) -> None:
        """`parameters`: the trainable parameters of this rank's stages, by name, in the reducer's
        order."""
        self._pipeline = pipeline
        places = {name: place for place, name in enumerate(parameters)}
        mine = [each for each in tied if pipeline.rank in each.ranks and each.name in parameters]
        self._mine = [(places[each.name], parameters[each.name], each.ranks) for each in mine]
        self._elsewhere = {
            id(parameter) for _, parameter, ranks in self._mine if ranks[0] != pipeline.rank
        }

    def counts(self, parameter: nn.Parameter) -> bool:
        """True if this rank counts the parameter in the gradient's norm."""
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
        """Sum over `ranks`: the first one adds the values in the order of ranks, and sends the
        result to the others."""
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
