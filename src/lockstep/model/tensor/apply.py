"""The `tensor` axis (tensor parallelism). The weights of layers are DTensors. A `colwise` layer
computes a shard of its outputs on each rank. The next `rowwise` layer takes the shard as input and
sums over the ranks. User code between the two layers runs on the shard (`sharded_features.py`).
Code outside of the sharded layers has equal activations on all ranks of the axis. With slices, the
output has the same bits on any number of ranks (`sliced.py`)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
)

from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import tree_map, without_torch_function_modes
from lockstep.model.blocks import is_passing_through, share_parameter, shared_names
from lockstep.model.placement import place_parameters
from lockstep.model.tensor.first_forward_check import FirstForwardCheck
from lockstep.model.tensor.marks import is_sharded, mark_sharded
from lockstep.model.tensor.sharded_features import (
    ShardedFeatures,
    SlicedModel,
    check_backward,
    check_gradients,
    checked_output,
    unseen_backward,
)
from lockstep.model.tensor.sharded_logits import (
    as_sharded_logits,
    as_sliced_logits,
    gather_full,
    local_shard,
)
from lockstep.model.tensor.sliced import Slices, linear
from lockstep.model.tensor.styles import STYLES, is_transposed, kind_of, shard_dim, sizes_of

SHAPES = re.compile(
    r"is invalid for input of size|must match|cannot be multiplied|size"
    r" mismatch|to be equal size|split_with_sizes|not compatible|doesn't match|"
    r"not enough values to unpack|too many values to unpack|Expected size|normalized_shape|not"
    r" divisible|broadcast|"
    r"should contain \d+ elements"
)


def tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh | None,
    styles: Mapping[str, str],
    *,
    materialize: Callable[[nn.Module], None],
    experts: Sequence[str] = (),
    slices: Slices | None = None,
) -> None:
    """Shard the layers of `model` over `mesh` (one axis), in place. Every rank must call this
    function before FSDP2 shards the model. `materialize` gives a layer its values just before the
    layer is sharded, and must compute the same values on all ranks. If `mesh` is None, a single
    rank computes in slices."""
    shared = shared_names(model)
    unsharded_now: set[str] = set()
    sliced = None if slices is None else SlicedModel(model, list(styles), slices)
    features = ShardedFeatures(mesh, sliced)
    for name, style in styles.items():
        layer = model.get_submodule(name)
        hooks = _ShardedLayer(name, style, unsharded_now, slices, features)
        materialize(layer)
        if mesh is None:
            layer.register_forward_pre_hook(hooks.check_input)
            layer.register_forward_hook(hooks.mark_output)
        else:
            # torch's docs allow more than its types
            placing: Any = hooks.place_input, hooks.place_output
            distribute_module(layer, mesh, hooks.shard_parameters, *placing)
        if slices is not None:
            _replace_forward(layer, _SlicedLayer(name, style, unsharded_now, slices))
    for names in shared:
        share_parameter(model, names)
    for name in experts:
        call = functools.partial(_gather_tokens, name)
        model.get_submodule(name).register_forward_pre_hook(call, with_kwargs=True)
    exposed = [name for name, style in styles.items() if STYLES[style].exposes_shards]
    on_sequence = [
        name
        for name, style in styles.items()
        if name not in exposed and STYLES[style].output_layout == "sequence"
    ]
    check = None
    if mesh is not None:
        check = FirstForwardCheck(
            model, exposed, on_sequence, unsharded_now, draws_alike=slices is None
        )
    around = {"", *(name[: dot.start()] for name in styles for dot in re.finditer(r"\.", name))}
    for name, module in model.named_modules():
        if name in around:
            own = [child for child in styles if child.rpartition(".")[0] == name]
            _replace_forward(module, _TensorParallelForward(module, name, features, check, own))


@torch.no_grad()
def reduce_partial_gradients(parameters: Sequence[Tensor]) -> None:
    """All-reduce gradients that are partial sums, such as the gradient of a norm's weight with the
    style `sequence`. Every rank must call this function once, after a step's last backward. A rank
    whose `.grad` is None contributes zeros."""
    for parameter in parameters:
        gradient = parameter.grad
        if (
            isinstance(parameter, DTensor)
            and isinstance(gradient, DTensor)
            and gradient.placements != parameter.placements
        ):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def _gather_tokens(
    name: str, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, Any]:
    for each in (*arguments, *keywords.values()):
        if is_sharded(each):
            raise RecipeError(
                f"{name} is called with a tensor of shape {tuple(each.shape)} that is sharded over"
                " the tensor axis; experts and their router take all features; give the layer"
                " before them 'colwise_gathered', or leave the router unsharded"
            )
    return tree_map(gather_full, arguments), tree_map(gather_full, keywords)


class _ShardedLayer:
    """Hooks that place the parameters, the input and the output of a sharded layer according to its
    style."""

    def __init__(
        self,
        name: str,
        style: str,
        unsharded_now: set[str],
        slices: Slices | None,
        features: ShardedFeatures,
    ) -> None:
        """`unsharded_now` has the names of the layers that currently run with full inputs and
        weights."""
        self._slices = slices
        self._features = features
        self._name = name
        self._style_name = style
        self._style = STYLES[style]
        self._unsharded_now = unsharded_now
        self._is_checked = False

    def shard_parameters(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        def placement_of(name: str) -> Placement:
            dim = shard_dim(module, name, self._style_name)
            return Replicate() if dim is None else Shard(dim)

        place_parameters(module, mesh, placement_of)

    def check_input(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not is_passing_through(module):
            self._placement(module, self._first(inputs), 1)

    def mark_output(self, module: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        """Set the marks of `place_output` on a single rank."""
        if is_passing_through(module):
            return output
        assert self._slices is not None, "one rank has no hooks without slices"
        if self._style.output_layout == "classes":
            sliced: Tensor = as_sliced_logits(output, self._slices)
            return sliced
        if self._style_name == "embedding":
            return output + 0.0  # a sum over ranks makes 0.0 of -0.0
        return (
            mark_sharded(output, output.dim() - 1)
            if self._style.output_layout == "sharded"
            else output
        )

    def place_input(
        self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh
    ) -> tuple[Any, ...]:
        if self._name in self._unsharded_now or is_passing_through(module):
            return inputs
        given = self._first(inputs)
        if not isinstance(given, DTensor):
            placements = (self._placement(module, given, mesh.size()),)
            given = DTensor.from_local(given, mesh, placements, run_check=False)
        if self._style.input_layout == "sequence" and given.dim() < 2:
            raise RecipeError(
                f"{self._name} has the style 'sequence' and an input of shape {tuple(given.shape)};"
                " the sequence is dim 1"
            )
        wanted: dict[str, Placement] = {
            "replicated": Replicate(),
            "sharded": Shard(given.dim() - 1),
            "sequence": Shard(1),
        }
        return given.redistribute(placements=(wanted[self._style.input_layout],)), *inputs[1:]

    def _first(self, inputs: tuple[Any, ...]) -> Any:
        if not inputs:
            raise RecipeError(
                f"{self._name} is called with keywords alone; a layer that is sharded takes its"
                " input as the first argument"
            )
        return inputs[0]

    def _placement(self, module: nn.Module, given: Tensor, size: int) -> Placement:
        if self._slices is not None and self._style.exposes_shards:
            self._check_is_seen(given)
        wants_shard = self._style.input_layout == "sharded" and not self._style.slices_input
        if wants_shard and given.shape[-1] * size == sizes_of(module)[1]:
            if not self._is_checked and torch.is_grad_enabled():
                with without_torch_function_modes():
                    check_gradients(given, self._name)
                    self._is_checked = given.requires_grad
            return Shard(given.dim() - 1)
        if wants_shard:
            is_whole = given.shape[-1] == sizes_of(module)[1]
            remedy = "'rowwise_split'" if is_whole else "a 'colwise' layer before it"
            raise RecipeError(
                f"{self._name} has the style {self._style_name!r} and {sizes_of(module)[1]} "
                f"inputs, split over {size} ranks, but got {given.shape[-1]}; give it {remedy}, or "
                "leave it unsharded"
            )
        if is_sharded(given):
            raise RecipeError(
                f"{self._name} has the style {self._style_name!r}, which takes an unsharded input, "
                "but got one that is sharded over the tensor axis; give it 'rowwise', or the "
                "layer before it 'colwise_gathered'"
            )
        return Replicate()

    def _check_is_seen(self, given: Tensor) -> None:
        if not self._features.is_entered:
            raise unseen_backward(f"{self._name}, called outside of the forward of its module")
        with without_torch_function_modes():
            check_backward(given)
        if self._style.input_layout == "sharded" and not is_sharded(given):
            raise RecipeError(
                f"{self._name} has the style {self._style_name!r} and an input that lockstep has"
                " not seen a function of a sharded tensor return; with slices, it must see all of"
                " them; compute it from the output of a 'colwise' layer with torch's functions,"
                " give this layer 'rowwise_split', or leave"
                " slices and numerics=bitwise out"
            )

    def place_output(self, module: nn.Module, output: DTensor, __: DeviceMesh) -> Tensor:
        if self._name in self._unsharded_now or is_passing_through(module):
            return output
        layouts: dict[str, Placement] = {"replicated": Replicate(), "sequence": Shard(1)}
        layout = layouts.get(self._style.output_layout, Shard(output.dim() - 1))
        spread = output.redistribute(placements=(layout,))
        if self._style.output_layout == "classes":
            logits: Tensor = as_sharded_logits(spread, self._slices)
            return logits
        if self._style.output_layout == "sequence":
            return spread
        held = local_shard(spread)
        return (
            mark_sharded(held, held.dim() - 1) if self._style.output_layout == "sharded" else held
        )


class OtherForward:
    """An object whose `run` is called in place of a module's forward. Copies of the module keep a
    reference to the same object."""

    def __deepcopy__(self, _: Any) -> Self:
        return self

    def run(
        self, module: nn.Module, forward: Callable[..., Any], /, *arguments: Any, **keywords: Any
    ) -> Any:
        raise NotImplementedError


class _SlicedLayer(OtherForward):
    """The forward of a sharded layer, computed in slices. An embedding has no sums, and keeps its
    original forward."""

    def __init__(self, name: str, style: str, unsharded_now: set[str], slices: Slices) -> None:
        self._name = name
        self._over = STYLES[style].shards
        self._unsharded_now = unsharded_now
        self._slices = slices

    def run(
        self, module: nn.Module, forward: Callable[..., Any], /, *arguments: Any, **keywords: Any
    ) -> Any:
        with without_torch_function_modes():
            if self._name in self._unsharded_now or kind_of(module) == "embedding":
                return forward(*arguments, **keywords)
            given = arguments[0]
            weight, bias = (_local_part(getattr(module, each)) for each in ("weight", "bias"))
            weight = weight.t() if is_transposed(module) else weight
            out = linear(_local_part(given), weight, bias, self._slices, over=self._over)
            if not isinstance(given, DTensor):
                return out
            placement = Shard(out.dim() - 1) if self._over == "outputs" else Replicate()
            return DTensor.from_local(out, given.device_mesh, (placement,), run_check=False)


def _local_part(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _TensorParallelForward(OtherForward):
    """Runs the forward of a module with sharded submodules. Adds an explanation to errors about
    sizes of tensors."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        features: ShardedFeatures,
        check: FirstForwardCheck | None,
        layers: Sequence[str],
    ) -> None:
        self._name = name
        self._called = name or type(module).__name__
        self._features = features
        self._check = check
        self._layers = layers

    def run(
        self, module: nn.Module, forward: Callable[..., Any], /, *arguments: Any, **keywords: Any
    ) -> Any:
        with self._features:
            try:
                output = forward(*arguments, **keywords)
            except (RuntimeError, ValueError) as error:
                if not self._layers or not SHAPES.search(str(error)):
                    raise
                raise RecipeError(_explained(self._called, self._layers, error)) from error
            if self._check is not None:
                self._check.compare(self._name, module, forward, arguments, keywords)
            return output if self._name else checked_output(output, self._called)


