"""Tensors in a trace, and their distances. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PROJECTIONS = 8
"""Numbers in a tensor's projection."""
EPS = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "complex64": 2.0**-23,
    "complex128": 2.0**-52,
}
"""Machine epsilon by dtype. Any other dtype counts as float32."""

Vector = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """A tensor in a trace: a sketch, and perhaps a hash, instead of its elements."""

    projection: Vector
    """Sums of the elements under fixed random signs."""
    norm: float
    """L2 norm. NaN if it is not finite."""
    sha256: str = ""
    """Empty: not computed."""
    elements: int = 1
    dtype: str = "float32"

    @classmethod
    def of(cls, sketch: Sequence[float], **known: Any) -> TensorSummary:
        norm = math.sqrt(sketch[-1]) if math.isfinite(sketch[-1]) else math.nan
        return cls(np.array(sketch[:-1]), norm, **known)

    @classmethod
    def from_json(cls, row: Mapping[str, Any] | None) -> TensorSummary | None:
        """Return the summary that the trace has; None if there was no tensor."""
        return None if row is None else cls.of(**row)

    @property
    def eps(self) -> float:
        return EPS.get(self.dtype, EPS["float32"])


Summaries = dict[str, TensorSummary | None]
"""Tensor summaries by name. None: the tensor does not exist, such as the gradient of an unused
parameter."""


def distance(one: TensorSummary | None, other: TensorSummary | None) -> float:
    """Return the L2 distance of two tensors, estimated from projections. Infinite if one is missing
    or sizes differ."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if one.sha256 and one.sha256 == other.sha256:
        return 0.0
    if one.elements != other.elements:
        return math.inf
    if math.isnan(one.norm) and math.isnan(other.norm):  # a step that overflowed and was skipped
        return 0.0
    with np.errstate(invalid="ignore"):
        estimate = float(np.sqrt(np.mean((one.projection - other.projection) ** 2)))
    return estimate if math.isfinite(estimate) else math.inf


def pooled(distances: Sequence[float], summaries: Summaries) -> float:
    """Return the distance of all tensors together, relative to the norm of all tensors in
    `summaries`."""
    total = math.sqrt(sum(each.norm**2 for each in summaries.values() if each is not None))
    return math.sqrt(sum(value**2 for value in distances)) / total if total else 0.0


def sketch_difference(one: Sequence[float] | None, other: Sequence[float] | None) -> float:
    """Return the distance of two tensors, relative to the larger one; 0 if one is missing."""
    if one is None or other is None:
        return 0.0
    first, second = TensorSummary.of(one), TensorSummary.of(other)
    away = distance(first, second)
    return away if away in (0.0, math.inf) else away / max(first.norm, second.norm)


def finite_projection(sketch: Sequence[float] | None) -> Vector | None:
    """Return the projection of a sketch. None if there is no sketch, or it is not finite."""
    if sketch is None or not np.isfinite(sketch).all():
        return None
    return np.array(sketch[:-1])
