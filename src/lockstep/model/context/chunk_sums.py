"""Sums the losses of a sequence's chunks, and the chunks' gradients of parameters. The sum is a
fixed binary tree over the chunks, so the bits do not depend on the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lockstep.base import accelerator
from lockstep.base.nested import map_tensors, tensors_in
from lockstep.base.torch_private import keeps_graph
from lockstep.comm.ordered_sum import OrderedSum, TreeNodes
from lockstep.comm.world import BUCKET_NUMBERS
from lockstep.model.context.chunk_axis import ChunkAxis
from lockstep.model.context.label_shift import scalars_of
from lockstep.model.pipeline.unused import given_or_unused
from lockstep.recipe.recipe import Loss, Sum
from lockstep.tree import LeavesInAnyOrder, cover, fold

Scalar = Tensor | float


@dataclass(frozen=True)
class ChunkInputs:
    """The tensors with respect to which the backward of a process's chunks computes gradients."""

    axis: ChunkAxis
    parameters: Sequence[Tensor]
    received: Sequence[Tensor] = ()
    """The tensors that this rank's pipeline stage has received from the previous stage, for all of
    the process's chunks."""
    leaves: Sequence[Sequence[Tensor]] = ()
    in_two: bool = False
    """True if a zero-bubble schedule runs separate backwards for inputs and for weights. With
    separate backwards, the first backward computes both gradients."""


def sum_losses(values: Sequence[Any], inputs: ChunkInputs) -> Any:
    """Every process must call this function, and run the backward of the result."""
    rows = [list(scalars_of(value)) for value in values]
    if not all(_is_number(each) for row in rows for each in row):
        return values[0]
    axis = inputs.axis
    stacked = torch.stack([torch.stack([_widened(each, axis.device) for each in r]) for r in rows])
    shares = axis.shares
    everyone = axis.processes.gather_rows(stacked, list(map(len, shares)))
    chunks = [(chunk, chunk + 1) for chunk in range(axis.size)]
    total = fold(chunks, list(everyone), axis.size, torch.add)
    learned = [any(_learns(row[place]) for row in rows) for place in range(len(rows[0]))]
    with_gradient = total
    if torch.is_grad_enabled() and any(learned):

        def backward(gradients: Sequence[Tensor]) -> list[Tensor | None]:
            return _gradients([_starts(row, gradients[0].unbind()) for row in rows], inputs)

        (with_gradient,) = _with_backward([total], [True], backward, inputs)
    summed = [
        (with_gradient if learns else total)[place].to(_dtype(rows[0][place], total.dtype))
        for place, learns in enumerate(learned)
    ]
    return _with_scalars(values[0], iter(summed))


def join_outputs(outputs: Sequence[Any], inputs: ChunkInputs) -> list[Any]:
    """Every process must call this function. The returned tensors share one backward function."""
    rows = [tensors_in(output) for output in outputs]
    flat = [each for row in rows for each in row]
    learns = list(map(_learns, flat))
    if not any(learns):
        return list(outputs)

    def backward(gradients: Sequence[Tensor]) -> list[Tensor | None]:
        given = iter(gradients)
        return _gradients([_starts(row, [next(given) for _ in row]) for row in rows], inputs)

    values = [each.detach() for each in flat]
    joined = iter(_with_backward(values, learns, backward, inputs))
    return [map_tensors(output, lambda _: next(joined)) for output in outputs]


Backward = Callable[[Sequence[Tensor]], list[Tensor | None]]


def _with_backward(
    values: Sequence[Tensor], learns: Sequence[bool], backward: Backward, inputs: ChunkInputs
) -> tuple[Tensor, ...]:
    """Return copies of `values` that share the function `backward`. A separate autograd node
    returns the gradients of the parameters, because torch's zero-bubble schedules add up the
    gradients of all outputs of a node."""
    given = (*inputs.received, *inputs.parameters)
    shared = _SharedBackward(backward, given, in_two=inputs.in_two)
    start = _Inputs.apply(shared, inputs.axis.device, *given)  # type: ignore[no-untyped-call]
    return _Outputs.apply(shared, learns, start, *values)  # type: ignore[no-untyped-call, no-any-return]


