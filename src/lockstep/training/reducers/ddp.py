"""Gradient reduction by DistributedDataParallel (DDP): every rank has the full model, and buckets
are summed during the backward.

DDP wraps the loss, not the model. DDP's forward is an identity on the last microbatch's loss, and
the graph reaches every parameter. The user's model keeps its class and may be called any number of
times. DDP's hook then also fires for a parameter that the loss does not use, without
`find_unused_parameters`. A rank without a microbatch uses a loss of zero.

DDP gets one more parameter, `stats`. The gradient of `stats` contains the step's losses and flags.
The gradient of `stats` is set after the backward and completes the last bucket.

DDP's own all-reduce computes a mean, so every bucket has a communication hook that computes a sum.
Multiplying the loss by the number of ranks would change the gradients that activation hooks see.

(No `from __future__ import annotations` here: DDP inspects the annotations of its hooks and needs
classes.)
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_float
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.assignment import MicrobatchAssignment
from lockstep.base import accelerator
from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import GradBucket
from lockstep.comm.mesh import Mesh
from lockstep.comm.ordered_sum import OrderedSum, TreeNodes
from lockstep.comm.torch_collectives import waits
from lockstep.training.reducers.agreement import StepAgreement
from lockstep.training.reducers.compression import Compression, gradients_of, views_like
from lockstep.training.reducers.dummies import dummy_backward
from lockstep.training.reducers.microbatch_checksums import Recording
from lockstep.training.reducers.step_stats import (
    READY_TWICE,
    Number,
    StepStats,
    StepStatsVector,
    UnusedParameters,
    gradient_versions,
)
from lockstep.tree import Counter


class _Touch(torch.autograd.Function):
    """An identity on a loss. The backward reaches every parameter, but gives no parameter a
    gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (*gradients, *[None] * ctx.parameters)


