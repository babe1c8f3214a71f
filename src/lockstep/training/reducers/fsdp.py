"""Gradient reduction for a model sharded by FSDP2, with or without hybrid sharding.

Every rank takes part in each all-gather of parameters and each reduce-scatter of gradients. The
ranks compute in rounds of one microbatch, so that all ranks call each collective. A rank that has
no microbatch left computes a dummy microbatch, whose gradient is zeroed before the reduce-scatter.
With hybrid sharding, the replicas of a shard sum their gradients once per step instead of once per
round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.assignment import MicrobatchAssignment
from lockstep.base.errors import PlanError, RecipeError
from lockstep.base.nested import tree_tensors
from lockstep.base.torch_private import (
    DefaultAllGather,
    DefaultReduceScatter,
    backward_number,
    fsdp_parameter_group,
    gradient_hook_counts,
    is_fsdp_root,
    own_parameters,
    tree_leaves,
    version,
)
from lockstep.comm.mesh import Mesh, like_parameter, shard_as, shard_dim_over, to_local
from lockstep.comm.shared_memory import SharedMemoryGroup
from lockstep.comm.world import World
from lockstep.model.expert.leaves import Leaves, ParameterLeaves
from lockstep.model.separate_parts import PartLeaf
from lockstep.model.shard import error_of_change, fsdp_groups, modules_of, reshard
from lockstep.model.weight_casts import check_uses
from lockstep.training.reducers.agreement import StepAgreement
from lockstep.training.reducers.exchange_order import ExchangeOrder
from lockstep.training.reducers.gradient_hooks import (
    refuse_gradient_hooks,
    refuse_post_accumulate_hooks,
)
from lockstep.training.reducers.microbatch_checksums import MicrobatchChecksums, Recording
from lockstep.training.reducers.round_sum import RoundSum
from lockstep.training.reducers.step_stats import (
    READY_TWICE,
    Number,
    StepStats,
    StepStatsVector,
    UnusedParameters,
)

REPLICATE = "use replicate, under which parameters are plain tensors"


class FsdpReducer:
    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        mesh: Mesh,
        *,
        bitwise: bool,
        max_microbatches: int,
        leaves: Sequence[Leaves] = (),
        part_leaves: Sequence[PartLeaf] = (),
        stages: Sequence[nn.Module] = (),
        agreement: StepAgreement,
    ) -> None:
        reshard(model)  # a forward without a backward may have left parameters gathered
        self._model = model
        self._mesh = mesh
        self._parameters = list(parameters)
        self._replicas = mesh.replicas
        self._bitwise = bitwise
        self._unused = UnusedParameters(self._parameters, mesh.summed())
        self._doing = agreement.doing
        self._scatters: list[Scatter] = []
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._groups = fsdp_groups(model)
        memory = mesh.shards().shared_memory
        self._forward_ends = None if memory is None else ForwardEnds(memory)
        names = {module: name for name, module in model.named_modules()}
        for group in self._groups:
            label = (
                f"block {names[group]!r}" if names[group] else "the parameters outside of blocks"
            )
            parameters_of_group = fsdp_parameter_group(group)
            first = None
            if parameters_of_group is not None:
                first = parameters_of_group.fsdp_params[0].sharded_param
            world = mesh.shards(first)
            scatter = (
                OrderedScatter(
                    mesh.summed(first),
                    mesh.replicas,
                    parameters_of_group,
                    shards=world.size,
                    leaves=leaves,
                    places=places,
                    label=label,
                    agreement=agreement,
                )
                if bitwise
                else Scatter(
                    world,
                    self._replicas,
                    parameters_of_group,
                    of_experts=first is not None and mesh.is_expert(first),
                    label=label,
                    agreement=agreement,
                )
            )
            group.set_custom_reduce_scatter(scatter)
            if world.shared_memory is not None:
                group.set_custom_all_gather(
                    SharedMemoryAllGather(world.shared_memory, label, self._forward_ends)
                )
            elif (order := agreement.over(world)) is not None:
                group.set_custom_all_gather(NotedAllGather(order, label))
            group.set_gradient_divide_factor(1.0)
            group.set_reduce_scatter_unused_params(True)
            self._scatters.append(scatter)
        self._vector = StepStatsVector(parameters, max_microbatches, mesh.world.device, agreement)
        self._checked: set[nn.Module] = set()
        self._used = _UsedParameters(model, self._parameters, mesh, leaves)
        self._part_sums = [
            _PartSum(leaf, mesh, len(self._parameters) + place)
            for place, leaf in enumerate(part_leaves)
        ]
        self.recording = Recording()
        self._stages = [
            _Stage(stage, self._groups, self._scatters, self.recording)
            for stage in (stages or [model])
        ]
        self._discards = False
        self._backwards = [_GroupBackwards() for _ in self._groups]
        self._handles = [
            group.register_forward_hook(each.watch)
            for group, each in zip(self._groups, self._backwards, strict=True)
        ]
        if self._forward_ends is not None:
            for group in self._groups:
                self._handles += self._forward_ends.watch(group)
        if mesh.stages.size > 1:  # the pipeline's schedule computes the backwards
            self._handles += [
                group.register_forward_hook(self._check_stage) for group in self._groups
            ]

    def gradient_versions(self) -> list[int]:
        """Does not use the gradients' version counters: FSDP2 also writes zeros to gradients that a
        backward does not compute."""
        return [self._used.accumulations]

    def close(self) -> None:
        self._used.close()
        for handle in self._handles:
            handle.remove()
        for group in self._groups:
            group.set_custom_all_gather(DefaultAllGather())

    def _check_stage(self, group: nn.Module, inputs: Any, output: Any) -> None:
        if is_fsdp_root(group) and torch.is_grad_enabled():
            self._check_uses(group, tree_tensors(output))

    def _check_uses(self, root: nn.Module, outputs: Sequence[Tensor]) -> None:
        """Check that weights gathered in autocast's precision are used only in matrix products and
        convolutions."""
        if root not in self._checked:
            for output in outputs:
                check_uses(self._groups, output)
            self._checked.add(root)

    def begin_step(self, count: int, assignment: MicrobatchAssignment) -> None:
        self._count = count
        self._mine = assignment.indices(count, self._mesh.data.rank)
        self._rounds = -(-count // assignment.per_round)
        for parameter in self._parameters:
            parameter.grad = None
        self._used.clear()
        for scatter in self._scatters:
            scatter.begin(count)
        for stage in self._stages:
            stage.round = 0
            # a pipeline's schedule computes the backwards, so `backward` does not begin this round
            stage.next_round(is_dummy=False, last=False)
        for each in self._part_sums:
            each.begin(count)
        self._tell("forward", 0)

    def _tell(self, what: str, place: int) -> None:
        """Set the text that errors and hang reports show for the current computation."""
        if self._mesh.stages.size > 1:  # the schedule computes several microbatches in turn
            return
        of = f"microbatch {self._mine[place]}" if place < len(self._mine) else "a dummy microbatch"
        self._doing.text = f"in the {what} of {of}"

    def backward(
        self, total: Tensor, grad_output: Tensor, *, own_parameters_only: bool, is_dummy: bool
    ) -> None:
        # other models clear their gradients at the beginning of a step
        del own_parameters_only
        (whole,) = self._stages
        whole.next_round(is_dummy=is_dummy, last=whole.round + 1 == self._rounds)
        self._tell("backward", whole.round)
        self._backward(total, grad_output, is_dummy=is_dummy)
        for leaf in self._part_sums:
            leaf.push(leaf.take(self.recording.at()))
        self._end_round(whole)
        self._tell("forward", whole.round)

    def after_backward(self, stage: int, microbatch: int) -> None:
        """Take the gradient that a pipeline schedule has computed."""
        of_stage = self._stages[stage]
        if self._discards:
            return
        assert microbatch == of_stage.round, "gradients are leaves of the tree in this order"
        self._end_round(of_stage)
        of_stage.next_round(is_dummy=False, last=of_stage.round + 1 == self._rounds)

    def _end_round(self, stage: _Stage) -> None:
        stage.round += 1
        for scatter in stage.scatters:
            scatter.end_round(last=stage.round == self._rounds)
        if self._bitwise and stage.round < self._rounds:
            stage.clear()

    def _backward(self, total: Tensor, grad_output: Tensor, *, is_dummy: bool) -> None:
        self._used.is_dummy = is_dummy
        self._check_uses(self._model, [total])
        for each in self._backwards:
            each.begin()
        torch.autograd.backward(total, grad_output)
        for each in self._backwards:
            each.end()

    @contextmanager
    def discarding(self) -> Iterator[None]:
        self._discards = self._used.is_dummy = True
        for scatter in self._scatters:
            scatter.sends = False
        try:
            yield
        finally:
            self._discards = self._used.is_dummy = False
            for scatter in self._scatters:
                scatter.sends = True
        for stage in self._stages:
            stage.clear()

    def recompute(self, total: Tensor, grad_output: Tensor) -> None:
        self._backward(total, grad_output, is_dummy=True)
        for leaf in self._part_sums:
            leaf.take(self.recording.at())

    def reduce(
        self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool
    ) -> StepStats:
        self._doing.text = ""
        for leaf in self._part_sums:
            leaf.finish()
        used = self._used.flags
        self._used.refuse_hooks()
        self._used.refuse_changes()
        packed = self._vector.pack(used, self._mine, values, weights, flag)
        self._mesh.summed().all_reduce(packed)
        stats = self._vector.unpack(packed, self._count, weighted=weights is not None)
        for scatter in self._scatters:
            scatter.end()
        if not self._bitwise and self._replicas.size > 1:
            summed = {id(parameter) for scatter in self._scatters for parameter in scatter.summed}
            rest = [
                parameter.grad
                for parameter in self._parameters
                if parameter.grad is not None and id(parameter) not in summed
            ]
            self._replicas.sum_each(list(map(to_local, rest)))
        self._unused.clear(used, stats)
        return stats


class _Stage:
    """The rounds of microbatches of one stage of a pipeline, or of the whole model."""

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[nn.Module],
        scatters: Sequence[Scatter],
        recording: Recording,
    ) -> None:
        inside = set(module.modules())
        pairs = zip(groups, scatters, strict=True)
        self.scatters = [scatter for group, scatter in pairs if group in inside]
        self.parameters = list(module.parameters())
        self.round = 0
        self._recording = recording
        for scatter in self.scatters:
            scatter.checksums = self._checksums

    def _checksums(self) -> MicrobatchChecksums | None:
        return self._recording.at(self.round)

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def next_round(self, *, is_dummy: bool, last: bool) -> None:
        for scatter in self.scatters:
            scatter.next_round(is_dummy=is_dummy, last=last)


class _PartSum:
    """Sums over microbatches the gradients that one sequential part of the model computes for a
    shared parameter."""

    def __init__(self, leaf: PartLeaf, mesh: Mesh, place: int) -> None:
        self._leaf = leaf
        self._place = place
        self._device = mesh.world.device
        self._sum = RoundSum(mesh.data, mesh.data)
        self._tensor = mesh.axis("tensor")
        self._dim = shard_dim_over(leaf.parameter, "tensor")
        self._shape = list(leaf.parameter.shape)
        """Shape of the gradient on this rank, which tensor parallelism may shard. Tensor
        parallelism shards the gradient."""
        if self._dim is not None:
            self._shape[self._dim] //= self._tensor.size

    def begin(self, count: int) -> None:
        self._sum.begin(count)
        self._leaf.parameter.grad = None
        self.take()  # another model's loss may have left a gradient

    def push(self, gradient: Tensor | None) -> None:
        """Add the gradient of this rank's microbatch, or None. Every rank must call this method."""
        parameter = self._leaf.parameter
        numbers = math.prod(self._shape)
        flat = torch.zeros(numbers + 1, dtype=parameter.dtype, device=self._device)
        if gradient is not None:
            flat[:-1] = to_local(gradient).reshape(-1)
            flat[-1] = 1.0
        self._sum.add(flat[None, None])
        self._sum.end_round()

    def finish(self) -> None:
        """Write the sum to the parameter's `.grad`. Leave `.grad` None if no microbatch of any rank
        has a gradient."""
        parameter, flat = self._leaf.parameter, self._sum.finish()
        if flat[-1] > 0:
            mine = shard_as(parameter, self._over_tensor(flat[:-1].view(self._shape)))
            parameter.grad = like_parameter(parameter, mine.to(to_local(parameter).device))

    def _over_tensor(self, part: Tensor) -> Tensor:
        if self._dim is None:
            return part
        rows = part.movedim(self._dim, 0).contiguous()
        return self._tensor.gather_rows(rows, [len(rows)] * self._tensor.size).movedim(0, self._dim)

    def take(self, checksums: MicrobatchChecksums | None = None) -> Tensor | None:
        (gradient,) = self._leaf.take()
        if checksums is not None and gradient is not None:
            checksums.add(self._place, to_local(gradient))
        return gradient