class _SharedBackward:
    def __init__(self, backward: Backward, inputs: Sequence[Tensor], *, in_two: bool) -> None:
        self._backward = backward
        self._inputs = inputs
        self._in_two = in_two
        self.gradients: Sequence[Tensor] = ()
        self._later: list[Tensor | None] | None = None

    def compute(self) -> list[Tensor | None]:
        if self._later is not None:
            gradients, self._later = self._later, None
            return gradients
        gradients = self._backward(self.gradients)
        self.gradients = ()
        if self._in_two:
            self._later = list(map(given_or_unused, gradients, self._inputs))
        return gradients


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: _SharedBackward, device: torch.device, *inputs: Tensor) -> Tensor:
        ctx.shared = shared
        return torch.zeros((), device=device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None, *ctx.shared.compute()


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shared: _SharedBackward, learns: Sequence[bool], start: Tensor, *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.shared, ctx.device = shared, start.device
        outputs = tuple(value.view_as(value) for value in values)
        fixed = [each for each, learn in zip(outputs, learns, strict=True) if not learn]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.shared.gradients = gradients
        return None, None, torch.zeros((), device=ctx.device), *[None] * len(gradients)


def _starts(tensors: Sequence[Scalar], gradients: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [
        (each, start.to(each.dtype).reshape(each.shape))
        for each, start in zip(tensors, gradients, strict=True)
        if isinstance(each, Tensor) and each.requires_grad
    ]


def _gradients(
    pairs: Sequence[Sequence[tuple[Tensor, Tensor]]], inputs: ChunkInputs
) -> list[Tensor | None]:
    """Return the gradients of the received tensors, then the gradients of the parameters. Only the
    gradients of parameters are summed over chunks."""
    axis, parameters = inputs.axis, inputs.parameters
    sums = [LeavesInAnyOrder(torch.add, count=axis.size) for _ in parameters]
    own, threads, keeps = axis.own_share, axis.threads, keeps_graph() and not inputs.in_two
    leaves = inputs.leaves or [()] * len(pairs)

    def take(sum_of_parameter: LeavesInAnyOrder[Tensor], part: Tensor) -> Tensor:
        sum_of_parameter.add(own.start + threads.turn, part)
        # torch keeps the result until the end of the backward, so return a tensor without memory
        return part.new_zeros(()).expand_as(part)

    def differentiate(
        pairs: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor]
    ) -> list[Tensor | None]:
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                [*(leaf for leaf in leaves if leaf.requires_grad), *parameters],
                [start for _, start in pairs],
                retain_graph=keeps,
                allow_unused=True,
            )
        )
        return [next(found) if leaf.requires_grad else None for leaf in leaves]

    handles = [
        parameter.register_hook(partial(take, sum_of_parameter))  # type: ignore[no-untyped-call]
        for parameter, sum_of_parameter in zip(parameters, sums, strict=True)
    ]
    try:
        of_leaves = threads.run(
            [partial(differentiate, *each) for each in zip(pairs, leaves, strict=True)]
        )
    finally:
        for handle in handles:
            handle.remove()
    received = [gradient for of_chunk in of_leaves for gradient in of_chunk]
    return [*received, *_over_processes(axis, parameters, sums)]


def _over_processes(
    axis: ChunkAxis, parameters: Sequence[Tensor], sums: Sequence[LeavesInAnyOrder[Tensor]]
) -> list[Tensor | None]:
    """Return each parameter's gradient summed over all chunks, or None if no chunk uses the
    parameter."""
    own, processes = axis.own_share, axis.processes
    used = torch.tensor([float(bool(each.values)) for each in sums], device=axis.device)
    processes.all_reduce(used)
    nodes = cover(own.start, own.stop, axis.size)
    totals: list[Tensor | None] = [None] * len(sums)
    indices = []
    given = zip(parameters, sums, used.tolist(), strict=True)
    for place, (parameter, each, uses) in enumerate(given):
        if not uses:
            continue
        for leaf in each.missing(own):
            each.add(leaf, torch.zeros_like(parameter))
        if processes.size == 1:
            totals[place] = each.values[nodes[0]]
        else:
            indices.append(place)
    for bucket in _buckets(indices, parameters):
        flat = [
            torch.cat([sums[place].values[node].reshape(-1) for place in bucket]) for node in nodes
        ]
        for place in bucket:
            sums[place].values.clear()
        ordered = OrderedSum(flat, TreeNodes.of(axis.shares), processes)
        ordered.start(sum(parameters[place].numel() for place in bucket), parameters[bucket[0]])
        ordered.fold()
        parts = torch.split(ordered.finish(), [parameters[place].numel() for place in bucket])
        for place, part in zip(bucket, parts, strict=True):
            totals[place] = part.view(parameters[place].shape)
    return totals


def _buckets(places: Sequence[int], parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    bucket: list[int] = []
    numbers = 0
    for place in places:
        if bucket and (
            numbers >= BUCKET_NUMBERS or parameters[place].dtype is not parameters[bucket[0]].dtype
        ):
            yield bucket
            bucket, numbers = [], 0
        bucket.append(place)
        numbers += parameters[place].numel()
    if bucket:
        yield bucket


def _with_scalars(value: Any, scalars: Iterator[Any]) -> Any:
    if isinstance(value, dict):
        terms = {name: _with_scalars(value[name], scalars) for name in sorted(value, key=str)}
        return {name: terms[name] for name in value}
    if isinstance(value, Loss):
        return Loss(next(scalars), next(scalars))
    return Sum(next(scalars)) if isinstance(value, Sum) else next(scalars)


def _is_number(scalar: Any) -> bool:
    if isinstance(scalar, Tensor):
        return scalar.numel() == 1 and not scalar.is_complex()
    return isinstance(scalar, Real) and not isinstance(scalar, bool)


def _learns(scalar: Scalar) -> bool:
    return isinstance(scalar, Tensor) and scalar.requires_grad


def _dtype(scalar: Scalar, wide: torch.dtype) -> torch.dtype:
    return scalar.dtype if isinstance(scalar, Tensor) and scalar.is_floating_point() else wide


def _widened(scalar: Scalar, device: torch.device) -> Tensor:
    wide = accelerator.wide_dtype(device)
    if isinstance(scalar, Tensor):
        return scalar.detach().reshape(()).to(device, wide)
    return torch.tensor(scalar, dtype=wide, device=device)
