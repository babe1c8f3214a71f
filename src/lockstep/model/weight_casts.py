"""Casts of gathered weights that autograd does not keep: it casts the weight again in the backward,
to the same bits.

A product under autocast saves the cast of its weight for its backward, where FSDP2 cannot free it:
the full model in bf16 on every rank. After the forward of a block this module replaces each such
cast by a recipe to make it from the weight, which FSDP2 gathers again for the block's backward.
Other tensors that autograd has saved stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.errors import PlanError
from lockstep.base.torch_private import (
    base_of,
    begins_forward_of,
    fsdp_parameter_group,
    gathered,
    is_distributed,
    name_of,
    output_shape,
    saved_tensors,
    saved_value,
    tree_leaves,
    version,
)
from lockstep.model.autocast_weights import VIEWS

BLOCK = "lockstep: output of a block"
"""Key in the metadata of nodes."""
CAST = "ToCopyBackward0"
View = Callable[[Tensor], Tensor]


def drop_casts(group: nn.Module, *, is_root: bool) -> None:
    """Stop autograd from keeping casts of the weights of one of FSDP2's groups from forward to
    backward. `is_root`: the group of the parameters outside of blocks; its forward is searched only
    after the last block."""
    parameters = fsdp_parameter_group(group)
    compared: set[str] = set()

    def after_forward(_: nn.Module, __: Any, output: Any) -> None:
        outputs: list[Any] = [
            leaf.grad_fn
            for leaf in tree_leaves(output)
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None
        ]
        held = (
            [(gathered(each), each) for each in parameters.fsdp_params]
            if parameters is not None and outputs
            else []
        )
        if weights := {
            id(weight): name_of(each)
            for weight, each in held
            if weight is not None and _may_be_cast(weight)
        }:
            is_end = (
                (lambda node: BLOCK in node.metadata)
                if is_root
                else partial(begins_forward_of, parameters)
            )
            drop_from_graph(list(outputs), weights, is_end, compared)
        if not is_root:
            for node in outputs:
                node.metadata[BLOCK] = True

    group.register_forward_hook(after_forward)


def _may_be_cast(weight: Tensor) -> bool:
    """False for small weights, and weights that autocast never casts, such as those of norms."""
    return weight.dim() > 1 and weight.dtype is torch.float32 and not is_distributed(weight)


def drop_from_graph(
    waiting: list[Any],
    weights: Mapping[int, str],
    is_end: Callable[[Any], bool],
    compared: set[str],
) -> None:
    """Drop the casts of the weights from the graph between these nodes and the `is_end` nodes.
    `weights`: the name of each, by its id. `compared`: names of weights already compared;
    the backward adds to them."""
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
    """Return the cast, made again. Raises `PlanError` if it differs from the forward's."""
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
    bits = tensor.detach().view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )
    return bits.sum(dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class _Cast:
    """A view of the cast of a view of a gathered weight. `views`: the views before the cast."""

    weight: Tensor
    views: tuple[View, ...]
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, weights: Mapping[int, str]) -> _Cast | None:
        """Return a recipe to make `tensor` again; None if it is no cast of these weights, or was
        changed."""
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
        made = cls(
            weight,
            tuple(reversed(views)),
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
        )
        # FSDP2 has freed the weight's memory by now.
        again = (
            made._seen(torch.empty_strided(weight.shape, weight.stride(), device="meta")).to(
                tensor.dtype
            )
            if views
            else weight
        )
        laid_out_alike = (again.shape, again.stride(), weight.device) == (
            cast.shape,
            cast.stride(),
            cast.device,
        )
        return made if laid_out_alike else None

    def _seen(self, source: Tensor) -> Tensor:
        for view in self.views:
            source = view(source)
        return source

    def again(self) -> Tensor:
        """Return the cast of the weight, if its memory exists: a backward also unpacks tensors that
        it does not use."""
        if not self.weight.untyped_storage().nbytes():
            freed = torch.empty_strided(
                self.size, self.stride, dtype=self.dtype, device=self.weight.device
            )
            freed.untyped_storage().resize_(0)
            return freed
        return (
            self._seen(self.weight.detach())
            .to(self.dtype)
            .as_strided(self.size, self.stride, self.offset)
        )


@cache
def _is_cast_or_view(kind: Any) -> bool:
    return re.fullmatch(f"(ToCopy|{VIEWS})Backward\\d?", kind.__name__) is not None


def _view_of(node: Any, place: int) -> View | None:
    """Return the view whose backward, for output `place`, is `node`; None for another operation."""
    match type(node).__name__.rstrip("0123456789"):
        case "ViewBackward" | "UnsqueezeBackward" | "SqueezeBackward" | "AliasBackward":
            return partial(torch.Tensor.view, size=output_shape(node, place))
        case "ExpandBackward":
            return partial(torch.Tensor.expand, size=output_shape(node, place))
        case "TBackward":
            return torch.t
        case "TransposeBackward":
            return partial(
                torch.transpose, dim0=saved_value(node, "dim0"), dim1=saved_value(node, "dim1")
            )
        case "PermuteBackward":
            return partial(torch.permute, dims=saved_value(node, "dims"))
        case "SelectBackward":
            return partial(
                torch.select, dim=saved_value(node, "dim"), index=saved_value(node, "index")
            )
        case "UnbindBackward":
            return partial(torch.select, dim=saved_value(node, "dim"), index=place)
        case "SliceBackward":
            return partial(
                torch.ops.aten.slice,
                **{name: saved_value(node, name) for name in ("dim", "start", "end", "step")},
            )
        case "SplitBackward":
            return partial(
                _part,
                sizes=saved_value(node, "split_size"),
                dim=saved_value(node, "dim"),
                place=place,
            )
        case "SplitWithSizesBackward":
            return partial(
                _part,
                sizes=saved_value(node, "split_sizes"),
                dim=saved_value(node, "dim"),
                place=place,
            )
    return None


def _part(tensor: Tensor, sizes: int | list[int], dim: int, place: int) -> Tensor:
    return torch.split(tensor, sizes, dim)[place]
