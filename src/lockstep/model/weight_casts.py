"""Autocast's casts of the weights that FSDP2 shards.

FSDP2 gathers the weights of torch's layers in autocast's precision. Other code that uses the
weights would get rounded values. `check_uses` detects code that would get rounded values, in the
first backward.

FSDP2 gathers weights outside of torch's layers in full precision. A matrix product under autocast
saves the cast weight for its backward. FSDP2 cannot free the casts, which would keep the full model
in bf16 on every rank. `drop_casts` replaces each saved cast by a function. The replacement casts
the weight that FSDP2 gathers for the block's backward, and gets the same bits.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lockstep.base.errors import PlanError
from lockstep.base.torch_private import (
    base_of,
    begins_forward_of,
    fsdp_parameter_group,
    gather_in,
    gathered,
    gathered_short,
    is_distributed,
    output_shape,
    own_parameters,
    owners_of,
    parameter_name,
    saved_tensors,
    saved_value,
    tree_leaves,
    version,
)

_WEIGHTS: dict[type[nn.Module], tuple[str, ...]] = {
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), ("weight",)),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), ("weight",)),
    nn.MultiheadAttention: ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
}
"""Parameters that the forwards of torch's modules use only in matrix products and convolutions."""
SMALL_PART = 200
"""A weight keeps its dtype if it has less than 1 / 200 of the elements that FSDP2 gathers together,
because a router may be called outside of autocast. A router has at most 1 / (2 h) of the elements,
where h is the width of the experts' hidden layer. The smallest attention projection of a large
model has 1 / 100 of the elements."""
VIEWS = (
    "(T|Transpose|Permute|View|UnsafeView|Split|SplitWithSizes|Chunk|Slice|Select|Squeeze|Unsqueeze"
    "|Expand|Alias|Unbind)"
)
_PRODUCTS = r"Addmm|Mm|Bmm|Baddbmm|Addbmm|Addmv|Mv|Dot|Linear|\w*Convolution"
_OTHERS = rf"(?!({VIEWS}|{_PRODUCTS})Backward)\w+Backward\d"
_TWO_DTYPES = (
    r"[^\n]*(have the same dtype|should be the same|expected scalar"
    r" type)[^\n]*(BFloat16|Half)[^\n]*"
)
_A_FORWARD_OF_ITS_OWN = (
    "give the layer a class with a forward of its own, class Gate(nn.Linear): def forward(self, x):"
    " return super().forward(x), whose weights are gathered as they are, or use replicate"
)


@dataclass(frozen=True, slots=True)
class AutocastWeights:
    """The weights that FSDP2 may all-gather in autocast's `dtype`, by their module and their name
    in the module."""

    dtype: torch.dtype
    owners: Collection[tuple[nn.Module, str]]

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype) -> Self:
        """Find the float32 weights that autocast casts in each forward of their module. Call this
        method before the model's forwards are changed."""
        kinds = dict(_WEIGHTS)
        if transformers := sys.modules.get("transformers.pytorch_utils"):
            kinds[transformers.Conv1D] = ("weight",)
        owners = {
            (module, name)
            for module in model.modules()
            for name, parameter in own_parameters(module).items()
            if parameter is not None and parameter.dtype is torch.float32
            if any(name in names and _computes_as(module, kind) for kind, names in kinds.items())
        }
        return cls(dtype, owners)

    def gather_short(self, groups: Iterable[nn.Module]) -> None:
        """Small weights and weights that another module also uses keep their dtype."""
        for group in groups:
            held = fsdp_parameter_group(group)
            parameters = [] if held is None else held.fsdp_params
            elements = sum(each.sharded_param.numel() for each in parameters)
            for parameter in parameters:
                is_large = parameter.sharded_param.numel() * SMALL_PART >= elements
                if is_large and all(owner in self.owners for owner in owners_of(parameter)):
                    gather_in(parameter, self.dtype)


