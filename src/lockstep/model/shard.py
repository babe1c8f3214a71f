"""The `shard` axis. FSDP2 shards parameters, gradients and optimizer state, and `FsdpReducer`
reduces the gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from lockstep.base.errors import PlanError, RecipeError, UserError
from lockstep.base.torch_private import (
    fsdp_parameter_group,
    gathered,
    gathers_in_forward,
    is_fsdp_root,
    reduce_gradients,
    remove_forward_hooks,
    set_unshard_async,
    tree_flatten,
    tree_unflatten,
    unmark_sharded,
    version,
)
from lockstep.comm.mesh import Mesh
from lockstep.comm.segment import CallsDiffer
from lockstep.model.block_inputs import RepeatedInputs
from lockstep.model.blocks import is_within, pass_through, share_parameter, shared_names
from lockstep.model.weight_casts import AutocastWeights, drop_casts

SHARDED = re.compile(
    r"[Tt]ensors? (at index \d+ )?appears to not have been used in the graph|got mixed torch.Tensor"
    r" and DTensor|Cannot access data pointer of Tensor that doesn't have storage"
)
"""Matches the text of torch's errors when code outside of a module uses the module's sharded
parameters."""
CALLED_BEFORE_MODEL = re.compile(
    "requires running forward through the root module first"
    "|'FSDPCommContext' object has no attribute"  # after a forward that has failed
)
CHANGED_INPUT = re.compile(r"RegisterPostBackwardFunction is a view and is being modified inplace")


def reshard(model: nn.Module) -> None:
    """Free the full parameters that FSDP2 has all-gathered and still holds, for example after a
    forward without a backward."""
    for group in fsdp_groups(model):
        group.reshard()


def reset_after_error(model: nn.Module) -> None:
    for group in fsdp_groups(model):
        if is_fsdp_root(group):
            group.reset_iter_state()


def gather_whole(model: nn.Module) -> None:
    """All-gather all parameters in each forward and keep them until `reshard`. Gradients are not
    reduced, so several forwards and backwards can run in turn."""
    groups = fsdp_groups(model)
    versions: dict[str, int] = {}
    for group in groups:
        remove_forward_hooks(group)

    def before(_: nn.Module, __: Any) -> None:
        for group in groups:
            group.unshard()
        for name, parameter in model.named_parameters():
            versions.setdefault(name, version(parameter))

    def after(_: nn.Module, __: Any, ___: Any) -> None:
        for name, parameter in model.named_parameters():
            if version(parameter) != versions[name]:
                raise error_of_change(name)

    model.register_forward_pre_hook(before, prepend=True)
    model.register_forward_hook(after)


def error_of_change(name: str) -> RecipeError:
    return RecipeError(
        f"the model's forward changed its parameter {name!r} (as nn.Embedding does by max_norm):"
        " under shard a copy that is gathered for the forward, and dropped; change it between"
        " steps, in a hook's after_step"
    )


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Every rank must enter the context."""
    groups = fsdp_groups(model)
    for group in groups:
        group.unshard()
    yield
    for group in groups:
        group.reshard()


@contextmanager
def unreduced(model: nn.Module) -> Iterator[None]:
    """Backwards accumulate gradients on the all-gathered parameters. FSDP2 would reduce zeros after
    a backward that computes only gradients of inputs."""
    groups = fsdp_groups(model)
    for group in groups:
        group.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for group in groups:
            group.set_requires_gradient_sync(True, recurse=False)


@contextmanager
def weights_backward(model: nn.Module) -> Iterator[None]:
    """A context for a backward that computes only gradients of weights. FSDP2 gathers when a
    backward reaches a module's output, and reduces when the backward reaches the module's input. A
    backward that computes only gradients of weights reaches neither a module's output nor its
    input. Every rank must enter the context."""
    groups = fsdp_groups(model)
    if not all(map(gathers_in_forward, groups)):  # see `gather_whole`
        yield
        return
    with unsharded(model):
        for group in groups:
            group.set_reshard_after_backward(False, recurse=False)
        try:
            with unreduced(model):
                yield
        finally:
            for group in groups:
                group.set_reshard_after_backward(True, recurse=False)
        for group in groups:
            if is_fsdp_root(group):
                reduce_gradients(group)


def gathered_parameters(model: nn.Module) -> list[Any]:
    """Return the full parameters into which FSDP2 all-gathers the shards. The full parameters are
    the leaves of autograd's graph in a forward."""
    grouped = [fsdp_parameter_group(group) for group in fsdp_groups(model)]
    return [gathered(each) for group in grouped if group is not None for each in group.fsdp_params]