class _LossModule(nn.Module):
    """A module with the model's parameters but without its buffers, which DDP would synchronize."""

    def __init__(self, parameters: Sequence[nn.Parameter], length: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.stats = nn.Parameter(torch.zeros(length, dtype=dtype, device=parameters[0].device))
        self.touched = nn.ParameterList(parameters)
        self._parameters_once = list(parameters)

    def forward(self, loss: Tensor) -> Tensor:
        touched: Tensor = _Touch.apply(loss, *self._parameters_once)  # type: ignore[no-untyped-call]
        return touched


def _sum_bucket(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None, "this rank is in the default group"
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


class DdpReducer:
    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        mesh: Mesh,
        *,
        bitwise: bool,
        max_microbatches: int,
        compression: Compression | None = None,
        agreement: StepAgreement,
    ) -> None:
        world = mesh.summed()
        self._waits_in_torch = world.hierarchy is None and compression is None
        self._parameters = list(parameters)
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._world = world
        self._data_rank = mesh.data.rank
        self._bitwise = bitwise
        self._used = [0.0] * len(parameters)
        self._unused = UnusedParameters(self._parameters, world)
        self._vector = StepStatsVector(
            parameters, max_microbatches, parameters[0].device, agreement
        )
        self._ddp: DistributedDataParallel | None = None
        self._hooks: list[Any] = []
        self.recording = Recording()
        if world.size > 1:
            self._wrapped = _LossModule(self._parameters, self._vector.length, self._vector.dtype)
            self._ddp = DistributedDataParallel(
                self._wrapped,
                process_group=world.group,
                gradient_as_bucket_view=True,
                init_sync=False,
            )
            if bitwise:
                self._ddp.register_comm_hook(None, self._ordered_bucket)
            elif compression is not None:
                self._ddp.register_comm_hook(self._wrapped.stats, compression.sum_bucket)
            else:
                self._ddp.register_comm_hook(
                    None, _sum_bucket if world.hierarchy is None else world.hierarchy.sum_bucket
                )
            self._hooks = [
                p.register_post_accumulate_grad_hook(self._note_use(i))  # type: ignore[no-untyped-call]
                for i, p in enumerate(self._parameters)
            ]

    def gradient_versions(self) -> list[tuple[int, int] | None]:
        return gradient_versions(self._parameters)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._ddp = None

    def begin_step(self, count: int, assignment: MicrobatchAssignment) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._count = count
        self._mine = assignment.indices(count, self._data_rank)
        self._has_rounds = assignment.round_robin
        self._remaining = len(self._mine)
        self._synchronized = False
        if self._bitwise:
            self._counter: Counter[list[Tensor]] = Counter(
                _add_into_left, start=self._mine.start, count=count
            )
            self._nodes = TreeNodes.of(assignment.indices_by_rank(count))
            self._sums: list[tuple[OrderedSum, Tensor, torch.futures.Future[Tensor]]] = []
        self._used[:] = [0.0] * len(self._used)
        self._complete_at = time.perf_counter()

    def backward(
        self, total: Tensor, grad_output: Tensor, *, own_parameters_only: bool, is_dummy: bool
    ) -> None:
        """If the ranks compute microbatches in rounds, `reduce` starts DDP's all-reduces."""
        if is_dummy:
            dummy_backward(
                total, grad_output, self._parameters, own_parameters_only=own_parameters_only
            )
            return
        self._remaining -= 1
        inputs = self._parameters if own_parameters_only else None
        if self._ddp is not None and self._remaining == 0 and not self._has_rounds:
            self._synchronize(total, grad_output, inputs)
            return
        torch.autograd.backward(total, grad_output, inputs=inputs)
        if self._bitwise:
            self._counter.push(self._take_leaf())

    @contextmanager
    def discarding(self) -> Iterator[None]:
        for parameter in self._parameters:
            parameter.grad = None
        yield
        for parameter in self._parameters:
            parameter.grad = None
        self._used[:] = [0.0] * len(self._used)

    def recompute(self, total: Tensor, grad_output: Tensor) -> None:
        torch.autograd.backward(total, grad_output)

    def reduce(
        self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool
    ) -> StepStats:
        if self._ddp is None:
            if self._bitwise:
                (root,) = self._counter.values
                for parameter, gradient, used in zip(
                    self._parameters, root, self._used, strict=True
                ):
                    parameter.grad = gradient if used else None
            recorded = (
                self._vector.column(values)
                if isinstance(values[0], Tensor)
                else [self._rounded(value) for value in values]
            )
            return StepStats(
                self._used,
                recorded,
                None if weights is None else self._vector.column(weights),
                flag,
                self._vector.own_numbers(),
            )
        if not self._synchronized:
            zero = torch.zeros((), device=self._wrapped.stats.device, requires_grad=True)
            self._synchronize(zero, torch.zeros_like(zero), None)
        stats = self._wrapped.stats
        packed = self._vector.pack(self._used, self._mine, values, weights, flag)
        torch.autograd.backward(stats.view_as(stats), packed)
        assert stats.grad is not None
        summed, stats.grad = stats.grad, None
        received = self._vector.unpack(summed, self._count, weighted=weights is not None)
        self._unused.clear(self._used, received)
        return received

    def _synchronize(
        self, total: Tensor, grad_output: Tensor, inputs: list[nn.Parameter] | None
    ) -> None:
        assert self._ddp is not None
        self._synchronized = True
        try:
            torch.autograd.backward(self._ddp(total), grad_output, inputs=inputs)
            # DDP waits for its last all-reduces in C++, without the GIL
            if self._waits_in_torch:
                waits.seconds += time.perf_counter() - self._complete_at
        except RuntimeError as error:
            if "mark a variable ready only once" not in str(error):
                raise
            raise RecipeError(READY_TWICE) from error

    def _rounded(self, value: Number) -> float:
        """Round the value to the precision of the exchange. One rank then records the same bits as
        several ranks."""
        number = float(value)
        # faster than NumPy's scalars
        return c_float(number).value if self._vector.dtype is torch.float32 else number

    def _note_use(self, index: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            self._complete_at = time.perf_counter()
            if parameter.grad is not None:
                self._used[index] = 1.0
                if self.recording.checksums is not None:
                    self.recording.checksums.add(index, parameter.grad)

        return hook

    def _take_leaf(self) -> list[Tensor]:
        leaf = []
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                leaf.append(torch.zeros_like(parameter))
            else:
                self._used[index] = 1.0
                leaf.append(parameter.grad)
                parameter.grad = None
        return leaf

    def _ordered_bucket(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook. DDP's call for the last bucket finishes the sums of all
        buckets, in the same order on all ranks."""
        members = [self._places.get(id(parameter)) for parameter in bucket.parameters()]
        buffer, last_leaf = bucket.buffer(), gradients_of(bucket)
        counter: Counter[list[Tensor]] = Counter(
            _add_into_right, start=self._mine.start, count=self._count
        )
        for node, value in zip(self._counter.nodes, self._counter.values, strict=True):
            counter.push_node(
                node,
                [
                    torch.zeros_like(g) if m is None else value[m]
                    for m, g in zip(members, last_leaf, strict=True)
                ],
            )
        if self._mine:
            counter.push(last_leaf)
        nodes = [
            buffer if value is last_leaf else _flatten(value, last_leaf, buffer)
            for value in counter.values
        ]
        ordered = OrderedSum(nodes, self._nodes, self._world)
        ordered.start(buffer.numel(), buffer)
        future = accelerator.future(buffer)
        self._sums.append((ordered, buffer, future))
        if bucket.is_last():
            for waiting, _, _ in self._sums:
                waiting.fold()
            for waiting, into, promised in self._sums:
                promised.set_result(into.copy_(waiting.finish()))
        return future


def _flatten(value: Sequence[Tensor], gradients: Sequence[Tensor], buffer: Tensor) -> Tensor:
    """Copy the tensors into a flat buffer, at the offsets that `gradients` have in `buffer`."""
    flat = torch.zeros_like(buffer)
    torch._foreach_copy_(views_like(gradients, buffer, flat), list(value))
    return flat


def _add_into_left(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left


def _add_into_right(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(right, left)
    return right
