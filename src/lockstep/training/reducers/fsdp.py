"""Gradient reduction for a model sharded by FSDP2, and for hybrid sharding.

Every rank takes part in each all-gather of a block's parameters and in each reduce-scatter of its gradients, so the ranks compute in
rounds of one microbatch each. A rank that has none left computes a dummy microbatch, whose gradient is set to zero before the
reduce-scatter. The sum over rounds and ranks is put into FSDP2 as its reduce-scatter: plain, or in the canonical order. Replicas of the
shards (hybrid sharding) are summed once a step, not once a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.torch_private import DefaultAllGather, fsdp_parameter_group, own_parameters
from lockstep.comm.mesh import Mesh, to_local
from lockstep.model.shard import fsdp_groups, modules_of
from lockstep.training.reducers.fsdp_exchange import Gather, OrderedScatter, Scatter
from lockstep.training.reducers.step_stats import Number, StepStats, StepStatsVector, clear_unused


class FsdpReducer:
    """A `GradientReducer` for a model that `lockstep.model.shard` has sharded."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], mesh: Mesh, *, bitwise: bool, max_microbatches: int) -> None:
        self._mesh = mesh
        self._parameters = list(parameters)
        self._replicas = mesh.axis("replicate")
        self._bitwise = bitwise
        device = mesh.world.device
        dtype = torch.float64 if any(p.dtype is torch.float64 for p in parameters) else torch.float32
        self._vector = StepStatsVector(len(parameters), max_microbatches, dtype=dtype, device=device)
        self._scatters: list[Scatter] = []
        self._groups = fsdp_groups(model)
        memory = mesh.axis("shard").memory
        for group in self._groups:
            scatter = OrderedScatter(mesh, fsdp_parameter_group(group)) if bitwise else Scatter(memory)
            group.set_custom_reduce_scatter(scatter)
            if memory is not None:
                group.set_custom_all_gather(Gather(memory))
            group.set_gradient_divide_factor(1.0)
            group.set_reduce_scatter_unused_params(True)
            self._scatters.append(scatter)
        self._used = _Used(model, self._parameters)

    def close(self) -> None:
        """Remove the hooks. The model can still be called, as long as torch's process group exists."""
        self._used.close()
        for group in self._groups:
            group.set_custom_all_gather(DefaultAllGather())

    def begin_step(self, count: int) -> None:
        self._count = count
        self._rounds = -(-count // self._mesh.assignment.per_round)
        self._round = 0
        self._clear()
        self._used.clear()
        for scatter in self._scatters:
            scatter.begin(count)
            scatter.next_round(is_dummy=False)

    def backward(self, total: Tensor, grad_output: Tensor, *, own_parameters_only: bool, is_dummy: bool) -> None:
        del own_parameters_only  # other models' gradients are cleared when their accumulation begins
        self._used.is_dummy = is_dummy
        for scatter in self._scatters:
            scatter.next_round(is_dummy=is_dummy)
        torch.autograd.backward(total, grad_output)
        self._round += 1
        for scatter in self._scatters:
            scatter.end_round(last=self._round == self._rounds)
        if self._bitwise and self._round < self._rounds:
            self._clear()

    def reduce(self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool) -> StepStats:
        return self.reduce_used(self.used(), values, weights, flag=flag)

    def used(self) -> list[float]:
        """Return 1 for each parameter that a microbatch of this rank used, else 0."""
        return self._used.flags

    def reduce_used(self, used: Sequence[float], values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool) -> StepStats:
        """`reduce`, given what `used` returned."""
        share = self._mesh.assignment.indices(self._count, self._mesh.data.rank)
        packed = self._vector.pack(used, share, values, weights, flag)
        self._mesh.data.all_reduce(packed)
        stats = self._vector.unpack(packed, self._count, weighted=weights is not None)
        for scatter in self._scatters:
            scatter.end()
        if not self._bitwise and self._replicas.size > 1:
            self._replicas.sum_each([to_local(parameter.grad) for parameter in self._parameters if parameter.grad is not None])
        clear_unused(self._parameters, stats)
        return stats

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class _Used:
    """Notes which parameters a microbatch of this rank has used. FSDP2 fills in zeros for the others."""

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
                for name, parameter in own_parameters(module).items()
                if id(parameter) in places
            ]
            self._handles.append(group.register_forward_pre_hook(self._watch(own)))

    def clear(self) -> None:
        self.flags[:] = [0.0] * len(self.flags)

    def close(self) -> None:
        for handle in [*self._handles, *self._hooks.values()]:
            handle.remove()

    def _watch(self, own: list[tuple[nn.Module, str, int]]) -> Any:
        """In a group's forward its parameters are the gathered ones, which are made once: their hooks see the gradients."""

        def before(_: nn.Module, __: Any) -> None:
            for module, name, place in own:
                parameter = own_parameters(module)[name]
                if place not in self._hooks and parameter is not None and parameter.requires_grad:
                    self._hooks[place] = parameter.register_post_accumulate_grad_hook(self._note(place))  # type: ignore[no-untyped-call]

        return before

    def _note(self, place: int) -> Any:
        def hook(parameter: Tensor) -> None:
            if not self.is_dummy and parameter.grad is not None:
                self.flags[place] = 1.0

        return hook