def shard(
    model: nn.Module,
    mesh: Mesh,
    blocks: Sequence[str],
    *,
    free_after_forward: bool,
    free_root: bool = False,
    offload: bool,
    materialize: Callable[[nn.Module], None],
    short: AutocastWeights | None,
    keep_casts: bool,
    used_after_forward: Collection[nn.Module] = (),
    experts: Sequence[str] = (),
) -> None:
    """Shard the parameters over `Mesh.shards`, block by block. Every rank must call this function.
    `free_root` frees parameters outside the blocks after the forward. `materialize` is called with
    a module just before the module is sharded, so a rank never holds more than one full block
    besides its shards. `short` gives the weights to all-gather in autocast's precision.
    `keep_casts=False` frees autocast's casts of weights after each block's forward. Weights of the
    modules `used_after_forward` are not freed after the forward."""
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise RecipeError(
                f"the parameter {name!r} is a scalar, which FSDP2 cannot shard; give it one dim,"
                " torch.zeros(1), or choose replicate"
            )
        if not parameter.is_contiguous():
            raise RecipeError(
                f"the parameter {name!r} is not contiguous (strides {parameter.stride()}), and"
                " FSDP2 shards contiguous rows; make it contiguous in the model,"
                " nn.Parameter(value.contiguous()), or choose replicate"
            )
    modules = [model.get_submodule(name) for name in blocks if name not in experts]
    of_experts = [model.get_submodule(name) for name in experts]
    _check_dtypes(model, [*of_experts, *modules])
    on_cpu = mesh.world.device.type == "cpu"
    guard = SkippedBlockGuard(model, modules, gathers_ahead=on_cpu)
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()

    def is_used(module: nn.Module) -> bool:
        return any(each in used_after_forward for each in module.modules())

    def shard_module(module: nn.Module, axis: DeviceMesh, free: bool) -> None:
        materialize(module)
        inputs = RepeatedInputs(module)
        free = free and not is_used(module)
        fully_shard(module, mesh=axis, reshard_after_forward=free, offload_policy=policy)
        inputs.install()

    for module in of_experts:
        shard_module(module, mesh.shard_mesh(next(module.parameters())), free_after_forward)
    for module in modules:
        shard_module(module, mesh.shard_mesh(), free_after_forward)
    shard_module(model, mesh.shard_mesh(), free_root)
    # FSDP2 prefetches blocks in the backward; a CPU would wait for each all-gather otherwise
    set_unshard_async(model, on_cpu)
    guard.install()
    if not keep_casts:
        for group in fsdp_groups(model):
            drop_casts(group, is_root=group is model)
    if short is not None:
        short.gather_short(fsdp_groups(model))


