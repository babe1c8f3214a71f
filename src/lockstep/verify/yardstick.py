"""How far apart two right runs of one recipe may be: as far as rounding alone drives its noise twins apart.

No tolerance is picked by hand. The reference and its twins differ by noise of rounding's size; the largest distance between any two of
them, tensor by tensor and step by step, is the unit in which a plan's distance from the reference is counted. Twins can coincide by chance
in a small tensor or a scalar, so the unit is never less than what is typical of the other tensors at that step, than it was at an earlier
step, and than a few units in the last place.

An optimizer that divides by the gradient's size (Adam) turns rounding of an element near zero into a full update one way or the other, now
and then, and more often in a short compute type. So a parameter's unit is also never less than what the updates of all tensors
together differ by, and than a part of one element's update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from lockstep.verify.records import EPS, Mark, Marks, Trace

FLOOR_ULPS = 4.0
"""Of a tensor's norm: less than this is never told apart from rounding."""
FLIP = 0.25
"""Of the typical update of an element: ten units let one element of a parameter go the other way."""
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


class Group(NamedTuple):
    """Runs that differ by noise alone."""

    reference: Trace
    twins: Sequence[Trace]
    scale: float = 1.0
    """What their distances are multiplied by."""

    @property
    def everyone(self) -> list[Trace]:
        return [self.reference, *self.twins]


class Yardstick:
    """The units of a reference and its noise twins. Without twins, units are the floors."""

    def __init__(self, reference: Trace, twins: Sequence[Trace], *, floor: float = 0.0) -> None:
        """`floor`: a unit's least size, relative to a tensor's norm, or to what it would be with elements as large as the others'."""
        self.reference = reference
        """Whose floors count, and what plans are compared with."""
        self._groups = [Group(reference, twins)]
        self._floor = floor
        self._flips = True
        self._units = cache(self._computed)
        self._own = cache(self._noise)

    def in_float64(self, reference: Trace, twins: Sequence[Trace], *, scale: float, margin: float) -> Yardstick:
        """The yardstick of a float64 reference: its own twins' noise times `margin`, and this one's times `scale`, whichever is more.

        `scale` is the ratio of the two precisions, for the noise that an island of a shorter type hides from the float64 twins.
        """
        made = Yardstick(reference, [])
        made._groups = [Group(reference, twins, margin), *(group._replace(scale=scale) for group in self._groups)]
        made._flips = False
        return made

    def units(self, step: int, kind: str) -> dict[str, float]:
        """Name -> unit of each tensor of a kind after `step`."""
        return self._units(step, kind)

    def microbatch_units(self, step: int, index: int) -> dict[str, float]:
        """Name -> unit of each gradient of one microbatch alone."""
        mine = _microbatch_marks(self.reference, step, index)
        noise = dict.fromkeys(mine, 0.0)
        for group in self._groups:
            for one, other in combinations([_microbatch_marks(trace, step, index) for trace in group.everyone], 2):
                for name in mine:
                    if name in one and name in other:
                        noise[name] = max(noise[name], group.scale * _finite(distance(one[name], other[name])))
        return self._floored(noise, mine)

    def scalar(self, step: int, what: str) -> float:
        """The unit of `loss` or `norm`."""
        noise = 0.0
        for group in self._groups:
            for earlier in range(step + 1):
                values = [value for trace in group.everyone if (value := _scalar(trace, earlier, what)) is not None]
                noise = max([noise, *(group.scale * abs(a - b) for a, b in combinations(values, 2))])
        size = abs(_scalar(self.reference, step, what) or 0.0)
        if what == "norm":
            noise = max(noise, _typical(self._own(step, "gradients"), self.reference.first.steps[step].tensors["gradients"]) * size)
        return max(noise, FLOOR_ULPS * self._eps() * size, self._floor * size, 1e-30)

    def band(self, step: int, kind: str) -> tuple[float, float]:
        """The least and the largest pooled distance between any two of them, relative."""
        marks = self.reference.first.steps[step].tensors[kind]
        everyone = self._groups[0].everyone
        found = [pooled([_away(a, b, step, kind, name) for name in marks], marks) for a, b in combinations(everyone, 2)]
        return (min(found), max(found)) if found else (0.0, 0.0)

    def loss_band(self, step: int) -> tuple[float, float]:
        """The least and the largest distance between the losses of any two of them, relative."""
        losses = [trace.first.steps[step].loss for trace in self._groups[0].everyone]
        found = [abs(a - b) / (abs(losses[0]) or 1.0) for a, b in combinations(losses, 2)]
        return (min(found), max(found)) if found else (0.0, 0.0)

    def _eps(self) -> float:
        marks = self.reference.first.steps[0].tensors["parameters"].values()
        return max((mark.eps for mark in marks if mark is not None), default=EPS["float32"])

    def _computed(self, step: int, kind: str) -> dict[str, float]:
        marks = self.reference.first.steps[step].tensors[kind]
        largest = {name: max(self._own(earlier, kind).get(name, 0.0) for earlier in range(step + 1)) for name in marks}
        units = self._floored(largest, marks)
        if kind == "parameters":
            for name, least in self._turned(step, largest).items():
                units[name] = max(units[name], least)
        return units

    def _turned(self, step: int, noise: dict[str, float]) -> dict[str, float]:
        """Name -> the least unit of each parameter by how far the steps so far have moved it."""
        rank = self.reference.first
        states = [rank.initial["parameters"], *(each.tensors["parameters"] for each in rank.steps[: step + 1])]
        moved = {
            name: math.sqrt(sum(_finite(distance(before.get(name), after.get(name))) ** 2 for before, after in pairwise(states)))
            for name in states[-1]
        }
        total = sum(value**2 for value in moved.values())
        share = math.sqrt(sum(noise[name] ** 2 for name in moved) / total) if total else 0.0
        flip = FLIP if self._flips else 0.0
        return {
            name: max(share, flip / math.sqrt(mark.count)) * moved[name]
            for name, mark in states[-1].items()
            if mark is not None and mark.count
        }

    def _noise(self, step: int, kind: str) -> dict[str, float]:
        """Name -> the largest distance between any two of a group."""
        noise = dict.fromkeys(self.reference.first.steps[step].tensors[kind], 0.0)
        for group in self._groups:
            for one, other in combinations(group.everyone, 2):
                for name in noise:
                    noise[name] = max(noise[name], group.scale * _finite(_away(one, other, step, kind, name)))
        return noise

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
                noise.get(name, 0.0),
                typical * norm,
                FLOOR_ULPS * eps * norm,
                self._floor * max(norm, element * math.sqrt(size)),
                NEGLIGIBLE * eps * element * math.sqrt(size),
                1e-38,
            )
        return units


def _typical(noise: dict[str, float], marks: Marks) -> float:
    relative = [noise[name] / mark.norm for name, mark in marks.items() if name in noise and mark is not None and mark.norm > 0]
    return median(relative) if relative else 0.0


def _microbatch_marks(trace: Trace, step: int, index: int) -> Marks:
    return next((m.gradients for m in trace.of_step(step) if m.index == index and m.gradients is not None), {})


def _away(one: Trace, other: Trace, step: int, kind: str, name: str) -> float:
    marks = (one.first.steps[step].tensors[kind].get(name), other.first.steps[step].tensors[kind].get(name))
    return tensor_distance(one, other, step, kind, name, marks)


def _scalar(trace: Trace, step: int, what: str) -> float | None:
    value: float | None = getattr(trace.first.steps[step], what)
    return value


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
