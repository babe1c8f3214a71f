"""How far apart two right runs of one recipe may be: as far as rounding alone drives its noise twins apart.

No tolerance is picked by hand. The reference and its twins differ by noise of rounding's size; the largest distance between any two of
them, tensor by tensor and step by step, is the unit in which a plan's distance from the reference is counted. Twins can coincide by chance
in a small tensor or a scalar, so the unit is never less than what is typical of the other tensors at that step, than it was at an earlier
step, and than a few units in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations
from statistics import median

import numpy as np

from lockstep.verify.records import EPS, Mark, Marks, Trace

FLOOR_ULPS = 4.0
"""Of a tensor's norm: less than this is never told apart from rounding."""
NEGLIGIBLE = 1e-3
"""A tensor's elements whose unit is below this part of one unit in the last place of the whole gradient's typical element count as zero."""

KINDS = ("gradients", "states", "parameters", "buffers")


def distance(one: Mark | None, other: Mark | None) -> float:
    """Between two tensors by their marks. Infinite where one is missing, or they are not alike; zero where they have the same bits, and
    where neither is finite (a step that overflowed and was skipped)."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if one.sha == other.sha:
        return 0.0
    if one.count != other.count:
        return math.inf
    if math.isnan(one.norm) and math.isnan(other.norm):
        return 0.0
    estimate = float(np.sqrt(np.mean((one.projection - other.projection) ** 2)))
    return estimate if math.isfinite(estimate) else math.inf


def tensor_distance(one: Trace, other: Trace, step: int, kind: str, name: str, marks: tuple[Mark | None, Mark | None]) -> float:
    """`distance`, from the tensors themselves where both traces have them."""
    estimate = distance(*marks)
    if estimate == 0.0 or math.isinf(estimate):
        return estimate
    x, y = one.tensor(step, kind, name), other.tensor(step, kind, name)
    if x is None or y is None or x.shape != y.shape:
        return estimate
    return float(np.linalg.norm(x - y))


def pooled(distances: Sequence[float], marks: Marks) -> float:
    """The distance of all tensors together, relative to the reference's `marks`."""
    total = math.sqrt(sum(mark.norm**2 for mark in marks.values() if mark is not None))
    return math.sqrt(sum(value**2 for value in distances)) / total if total else 0.0


