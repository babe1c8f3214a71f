"""What the forward computes in, and what stands between the summed gradient and the optimizer: loss scale, global norm, clipping."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lockstep.base.torch_private import cpu_multiplies_bf16
from lockstep.comm.mesh import Mesh, to_local
from lockstep.recipe import Precision

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS_TO_DOUBLE = 2000
"""Without an overflow; GradScaler's number."""
PIECE_NUMBERS = 2**15 - 1
"""Whose squares are summed at once: torch sums so few in one thread, so in one order."""
LEAST_SHARED_BYTES = 8 << 20
"""Of gradients: reading fewer takes a rank less long than hearing of them from another."""


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The context that a forward runs in. Backward runs outside of it."""
    dtype = AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


class LossScale:
    """What an fp16 loss is multiplied by, against underflow: halved at an overflow, doubled after 2000 steps in a row without one.

    The same on every rank, because it follows from the norm of the whole gradient, which all ranks know: a part of the gradient that
    overflows on one rank alone halves it on all.
    """

    def __init__(self, *, factor: int) -> None:
        """`factor`: what the loss is multiplied by besides; the product is 2**16 at first."""
        self.value = 2.0 ** (16 - (factor - 1).bit_length())
        self.in_a_row = 0
        """Steps without an overflow, since the last change."""

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide the gradients by it, in place."""
        if gradients:
            torch._foreach_mul_([to_local(gradient) for gradient in gradients], 1.0 / self.value)

    def update(self, *, overflowed: bool) -> None:
        """Once a step, with what came of it."""
        self.in_a_row = 0 if overflowed else self.in_a_row + 1
        if overflowed:
            self.value /= 2.0
        elif self.in_a_row == STEPS_TO_DOUBLE:
            self.value *= 2.0
            self.in_a_row = 0


def choices(device: torch.device) -> list[Precision]:
    """What `auto` chooses from on such a device: fp32, and on a GPU what multiplies matrices there, bf16, or on older ones fp16.

    On a CPU fp32 alone, though some have instructions for bf16: a run keeps its precision, and without those it is many times slower.
    """
    if device.type != "cuda":
        return ["fp32"]
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return ["fp32", "bf16"]
    return ["fp32", "fp16"] if torch.cuda.get_device_capability(device) >= (7, 0) else ["fp32"]


def slow_on_this_cpu(precision: Precision, device: torch.device) -> str | None:
    """Why this precision is a bad choice here, or None."""
    if precision == "fp32" or device.type != "cpu":
        return None
    if precision == "bf16" and cpu_multiplies_bf16():
        return None
    return f"this CPU has no {precision} matrix instructions: expect {precision} to be many times slower than fp32"


