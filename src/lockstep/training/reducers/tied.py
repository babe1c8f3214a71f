"""Sums the gradients of tied parameters, which several pipeline stages or several sequential parts
of the model share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.mesh import to_local
from lockstep.comm.world import World
from lockstep.model.pipeline.stages import SharedParameter
from lockstep.model.separate_parts import PartLeaf


class TiedGradients:
    """Sums the gradients of parameters that several pipeline stages share. Under numerics=bitwise,
    the class also sums the gradients of parameters that sequential parts on one rank share."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        tied: Sequence[SharedParameter],
        pipeline: World,
        leaves: Mapping[str, Sequence[PartLeaf]] | None = None,
    ) -> None:
        self._pipeline = pipeline
        mine = [each for each in tied if pipeline.rank in each.ranks and each.name in parameters]
        held = {each.name: (leaves or {}).get(each.name, ()) for each in mine}
        self._mine = [
            ([parameters[each.name], *(leaf.parameter for leaf in held[each.name])], each.ranks)
            for each in mine
        ]
        self.leaves = [leaf for several in held.values() for leaf in several]
        self.names_of_leaves = [name for name, several in held.items() for _ in several]
        self._elsewhere = {
            id(several[0]) for several, ranks in self._mine if ranks[0] != pipeline.rank
        }

    def counts(self, parameter: nn.Parameter) -> bool:
        """Return True if the gradient norm counts the parameter on this rank: the first rank that
        holds the parameter."""
        return id(parameter) not in self._elsewhere

    def sum(self) -> None:
        """Every rank of the pipeline must call this method once per step, after the reducer has
        summed over microbatches. Gradients are added in the order of the model's parts."""
        for holders, ranks in self._mine:
            parameter = holders[0]
            local = to_local(parameter.detach())
            size = len(holders), local.numel() + 1
            mine = torch.zeros(size, dtype=local.dtype, device=self._pipeline.device)
            for row, holder in zip(mine, holders, strict=True):
                if holder.grad is not None:
                    row[:-1] = to_local(holder.grad).reshape(-1)
                    row[-1] = 1.0
            total = self._sum(mine, ranks)
            for leaf in holders[1:]:
                leaf.grad = None
            if total[-1] == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            to_local(parameter.grad).copy_(total[:-1].view_as(local))

    def _sum(self, mine: Tensor, ranks: Sequence[int]) -> Tensor:
        group = self._pipeline.group or dist.group.WORLD
        first, *others = dict.fromkeys(ranks)
        if self._pipeline.rank != first:
            dist.send(mine, group=group, group_dst=first)
            total = torch.empty_like(mine[0])
            dist.recv(total, group=group, group_src=first)
            return total
        rows = {first: iter(mine)}
        for rank in others:
            theirs = mine.new_empty(ranks.count(rank), mine.shape[1])
            dist.recv(theirs, group=group, group_src=rank)
            rows[rank] = iter(theirs)
        added: Tensor = next(rows[first])
        for rank in ranks[1:]:
            added += next(rows[rank])
        for rank in others:
            dist.send(added, group=group, group_dst=rank)
        return added
