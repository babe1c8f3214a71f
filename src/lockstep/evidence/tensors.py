"""Compares summaries of tensors: the distance between two tensors, and the factors with which
tensors add up to another tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BATCHNORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
PROJECTIONS = 8
TOKEN_PROJECTIONS = 4
EPS = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "complex64": 2.0**-23,
    "complex128": 2.0**-52,
}
COMPUTE_EPS = {"fp32": EPS["float32"], "bf16": EPS["bfloat16"], "fp16": EPS["float16"]}
EXACT = 1e-3
"""A fit with a relative residual below this counts as exact."""
MOST_CONDITION = 1e5
"""Vectors with a larger condition number are too similar for a fit."""

Vector = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """A tensor in a trace: random projections instead of its elements, and optionally a hash."""

    projection: Vector
    norm: float
    sha256: str = ""
    elements: int = 1
    dtype: str = "float32"

    @classmethod
    def of(cls, sketch: Sequence[float], **known: Any) -> TensorSummary:
        norm = math.sqrt(sketch[-1]) if math.isfinite(sketch[-1]) else math.nan
        return cls(np.array(sketch[:-1]), norm, **known)

    @classmethod
    def from_json(cls, row: Mapping[str, Any] | None) -> TensorSummary | None:
        return None if row is None else cls.of(**row)

    @property
    def eps(self) -> float:
        return EPS.get(self.dtype, EPS["float32"])


Summaries = dict[str, TensorSummary | None]
"""Maps tensor names to summaries. None stands for a missing tensor, such as the gradient of an
unused parameter."""


def distance(one: TensorSummary | None, other: TensorSummary | None) -> float:
    """Estimate the L2 distance of two tensors from their projections. The distance is infinite if a
    tensor is missing or if their sizes differ."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if one.sha256 and one.sha256 == other.sha256:
        return 0.0
    if one.elements != other.elements:
        return math.inf
    # both runs have skipped the step after an overflow
    if math.isnan(one.norm) and math.isnan(other.norm):
        return 0.0
    with np.errstate(invalid="ignore"):
        estimate = float(np.sqrt(np.mean((one.projection - other.projection) ** 2)))
    return estimate if math.isfinite(estimate) else math.inf


def added(parts: Sequence[Summaries]) -> Summaries:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _sum([part.get(name) for part in parts]) for name in names}


def _sum(terms: Sequence[TensorSummary | None]) -> TensorSummary | None:
    known = [term for term in terms if term is not None]
    if len(known) < 2:
        return known[0] if known else None
    projection: Vector = np.sum([term.projection for term in known], axis=0)
    norm = float(np.sqrt(np.mean(projection**2)))
    if any(math.isnan(term.norm) for term in known):
        norm = math.nan
    return TensorSummary(projection, norm, elements=known[0].elements, dtype=known[0].dtype)


def pooled(distances: Sequence[float], summaries: Summaries) -> float:
    total = math.sqrt(sum(each.norm**2 for each in summaries.values() if each is not None))
    return math.sqrt(sum(value**2 for value in distances)) / total if total else 0.0


def sketch_difference(one: Sequence[float] | None, other: Sequence[float] | None) -> float:
    """Estimate the relative distance of two tensors from their sketches; 0 if one is missing."""
    if one is None or other is None:
        return 0.0
    first, second = TensorSummary.of(one), TensorSummary.of(other)
    away = distance(first, second)
    return away if away in (0.0, math.inf) else away / max(first.norm, second.norm)


def finite_projection(sketch: Sequence[float] | None) -> Vector | None:
    if sketch is None or not np.isfinite(sketch).all():
        return None
    return np.array(sketch[:-1])


@dataclass(frozen=True, slots=True)
class Fit:
    """A vector as a linear combination of other vectors."""

    factors: list[float]
    residual: float


def fit(columns: Sequence[Vector], target: Vector) -> Fit | None:
    if not columns:
        return None
    matrix = np.stack(columns, axis=1)
    norms, size = np.linalg.norm(matrix, axis=0), float(np.linalg.norm(target))
    if not (size and np.isfinite(size) and np.isfinite(norms).all() and norms.any()):
        return None
    kept = norms > 1e-12 * norms.max()
    scaled = matrix[:, kept] / norms[kept]
    if np.linalg.cond(scaled) > MOST_CONDITION:
        return None
    factors = np.zeros(len(columns))
    factors[kept] = np.linalg.lstsq(scaled, target, rcond=None)[0] / norms[kept]
    residual = float(np.linalg.norm(target - matrix @ factors)) / size
    return Fit([float(each) for each in factors], residual)


def exact_factors(columns: Sequence[Vector], target: Vector) -> list[float] | None:
    if len(columns) >= len(target) or not all(map(np.any, columns)):
        return None
    fitted = fit(columns, target)
    return None if fitted is None or fitted.residual > EXACT else fitted.factors


def exact_ratio(base: Vector, value: Vector) -> float | None:
    square = float(base @ base)
    if not square or not np.all(np.isfinite(value)) or not np.any(value):
        return None
    factor = float(base @ value) / square
    exact = np.linalg.norm(value - factor * base) <= EXACT * np.linalg.norm(value)
    return factor if exact else None
