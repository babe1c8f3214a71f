"""Logits whose classes are sharded over the `tensor` axis. The cross-entropy is computed on shards,
and communicates three numbers per token."""

from __future__ import annotations

import re
from collections.abc import Callable
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
from lockstep.model.tensor.elementwise import elementwise
from lockstep.model.tensor.sliced import Slices, tree_sum

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
"""Names of functions that return sharded logits or no tensor, and compute no values."""
WRITES = re.compile(r".*[^_]_|__(setitem|i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor))__")


class ShardedLogits(DTensor):
    """Logits whose class dim is sharded. The cross-entropy and changes of shape work on shards.
    Functions other than the cross-entropy and changes of shape get the gathered logits."""

    slices: Slices | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, kwargs or {}, as_sharded_logits)


def as_sharded_logits(item: Any, slices: Slices | None = None) -> Any:
    if not isinstance(item, DTensor):
        return item
    if not (len(item.placements) == 1 and item.placements[0].is_shard()):
        return gather_full(item)
    item.__class__ = ShardedLogits
    logits: Any = item
    logits.slices = slices
    return logits


class SlicedLogits(Tensor):
    """Logits on one process, with the same bits in the cross-entropy as `ShardedLogits` on
    several."""

    slices: Slices

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, kwargs or {}, as_sliced_logits)


def as_sliced_logits(item: Any, slices: Slices) -> Any:
    if type(item) is not Tensor:
        return item
    logits = item.as_subclass(SlicedLogits)
    logits.slices = slices
    return logits


def _called(func: Any, args: Any, kwargs: Any, as_logits: Callable[[Any, Any], Any]) -> Any:
    with DisableTorchFunctionSubclass():
        if func is F.cross_entropy and (loss := _cross_entropy(*args, **kwargs)) is not None:
            return loss
        name = getattr(func, "__name__", "")
        _check_not_written(name, args)
        if name in KEEPS_CLASSES and _is_simple(args[1:]):
            slices = args[0].slices
            return tree_map(lambda item: as_logits(item, slices), func(*args, **kwargs))
        args, kwargs = tree_map(gather_full, (args, kwargs))
        return func(*args, **kwargs)


def _check_not_written(name: str, args: Any) -> None:
    if WRITES.fullmatch(name) and isinstance(args[0], ShardedLogits | SlicedLogits):
        raise LossError(
            f"Tensor.{name} changes logits in place that the style 'loss' has sharded over "
            "the tensor axis; each rank has some of the classes; write it out of place, "
            "or give the output layer the style 'vocabulary'"
        )


def gather_full(item: Any) -> Any:
    if not isinstance(item, DTensor):
        return item
    return local_shard(item.redistribute(placements=[Replicate()] * item.device_mesh.ndim))


def local_shard(tensor: DTensor) -> Tensor:
    """Return this rank's shard, with a gradient. An in-place change of the view that `to_local`
    returns would lose FSDP2's hooks."""
    return _LocalShard.apply(tensor)  # type: ignore[no-untyped-call, no-any-return]


class _LocalShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.mesh, ctx.placements, ctx.shape = tensor.device_mesh, tensor.placements, tensor.shape
        return to_local(tensor).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # the layer's backward needs a contiguous gradient, which transposes after the layer would
        # prevent
        gradient = gradients[0].contiguous()
        stride = make_contiguous_strides_for(ctx.shape)
        return DTensor.from_local(
            gradient, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=stride
        )


def _is_simple(arguments: tuple[Any, ...]) -> bool:
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
    if not usual or not isinstance(target, Tensor) or isinstance(target, DTensor):
        return None
    if not isinstance(input, ShardedLogits | SlicedLogits) or target.is_floating_point():
        return None
    dim = 1 if input.dim() > 1 else 0
    ranks: Any = _Alone()
    if isinstance(input, SlicedLogits):
        part = input.as_subclass(Tensor)
    elif input.placements == (Shard(dim),):
        part, ranks = local_shard(input), input.device_mesh
    else:
        return None
    part = part.movedim(dim, -1)
    if torch.is_autocast_enabled(part.device.type):
        part = part.float()
    counts = target != ignore_index
    losses: Tensor = _CrossEntropy.apply(part, target, counts, ranks, input.slices)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


class _Alone:
    """An object with the methods of a one-dimensional DeviceMesh, for a single process."""

    def size(self) -> int:
        return 1

    def get_local_rank(self) -> int:
        return 0


class _CrossEntropy(torch.autograd.Function):
    """The cross-entropy of logits whose classes are sharded. The inputs are logits of this rank's
    classes, targets among all classes, and a mask that is False for ignored targets. The losses are
    0 for ignored targets."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, target: Tensor, counts: Tensor, mesh: Any, slices: Slices | None
    ) -> Tensor:
        own = part.shape[-1]
        most = part.amax(-1)
        if mesh.size() > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.get_group())
        shifted = part - most.unsqueeze(-1)
        place = target - mesh.get_local_rank() * own
        held = counts & (place >= 0) & (place < own)
        inside = (target >= 0) & (target < own * mesh.size()) | ~counts
        assert_async(
            inside.all(),
            f"a target of the cross entropy is not one of its {own * mesh.size()} classes",
        )
        place = place.where(held, 0).unsqueeze(-1)
        sliced = slices is not None
        exponentials = elementwise(torch.exp, (shifted,), {}) if sliced else shifted.exp()
        picked = shifted.gather(-1, place).squeeze(-1).where(held, 0.0)
        if slices is None:
            sums = torch.stack([exponentials.sum(-1), picked])
            dist.all_reduce(sums, group=mesh.get_group())
        else:
            width = own // slices.own
            each = exponentials.reshape(*exponentials.shape[:-1], slices.own, width).sum(-1)
            sums = slices.sum_over_ranks(torch.stack([tree_sum(each.unbind(-1)), picked]))
        ctx.save_for_backward(exponentials / sums[0].unsqueeze(-1), place, held, counts)
        return (sums[0].log() - sums[1]) * counts

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        probabilities, place, held, counts = ctx.saved_tensors
        slope = probabilities.scatter_add(-1, place, -held.to(probabilities.dtype).unsqueeze(-1))
        return slope * (gradients[0] * counts).unsqueeze(-1), None, None, None, None