def check_uses(groups: Iterable[nn.Module], loss: Tensor) -> None:
    """Raise an error if `loss` depends on a rounded weight through operations other than matrix
    products and convolutions. Compiled code and the user's autograd.Functions cannot be checked."""
    held = filter(None, map(fsdp_parameter_group, groups))
    parameters = [each for group in held for each in group.fsdp_params]
    names = {id(gathered): name for name, gathered in filter(None, map(gathered_short, parameters))}
    waiting = [loss.grad_fn] if names and loss.grad_fn is not None else []
    found = set(waiting)
    while waiting:
        node = waiting.pop()
        for following in [each for each, _ in node.next_functions if each is not None]:
            if (name := _name_of(following, names)) and re.match(_OTHERS, node.name()):
                operation = node.name().partition("Backward")[0]
                raise PlanError(
                    f"under shard the weight {name!r} is gathered in the precision of autocast, and"
                    f" {operation} uses it too, which would have it in float32 under other plans;"
                    f" {_A_FORWARD_OF_ITS_OWN}"
                )
            if following not in found:
                found.add(following)
                waiting.append(following)


def error_of_autocast(error: BaseException | None, plan: object) -> PlanError | None:
    if not isinstance(error, RuntimeError) or not (said := re.search(_TWO_DTYPES, str(error))):
        return None
    return PlanError(
        f"{plan}: {said.group()}; under shard the weights of torch's layers are gathered in the"
        " precision of autocast, and one may have been called without it; if so, call the model"
        f" within session.autocast(); to compute a layer in float32, {_A_FORWARD_OF_ITS_OWN}"
    )


def _name_of(node: Node, names: Mapping[int, str]) -> str | None:
    """Return the name of the weight whose gradient the node accumulates."""
    while (
        re.match(f"{VIEWS}Backward", node.name())
        and (following := node.next_functions[0][0]) is not None
    ):
        node = following
    return names.get(id(getattr(node, "variable", None)))


def _computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and "forward" not in vars(module)
    )


BLOCK = "lockstep: output of a block"
"""Marks autograd's nodes that made the output of a block."""
CAST = "ToCopyBackward0"
View = Callable[[Tensor], Tensor]


def drop_casts(group: nn.Module, *, is_root: bool) -> None:
    """Stop autograd from keeping casts of the weights of `group` from forward to backward."""
    parameters = fsdp_parameter_group(group)
    compared: set[str] = set()

    def after_forward(_: nn.Module, __: Any, output: Any) -> None:
        outputs: list[Any] = [
            leaf.grad_fn
            for leaf in tree_leaves(output)
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None
        ]
        held = parameters.fsdp_params if parameters is not None and outputs else ()
        if weights := {
            id(weight): parameter_name(each)
            for each in held
            if (weight := gathered(each)) is not None and _may_be_cast(weight)
        }:
            begins = partial(begins_forward_of, parameters)
            is_end = (lambda node: BLOCK in node.metadata) if is_root else begins
            drop_from_graph(list(outputs), weights, is_end, compared)
        if not is_root:
            for node in outputs:
                node.metadata[BLOCK] = True

    group.register_forward_hook(after_forward)


def _may_be_cast(weight: Tensor) -> bool:
    return weight.dim() > 1 and weight.dtype is torch.float32 and not is_distributed(weight)


def drop_from_graph(
    waiting: list[Any],
    weights: Mapping[int, str],
    is_end: Callable[[Any], bool],
    compared: set[str],
) -> None:
    """Replace saved casts of the weights by functions that make the casts again in the backward.
    `compared` collects the names of weights whose new casts had the same bits."""
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if is_end(node):
            continue
        uses_cast = False
        for following, _ in node.next_functions:
            if following is not None:
                kind: Any = type(following)
                uses_cast = uses_cast or _is_cast_or_view(kind)
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
        for saved, tensor in saved_tensors(node) if uses_cast else ():
            if (cast := _Cast.of(tensor, weights)) is not None:
                name = weights[id(cast.weight)]
                make = (
                    _Cast.again
                    if name in compared
                    else partial(_again_and_compared, _sum_of_bits(tensor), name, compared)
                )
                saved.register_hooks(partial(_in_its_place, cast), make)


def _in_its_place(cast: _Cast, tensor: Tensor) -> _Cast:
    return cast