class _GroupBackwards:
    """Refuses a nested backward through an FSDP2 group, and a backward with create_graph=True."""

    def __init__(self) -> None:
        self._in_step = False
        self._number: int | None = None

    def begin(self) -> None:
        self._in_step, self._number = True, None

    def end(self) -> None:
        self._in_step = False

    def watch(self, group: nn.Module, inputs: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._check)  # type: ignore[no-untyped-call]

    def _check(self, gradient: Tensor) -> None:
        """With create_graph=True, FSDP2 frees the parameters that the second backward needs. After
        a nested backward, FSDP2 would end the reduction too early."""
        if torch.is_grad_enabled():
            raise PlanError(
                "the shard axis with a gradient that is itself differentiated (autograd.grad with"
                " create_graph=True, as in a gradient penalty); FSDP2 frees a block's parameters"
                " after its first backward, and the gradients of the second backward would be"
                f" lost; {REPLICATE}"
            )
        if self._in_step:
            number = backward_number()
            if self._number not in (None, number):
                raise RecipeError(READY_TWICE)
            self._number = number


class _Own(NamedTuple):
    parameters: dict[str, nn.Parameter | None]
    """The module's parameters. FSDP2 replaces the sharded parameters by all-gathered parameters."""
    name: str
    place: int
    full_name: str


