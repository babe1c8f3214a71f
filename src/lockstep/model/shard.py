"""The `shard` axis: the parameters, their gradients and the optimizer's state are cut over the ranks, by torch's FSDP2.

Every rank takes part in every gathering of a block's parameters and every scattering of its gradients, so ranks compute in rounds: one
microbatch each, dealt in turn, and a rank that has none left computes one for nothing (its gradient is set to zero before it is sent).
The sum over rounds and ranks is ours, put into FSDP2 as its reduce-scatter: plain, or in the canonical order. The `replicate` axis
(hybrid sharding) is summed by us too: it needs one exchange a step, not one a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import DefaultAllGather, fsdp_parameter_group, own_parameters, set_unshard_async
from lockstep.comm.mesh import Mesh, to_local
from lockstep.model.shared_parameters import tie, ties
from lockstep.model.skipped_blocks import Visits
from lockstep.train.reducers.fsdp_exchange import Gather, OrderedScatter, Scatter
from lockstep.train.reducers.step_stats import Number, Slots, Told, forget_unused


def reshard(model: nn.Module) -> None:
    """Let go of what a forward without a backward has gathered, and leave the parameters cut."""
    for group in _groups(model):
        group.reshard()


def shard(
    model: nn.Module,
    mesh: Mesh,
    blocks: Sequence[str],
    *,
    free_after_forward: bool,
    free_root: bool = False,
    offload: bool,
    fill: Callable[[nn.Module], None],
) -> None:
    """Cut the parameters of `model`, block by block, over the `shard` axis. The model stays the object it is; every rank calls it.

    `free_after_forward`: gather a block again for its backward, instead of keeping all blocks from the forward on. `free_root`: what is
    in no block too; for a whole model that is in vain, since the backward begins with it. `offload`: the shards and their gradients are on
    the CPU. `fill`: called with a module just before it is cut, to give it its values, on the mesh's device: no rank ever holds more than
    a block and its shards. Raises `RecipeError`.
    """
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise RecipeError(
                f"the parameter {name!r} is a scalar, which the shard axis cannot cut; give it one dim, torch.zeros(1), or choose replicate"
            )
        if not parameter.is_contiguous():
            raise RecipeError(
                f"the parameter {name!r} is not contiguous (strides {parameter.stride()}), and the shard axis cuts rows that lie behind "
                "one another; make it so in the model, nn.Parameter(value.contiguous()), or choose replicate"
            )
    assert mesh.torch_mesh is not None
    axis = mesh.torch_mesh["shard"]
    modules = [model.get_submodule(name) for name in blocks]
    on_cpu = mesh.world.device.type == "cpu"
    visits = Visits(model, modules, gathers_ahead=on_cpu)
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for module in modules:
        fill(module)
        fully_shard(module, mesh=axis, reshard_after_forward=free_after_forward, offload_policy=policy)
    fill(model)
    root = fully_shard(model, mesh=axis, reshard_after_forward=free_root, offload_policy=policy)
    # In the backward it gathers a block ahead by itself, on a CPU only then without waiting for it.
    set_unshard_async(root, on_cpu)
    visits.enter()


def shard_parts(model: nn.Module, mesh: Mesh, parts: Mapping[str, Sequence[str]], **how: Any) -> None:
    """Cut the parameters of each of these parts of a model, which are called by themselves. `parts`: names, and the blocks in each.

    `how`: as in `shard`. Raises `RecipeError` where two parts have a parameter in common.
    """
    tied = ties(model)
    for names in tied:
        holders = [part for part in parts if any(name.startswith(f"{part}.") for name in names)]
        if len(holders) > 1:
            raise RecipeError(
                f"the stages {holders[0]!r} and {holders[1]!r} share the parameter {names[0]!r} and are on one rank of the pipeline; "
                "sharding would part them; put both into one module, or choose another schedule or size of the pipeline"
            )
    for name, blocks in parts.items():
        part = model.get_submodule(name)
        if any(True for _ in part.parameters()):
            shard(part, mesh, [block.removeprefix(f"{name}.") for block in blocks if block != name], **how)
    for names in tied:
        tie(model, names)


class Shards:
    """An `Engine` for a model that `shard` has cut."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], mesh: Mesh, *, bitwise: bool, max_microbatches: int) -> None:
        self._mesh = mesh
        self._parameters = list(parameters)
        self._replicas = mesh.axis("replicate")
        self._bitwise = bitwise
        device = mesh.world.device
        dtype = torch.float64 if any(p.dtype is torch.float64 for p in parameters) else torch.float32
        self._slots = Slots(len(parameters), max_microbatches, dtype=dtype, device=device)
        self._scatters: list[Scatter] = []
        self._groups = _groups(model)
        memory = mesh.axis("shard").shared_memory
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
        for group in _groups(model):
            own = [
                (module, name, places[id(parameter)])
                for module in _modules_of(group)
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
        """In its forward a group's parameters are the gathered ones, made once: their own hooks tell of gradients."""

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


def _groups(model: nn.Module) -> list[Any]:
    """The modules whose parameters FSDP2 gathers together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _modules_of(group: nn.Module) -> Iterator[nn.Module]:
    """Those whose parameters are gathered with the group's: all in it, but for what is in another group."""
    yield group
    for child in group.children():
        if not isinstance(child, FSDPModule):
            yield from _modules_of(child)