def _replace_forward(module: Any, by: OtherForward) -> None:
    """Give the module a new class whose forward is `by.run`. A copy of the module passes itself to
    `run`."""
    # a module's attribute `forward` has priority over its class's method
    if "forward" in vars(module):
        run = functools.partial(by.run, module, module.forward)
        module.forward = functools.wraps(module.forward)(run)
    else:
        kind: Any = type(module)
        module.__class__ = _class_with_other_forward(kind)
        module.lockstep_forward = by


@functools.cache
def _class_with_other_forward(kind: Any) -> type[nn.Module]:
    @functools.wraps(kind.forward)
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        own = functools.partial(kind.forward, self)
        return self.lockstep_forward.run(self, own, *arguments, **keywords)

    members = {"forward": forward, "__module__": kind.__module__}
    made: type[nn.Module] = type(kind.__name__, (kind,), members)
    return made


def _explained(name: str, layers: Sequence[str], error: Exception) -> str:
    first_line = str(error).partition("\n")[0]
    return (
        f"the forward of {name} failed with its layers {', '.join(layers)} sharded over the tensor "
        f"axis: {first_line}; between a 'colwise' and a 'rowwise' layer each rank has some of the "
        "features, in whole heads, so code there must not name their full number: write -1 for "
        "the heads, as in query.view(batch, length, -1, head_dim) and mixed.reshape(batch, "
        "length, -1); use separate layers for query, key and value; have no norm over the "
        "features there; or give the first layer 'colwise_gathered' and the second "
        "'rowwise_split', which leave the code between them unsharded"
    )
