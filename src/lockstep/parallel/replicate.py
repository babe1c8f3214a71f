"""The `replicate` axis: every rank holds the whole model, and gradients are summed over ranks by DistributedDataParallel.

DDP is given the *loss*, not the model: its forward is an identity on the last microbatch's loss that touches every parameter. So the
user's model keeps its own class and may be called as often as they like; a parameter that the loss does not reach still reports to DDP
(its hook fires, without a gradient), and no `find_unused_parameters` pass is needed; and a rank without a microbatch takes part by
handing in a zero.

One more parameter rides along, `slots`. Its gradient is set after the backward, by hand, and carries what a step has to say beyond
gradients: which parameters were used, and each microbatch's loss and weight. It is ready last, so it completes the last bucket, and a
step costs no collective beyond the gradients' own. Each number is written by one rank and is zero on the others, so its sum
is exact, but for the last digit where `sum_factor` is no power of two.

(No `from __future__ import annotations` here: DDP looks at its hooks' annotations, and wants classes.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lockstep.assignment import share
from lockstep.comm.group import World
from lockstep.comm.ordered import OrderedSum, Shares
from lockstep.errors import RecipeError
from lockstep.tree import Counter

Number = Tensor | float
"""A scalar tensor, or a number that the host knows already."""


class _Touch(torch.autograd.Function):
    """The identity on a loss, whose graph reaches every parameter without giving it a gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (*gradients, *[None] * ctx.parameters)


class _Touched(nn.Module):
    """What DDP wraps: the parameters and the slots, and `_Touch` as the forward. It holds no buffers, so DDP synchronises none."""

    def __init__(self, parameters: Sequence[nn.Parameter], slots: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.zeros(slots, dtype=dtype, device=parameters[0].device))
        self.touched = nn.ParameterList(parameters)
        self._parameters_once = list(parameters)

    def forward(self, loss: Tensor) -> Tensor:
        touched: Tensor = _Touch.apply(loss, *self._parameters_once)  # type: ignore[no-untyped-call]
        return touched


def sum_factor(world: World, *, bitwise: bool) -> int:
    """What is sent is multiplied by it: DDP's own all-reduce, which no Python slows down, gives the mean over ranks instead of the sum."""
    return 1 if bitwise else world.size