class Yardstick:
    """The units of a reference and its noise twins. Without twins, units are the floors.

    `scale` is what noise is multiplied by: for a float64 run measured by float32 twins, the ratio of the types' precisions.
    """

    def __init__(
        self, reference: Trace, twins: Sequence[Trace], *, subject: Trace | None = None, scale: float = 1.0, floor: float = 0.0
    ) -> None:
        """`subject`: the reference whose floors count, where it is not the twins' own. `floor`: a unit's least size, relative to a tensor's
        norm and to what its elements would have if they were as large as the others'."""
        self.reference = reference
        self.twins = list(twins)
        self.subject = subject or reference
        self._scale = scale
        self._floor = floor
        self._units = cache(self._computed)
        self._own = cache(self._noise)

    def scaled(self, subject: Trace, scale: float) -> Yardstick:
        """The yardstick of another reference, a float64 one: the same noise in proportion, `scale` times as large."""
        return Yardstick(self.reference, self.twins, subject=subject, scale=scale)

    def units(self, step: int, kind: str) -> dict[str, float]:
        """Name -> unit of each tensor of a kind after `step`."""
        return self._units(step, kind)

    def microbatch_units(self, step: int, index: int) -> dict[str, float]:
        """Name -> unit of each gradient of one microbatch alone."""
        mine = _microbatch_marks(self.subject, step, index)
        everyone = [marks for trace in self._all() if (marks := _microbatch_marks(trace, step, index))]
        return self._floored(_largest(mine, everyone), mine)

    def scalar(self, step: int, what: str) -> float:
        """The unit of `loss` or `norm`."""
        noise, size = 0.0, 0.0
        for earlier in range(step + 1):
            values = [value for trace in self._all() if (value := _scalar(trace, earlier, what)) is not None]
            noise = max([noise, *(abs(a - b) for a, b in combinations(values, 2))])
        size = abs(_scalar(self.subject, step, what) or 0.0)
        if what == "norm":
            noise = max(noise, self._typical(step, "gradients") * size)
        return max(self._scale * noise, FLOOR_ULPS * self._eps() * size, self._floor * size, 1e-30)

    def pairs(self) -> Iterator[tuple[Trace, Trace]]:
        """Every two of the reference and its twins."""
        return combinations(self._all(), 2)

    def band(self, step: int, kind: str) -> tuple[float, float]:
        """The least and the largest pooled distance between any two of them, relative."""
        marks = self.reference.first.steps[step].tensors[kind]
        found = [
            pooled([tensor_distance(a, b, step, kind, name, _both(a, b, step, kind, name)) for name in marks], marks)
            for a, b in self.pairs()
        ]
        return (min(found), max(found)) if found else (0.0, 0.0)

    def loss_band(self, step: int) -> tuple[float, float]:
        """The least and the largest distance between the losses of any two of them, relative."""
        losses = [trace.first.steps[step].loss for trace in self._all()]
        found = [abs(a - b) / (abs(losses[0]) or 1.0) for a, b in combinations(losses, 2)]
        return (min(found), max(found)) if found else (0.0, 0.0)

    def _all(self) -> list[Trace]:
        return [self.reference, *self.twins]

    def _eps(self) -> float:
        marks = self.subject.first.steps[0].tensors["parameters"].values()
        return max((mark.eps for mark in marks if mark is not None), default=EPS["float32"])

    def _computed(self, step: int, kind: str) -> dict[str, float]:
        marks = self.subject.first.steps[step].tensors[kind]
        largest = {name: max(self._own(earlier, kind).get(name, 0.0) for earlier in range(step + 1)) for name in marks}
        return self._floored(largest, marks)

    def _noise(self, step: int, kind: str) -> dict[str, float]:
        """Name -> the largest distance between any two."""
        names = self.reference.first.steps[step].tensors[kind]
        return {
            name: max(
                (_finite(tensor_distance(a, b, step, kind, name, _both(a, b, step, kind, name))) for a, b in self.pairs()), default=0.0
            )
            for name in names
        }

    def _typical(self, step: int, kind: str) -> float:
        return _typical(self._own(step, kind), self.reference.first.steps[step].tensors[kind])

    def _floored(self, noise: dict[str, float], marks: Marks) -> dict[str, float]:
        """Never less than what is typical of the other tensors, than a few units in the last place, and than next to nothing."""
        typical = _typical(noise, marks)
        present = [mark for mark in marks.values() if mark is not None]
        squares, count = sum(mark.norm**2 for mark in present), sum(mark.count for mark in present)
        element = math.sqrt(squares / count) if count and math.isfinite(squares) else 0.0
        units = {}
        for name, mark in marks.items():
            norm, size, eps = (mark.norm, mark.count, mark.eps) if mark is not None else (0.0, 1, EPS["float64"])
            units[name] = max(
                self._scale * noise.get(name, 0.0),
                self._scale * typical * norm,
                FLOOR_ULPS * eps * norm,
                self._floor * max(norm, element * math.sqrt(size)),
                NEGLIGIBLE * eps * element * math.sqrt(size),
                1e-38,
            )
        return units


def _typical(noise: dict[str, float], marks: Marks) -> float:
    relative = [noise[name] / mark.norm for name, mark in marks.items() if name in noise and mark is not None and mark.norm > 0]
    return median(relative) if relative else 0.0


def _largest(marks: Marks, everyone: Sequence[Marks]) -> dict[str, float]:
    return {name: max((_finite(distance(a.get(name), b.get(name))) for a, b in combinations(everyone, 2)), default=0.0) for name in marks}


def _microbatch_marks(trace: Trace, step: int, index: int) -> Marks:
    return next((m.gradients for m in trace.of_step(step) if m.index == index and m.gradients is not None), {})


def _both(one: Trace, other: Trace, step: int, kind: str, name: str) -> tuple[Mark | None, Mark | None]:
    return one.first.steps[step].tensors[kind].get(name), other.first.steps[step].tensors[kind].get(name)


def _scalar(trace: Trace, step: int, what: str) -> float | None:
    value: float | None = getattr(trace.first.steps[step], what)
    return value


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