class _UsedParameters:
    """Records the parameters that this rank's microbatches have used. FSDP2 gives a parameter that
    the forward does not use a zero gradient."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        mesh: Mesh,
        leaves: Sequence[Leaves],
    ) -> None:
        self.is_dummy = False
        self._leaves = [ParameterLeaves(parameter, leaves) for parameter in parameters]
        self._is_expert = [mesh.is_expert(parameter) for parameter in parameters]
        self.accumulations = 0
        self._parameters = parameters
        self.flags = [0.0] * len(parameters)
        self._hooked: set[int] = set()
        self._gathered: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._handles: list[Any] = []
        for group in fsdp_groups(model):
            own = [
                _Own(own_parameters(module), name, places[id(parameter)], names[id(parameter)])
                for module in modules_of(group)
                for name, parameter in own_parameters(module).items()
                if id(parameter) in places
            ]
            # before FSDP2's own hook
            self._handles.append(
                group.register_forward_pre_hook(self._refuse_others(own), prepend=True)
            )
            self._handles.append(group.register_forward_pre_hook(self._watch(own)))

    def clear(self) -> None:
        self.flags[:] = [0.0] * len(self.flags)
        self._versions = {name: version(gathered) for name, gathered in self._gathered.items()}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def refuse_hooks(self) -> None:
        if max(gradient_hook_counts(list(self._gathered.values())), default=0) > 1:
            refuse_gradient_hooks(self._gathered.items())
            refuse_post_accumulate_hooks(self._gathered.items())

    def refuse_changes(self) -> None:
        """Refuse in-place changes of an all-gathered parameter in the forward: the changes would be
        lost."""
        for name, then in self._versions.items():
            if version(self._gathered[name]) != then:
                raise error_of_change(name)

    def _refuse_others(self, own: Sequence[_Own]) -> Any:
        """Refuse another tensor in place of a parameter (`torch.func.functional_call`): FSDP2 would
        not use it."""

        def before(_: nn.Module, __: Any) -> None:
            for parameters, name, place, full_name in own:
                tensor = parameters[name]
                if tensor is not self._parameters[place] and tensor is not self._gathered.get(
                    full_name
                ):
                    raise PlanError(
                        f"the shard axis, and this forward replaces {full_name!r} by another"
                        " tensor, as torch.func.functional_call does; FSDP2 computes with the"
                        f" model's own parameters; {REPLICATE}"
                    )

        return before

    def _watch(self, own: Sequence[_Own]) -> Any:
        def before(_: nn.Module, __: Any) -> None:
            for parameters, name, place, full_name in own:
                parameter = parameters[name]
                if (
                    parameter is self._gathered.get(full_name)
                    or parameter is None
                    or not parameter.requires_grad
                ):
                    continue
                self._gathered[full_name], self._versions[full_name] = parameter, version(parameter)
                if place not in self._hooked:
                    self._hooked.add(place)
                    leaves = self._leaves[place]
                    for each in leaves.tensors() if leaves.are_apart else [parameter]:
                        handle = each.register_hook(self._note(place))  # type: ignore[no-untyped-call]
                        self._handles.append(handle)

        return before

    def _note(self, place: int) -> Any:
        def hook(_: Tensor) -> None:
            self.accumulations += 1
            if self._is_expert[place] or not self.is_dummy:
                self.flags[place] = 1.0

        return hook


class ForwardEnds:
    """Synchronizes ranks at the end of each forward under `torch.no_grad`. Unsynchronized ranks
    could wait for each other in different process groups, after different numbers of
    all-gathers."""

    def __init__(self, memory: SharedMemoryGroup) -> None:
        self.has_gathered = False
        self._memory = memory
        self._label = memory.label("ends a forward")
        self._parts = torch.zeros(memory.size + 1)

    def watch(self, group: nn.Module) -> list[Any]:
        return [
            group.register_forward_pre_hook(self._begin, prepend=True),
            group.register_forward_hook(self._end),
        ]

    def _begin(self, group: nn.Module, inputs: Any) -> None:
        if is_fsdp_root(group):
            self.has_gathered = False

    def _end(self, group: nn.Module, inputs: Any, output: Any) -> None:
        if self.has_gathered and is_fsdp_root(group) and not torch.is_grad_enabled():
            self._memory.all_gather(self._parts[1:], self._parts[:1], self._label)


class SharedMemoryAllGather(DefaultAllGather):
    def __init__(self, memory: SharedMemoryGroup, label: str, ends: ForwardEnds | None) -> None:
        self._memory = memory
        self._ends = ends
        self._label = memory.label(f"gathers {label}")

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self._ends is not None:
            self._ends.has_gathered = True
        if async_op:
            return self._memory.start_all_gather(output_tensor, input_tensor, self._label)
        self._memory.all_gather(output_tensor, input_tensor, self._label)
        return None


class NotedAllGather(DefaultAllGather):
    """Torch's all-gather, recorded to compare the order of collectives between ranks."""

    def __init__(self, order: ExchangeOrder, label: str) -> None:
        self._order = order
        self._label = order.label(f"gathers {label}")

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        self._order.note(self._label)
        work: dist.Work | None = super().__call__(*args, **kwargs)
        return work


