"""The sums over the chunks of a sequence, in one order on any number of processes: of the losses of
chunks, and of the gradients of parameters.

Leaves are added in the tree over the paired order of chunks (`lockstep.tree`): first those of a
process, in the nodes that it has completely, then those of all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lockstep.base import accelerator
from lockstep.base.torch_private import keeps_graph
from lockstep.comm.ordered_sum import OrderedSum, TreeNodes
from lockstep.comm.world import BUCKET_NUMBERS
from lockstep.model.context.chunk_axis import ChunkAxis
from lockstep.recipe.recipe import Loss, Sum
from lockstep.tree import LeavesInAnyOrder, cover, fold

Scalar = Tensor | float


def sum_losses(values: Sequence[Any], axis: ChunkAxis, parameters: Sequence[Tensor]) -> Any:
    """Return the loss of all chunks, in the form of each of `values`, the losses of this process's
    chunks. Every process calls it, also the backward. The backward computes the gradients of the
    `parameters`, which are leaves of autograd's graph, in the threads of the chunks, and sums them
    over the chunks of all processes. What is no loss is returned as it is."""
    rows = [list(_scalars_of(value)) for value in values]
    if not all(_is_number(each) for row in rows for each in row):
        return values[0]
    device = axis.device
    stacked = torch.stack([torch.stack([_widened(each, device) for each in row]) for row in rows])
    shares = axis.shares
    everyone = axis.processes.gather_rows(stacked, list(map(len, shares)))
    leaves = [(chunk, chunk + 1) for chunk in range(axis.size)]
    total = fold(leaves, list(everyone), axis.size, torch.add)
    learned = [any(_learns(row[place]) for row in rows) for place in range(len(rows[0]))]
    with_gradient = total
    if torch.is_grad_enabled() and any(learned):
        backward = partial(_gradients, rows, axis, parameters)
        with_gradient = _WithGradient.apply(total, backward, *parameters)  # type: ignore[no-untyped-call]
    summed = [
        (with_gradient if learns else total)[place].to(_dtype(rows[0][place], total.dtype))
        for place, learns in enumerate(learned)
    ]
    return _with_scalars(values[0], iter(summed))


class _WithGradient(torch.autograd.Function):
    """The identity on a vector, whose backward is a function: (gradient of the vector) -> the
    gradients of parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        vector: Tensor,
        backward: Callable[[Tensor], Sequence[Tensor | None]],
        *parameters: Tensor,
    ) -> Tensor:
        ctx.gradients = backward
        return vector.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *ctx.gradients(gradients[0])


def _gradients(
    rows: Sequence[Sequence[Scalar]],
    axis: ChunkAxis,
    parameters: Sequence[Tensor],
    gradient: Tensor,
) -> list[Tensor | None]:
    """Return the gradients of the parameters, summed over all chunks. `rows`: the losses of this
    process's chunks. `gradient`: of their sums."""
    sums = [LeavesInAnyOrder(torch.add, count=axis.size) for _ in parameters]
    own, threads, keeps = axis.own_share, axis.threads, keeps_graph()

    def take(sum_of_parameter: LeavesInAnyOrder[Tensor], part: Tensor) -> Tensor:
        sum_of_parameter.add(own.start + threads.turn, part)
        # torch keeps what is returned until the end of the backward: a tensor without memory
        return part.new_zeros(()).expand_as(part)

    def differentiate(row: Sequence[Scalar]) -> None:
        pairs = [
            (each, start.to(each.dtype).reshape(each.shape))
            for each, start in zip(row, gradient.unbind(), strict=True)
            if isinstance(each, Tensor) and each.requires_grad
        ]
        torch.autograd.grad(
            [total for total, _ in pairs],
            parameters,
            [start for _, start in pairs],
            retain_graph=keeps,
            allow_unused=True,
        )

    handles = [
        parameter.register_hook(partial(take, sum_of_parameter))  # type: ignore[no-untyped-call]
        for parameter, sum_of_parameter in zip(parameters, sums, strict=True)
    ]
    try:
        threads.run([partial(differentiate, row) for row in rows])
    finally:
        for handle in handles:
            handle.remove()
    return _over_processes(axis, parameters, sums)


def _over_processes(
    axis: ChunkAxis, parameters: Sequence[Tensor], sums: Sequence[LeavesInAnyOrder[Tensor]]
) -> list[Tensor | None]:
    """Return the sum over all chunks for each parameter; None if no chunk uses it. `sums`: those of
    this process's chunks."""
    own, processes = axis.own_share, axis.processes
    used = torch.tensor([float(bool(each.values)) for each in sums], device=axis.device)
    processes.all_reduce(used)
    nodes = cover(own.start, own.stop, axis.size)
    found: list[Tensor | None] = [None] * len(sums)
    wanted = []
    given = zip(parameters, sums, used.tolist(), strict=True)
    for place, (parameter, each, uses) in enumerate(given):
        if not uses:
            continue
        for leaf in each.missing(own):
            each.add(leaf, torch.zeros_like(parameter))
        if processes.size == 1:
            found[place] = each.values[nodes[0]]
        else:
            wanted.append(place)
    for bucket in _buckets(wanted, parameters):
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
            found[place] = part.view(parameters[place].shape)
    return found


def _buckets(places: Sequence[int], parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the places of parameters in buckets of one dtype."""
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


def _scalars_of(value: Any) -> Iterator[Any]:
    """Yield the numbers in the result of a loss: totals, and the weight of an `ls.Loss`."""
    if isinstance(value, dict):
        for term in value.values():
            yield from _scalars_of(term)
    elif isinstance(value, Loss):
        yield from (value.total, value.weight)
    else:
        yield value.total if isinstance(value, Sum) else value


def _with_scalars(value: Any, scalars: Iterator[Any]) -> Any:
    """Return the same form with other numbers."""
    if isinstance(value, dict):
        return {name: _with_scalars(term, scalars) for name, term in value.items()}
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