def _again_and_compared(expected: Tensor, name: str, compared: set[str], cast: _Cast) -> Tensor:
    """Raise `PlanError` if the sum of the new cast's bits is not `expected`."""
    again = cast.again()
    if again.untyped_storage().nbytes():
        if not torch.equal(_sum_of_bits(again), expected):
            raise PlanError(
                f"under shard the backward casts the weight {name!r} to {cast.dtype} again, to "
                "other values than in the forward: the cast, or the weight after it, was changed "
                "through .data, which autograd does not see; change it within torch.no_grad() and "
                "without .data, which keeps the cast (cast.copy_(quantized)), or use replicate"
            )
        compared.add(name)
    return again


def _sum_of_bits(tensor: Tensor) -> Tensor:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(whole[tensor.element_size()]).sum(dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class _Cast:
    """Makes a saved cast of a weight again, from the gathered weight."""

    weight: Tensor
    views: tuple[View, ...]
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, weights: Mapping[int, str]) -> _Cast | None:
        """Return None if `tensor` is not a cast of one of the weights, or was changed after the
        cast."""
        cast = base_of(tensor)
        if type(cast.grad_fn).__name__ != CAST or version(cast) or is_distributed(cast):
            return None
        if tensor.dtype is not cast.dtype or not cast.is_floating_point() or tensor.is_neg():
            return None
        views = []
        node: Any
        node, place = cast.grad_fn.next_functions[0]  # type: ignore[union-attr]
        while (view := _view_of(node, place)) is not None:
            views.append(view)
            node, place = node.next_functions[0]
        weight = getattr(node, "variable", None)
        if weight is None or id(weight) not in weights or weight.dtype is cast.dtype:
            return None
        layout = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        made = cls(weight, tuple(reversed(views)), tensor.dtype, *layout)
        again = weight
        if views:  # FSDP2 has freed the weight's memory by now.
            freed = torch.empty_strided(weight.shape, weight.stride(), device="meta")
            again = made._through_views(freed).to(tensor.dtype)
        here = again.shape, again.stride(), weight.device
        return made if here == (cast.shape, cast.stride(), cast.device) else None

    def _through_views(self, source: Tensor) -> Tensor:
        for view in self.views:
            source = view(source)
        return source

    def again(self) -> Tensor:
        """Return a tensor without memory if FSDP2 has freed the gathered weight. Autograd also
        unpacks saved tensors that the backward does not use."""
        if not self.weight.untyped_storage().nbytes():
            device = self.weight.device
            freed = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)
            freed.untyped_storage().resize_(0)
            return freed
        cast = self._through_views(self.weight.detach()).to(self.dtype)
        return cast.as_strided(self.size, self.stride, self.offset)


@cache
def _is_cast_or_view(kind: Any) -> bool:
    return re.fullmatch(f"(ToCopy|{VIEWS})Backward\\d?", kind.__name__) is not None


def _view_of(node: Any, place: int) -> View | None:
    """Return the view operation whose backward is `node`. `place` is the index of the view among
    the operation's outputs."""

    def saved(*names: str) -> dict[str, Any]:
        return {name: saved_value(node, name) for name in names}

    match type(node).__name__.rstrip("0123456789"):
        case "ViewBackward" | "UnsqueezeBackward" | "SqueezeBackward" | "AliasBackward":
            return partial(torch.Tensor.view, size=output_shape(node, place))
        case "ExpandBackward":
            return partial(torch.Tensor.expand, size=output_shape(node, place))
        case "TBackward":
            return torch.t
        case "TransposeBackward":
            return partial(torch.transpose, **saved("dim0", "dim1"))
        case "PermuteBackward":
            return partial(torch.permute, **saved("dims"))
        case "SelectBackward":
            return partial(torch.select, **saved("dim", "index"))
        case "UnbindBackward":
            return partial(torch.select, **saved("dim"), index=place)
        case "SliceBackward":
            return partial(torch.ops.aten.slice, **saved("dim", "start", "end", "step"))
        case "SplitBackward":
            return partial(
                _part, sizes=saved_value(node, "split_size"), **saved("dim"), place=place
            )
        case "SplitWithSizesBackward":
            sizes = saved_value(node, "split_sizes")
            return partial(_part, sizes=sizes, **saved("dim"), place=place)
    return None


def _part(tensor: Tensor, sizes: int | list[int], dim: int, place: int) -> Tensor:
    return torch.split(tensor, sizes, dim)[place]
