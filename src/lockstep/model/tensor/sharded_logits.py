"""Logits whose classes are sharded over the tensor axis: the output of the style `loss`. Their
cross-entropy is computed on shards, and communicates three numbers per token. Other operations
gather the logits."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from lockstep.base.errors import LossError
from lockstep.base.torch_private import (
    DisableTorchFunctionSubclass,
    assert_async,
    make_contiguous_strides_for,
    to_local,
    tree_map,
)

KEEPS_CLASSES = frozenset(
    [
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "transpose",
        "permute",
        "movedim",
        "contiguous",
        "float",
        "double",
        "to",
        "detach",
        "__getitem__",
        "__get__",
        "size",
        "dim",
        "numel",
        "stride",
        "__len__",
        "register_hook",
        "retain_grad",
        "is_floating_point",
        "_is_view",
    ]
)
"""Names of functions that compute nothing: their result is still sharded, or is not a tensor."""
WRITES = re.compile(r".*[^_]_|__(setitem|i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor))__")
"""Names of functions that change a tensor in place."""


class ShardedLogits(DTensor):
    """Logits sharded along one dim, the classes, over one mesh axis. Code outside of this package
    sees all classes."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if func is F.cross_entropy and (loss := _cross_entropy(*args, **kwargs)) is not None:
                return loss
            name = getattr(func, "__name__", "")
            if WRITES.fullmatch(name) and isinstance(args[0], ShardedLogits):
                raise LossError(
                    f"Tensor.{name} changes logits in place that the style 'loss' has sharded over "
                    "the tensor axis; each rank has some of the classes; write it out of place, "
                    "or give the output layer the style 'vocabulary'"
                )
            if name in KEEPS_CLASSES and _is_simple(args[1:]):
                return tree_map(as_sharded_logits, func(*args, **kwargs))
            args, kwargs = tree_map(gather_full, (args, kwargs))
            return func(*args, **kwargs)


def as_sharded_logits(item: Any) -> Any:
    """Return a DTensor sharded along one dim as `ShardedLogits`, another one gathered, and anything
    else unchanged."""
    if not isinstance(item, DTensor):
        return item
    if not (len(item.placements) == 1 and item.placements[0].is_shard()):
        return gather_full(item)
    item.__class__ = ShardedLogits
    return item


def gather_full(item: Any) -> Any:
    """Gather a DTensor into a plain tensor, with a gradient; return anything else unchanged."""
    if not isinstance(item, DTensor):
        return item
    return local_shard(item.redistribute(placements=[Replicate()] * item.device_mesh.ndim))


def local_shard(tensor: DTensor) -> Tensor:
    """This rank's shard, with a gradient. (`to_local`'s view loses FSDP2's hooks if it is changed
    in place.)"""
    return _LocalShard.apply(tensor)  # type: ignore[no-untyped-call, no-any-return]


class _LocalShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.mesh, ctx.placements, ctx.shape = tensor.device_mesh, tensor.placements, tensor.shape
        return to_local(tensor).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # the gradient is not contiguous if the code after the layer transposes, but the layer's
        # backward relies on it
        gradient = gradients[0].contiguous()
        stride = make_contiguous_strides_for(ctx.shape)
        return DTensor.from_local(
            gradient, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=stride
        )


def _is_simple(arguments: tuple[Any, ...]) -> bool:
    """True if no argument is a tensor, or something that torch converts to a tensor (a list of
    indices)."""
    return not any(
        isinstance(item, Tensor | list) or (isinstance(item, tuple) and not _is_simple(item))
        for item in arguments
    )


def _cross_entropy(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    usual = weight is None and size_average is None and reduce is None and not label_smoothing
    if not usual or not isinstance(input, ShardedLogits) or not isinstance(target, Tensor):
        return None
    dim = 1 if input.dim() > 1 else 0
    if input.placements != (Shard(dim),) or isinstance(target, DTensor):
        return None
    if target.is_floating_point():
        return None
    part = local_shard(input).movedim(dim, -1)
    if torch.is_autocast_enabled(part.device.type):
        part = part.float()
    counts = target != ignore_index
    losses: Tensor = _CrossEntropy.apply(part, target, counts, input.device_mesh)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy. Inputs: logits (..., this rank's classes), targets (...), a mask (...) of
    targets that count. Output: losses (...), 0 where the mask is False."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, target: Tensor, counts: Tensor, mesh: Any) -> Tensor:
        group, own = mesh.get_group(), part.shape[-1]
        most = part.amax(-1)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        shifted = part - most.unsqueeze(-1)
        place = target - mesh.get_local_rank() * own
        held = counts & (place >= 0) & (place < own)
        inside = (target >= 0) & (target < own * mesh.size()) | ~counts
        assert_async(
            inside.all(),
            f"a target of the cross entropy is not one of its {own * mesh.size()} classes",
        )
        place = place.where(held, 0).unsqueeze(-1)
        exponentials = shifted.exp()
        sums = torch.stack(
            [exponentials.sum(-1), shifted.gather(-1, place).squeeze(-1).where(held, 0.0)]
        )
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials / sums[0].unsqueeze(-1), place, held, counts)
        return (sums[0].log() - sums[1]) * counts

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        probabilities, place, held, counts = ctx.saved_tensors
        slope = probabilities.scatter_add(-1, place, -held.to(probabilities.dtype).unsqueeze(-1))
        return slope * (gradients[0] * counts).unsqueeze(-1), None, None, None