def _check_dtypes(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen: set[int] = set()
    for group in (*blocks, model):
        new = (each for each in group.parameters() if id(each) not in seen)
        own = [each for each in new if each.requires_grad]
        seen.update(map(id, own))
        for parameter in own:
            if parameter.dtype != own[0].dtype:
                raise RecipeError(
                    f"the parameter {names[id(own[0])]!r} is {own[0].dtype} and "
                    f"{names[id(parameter)]!r} is {parameter.dtype}; FSDP2 sums the gradients of a "
                    "block in one tensor; name modules of one dtype in Recipe.blocks that every "
                    "forward calls, so that the rest has one dtype too, give all parameters one "
                    "dtype, or choose replicate"
                )


def unmark(model: nn.Module, compiled: Sequence[str]) -> None:
    """Remove the attribute by which FSDP2 marks modules. transformers calls the layers that
    LayerDrop skips if a module has the attribute. Modules in `compiled` keep the attribute for
    torch.compile. Modules with a `generate` method also keep the attribute, because transformers
    then makes equally many forwards on all ranks."""
    for name, module in model.named_modules():
        if not hasattr(module, "generate") and not any(
            is_within(name, block) for block in compiled
        ):
            unmark_sharded(module)


def shard_parts(
    model: nn.Module,
    mesh: Mesh,
    parts: Mapping[str, Sequence[str]],
    *,
    experts: Sequence[str],
    **how: Any,
) -> None:
    """`parts` maps the name of each module that a pipeline calls separately to the names of the
    module's blocks."""
    shared = shared_names(model)
    for names in shared:
        holders = [part for part in parts if any(name.startswith(f"{part}.") for name in names)]
        if len(holders) > 1:
            raise RecipeError(
                f"the stages {holders[0]!r} and {holders[1]!r} share the parameter {names[0]!r}"
                " and are on one rank of the pipeline; they would be sharded separately; put both"
                " into one module, or choose another schedule or size of the pipeline"
            )
    for name, blocks in parts.items():
        part = model.get_submodule(name)
        if any(True for _ in part.parameters()):
            inner = [block.removeprefix(f"{name}.") for block in blocks if block != name]
            inside = [each.removeprefix(f"{name}.") for each in experts if is_within(each, name)]
            shard(part, mesh, inner, experts=inside, **how)
    for names in shared:
        share_parameter(model, names)


def error_of_order(calls: str) -> RecipeError:
    return RecipeError(
        f"{calls}; with sharded parameters, all ranks must call the same blocks in the same order,"
        " equally often; they may skip a block between others that get a tensor with a gradient;"
        " leave blocks whose calls depend on the data out of Recipe.blocks; or give those that get"
        " the data itself an input with a gradient, input.requires_grad_(); or choose replicate"
    )


def error_of_sharding(error: BaseException | None, plan: object) -> UserError | None:
    if isinstance(error, CallsDiffer) and error.calls is not None:
        return error_of_order(
            " and ".join(f"rank {rank} {call}" for rank, call in error.calls.items())
        )
    if isinstance(error, RuntimeError) and CHANGED_INPUT.search(str(error)):
        return PlanError(
            f"{plan}: a block changes its input in place, as with nn.ReLU(inplace=True) as its "
            "first layer; torch refuses this after FSDP2's node in autograd's graph; leave "
            "inplace out, or use replicate"
        )
    if isinstance(error, AttributeError | RuntimeError) and CALLED_BEFORE_MODEL.search(str(error)):
        return PlanError(
            f"{plan}: a part of the model was called before the model itself (as model.actor(x));"
            " FSDP2 gathers the weights in the model's own forward; call the model, model(x), and"
            " take from its output what you need; or use replicate"
        )
    if isinstance(error, AssertionError) and "does not support deepcopy" in str(error):
        return PlanError(
            f"{plan}: a deepcopy of the model, whose parameters are sharded; for averaged weights,"
            " give ls.ExponentialMovingAverage as a hook; for a second network, such as a teacher,"
            " make both parts of one model in the recipe's factory; or use replicate"
        )
    if not isinstance(error, RuntimeError) or not (match := SHARDED.search(str(error))):
        return None
    return PlanError(
        f"{plan}: {match.group()}; parameters are sharded (DTensors) outside of their module's "
        "forward, and the graph has gathered ones; use weights only in their module's forward, "
        "and differentiate the loss or by inputs; for gradients of weights, functional_call and "
        "weights of one module in another, use replicate"
    )


def fsdp_groups(model: nn.Module) -> list[Any]:
    """Return the modules on which `fully_shard` was called."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def modules_of(group: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules inside `group`, without the modules of inner FSDP groups."""
    yield group
    for child in group.children():
        if not isinstance(child, FSDPModule):
            yield from modules_of(child)


class SkippedBlockGuard:
    """Makes a forward also all-gather the blocks that the forward does not call, as with LayerDrop.
    All ranks then call the same collectives. Create the guard before the model is sharded and
    install it afterwards. The guard's hooks then run around the hooks of FSDP2."""

    def __init__(self, model: nn.Module, blocks: Sequence[Any], *, gathers_ahead: bool) -> None:
        """`gathers_ahead` all-gathers a block's parameters while the previous block runs."""
        self._model = model
        self._blocks = list(blocks)
        self._gathers_ahead = gathers_ahead
        self._next = 0
        self._passing_through = False
        model.register_forward_hook(self._after_all)

    def install(self) -> None:
        self._model.register_forward_pre_hook(self._start, prepend=True)
        for place, block in enumerate(self._blocks):
            block.register_forward_pre_hook(self._before(place), prepend=True, with_kwargs=True)

    def _start(self, _: nn.Module, __: Any) -> None:
        self._next = 0

    def _before(self, place: int) -> Any:
        def hook(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if self._passing_through:
                return None
            first = place >= self._next
            skipped, self._next = range(self._next, place), max(self._next, place + 1)
            changed = self._pass_through(skipped, (arguments, keywords)) if skipped else None
            # prefetched blocks are used in this forward, before weights can change
            if first and self._gathers_ahead:
                for block in self._blocks[place : place + 2]:
                    block.unshard(async_op=True)
            return changed

        return hook

    def _after_all(self, _: nn.Module, __: Any, output: Any) -> Any:
        skipped, self._next = range(self._next, len(self._blocks)), len(self._blocks)
        return self._pass_through(skipped, output) if skipped else None

    def _pass_through(self, skipped: range, value: Any) -> Any:
        """Pass the first tensor in `value` through the hooks of the skipped blocks."""
        leaves, structure = tree_flatten(value)
        tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        place = next((place for place in tensors if leaves[place].requires_grad), None)
        if place is None and torch.is_grad_enabled():
            raise RecipeError(
                f"a forward left out block {skipped[0]} of {len(self._blocks)} before any tensor "
                "with a gradient; with sharded parameters every rank must gather every block; "
                "call the first block in every forward, or name other blocks in Recipe.blocks"
            )
        passed = tensor = leaves[tensors[0] if place is None else place]
        self._passing_through = True
        try:
            for block in skipped:
                passed = _pass_through_block(self._blocks[block], passed)
        finally:
            self._passing_through = False
        return tree_unflatten([passed if leaf is tensor else leaf for leaf in leaves], structure)


def _pass_through_block(block: nn.Module, tensor: Tensor) -> Tensor:
    own = block.__dict__.get("forward")
    block.forward = pass_through
    try:
        passed: Tensor = block(tensor)
    finally:
        if own is None:
            del block.forward
        else:
            block.forward = own
    return passed