class Scatter(DefaultReduceScatter):
    """The reduce-scatter of one FSDP2 parameter group. FSDP2 calls it several times in a round if
    the forward calls the model several times. Outside of a step, a backward exchanges nothing: for
    example, the backward of another model's loss through this model."""

    def __init__(
        self,
        world: World,
        replicas: World,
        parameters: Any,
        *,
        of_experts: bool = False,
        label: str,
        agreement: StepAgreement,
    ) -> None:
        """With `of_experts`, the gradient of a dummy microbatch is kept, because other ranks'
        tokens produce it."""
        self._of_experts = of_experts
        self._memory = world.shared_memory
        self._memory_label = 0 if self._memory is None else self._memory.label(f"reduces {label}")
        self._replicas = replicas
        self._note = _noting(agreement.over(world), f"reduces {label}")
        self._note_replicas = _noting(
            None if world.device.type == "cpu" else agreement.over(replicas), f"sums {label}"
        )
        self._parameters = parameters
        self._in_step = False
        self.checksums: Callable[[], MicrobatchChecksums | None] = lambda: None
        """Returns the collector of checksums for the gradients that this rank sends."""
        self.sends = True
        """False while gradients are computed only for their checksums."""
        self.summed: list[nn.Parameter] = []
        """Parameters whose gradients were also summed over replicas in this step."""

    def begin(self, count: int) -> None:
        self._in_step = True
        self.summed = []

    def next_round(self, *, is_dummy: bool, last: bool) -> None:
        self._is_discarded = is_dummy and not self._of_experts
        self._is_last = last

    def end_round(self, *, last: bool) -> None:
        """After the last round, each `.grad` is this rank's shard of the step's sum."""

    def end(self) -> None:
        self._in_step = False

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if (checksums := self.checksums()) is not None:
            self._record(input_tensor, checksums)
        if not (self._in_step and self.sends):
            output_tensor.zero_()
            return None
        if self._is_discarded:
            input_tensor.zero_()
        self._note()
        return self._sum(output_tensor, input_tensor, group, async_op)

    def _record(self, sent: Tensor, checksums: MicrobatchChecksums) -> None:
        raise NotImplementedError(
            "ranks compute gradients with the same bits only under numerics=bitwise"
        )

    def _sum(
        self, output: Tensor, sent: Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        if self._memory is not None:
            self._memory.reduce_scatter(output, sent, self._memory_label)
            return None
        work: dist.Work | None = dist.reduce_scatter_single(
            output, sent, group=group, op=dist.ReduceOp.SUM, async_op=async_op
        )
        if self._is_last and self._replicas.size > 1 and not output.is_cpu and not async_op:
            self._sum_over_replicas(output)
        return work

    def _sum_over_replicas(self, output: Tensor) -> None:
        """Sum the gradient shards over replicas on the reduce-scatter stream, during the
        backward."""
        trainable = [
            each for each in self._parameters.fsdp_params if each.sharded_param.requires_grad
        ]
        if any(each.offload_to_cpu for each in trainable):
            return
        parts = torch.split(output, [each.padded_sharded_param_size.numel() for each in trainable])
        if not self.summed:
            self.summed = [each.sharded_param for each in trainable]
            earlier = [
                (part, to_local(p.grad))
                for part, p in zip(parts, self.summed, strict=True)
                if p.grad is not None
            ]
            if earlier:
                views = [part[: gradient.numel()].view_as(gradient) for part, gradient in earlier]
                torch._foreach_add_(views, [gradient for _, gradient in earlier])
            for parameter in self.summed:
                parameter.grad = None
        self._note_replicas()
        self._replicas.all_reduce(output)


def _noting(order: ExchangeOrder | None, label: str) -> Callable[[], None]:
    return (lambda: None) if order is None else partial(order.note, order.label(label))


class OrderedScatter(Scatter):
    """Sums the gradients of all microbatches for numerics=bitwise, in one sum over shards and
    replicas. FSDP2 gets zeros, which the sum replaces after the last round. An expert has one
    gradient for each microbatch whose tokens it computes."""

    def __init__(
        self,
        world: World,
        replicas: World,
        parameters: Any,
        *,
        shards: int,
        leaves: Sequence[Leaves],
        places: Mapping[int, int],
        label: str,
        agreement: StepAgreement,
    ) -> None:
        super().__init__(world, replicas, parameters, label=label, agreement=agreement)
        self._shards = shards
        self._places = places
        self._sum_of_rounds = RoundSum(world, replicas, f"reduces {label}")
        self._trainable = [
            each
            for each in ([] if parameters is None else parameters.fsdp_params)
            if each.sharded_param.requires_grad
        ]
        self._leaves = [ParameterLeaves(each.sharded_param, leaves) for each in self._trainable]

    def begin(self, count: int) -> None:
        super().begin(count)
        self._sum_of_rounds.begin(count)
        self._take_leaves()  # another model's loss may have left gradients

    def _sum(
        self, output: Tensor, sent: Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        given = sent.view(1, self._shards, -1)
        if taken := self._take_leaves():
            leaves = zip(*taken, strict=True)
            given = torch.stack([self._in_shards(leaf, sent) for leaf in leaves])
        self._sum_of_rounds.add(given)
        output.zero_()
        return None

    def end_round(self, *, last: bool) -> None:
        if not self._trainable:
            return
        if self._sum_of_rounds.is_round_empty:  # no rank has called the modules yet
            none = [None] * len(self._trainable)
            like = to_local(self._trainable[0].sharded_param)
            zeros = self._in_shards(none, like)
            self._sum_of_rounds.add(torch.stack([zeros] * self._leaves[0].count))
        self._sum_of_rounds.end_round()
        if last:
            self._write_gradients(self._sum_of_rounds.finish())

    def _take_leaves(self) -> list[list[Tensor | None]]:
        return [each.take() for each in self._leaves if each.are_apart]

    def _in_shards(self, gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """Return shape (shards, elements of a padded shard), like FSDP2. A gradient of None becomes
        zeros."""
        rows = []
        for gradient, each in zip(gradients, self._trainable, strict=True):
            row = like.new_zeros(self._shards, each.padded_sharded_param_size.numel())
            if gradient is not None:
                row.view(-1)[: gradient.numel()] = gradient.reshape(-1)
                if not gradient.is_cpu:  # the stream of the backward computed it
                    gradient.record_stream(torch.accelerator.current_stream(gradient.device))
            rows.append(row)
        return torch.cat(rows, 1)

    def _record(self, sent: Tensor, checksums: MicrobatchChecksums) -> None:
        parts = torch.split(sent.view(self._shards, -1), self._padded(), dim=1)
        for each, part in zip(self._trainable, parts, strict=True):
            checksums.add(self._places[id(each.sharded_param)], part)

    def _padded(self) -> list[int]:
        return [each.padded_sharded_param_size.numel() for each in self._trainable]

    def _write_gradients(self, flat: Tensor) -> None:
        gradients = [each.sharded_param.grad for each in self._trainable]
        if any(gradient is None for gradient in gradients):
            return  # no rank has called the modules yet
        held = list(map(to_local, gradients))
        flat = flat.to(held[0].device)
        for gradient, part in zip(held, torch.split(flat, self._padded()), strict=True):
            gradient.copy_(part[: gradient.numel()].view_as(gradient))
