"""Gradient compression between data-parallel ranks: communication hooks for DDP, with error
feedback.

(No `from __future__ import annotations` here: DDP checks its hooks' annotations and needs classes.)
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.base import accelerator
from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import GradBucket
from lockstep.comm.compressed_sum import CompressedAllReduce, Rounding, Senders
from lockstep.comm.torch_collectives import waits
from lockstep.comm.world import World
from lockstep.recipe.checks import powersgd_rank

MIN_COMPRESSION_RATIO = 2
"""A gradient matrix is compressed if two thin matrices have fewer elements by this factor (torch's
default)."""
_REVIVING_SEED = 1


class Compression(ABC):
    """Sums DDP's buckets over ranks in compressed form. With error feedback (`int8`, `powersgd`),
    the sending rank adds the compression error to the next step's gradient. (Seide et al., 1-Bit
    Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback Fixes SignSGD, 2019.)"""

    def __init__(self, world: World) -> None:
        self._senders = Senders.of(world)
        self._unit = 1.0

    def begin(self, unit: float) -> None:
        """`unit` is a scale factor of this step's gradients, the same on all ranks."""
        if unit != self._unit:
            self._rescale(unit / self._unit)
            self._unit = unit

    @abstractmethod
    def forget(self) -> None:
        """Discard the step's compression errors, because the step was not applied."""

    @abstractmethod
    def sum_bucket(self, stats: Tensor, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook, which returns a sum instead of a mean. `stats` is a parameter
        whose gradient holds the step's losses and flags, which must not be rounded."""

    @abstractmethod
    def _rescale(self, factor: float) -> None: ...


class Bucket(NamedTuple):
    """A bucket of DDP, with the future that DDP waits for."""

    buffer: Tensor
    gradients: list[Tensor]  # views of the buffer; each has the strides of its parameter
    parameters: list[Tensor]
    done: torch.futures.Future[Tensor]  # completed with the buffer, once it holds the sum

    @classmethod
    def of(cls, bucket: GradBucket) -> "Bucket":
        buffer = bucket.buffer()
        return cls(buffer, gradients_of(bucket), bucket.parameters(), accelerator.future(buffer))

    def stats_part(self, stats: Tensor) -> Tensor:
        """Return an empty tensor if the bucket does not contain `stats`."""
        parts = zip(self.gradients, self.parameters, strict=True)
        return next(
            (gradient for gradient, parameter in parts if parameter is stats), self.buffer[:0]
        )


class Rounded(Compression):
    def __init__(
        self, world: World, rounding: Rounding, parameters: Sequence[nn.Parameter]
    ) -> None:
        super().__init__(world)
        self._rounding = rounding
        self._keeps_residual = rounding.name == "int8" and self._senders.includes_this_rank
        self._residuals = {
            id(parameter): torch.zeros_like(parameter)
            for parameter in parameters
            if self._keeps_residual
        }
        self._sums: list[tuple[Bucket, CompressedAllReduce]] = []

    def forget(self) -> None:
        for residual in self._residuals.values():
            residual.zero_()

    def _rescale(self, factor: float) -> None:
        for residual in self._residuals.values():
            residual.mul_(factor)

    def sum_bucket(self, stats: Tensor, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            self._sums = []  # discard the sums of a failed backward
        current = Bucket.of(bucket)
        self._start(current, stats)
        if bucket.is_last():
            with self._senders.abort_on_error():
                self._end(stats)
        return current.done

    def _start(self, bucket: Bucket, stats: Tensor) -> None:
        self._senders.sum_on_host(bucket.buffer)
        summed = CompressedAllReduce(
            self._rounding, self._senders, keeps_residual=self._keeps_residual
        )
        if self._senders.includes_this_rank:
            exact = bucket.stats_part(stats)
            exact_stats = exact.clone()
            exact.zero_()
            if self._keeps_residual:
                torch._foreach_add_(*self._with_residuals(bucket, bucket.buffer))
            with self._senders.abort_on_error():
                summed.start(bucket.buffer, exact_stats)
        self._sums.append((bucket, summed))

    def _end(self, stats: Tensor) -> None:
        sums, self._sums = self._sums, []
        if self._senders.includes_this_rank:
            for _, summed in sums:
                summed.fold()
            for bucket, summed in sums:
                if self._keeps_residual:
                    residual = summed.residual.view(-1)[: bucket.buffer.numel()].nan_to_num_(
                        0.0, 0.0, 0.0
                    )
                    parts, memories = self._with_residuals(bucket, residual)
                    torch._foreach_copy_(memories, parts)
                exact = bucket.stats_part(stats)
                exact_stats = torch.empty_like(exact)
                summed.finish(bucket.buffer, exact_stats)
                exact.copy_(exact_stats)
        for bucket, _ in sums:
            self._senders.broadcast_on_host(bucket.buffer)
            bucket.done.set_result(bucket.buffer)

    def _with_residuals(self, bucket: Bucket, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parts of `flat` that belong to the model's parameters, and the kept
        compression error of each."""
        known = [
            (part, self._residuals[id(p)])
            for part, p in zip(
                views_like(bucket.gradients, bucket.buffer, flat), bucket.parameters, strict=True
            )
            if id(p) in self._residuals
        ]
        return [part for part, _ in known], [residual for _, residual in known]


class LowRank(Compression):
    """Sends the gradient of each large weight matrix as the product of two thin matrices (PowerSGD;
    Vogels et al., 2019)."""

    def __init__(self, world: World, rank: int, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(world)
        self._rank = rank
        matrices = [
            _Matrix(len(p), p.numel() // len(p), id(p))
            for p in parameters
            if p.dim() > 1 and p.numel()
        ]
        matrices = [
            each
            for each in matrices
            if (each.rows + each.columns) * rank * MIN_COMPRESSION_RATIO < each.rows * each.columns
        ]
        # in the order that torch uses: grouped by shape
        self._matrices = sorted(matrices, key=lambda each: (each.rows, each.columns))
        self._buckets: list[Bucket] = []
        self._reviving = torch.Generator()
        self.forget()

    def forget(self) -> None:
        # this module imports NumPy
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        # Torch refuses to start before step 2, when DDP has rebuilt its buckets; here the tensors
        # are the same in every step.
        self._state = PowerSGDState(
            self._senders.group,
            self._rank,
            start_powerSGD_iter=2,
            min_compression_rate=0,
            orthogonalization_epsilon=1e-30,
        )
        self._state.iter = self._state.start_powerSGD_iter
        self._reviving.manual_seed(_REVIVING_SEED)

    def _rescale(self, factor: float) -> None:
        for error in self._state.error_dict.values():
            error.mul_(factor)

    def sum_bucket(self, stats: Tensor, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            self._buckets = []  # discard the buckets of a failed backward
        current = Bucket.of(bucket)
        self._buckets.append(current)
        if bucket.is_last():
            buckets, self._buckets = self._buckets, []
            began = time.perf_counter()
            with self._senders.abort_on_error():
                self._sum(
                    {
                        id(p): g
                        for each in buckets
                        for p, g in zip(each.parameters, each.gradients, strict=True)
                    }
                )
            waits.seconds += time.perf_counter() - began
            for each in buckets:
                each.done.set_result(each.buffer)
        return current.done

    def _sum(self, gradients: dict[int, Tensor]) -> None:
        thin = [gradients.pop(each.parameter) for each in self._matrices]
        for tensors, add in (
            (list(gradients.values()), partial(dist.all_reduce, group=self._senders.group)),
            (thin, self._add_matrices),
        ):
            if not tensors:
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            self._senders.sum_on_host(flat)
            if self._senders.includes_this_rank:
                add(flat)
            self._senders.broadcast_on_host(flat)
            parts = torch.split(flat, [tensor.numel() for tensor in tensors])
            torch._foreach_copy_(
                tensors,
                [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)],
            )

    def _add_matrices(self, flat: Tensor) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        self._revive()
        powerSGD_hook(self._state, _Matrices(flat, self._matrices)).wait()
        flat.mul_(self._senders.size)  # the hook computes the mean

    def _revive(self) -> None:
        """Replace zero columns of torch's thin matrices. A zero gradient leaves columns that would
        stay zero in all later steps."""
        if (kept := self._state.q_memory_dict.get(0)) is None or kept.all():
            return
        ranks = [min(each.rows, each.columns, self._rank) for each in self._matrices]
        parts = torch.split(
            kept, [each.columns * rank for each, rank in zip(self._matrices, ranks, strict=True)]
        )
        for part, rank in zip(parts, ranks, strict=True):
            columns = part.view(-1, rank)
            dead = ~columns.any(dim=0)
            if dead.any():
                columns[:, dead] = torch.randn(
                    len(columns), int(dead.sum()), generator=self._reviving
                ).to(columns)


class _Matrix(NamedTuple):
    rows: int
    columns: int
    parameter: int  # the parameter's `id`; all its dims but the first are flattened


class _Matrices:
    """The methods of a DDP bucket that torch's PowerSGD hook calls."""

    def __init__(self, flat: Tensor, matrices: Sequence[_Matrix]) -> None:
        self._flat = flat
        self._matrices = matrices

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        parts = torch.split(self._flat, [each.rows * each.columns for each in self._matrices])
        return [
            part.view(each.rows, each.columns)
            for part, each in zip(parts, self._matrices, strict=True)
        ]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def compression_for(
    gradient_compression: str,
    world: World,
    parameters: Sequence[nn.Parameter],
    names: Sequence[str],
) -> Compression | None:
    if gradient_compression == "none":
        return None
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.dtype is not torch.float32:
            raise RecipeError(
                f"gradient_compression={gradient_compression!r} with the parameter {name!r} of"
                f" {parameter.dtype}; only gradients of float32 can be compressed; make the model"
                " float32 (precision='bf16' computes in bf16 all the same), or leave"
                " gradient_compression='none'"
            )
    if world.size == 1:
        return None
    rank = powersgd_rank(gradient_compression)
    return (
        Rounded(world, Rounding(gradient_compression), parameters)
        if rank is None
        else LowRank(world, rank, parameters)
    )


def gradients_of(bucket: GradBucket) -> list[Tensor]:
    """Return views of the bucket with the strides of their parameters. In contrast,
    `bucket.gradients()` returns contiguous views."""
    return [
        (
            gradient.as_strided(parameter.shape, parameter.stride())
            if not parameter.is_contiguous()
            and torch.ops.aten.is_non_overlapping_and_dense(parameter)
            else gradient
        )
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]


def views_like(gradients: Sequence[Tensor], buffer: Tensor, flat: Tensor) -> list[Tensor]:
    """Return views of `flat` with the offsets, shapes and strides that `gradients` have in
    `buffer`."""
    start = buffer.storage_offset() - flat.storage_offset()
    return [flat.as_strided(g.shape, g.stride(), g.storage_offset() - start) for g in gradients]
