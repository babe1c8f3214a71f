"""Checks that every rank builds the same model. A model's factory may read the rank, the clock or
an unseeded generator. Structure is compared before checksums, because ranks with different
parameters would deadlock in their collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from crc32c import crc32c
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lockstep.base.errors import RecipeError
from lockstep.comm.world import World


def check_structure(model: Any, world: World) -> None:
    """Every rank must call this function. All ranks raise the same error."""
    first, *others = world.gather_values(_structure(model))
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise _different(*_first_difference(first, other), 0, rank, "whatever its rank")


def _first_difference(first: list[Any], other: list[Any]) -> tuple[str, str]:
    here, there = dict(first), dict(other)
    for name in {**here, **there}:
        mine, theirs = here.get(name), there.get(name)
        if mine != theirs:
            return name, f"is {_described(mine)} on one and {_described(theirs)} on the other"
    pairs = zip(first, other, strict=False)
    return next(mine for (mine, _), (theirs, _) in pairs if mine != theirs), "is at another place"


def check_checksums(checksums: Mapping[str, int], world: World) -> None:
    """Every rank must call this function. All ranks raise the same error."""
    if world.size == 1:
        return
    seen: dict[str, tuple[int, int]] = {}
    for rank, theirs in enumerate(world.gather_values(checksums)):
        for name, value in theirs.items():
            first, before = seen.setdefault(name, (rank, value))
            if value != before:
                rule = (
                    "with weights drawn from torch's, numpy's or python's default generator (they"
                    " are seeded), not from the rank"
                )
                raise _different(name, "has other values", first, rank, rule)


def checksums_of(model: Any) -> dict[str, int]:
    """Sparse, quantized, lazy and meta tensors have no checksum."""
    return {
        name: tensor_checksum(tensor)
        for name, tensor in (_tensors(model) if isinstance(model, nn.Module) else ())
        if tensor.layout == torch.strided
        and not (tensor.is_meta or tensor.is_quantized or _is_lazy(tensor))
    }


def tensor_checksum(tensor: Tensor) -> int:
    dense = tensor.detach().resolve_conj().resolve_neg().cpu()
    dense = dense.permute(sorted(range(dense.dim()), key=dense.stride, reverse=True)).contiguous()
    # A tensor of one element may have any stride and still be contiguous; it could then not be
    # viewed as bytes.
    return crc32c(dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data)


def _structure(model: Any) -> list[Any]:
    if not isinstance(model, nn.Module):
        return [["", type(model).__qualname__]]
    modules = [[name, type(module).__qualname__] for name, module in model.named_modules()]
    return modules + [[name, _kind(tensor)] for name, tensor in _tensors(model)]


def _kind(tensor: Tensor) -> list[Any]:
    role = "parameter" if tensor.requires_grad else "frozen parameter"
    if not isinstance(tensor, nn.Parameter):
        role = "buffer"
    is_shaped = tensor.layout == torch.strided and not _is_lazy(tensor)
    form = [tensor.shape, tensor.stride()] if is_shaped else str(tensor.layout)
    return [role, str(tensor.dtype), form]


def _is_lazy(tensor: Tensor) -> bool:
    return isinstance(tensor, UninitializedParameter | UninitializedBuffer)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _described(kind: str | list[Any] | None) -> str:
    if kind is None or isinstance(kind, str):
        return kind or "missing"
    role, dtype, form = kind
    if not isinstance(form, str):
        form = f"of shape {tuple(form[0])}, strides {tuple(form[1])}"
    return f"a {role}, {dtype} {form}"


def _different(name: str, how: str, one: int, other: int, rule: str) -> RecipeError:
    return RecipeError(
        f"the model is not the same on ranks {one} and {other}: {repr(name) if name else 'it'}"
        f" {how}; the factory must build the same model in every process, {rule}"
    )