class Norm:
    """The global 2-norm of a model's gradients, of which a rank may hold parts: the same number on every rank.

    On a CPU it is a number, on a GPU a scalar tensor, which the host does not wait for. Every rank calls the methods alike.
    """

    def __init__(self, mesh: Mesh, *, bitwise: bool) -> None:
        self._shards = mesh.axis("shard")
        self._in_parts = mesh.torch_mesh is not None
        self._memory = None if self._in_parts else mesh.data.memory_here
        self._cutting = {name: axis for name in ("shard", "tensor") if (axis := mesh.axis(name)).size > 1}
        self._pipeline = mesh.axis("pipeline")
        self._bitwise = bitwise

    def of(self, gradients: Sequence[Tensor]) -> Tensor | float:
        """The norm. In bitwise numerics it does not depend on how the gradients are cut."""
        parts = [to_local(gradient) for gradient in gradients]
        if self._bitwise:
            return self._number(self._sum_of_rows(gradients, parts).sqrt())
        if not self._in_parts:
            return combined(self._of_each(parts, torch._foreach_norm))
        squares = torch.zeros((), dtype=torch.float64, device=self._shards.device)
        mine = [part for gradient, part in zip(gradients, parts, strict=True) if self._counts(gradient)]
        if mine:
            squares += torch.linalg.vector_norm(torch.stack(torch._foreach_norm(mine)).double()).square().to(squares.device)
        for axis in (*self._cutting.values(), self._pipeline):
            axis.all_reduce(squares)
        return self._number(squares.sqrt())

    def check(self, gradients: Sequence[Tensor]) -> Tensor | float:
        """A number that is finite only where every gradient is. Half the time of the norm, on a CPU."""
        if self._in_parts or self._bitwise or not gradients or not gradients[0].is_cpu:
            return self.of(gradients)
        sums = self._of_each(gradients, lambda mine: [gradient.sum().abs() for gradient in mine])
        return sum([total.item() for total in sums])

    def _of_each(
        self, parts: Sequence[Tensor], compute: Callable[[list[Tensor]], Sequence[Tensor]], lengths: Sequence[int] | None = None
    ) -> Sequence[Tensor]:
        """What `compute` makes of each part: `lengths` numbers, by default one.

        Ranks that hold the same and share memory each compute those of some parts, where that takes less long.
        """
        if self._memory is None or not parts or not parts[0].is_cpu or sum(part.nbytes for part in parts) < LEAST_SHARED_BYTES:
            return compute(list(parts)) if parts else []
        takers = shared_out(tuple(part.nbytes for part in parts), self._memory.size)
        mine = [place for place, taker in enumerate(takers) if taker == self._memory.rank]
        lengths = [1] * len(parts) if lengths is None else lengths
        numbers = torch.zeros(sum(lengths), dtype=torch.float64)
        each = numbers.split_with_sizes(list(lengths))
        for place, computed in zip(mine, compute([parts[place] for place in mine]) if mine else [], strict=True):
            each[place].copy_(computed)
        self._memory.all_reduce(numbers)
        return each

    def _counts(self, gradient: Tensor) -> bool:
        """Whether this rank counts what it holds of a gradient: of ranks that hold the same, the first of each axis does."""
        mesh = getattr(gradient, "device_mesh", None)
        names = () if mesh is None else mesh.mesh_dim_names
        cut = {name for name, placement in zip(names, getattr(gradient, "placements", ()), strict=True) if not placement.is_replicate()}
        return all(name in cut or axis.rank == 0 for name, axis in self._cutting.items())

    def _number(self, value: Tensor) -> Tensor | float:
        return value.item() if value.is_cpu else value

    def _sum_of_rows(self, gradients: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
        """Σ squares, added up in each row of each gradient (a shard is whole rows), then over the rows of all, in float64."""
        empty = torch.zeros(0, dtype=torch.float64, device=self._shards.device)
        rows = [gradient.shape[0] if gradient.shape else 1 for gradient in gradients]
        squares = self._of_each(parts, lambda some: [squares_of_rows(part) for part in some], rows)
        mine = torch.cat([empty, *[square.to(empty.device) for square in squares]])
        if self._shards.size == 1:
            return mine.sum()
        held = [[_rows_held(count, rank, self._shards.size) for count in rows] for rank in range(self._shards.size)]
        everyone = self._shards.gather_rows(mine, [sum(counts) for counts in held])
        pieces = torch.split(everyone, [count for counts in held for count in counts])
        return torch.cat([pieces[rank * len(rows) + place] for place in range(len(rows)) for rank in range(self._shards.size)]).sum()


def squares_of_rows(part: Tensor) -> Tensor:
    """Σ squares of each row, shape (rows,), float64: on a CPU the same bits whichever rows stand beside it.

    There in pieces that stay in a processor's cache: with 16 MB a tenth of the time of going through all of it once for each operation.
    """
    rows = part.reshape(part.shape[0] if part.dim() else 1, math.prod(part.shape[1:]))
    if rows.numel() <= PIECE_NUMBERS or not part.is_cpu:
        return _summed_squares(rows)
    if (width := rows.shape[1]) <= PIECE_NUMBERS:
        return torch.cat([_summed_squares(some) for some in torch.split(rows, PIECE_NUMBERS // width)])
    pieces = [torch.split(row, PIECE_NUMBERS) for row in rows.unbind()]
    return torch.stack([torch.cat([_summed_squares(piece[None]) for piece in row]).sum() for row in pieces])


def _summed_squares(rows: Tensor) -> Tensor:
    return rows.to(torch.float64, copy=True).square_().sum(dim=1)


def _rows_held(rows: int, rank: int, ranks: int) -> int:
    """As `torch.chunk` cuts them."""
    each = -(-rows // ranks)
    return max(0, min(rows - rank * each, each))


@lru_cache(maxsize=16)
def shared_out(sizes: tuple[int, ...], ranks: int) -> list[int]:
    """Which rank takes each: the largest first, each to the rank that has least so far."""
    takers = [0] * len(sizes)
    taken = [(0, rank) for rank in range(ranks)]
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        least, takers[place] = taken[0]
        heapq.heapreplace(taken, (least + sizes[place], takers[place]))
    return takers


def combined(norms: Sequence[Tensor]) -> Tensor | float:
    """The norm of all gradients as one vector, from each one's: a number on a CPU, a scalar tensor on a GPU, which nobody waits for.

    In two steps, so that the order does not depend on how gradients are laid out in memory.
    """
    if all(norm.is_cpu for norm in norms):
        return math.hypot(*[norm.item() for norm in norms])
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


def excess(norm: Tensor | float, limit: float) -> Tensor | float:
    """What to divide a gradient by so that its global norm, `norm` now, is at most `limit`: 1 or more, unless the norm is no number."""
    return torch.clamp(norm / limit, min=1.0) if isinstance(norm, Tensor) else max(norm / limit, 1.0)


def clip(gradients: Sequence[Tensor], norm: Tensor | float, limit: float) -> None:
    """Scale the gradients so that their global norm, `norm` now, is at most `limit`. A norm that is not finite is left alone."""
    if isinstance(norm, Tensor):
        factor = torch.clamp(limit / norm, max=1.0)
        scale(gradients, torch.where(torch.isfinite(norm), factor, 1.0))
    elif gradients and limit < norm < math.inf:
        torch._foreach_mul_([to_local(gradient) for gradient in gradients], limit / norm)


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply the gradients, which may be on several devices, by a scalar tensor, in place."""
    parts = [to_local(gradient) for gradient in gradients]
    for device in dict.fromkeys(part.device for part in parts):
        torch._foreach_mul_([part for part in parts if part.device == device], factor.to(device))
