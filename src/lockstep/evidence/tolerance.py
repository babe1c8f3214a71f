"""The tolerance of a comparison: `TOLERANCE` times the rounding of the model.

Rounding is measured with perturbed runs, which have noise of one unit in the last place. The
rounding of a tensor at a step is the largest distance between any two perturbed runs.

Two runs may be equal by chance in a small tensor. The rounding of a tensor is therefore at least
the typical relative rounding of the other tensors at the step, the tensor's rounding at an earlier
step, and a few units in the last place.

Adam divides by the size of the gradient, and can turn rounding of an element near zero into a full
update in either direction. The rounding of a parameter is therefore at least the relative
difference between the updates of all tensors together, and at least a part of the update of one
element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, pairwise
from statistics import median
from typing import NamedTuple

from lockstep.evidence.tensors import EPS, Summaries, distance, pooled
from lockstep.evidence.trace import Trace, tensor_distance

TOLERANCE = 10.0
MINIMUM_ULPS = 4.0
SIGN_FLIP = 0.25
"""Smallest rounding of a parameter, as a fraction of an element's typical update. The tolerance
allows an update of the opposite sign."""
NOT_REPEATED = 1e-2
"""A logged number that differs by more than this between perturbed runs depends on something other
than the training, such as the time."""
NEGLIGIBLE = 1e-3
"""Smallest rounding of an element, in units in the last place of a typical element of all
tensors."""


class _Runs(NamedTuple):
    reference: Trace
    perturbed: Sequence[Trace]
    scale: float = 1.0

    @property
    def traces(self) -> list[Trace]:
        return [self.reference, *self.perturbed]


class MeasuredRounding:
    """The rounding of each value of a reference run, measured with perturbed runs."""

    def __init__(
        self,
        reference: Trace,
        perturbed: Sequence[Trace],
        *,
        minimum: float = 0.0,
        sign_flip: float = SIGN_FLIP,
    ) -> None:
        """`minimum` is the smallest relative rounding of a tensor. `sign_flip` replaces
        `SIGN_FLIP`."""
        self.reference = reference
        self._groups = [_Runs(reference, perturbed)]
        self._minimum = minimum
        self._sign_flip = sign_flip
        self.of_tensors = cache(self._rounding)
        self._largest = cache(self._largest_distances)

    def in_float64(
        self, reference: Trace, perturbed: Sequence[Trace], *, scale: float, margin: float
    ) -> MeasuredRounding:
        """Return the rounding of a float64 run: the larger of `margin` times the rounding measured
        in float64, and `scale` times the rounding of this object.

        `scale` is the ratio of the precisions of the two dtypes. Operations in the model that round
        to a shorter dtype can hide the noise of the float64 runs.
        """
        made = MeasuredRounding(reference, [], sign_flip=0.0)
        made._groups = [
            _Runs(reference, perturbed, margin),
            *(group._replace(scale=scale) for group in self._groups),
        ]
        return made

    def of_microbatch(self, step: int, index: int) -> dict[str, float]:
        reference = _microbatch_gradients(self.reference, step, index)
        largest = dict.fromkeys(reference, 0.0)
        for group in self._groups:
            gradients = [_microbatch_gradients(trace, step, index) for trace in group.traces]
            for one, other in combinations(gradients, 2):
                for name in reference.keys() & one.keys() & other.keys():
                    away = group.scale * _finite(distance(one[name], other[name]))
                    largest[name] = max(largest[name], away)
        return self._at_least_minimum(largest, reference)

    def of_scalar(self, step: int, attribute: str) -> float:
        def value(trace: Trace, step: int) -> float | None:
            number: float | None = getattr(trace.rank_0.steps[step], attribute)
            return number

        largest = self._largest_of_numbers(step, value)
        size = abs(value(self.reference, step) or 0.0)
        if attribute == "norm":
            gradients = self.reference.rank_0.steps[step].tensors["gradients"]
            largest = max(largest, _typical(self._largest(step, "gradients"), gradients) * size)
        return self._of_number(largest, size)

    def of_logged(self, step: int, name: str) -> float:
        """Return the rounding of a logged number; infinite if the perturbed runs do not reproduce
        the number."""
        size = abs(self.reference.logged[step][name])
        largest = self._largest_of_numbers(
            step, lambda trace, at: trace.logged.get(at, {}).get(name)
        )
        return math.inf if largest > NOT_REPEATED * size else self._of_number(largest, size)

    def _largest_of_numbers(self, step: int, value: Callable[[Trace, int], float | None]) -> float:
        largest = 0.0
        for group in self._groups:
            for at in range(step + 1):
                numbers = [x for trace in group.traces if (x := value(trace, at)) is not None]
                away = (group.scale * abs(a - b) for a, b in combinations(numbers, 2))
                largest = max([largest, *away])
        return largest

    def _of_number(self, largest: float, size: float) -> float:
        return max(largest, MINIMUM_ULPS * self._eps() * size, self._minimum * size, 1e-30)

    @property
    def is_measured(self) -> bool:
        return any(group.perturbed for group in self._groups)

    def spread(self, step: int, kind: str) -> tuple[float, float]:
        summaries = self.reference.rank_0.steps[step].tensors[kind]
        pairs = combinations(self._groups[0].traces, 2)
        distances = [
            pooled([tensor_distance(a, b, step, kind, name) for name in summaries], summaries)
            for a, b in pairs
        ] or [0.0]
        return min(distances), max(distances)

    def loss_spread(self, step: int) -> tuple[float, float]:
        losses = [trace.rank_0.steps[step].loss for trace in self._groups[0].traces]
        distances = [abs(a - b) / (abs(losses[0]) or 1.0) for a, b in combinations(losses, 2)] or [
            0.0
        ]
        return min(distances), max(distances)

    def _eps(self) -> float:
        summaries = self.reference.rank_0.steps[0].tensors["parameters"].values()
        return max((each.eps for each in summaries if each is not None), default=EPS["float32"])

    def _rounding(self, step: int, kind: str) -> dict[str, float]:
        summaries = self.reference.rank_0.steps[step].tensors[kind]
        largest = {
            name: max(self._largest(earlier, kind).get(name, 0.0) for earlier in range(step + 1))
            for name in summaries
        }
        rounding = self._at_least_minimum(largest, summaries)
        if kind == "parameters":
            for name, least in self._rounding_of_updates(step, largest).items():
                rounding[name] = max(rounding[name], least)
        return rounding

    def _rounding_of_updates(self, step: int, largest: dict[str, float]) -> dict[str, float]:
        """Return a lower limit for the rounding of each parameter, from the distance that the
        parameter has moved up to `step`."""
        rank = self.reference.rank_0
        states = [
            rank.initial["parameters"],
            *(each.tensors["parameters"] for each in rank.steps[: step + 1]),
        ]
        moved = {}
        for name in states[-1]:
            values = [state.get(name) for state in states]
            moved[name] = math.hypot(*(_finite(distance(a, b)) for a, b in pairwise(values)))
        total = sum(value**2 for value in moved.values())
        relative = math.sqrt(sum(largest[name] ** 2 for name in moved) / total) if total else 0.0
        return {
            name: max(relative, self._sign_flip / math.sqrt(summary.elements)) * moved[name]
            for name, summary in states[-1].items()
            if summary is not None and summary.elements
        }

    def _largest_distances(self, step: int, kind: str) -> dict[str, float]:
        largest = dict.fromkeys(self.reference.rank_0.steps[step].tensors[kind], 0.0)
        for group in self._groups:
            for one, other in combinations(group.traces, 2):
                for name in largest:
                    away = group.scale * _finite(tensor_distance(one, other, step, kind, name))
                    largest[name] = max(largest[name], away)
        return largest

    def _at_least_minimum(
        self, largest: dict[str, float], summaries: Summaries
    ) -> dict[str, float]:
        typical = _typical(largest, summaries)
        present = [summary for summary in summaries.values() if summary is not None]
        squares, count = (
            sum(each.norm**2 for each in present),
            sum(each.elements for each in present),
        )
        element = math.sqrt(squares / count) if count and math.isfinite(squares) else 0.0
        rounding = {}
        for name, summary in summaries.items():
            norm, size, eps = 0.0, 1, EPS["float64"]
            if summary is not None:
                norm, size, eps = summary.norm, summary.elements, summary.eps
            rounding[name] = max(
                largest.get(name, 0.0),
                typical * norm,
                MINIMUM_ULPS * eps * norm,
                self._minimum * max(norm, element * math.sqrt(size)),
                NEGLIGIBLE * eps * element * math.sqrt(size),
                1e-38,
            )
        return rounding


def _typical(distances: dict[str, float], summaries: Summaries) -> float:
    ratios = [
        distances[name] / summary.norm
        for name, summary in summaries.items()
        if summary is not None and summary.norm > 0 and name in distances
    ]
    return median(ratios or [0.0])


def _microbatch_gradients(trace: Trace, step: int, index: int) -> Summaries:
    for m in trace.microbatches_of(step):
        if m.index == index and m.gradients is not None:
            return m.gradients
    return {}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
