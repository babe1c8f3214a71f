"""SyncBatchNorm splits the samples of every microbatch over the data ranks, and computes statistics
over all slices of the microbatch. Each layer exchanges (mean, variance, number of values) in the
forward and two sums per channel in the backward. Every rank must run the same layers in the same
order. Each slice has separate random numbers and a separate loss. With SyncBatchNorm, dropout masks
depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lockstep.assignment import MicrobatchAssignment
from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import BatchNormBase
from lockstep.comm.mesh import Mesh
from lockstep.comm.world import World
from lockstep.plan import Plan


class SyncBatchNormExchange:
    """The ranks that exchange statistics, and the slice that this rank computes now. All
    SyncBatchNorm layers of a session share one exchange, also in copies of the model."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.is_dummy: bool | None = None
        """True during the forward of a rank that has no slice of the microbatch. False while the
        rank computes a slice, and None outside of microbatches."""

    def __deepcopy__(self, _: Any) -> SyncBatchNormExchange:
        return self


class SyncBatchNorm(nn.SyncBatchNorm):
    """Torch's layer, with a forward that also works on CPUs."""

    _exchange: SyncBatchNormExchange

    def forward(self, input: Tensor) -> Tensor:
        exchange = self._exchange
        if exchange.world is None or exchange.is_dummy is None or not self.training:
            unsplit: Tensor = BatchNormBase.forward(self, input)
            return unsplit
        self._check_input_dim(input)
        output, mean, variance, number = _Normalise.apply(
            input, self.weight, self.bias, self.eps, exchange.world, exchange.is_dummy
        )  # type: ignore[no-untyped-call]
        if (
            self.running_mean is not None
            and self.running_var is not None
            and self.num_batches_tracked is not None
        ):
            self.num_batches_tracked.add_(1)
            factor = (
                1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            )
            unbiased = variance * (number / (number - 1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        return output  # type: ignore[no-any-return]


def use_exchange(model: nn.Module, exchange: SyncBatchNormExchange) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            if module.process_group is not None:
                raise RecipeError(
                    f"the SyncBatchNorm {name!r} has a process_group; the plan decides which "
                    "processes split a microbatch; leave process_group out"
                )
            kind = type(module)
            if kind is nn.SyncBatchNorm:
                module.__class__ = SyncBatchNorm
            elif not issubclass(kind, SyncBatchNorm):
                module.__class__ = type(kind.__name__, (kind, SyncBatchNorm), {})
            module._exchange = exchange  # type: ignore[assignment]


def split_microbatches(
    models: Sequence[nn.Module],
    mesh: Mesh,
    plan: Plan,
    assignment: MicrobatchAssignment,
    *,
    microbatch: int,
) -> MicrobatchAssignment:
    """If a model has a SyncBatchNorm in training mode, split each microbatch over all data ranks.
    Every rank must call this function. `microbatch` is a number of samples."""
    mine = [
        (name, type(layer).__name__, isinstance(layer, nn.SyncBatchNorm))
        for name, layer in training_batchnorms(models)
    ]
    layers = [layer for theirs in mesh.stages.gather_values(mine) for layer in theirs]
    if mesh.data.size == 1 or not any(split for *_, split in layers):
        return assignment
    ranks = f"SyncBatchNorm on {mesh.data.size} data ranks"
    if plan.numerics == "bitwise":
        raise RecipeError(
            f"numerics=bitwise with {ranks}; the ranks share each sum over a microbatch, so "
            "rounding depends on their number; use numerics=fast, or plain BatchNorm, which is "
            "the same at any number of processes"
        )
    for name, kind, split in layers:
        if not split:
            raise RecipeError(
                f"{name!r} is a {kind}, together with {ranks}; it would see slices of"
                " microbatches, which depend on the number of processes; convert all with"
                " nn.SyncBatchNorm.convert_sync_batchnorm(model), or put it in eval mode"
            )
    return replace(assignment, round_robin=True, slices=min(microbatch, mesh.data.size))


def training_batchnorms(models: Sequence[nn.Module]) -> list[tuple[str, BatchNormBase]]:
    return [
        (name, module)
        for model in models
        for name, module in model.named_modules()
        if isinstance(module, BatchNormBase) and module.training
    ]


class _Normalise(torch.autograd.Function):
    """Returns the output, and each channel's mean, variance and number of values. The statistics
    are float64 without gradient, for the running statistics. The variance is uncorrected."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        world: World,
        is_dummy: bool,
    ) -> Any:
        channels, kind = x.shape[1], torch.float64 if x.dtype is torch.float64 else torch.float32
        values = 0 if is_dummy else x.numel() // channels
        mine = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
        if values:
            variance, mean = torch.var_mean(x.to(kind), [0, *range(2, x.dim())], correction=0)
            torch.cat([mean, variance, mean.new_full((1,), values, dtype=torch.float64)], out=mine)
        everyone = world.gather_rows(mine[None], [1] * world.size)
        means, variances, numbers = torch.split(everyone, [channels, channels, 1], dim=1)
        number = numbers.sum()
        if values < 2 and number < 2:
            raise RecipeError(
                f"a SyncBatchNorm got {tuple(x.shape)} from a microbatch with one value per"
                " channel; a variance needs two; choose a microbatch size that leaves no"
                " remainder of one sample"
            )
        mean = (numbers * means).sum(0) / number
        variance = (numbers * (variances + (means - mean) ** 2)).sum(0) / number
        ctx.world, ctx.is_dummy, ctx.eps = world, is_dummy, eps
        ctx.save_for_backward(x, weight, mean, variance, number)
        ctx.mark_non_differentiable(mean, variance, number)
        scale, shift = (None if each is None else each.to(kind) for each in (weight, bias))
        output = functional.batch_norm(x, mean.to(kind), variance.to(kind), scale, shift, eps=eps)
        return output, mean, variance, number

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        x, weight, mean, variance, number = ctx.saved_tensors
        kind = torch.float64 if x.dtype is torch.float64 else torch.float32
        scale = torch.ones_like(mean, dtype=kind) if weight is None else weight.to(kind)
        mean, variance, wide = mean.to(kind), variance.to(kind), x.to(kind)
        given = gradient.to(kind), wide, scale, mean, variance
        with_fixed_statistics, for_scale, for_shift = torch.ops.aten.native_batch_norm_backward(
            *given, None, None, False, ctx.eps, [True, True, True]
        )
        sums = torch.stack([for_scale, for_shift]).double()
        if ctx.is_dummy:
            sums.zero_()
        dist.all_reduce(sums, group=ctx.world.group)
        deviation = torch.rsqrt(variance + ctx.eps)
        by_scale, by_shift = (sums / number).to(kind) * scale * deviation
        shape = [1, -1, *[1] * (x.dim() - 2)]
        for_x = with_fixed_statistics.sub_(by_shift.view(shape)).addcmul_(
            wide - mean.view(shape), (by_scale * deviation).view(shape), value=-1
        )
        if ctx.is_dummy:
            for_x.zero_()  # a dummy gets the sums of all slices, but its output is not used
        needs = ctx.needs_input_grad
        return (
            for_x.to(x.dtype),
            for_scale.to(weight.dtype) if needs[1] else None,
            for_shift.to(weight.dtype) if needs[2] else None,
            *[None] * 3,
        )