class Replica:
    """One model's gradients on one rank, from the first microbatch of a step to the sum over all ranks.

    In every step, on every rank: `begin`, then `backward` for each of this rank's microbatches, then `finish`. After it each `.grad` is
    the sum over all microbatches of all ranks, or None where no microbatch used the parameter.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, *, bitwise: bool, max_microbatches: int) -> None:
        self._parameters = list(parameters)
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._world = world
        self._bitwise = bitwise
        self._used = [0.0] * len(parameters)
        self._max_microbatches = max_microbatches
        self._dtype = torch.float64 if any(p.dtype is torch.float64 for p in parameters) else torch.float32
        self._ddp: DistributedDataParallel | None = None
        self._hooks: list[Any] = []
        self._factor = sum_factor(world, bitwise=bitwise)
        if world.size > 1:
            slots = len(parameters) + 2 * max_microbatches + 1
            self._touched = _Touched(self._parameters, slots, self._dtype)
            self._ddp = DistributedDataParallel(self._touched, gradient_as_bucket_view=True, init_sync=False)
            if bitwise:
                self._ddp.register_comm_hook(None, self._ordered_bucket)
            self._hooks = [p.register_post_accumulate_grad_hook(self._note_use(i)) for i, p in enumerate(self._parameters)]  # type: ignore[no-untyped-call]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._ddp = None

    def begin(self, count: int) -> range:
        """Start a step of `count` microbatches in all. Returns this rank's share of them."""
        for parameter in self._parameters:
            parameter.grad = None
        self._count = count
        self._share = share(count, self._world.rank, self._world.size)
        self._left = len(self._share)
        self._synchronised = False
        if self._bitwise:
            self._counter: Counter[list[Tensor]] = Counter(_add_into_left, start=self._share.start, count=count)
            self._shares = Shares.of(count, self._world.size)
            self._sums: list[tuple[OrderedSum, Tensor, torch.futures.Future[Tensor]]] = []
        self._used[:] = [0.0] * len(self._used)
        return self._share

    def backward(self, total: Tensor, seed: Tensor, *, only_these: bool) -> None:
        """Add the gradient of `seed * total`, the next microbatch's. `only_these`: leave other parameters that the graph reaches alone."""
        self._left -= 1
        if self._factor > 1:
            seed = seed * self._factor
        inputs = self._parameters if only_these else None
        if self._ddp is not None and self._left == 0:
            self._synchronise(total, seed, inputs)
            return
        torch.autograd.backward(total, seed, inputs=inputs)
        if self._bitwise:
            self._counter.push(self._take_leaf())

    def finish(
        self, values: Sequence[Number], weights: Sequence[Number] | None, *, flag: bool
    ) -> tuple[Tensor | list[float], Tensor | None, Tensor | bool]:
        """Sum over all ranks. `values` and `weights`: one number for each of this rank's microbatches; no weights on any rank, or on all.

        Returns those of all microbatches, in their order, (count,) each, and how many ranks raised the flag.
        """
        if self._ddp is None:
            if self._bitwise:
                self._put_root()
            recorded = self._column(values) if isinstance(values[0], Tensor) else [self._rounded(value) for value in values]
            return recorded, None if weights is None else self._column(weights), flag
        if not self._synchronised:
            zero = torch.zeros((), device=self._touched.slots.device, requires_grad=True)
            self._synchronise(zero, torch.zeros_like(zero), None)
        slots = self._touched.slots
        torch.autograd.backward(slots.view_as(slots), self._sent(values, weights, flag))
        assert slots.grad is not None
        received, slots.grad = slots.grad, None
        self._forget_unused(received)
        first, second = len(self._parameters), len(self._parameters) + self._max_microbatches
        received_weights = None if weights is None else received[second : second + self._count].clone()
        if received.is_cuda:
            received = received.clone()
            return received[first : first + self._count], received_weights, received[-1]
        numbers = received.tolist()
        return numbers[first : first + self._count], received_weights, bool(numbers[-1])

    def _synchronise(self, total: Tensor, seed: Tensor, inputs: list[nn.Parameter] | None) -> None:
        assert self._ddp is not None
        self._synchronised = True
        try:
            torch.autograd.backward(self._ddp(total), seed, inputs=inputs)
        except RuntimeError as error:
            if "mark a variable ready only once" not in str(error):
                raise
            raise RecipeError(
                "a parameter's gradient was complete twice in one backward, as reentrant activation checkpoints make it; ranks sum a "
                "gradient once; give torch.utils.checkpoint.checkpoint use_reentrant=False"
            ) from error

    def _column(self, numbers: Sequence[Number]) -> Tensor:
        if isinstance(numbers[0], float):
            return torch.tensor(numbers, dtype=self._dtype)
        return torch.stack([number for number in numbers if isinstance(number, Tensor)]).to(self._dtype)

    def _rounded(self, value: Number) -> float:
        """As it comes out of a slot: a world of one records what any other does."""
        return float(np.float32(value)) if self._dtype is torch.float32 else float(value)

    def _sent(self, values: Sequence[Number], weights: Sequence[Number] | None, flag: bool) -> Tensor:
        """This rank's slots: its own numbers in their places, zeros in the others'."""
        slots = self._touched.slots
        row = [*self._used, *[0.0] * (2 * self._max_microbatches), float(flag)]
        first = len(self._parameters) + self._share.start
        columns = [(first, values), (first + self._max_microbatches, weights or [])]
        if not slots.is_cuda:
            for start, numbers in columns:
                row[start : start + len(numbers)] = map(float, numbers)
            return torch.tensor(row, dtype=slots.dtype) * self._factor
        sent = torch.tensor(row, dtype=slots.dtype, pin_memory=True).to(slots.device, non_blocking=True)
        for start, numbers in columns:
            if numbers:
                sent[start : start + len(numbers)] = self._column(numbers)
        return sent * self._factor

    def _forget_unused(self, received: Tensor) -> None:
        """A gradient of zeros is not the absence of one: AdamW would decay the weight, momentum would move it."""
        if all(self._used):
            return
        for parameter, used in zip(self._parameters, received[: len(self._used)].tolist(), strict=True):
            if not used:
                parameter.grad = None

    def _note_use(self, index: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._used[index] = 1.0

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

    def _put_root(self) -> None:
        (root,) = self._counter.values
        for parameter, gradient, used in zip(self._parameters, root, self._used, strict=True):
            parameter.grad = gradient if used else None

    def _ordered_bucket(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start this bucket's ordered sum; once the last bucket is here, end all of them in their order, which is the same on all ranks."""
        members = [self._places.get(id(parameter)) for parameter in bucket.parameters()]
        buffer, last_leaf = bucket.buffer(), _gradients(bucket)
        counter: Counter[list[Tensor]] = Counter(_add_into_right, start=self._share.start, count=self._count)
        for node, value in zip(self._counter.nodes, self._counter.values, strict=True):
            counter.push_node(node, [torch.zeros_like(g) if m is None else value[m] for m, g in zip(members, last_leaf, strict=True)])
        if self._share:
            counter.push(last_leaf)
        nodes = [buffer if value is last_leaf else _flatten(value, like=bucket) for value in counter.values]
        ordered = OrderedSum(nodes, self._shares, self._world.rank)
        ordered.start(buffer.numel(), buffer)
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._sums.append((ordered, buffer, future))
        if bucket.is_last():
            for waiting, _, _ in self._sums:
                waiting.fold()
            for waiting, into, promised in self._sums:
                promised.set_result(into.copy_(waiting.finish()))
        return future


def _gradients(bucket: GradBucket) -> list[Tensor]:
    """Views of the bucket, each laid out as its parameter is: `bucket.gradients()` takes all of them for contiguous."""
    return [
        gradient.as_strided(parameter.shape, parameter.stride())
        if not parameter.is_contiguous() and torch.ops.aten.is_non_overlapping_and_dense(parameter)
        else gradient
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]


def _flatten(value: Sequence[Tensor], like: GradBucket) -> Tensor:
    """The tensors laid out as the bucket lays out its gradients, strides and all."""
    buffer = like.buffer()
    flat = torch.zeros_like(buffer)
    start = buffer.storage_offset()
    views = [flat.as_strided(g.shape, g.stride(), g.storage_offset() - start) for g in _gradients(like)]
    torch._foreach_copy_(views, list(value))
    return flat


def _add_into_left(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left


def _add_into_right(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(right, left)
    return right
