"""Gradients of a model that FSDP2 shards: the reduce-scatters of its backward, and one all-reduce for what they leave out.

The ranks of the shard axis compute in rounds of one microbatch each, because each of them takes part in every
reduce-scatter. A rank that has no microbatch left computes a dummy microbatch, whose gradient is set to zero before it
is sent. The sum over rounds and ranks is put into FSDP2 as its reduce-scatter: plain, or in the canonical order. The
gradient shards are summed over the `replicate` axis (hybrid sharding) once a step, not once a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from lockstep.comm.mesh import Mesh, to_local
from lockstep.model.shard import fsdp_groups
from lockstep.train.reducers.fsdp_exchange import Gather, OrderedScatter, Scatter
from lockstep.train.reducers.step_stats import Number, Slots, Told, forget_unused


class FsdpReducer:
    """The reducer of a model that `lockstep.model.shard.shard` has sharded."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], mesh: Mesh, *, bitwise: bool, max_microbatches: int) -> None:
        self._mesh = mesh
        self._parameters = list(parameters)
        self._replicas = mesh.axis("replicate")
        self._bitwise = bitwise
        device = mesh.world.device
        dtype = torch.float64 if any(p.dtype is torch.float64 for p in parameters) else torch.float32
        self._slots = Slots(len(parameters), max_microbatches, dtype=dtype, device=device)
        self._scatters: list[Scatter] = []
        self._groups = fsdp_groups(model)
        memory = mesh.axis("shard").memory
        for group in self._groups:
            scatter = OrderedScatter(mesh, group._get_fsdp_state()._fsdp_param_group) if bitwise else Scatter(memory)
            group.set_custom_reduce_scatter(scatter)
            if memory is not None:
                group.set_custom_all_gather(Gather(memory))
            group.set_gradient_divide_factor(1.0)
            group.set_reduce_scatter_unused_params(True)
            self._scatters.append(scatter)
        self._used = _Used(model, self._parameters)

    def close(self) -> None:
        """See `Engine.close`. The model can still be called, as long as torch's process group is there."""
        self._used.close()
        for group in self._groups:
            group.set_custom_all_gather(DefaultAllGather())

    def begin(self, count: int) -> None:
        self._count = count
        self._rounds = -(-count // self._mesh.assignment.per_round)
        self._round = 0
        self._clear()
        self._used.clear()
        for scatter in self._scatters:
            scatter.begin(count)
            scatter.next_round(is_dummy=False)

    def backward(self, total: Tensor, seed: Tensor, *, only_these: bool, is_dummy: bool) -> None:
        del only_these  # what reaches another pair's parameters is cleared when that pair's turn begins
        self._used.is_dummy = is_dummy
        for scatter in self._scatters:
            scatter.next_round(is_dummy=is_dummy)
        torch.autograd.backward(total, seed)
        self._round += 1
        for scatter in self._scatters:
            scatter.end_round(last=self._round == self._rounds)
        if self._bitwise and self._round < self._rounds:
            self._clear()

    def finish(self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool) -> Told:
        return self.sum_up(self.used(), values, weights, flag=flag)

    def used(self) -> list[float]:
        """See `Inner.used`."""
        return self._used.flags

    def sum_up(self, used: Sequence[float], values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool) -> Told:
        """See `Inner.sum_up`."""
        share = self._mesh.assignment.indices(self._count, self._mesh.data.rank)
        said = self._slots.say(used, share, values, weights, flag)
        self._mesh.data.all_reduce(said)
        told = self._slots.read(said, self._count, weighted=weights is not None)
        for scatter in self._scatters:
            scatter.end()
        if not self._bitwise and self._replicas.size > 1:
            self._replicas.sum_each([to_local(parameter.grad) for parameter in self._parameters if parameter.grad is not None])
        forget_unused(self._parameters, told)
        return told

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class _Used:
    """Which parameters some microbatch of this rank has used: FSDP2 fills in zeros for the others."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.is_dummy = False
        self.flags = [0.0] * len(parameters)
        self._hooks: dict[int, Any] = {}
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._handles: list[Any] = []
        for group in fsdp_groups(model):
            own = [
                (module, name, places[id(parameter)])
                for module in modules_of(group)
                for name, parameter in module._parameters.items()
                if id(parameter) in places
            ]
            self._handles.append(group.register_forward_pre_hook(self._watch(own)))

    def clear(self) -> None:
        self.flags[:] = [0.0] * len(self.flags)

    def close(self) -> None:
        for handle in [*self._handles, *self._hooks.values()]:
            handle.remove()

    def _watch(self, own: list[tuple[nn.Module, str, int]]) -> Any:
        """In its forward a group's parameters are the gathered ones, made once: their own hooks tell of gradients."""

        def before(_: nn.Module, __: Any) -> None:
            for module, name, place in own:
                parameter = module._parameters[name]
                if place not in self._hooks and parameter is not None and parameter.requires_grad:
                    self._hooks[place] = parameter.register_post_accumulate_grad_hook(self._note(place))  # type: ignore[no-untyped-call]

        return before

    def _note(self, place: int) -> Any:
        def hook(parameter: Tensor) -> None:
            if not self.is_dummy and parameter.grad is not None:
                self.flags[place] = 1.0

        return hook


def modules_of(group: nn.Module) -> Iterator[nn.Module]:
    """Those whose parameters are gathered with the group's: all in it, but for what is in another group."""
    yield group
    for child in group.children():
        if not isinstance(child, FSDPModule):
            yield from modules_of(child)
