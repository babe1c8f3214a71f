"""The global 2-norm of a model's gradients, and gradient clipping by it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from lockstep.base import accelerator
from lockstep.base.torch_private import own_parameters
from lockstep.comm.mesh import Mesh, divided_over, shard_dim_over, to_local
from lockstep.comm.world import World
from lockstep.model.tensor.sliced import tree_sum

PIECE_ELEMENTS = 2**15 - 1
"""Maximum number of elements that torch sums in one thread on a CPU, and thus in a fixed order."""
TOGETHER_ELEMENTS = 2**25
"""Number of elements whose squares an accelerator sums in one operation, in 128 MiB of memory."""
MIN_SHARED_BYTES = 8 << 20
"""Smallest size of gradients for which replicas on a CPU divide the work; for less, the exchange of
norms takes longer than the work."""


class GradientNorm:
    """The global 2-norm of a model's gradients, sharded or not. Every rank must make the same
    calls."""

    def __init__(self, mesh: Mesh, *, bitwise: bool, slices: int = 1) -> None:
        self._slices = slices
        self._tensor = mesh.axis("tensor")
        self._device = mesh.world.device
        self._mesh = mesh
        divided = [axis for axis in mesh.larger if not axis.same_state]
        self._in_parts = bool(divided)
        self._memory = None if self._in_parts else mesh.replicas.host_shared_memory
        self._parts = {
            axis.name: mesh.axis(axis.name) for axis in divided if "layers" not in axis.divides
        }
        """Mesh axes along which parameters are sharded."""
        self._stages = mesh.stages
        self._bitwise = bitwise
        self._stage_rows: StageRows | None = None

    def begin(self, model: nn.Module, counted: Mapping[str, nn.Parameter]) -> None:
        """In a pipeline, every rank must call this method before `of`."""
        if self._bitwise and self._stages.size > 1:
            self._stage_rows = StageRows(model, counted, self._stages)

    def of(self, gradients_or_none: Sequence[Tensor | None]) -> Tensor | float:
        """Parameters without a gradient have None. With numerics=bitwise, the bits do not depend on
        sharding or pipeline stages."""
        gradients = [each for each in gradients_or_none if each is not None]
        parts = [to_local(gradient) for gradient in gradients]
        if self._bitwise:
            rows = self._squares_of_all_rows(gradients, parts)
            if self._stage_rows is not None:
                has = [each is not None for each in gradients_or_none]
                rows = self._stage_rows.gather(rows, has)
            return self._number(torch.cat([self._empty(), *rows]).sum().sqrt())
        if not self._in_parts:
            return combined(self._of_each(parts, torch._foreach_norm))
        device = self._device
        squares = torch.zeros((), dtype=accelerator.wide_dtype(device), device=device)
        mine = [
            part for gradient, part in zip(gradients, parts, strict=True) if self._counts(gradient)
        ]
        if mine:
            squares += (
                torch.linalg.vector_norm(torch.stack(torch._foreach_norm(mine)).to(squares.dtype))
                .square()
                .to(squares.device)
            )
        for axis in (*self._parts.values(), self._stages):
            axis.all_reduce(squares)
        return self._number(squares.sqrt())

    def of_each(self, gradients: Sequence[Tensor]) -> list[float]:
        """Takes one all-reduce per mesh axis and one wait for the device. With numerics=bitwise,
        the bits do not depend on sharding."""
        if not gradients:
            return []
        wide, device = accelerator.wide_dtype(self._device), self._device
        parts = [to_local(each) for each in gradients]
        if self._bitwise:
            rows = self._squares_of_all_rows(gradients, parts)
            norms = torch.stack([squares.sum().sqrt() for squares in rows])
        else:
            norms = torch.stack([part.to(wide).norm().to(device) for part in parts])
        if self._parts and not self._bitwise:
            counts = torch.tensor([self._counts(each) for each in gradients], device=device)
            # not a product: the norm may be infinite
            squares = torch.where(counts, norms.square(), 0.0)
            for axis in self._parts.values():
                axis.all_reduce(squares)
            norms = squares.sqrt()
        numbers: list[float] = norms.tolist()
        return numbers

    def check(self, gradients_or_none: Sequence[Tensor | None]) -> Tensor | float:
        """Return a number that is finite only if every gradient is finite. On a CPU, the check
        takes half the time of the norm."""
        gradients = [each for each in gradients_or_none if each is not None]
        if self._in_parts or self._bitwise or not gradients or not gradients[0].is_cpu:
            return self.of(gradients_or_none)
        sums = self._of_each(gradients, lambda mine: [gradient.sum() for gradient in mine])
        return sum([abs(total.item()) for total in sums])

    def _of_each(
        self,
        parts: Sequence[Tensor],
        compute: Callable[[list[Tensor]], Sequence[Tensor]],
        lengths: Sequence[int] | None = None,
    ) -> Sequence[Tensor]:
        """Return `compute(parts)`. Replicas that share memory divide the computation if the
        gradients are large."""
        if (
            self._memory is None
            or not parts
            or not parts[0].is_cpu
            or sum(part.nbytes for part in parts) < MIN_SHARED_BYTES
        ):
            return compute(list(parts)) if parts else []
        ranks = balanced_assignment(tuple(part.nbytes for part in parts), self._memory.size)
        mine = [place for place, rank in enumerate(ranks) if rank == self._memory.rank]
        lengths = [1] * len(parts) if lengths is None else lengths
        numbers = torch.zeros(sum(lengths), dtype=torch.float64)
        each = numbers.split_with_sizes(list(lengths))
        for place, computed in zip(
            mine, compute([parts[place] for place in mine]) if mine else [], strict=True
        ):
            each[place].copy_(computed)
        self._memory.all_reduce(numbers)
        return each

    def _counts(self, gradient: Tensor) -> bool:
        """Return True on the first of the ranks that hold the same part of a gradient."""
        divided = divided_over(gradient)
        return all(name in divided or axis.rank == 0 for name, axis in self._parts.items())

    def _number(self, value: Tensor) -> Tensor | float:
        return value.item() if value.is_cpu else value

    def _empty(self) -> Tensor:
        return torch.zeros(0, dtype=accelerator.wide_dtype(self._device), device=self._device)

    def _squares_of_all_rows(
        self, gradients: Sequence[Tensor], parts: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return, in float64, the sum of squares of each row of each full tensor."""
        size = self._tensor.size
        sharded_dims = [shard_dim_over(gradient, "tensor") for gradient in gradients]
        in_slices = [
            _slices_of_row(gradient, self._slices) // (size if dim == 1 else 1)
            for gradient, dim in zip(gradients, sharded_dims, strict=True)
        ]
        given = [
            part.reshape(len(part) * slices, math.prod(part.shape[1:]) // slices)
            if slices > 1
            else part
            for part, slices in zip(parts, in_slices, strict=True)
        ]
        lengths = [len(part) if part.dim() else 1 for part in given]
        squares = [
            _sum_of_slices(each.to(self._device), slices)
            for each, slices in zip(
                self._of_each(given, squares_of_rows, lengths), in_slices, strict=True
            )
        ]
        experts = [place for place, each in enumerate(gradients) if self._mesh.is_expert(each)]
        sharded = [place for place, each in enumerate(gradients) if divided_over(each) - {"tensor"}]
        dense = [place for place in sharded if place not in experts]
        rows = [
            (gradient.shape[0] if gradient.shape else 1) // (size if dim == 0 else 1)
            for gradient, dim in zip(gradients, sharded_dims, strict=True)
        ]
        ranks = self._mesh.axis("expert")
        of_rank = [count // ranks.size if at in experts else count for at, count in enumerate(rows)]
        self._gather_rows(squares, dense, rows, self._mesh.shards())
        if experts:
            self._gather_rows(squares, experts, of_rank, self._mesh.shards(gradients[experts[0]]))
            self._gather_rows(squares, experts, rows, ranks)
        self._over_tensor(squares, sharded_dims)
        return squares

    def _gather_rows(
        self, squares: list[Tensor], places: Sequence[int], rows: Sequence[int], ranks: World
    ) -> None:
        """All-gather the sums of squares of rows over `ranks`, in place."""
        if not places or ranks.size == 1:
            return
        local_rows = [
            [_local_rows(rows[place], rank, ranks.size) for place in places]
            for rank in range(ranks.size)
        ]
        mine = torch.cat([self._empty(), *(squares[place] for place in places)])
        everyone = ranks.gather_rows(mine, [sum(counts) for counts in local_rows])
        pieces = torch.split(everyone, [count for counts in local_rows for count in counts])
        for place, at in enumerate(places):
            squares[at] = torch.cat(pieces[place :: len(places)])

    def _over_tensor(self, squares: list[Tensor], sharded_dims: Sequence[int | None]) -> None:
        sharded = [place for place, dim in enumerate(sharded_dims) if dim is not None]
        if not sharded:
            return
        size = self._tensor.size
        mine = torch.cat([squares[place] for place in sharded])
        everyone = self._tensor.gather_rows(mine, [len(mine)] * size).view(size, -1)
        each = torch.split(everyone, [len(squares[place]) for place in sharded], dim=1)
        for place, gathered in zip(sharded, each, strict=True):
            by_rows = sharded_dims[place] == 0
            squares[place] = gathered.reshape(-1) if by_rows else _sum_of_slices(gathered.t(), size)


def _slices_of_row(gradient: Tensor, slices: int) -> int:
    """The number of slices depends on the shape of the full tensor, and not on its sharding."""
    columns = math.prod(gradient.shape[1:])
    return slices if len(gradient.shape) > 1 and columns and columns % slices == 0 else 1


def _sum_of_slices(squares: Tensor, slices: int) -> Tensor:
    return tree_sum(squares.reshape(-1, slices).unbind(1))


class StageRows:
    """Gathers each row's sum of squares from all pipeline stages, in the order of the model's
    parameters."""

    def __init__(
        self, model: nn.Module, counted: Mapping[str, nn.Parameter], stages: World
    ) -> None:
        """Every rank of the pipeline must create a `StageRows`."""
        # modules of other stages keep the names of their parameters (with None as the value)
        names = [
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name in own_parameters(module)
        ]
        self._rows = [each.shape[0] if each.dim() else 1 for each in counted.values()]
        mine = [[names.index(name), rows] for name, rows in zip(counted, self._rows, strict=True)]
        everyone = stages.gather_values(mine)
        self._counts = [sum(1 + rows for _, rows in theirs) for theirs in everyone]
        places = [place for theirs in everyone for place, _ in theirs]
        self._order = sorted(range(len(places)), key=places.__getitem__)
        self._lengths = [1 + rows for theirs in everyone for _, rows in theirs]
        self._stages = stages

    def gather(self, squares: Sequence[Tensor], has_gradient: Sequence[bool]) -> list[Tensor]:
        """Every rank of the pipeline must call this method."""
        waiting, device = iter(squares), self._stages.device
        pieces = [torch.zeros(0, dtype=accelerator.wide_dtype(device), device=device)]
        for rows, has in zip(self._rows, has_gradient, strict=True):
            flag = pieces[0].new_full((1,), float(has))
            pieces += [flag, next(waiting) if has else flag.new_zeros(rows)]
        gathered = self._stages.gather_rows(torch.cat(pieces), self._counts)
        several = torch.split(gathered, self._lengths)
        present = torch.stack([each[0] for each in several]).tolist()
        return [several[place][1:] for place in self._order if present[place]]


def squares_of_rows(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return float64 tensors of shape (rows,). Each row is summed separately: its bits do not
    depend on the number of rows."""
    matrices = [
        part.reshape(part.shape[0] if part.dim() else 1, math.prod(part.shape[1:]))
        for part in parts
    ]
    if all(part.is_cpu for part in parts):
        return list(map(_squares_in_cache, matrices))
    squares: list[Tensor] = []
    for together in _groups(matrices):
        squares += squares_by_halves(together)
    return squares


def _squares_in_cache(rows: Tensor) -> Tensor:
    if rows.numel() <= PIECE_ELEMENTS:
        return _summed_squares(rows)
    if (width := rows.shape[1]) <= PIECE_ELEMENTS:
        return torch.cat(
            [_summed_squares(some) for some in torch.split(rows, PIECE_ELEMENTS // width)]
        )
    pieces = [torch.split(row, PIECE_ELEMENTS) for row in rows.unbind()]
    return torch.stack(
        [torch.cat([_summed_squares(piece[None]) for piece in row]).sum() for row in pieces]
    )


def squares_by_halves(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Add the two halves of each row until one number is left. A GPU's reduction kernel would sum
    in an order that depends on the number of rows."""
    wide = accelerator.wide_dtype(matrices[0].device)
    zeros = {
        device: torch.zeros((), dtype=wide, device=device)
        for device in {rows.device for rows in matrices}
    }
    sums = [_squares_of_halves(rows.t(), zeros[rows.device]) for rows in matrices]
    while longer := [place for place, each in enumerate(sums) if len(each) > 1]:
        halves = [torch.split(sums[place], -(-len(sums[place]) // 2)) for place in longer]
        torch._foreach_add_(
            [first[: len(second)] for first, second in halves], [second for _, second in halves]
        )
        for place, (first, _) in zip(longer, halves, strict=True):
            sums[place] = first
    return [each[0] if len(each) else each.new_zeros(each.shape[1]) for each in sums]


def _squares_of_halves(columns: Tensor, zero: Tensor) -> Tensor:
    half = -(-len(columns) // 2)
    first, second = columns[:half], columns[half:]
    squares = zero.new_empty(first.shape)
    torch.addcmul(zero.expand(first.shape), first, first, out=squares)
    squares[: len(second)].addcmul_(second, second)
    return squares


def _groups(matrices: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    group: list[Tensor] = []
    for rows in matrices:
        if group and sum(each.numel() for each in group) + rows.numel() > TOGETHER_ELEMENTS:
            yield group
            group = []
        group.append(rows)
    yield group


def _summed_squares(rows: Tensor) -> Tensor:
    return rows.to(accelerator.wide_dtype(rows.device), copy=True).square_().sum(dim=1)


def _local_rows(rows: int, rank: int, ranks: int) -> int:
    each = -(-rows // ranks)
    return max(0, min(rows - rank * each, each))


@lru_cache(maxsize=16)
def balanced_assignment(sizes: tuple[int, ...], ranks: int) -> list[int]:
    chosen = [0] * len(sizes)
    sums = [(0, rank) for rank in range(ranks)]
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        least, chosen[place] = sums[0]
        heapq.heapreplace(sums, (least + sizes[place], chosen[place]))
    return chosen


def combined(norms: Sequence[Tensor]) -> Tensor | float:
    """Combine norms into one norm, which does not depend on the memory layout of the gradients."""
    if all(norm.is_cpu for norm in norms):
        return math.hypot(*[norm.item() for norm in norms])
    total: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms])
    )
    return total


def clip_divisor(norm: Tensor | float, limit: float) -> Tensor | float:
    return (
        torch.clamp(norm / limit, min=1.0) if isinstance(norm, Tensor) else max(norm / limit, 1.0)
    )


def clip(gradients: Sequence[Tensor], norm: Tensor | float, limit: float) -> None:
    """Does nothing if the norm is not finite."""
    if isinstance(norm, Tensor):
        factor = torch.clamp(limit / norm, max=1.0)
        scale(gradients, torch.where(torch.isfinite(norm), factor, 1.0))
    elif gradients and limit < norm < math.inf:
        torch._foreach_mul_([to_local(gradient) for gradient in gradients], limit / norm)


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply the gradients, which may be on several devices, by `factor`."""
    parts = [to_local(gradient) for gradient in gradients]
    for device in dict.fromkeys(part.device for part in parts):
        torch._foreach_mul_([part for part in parts if part.device == device], factor.to(device))
