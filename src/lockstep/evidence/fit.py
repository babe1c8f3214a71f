"""Linear fits of tensors by their projections: which factors turn some tensors into another. Pure.

Projections are linear, so the projection of a sum is the sum of the projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.evidence.tensors import Vector

EXACT = 1e-3
"""Relative residual below which a fit is exact. Rounding is far below it, a wrong explanation far
above."""
MOST_CONDITION = 1e5
"""Condition from which tensors are too alike to be told apart."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A target as a sum of factors times tensors."""

    factors: list[float]
    residual: float
    """Part of the target that is left unexplained."""


def fit(columns: Sequence[Vector], target: Vector) -> Fit | None:
    """Fit the target with the columns. None if they are too alike, or all zero, or not finite."""
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
    """Return the factors with which the columns add up to the target; None if no factors do."""
    if len(columns) >= len(target) or not all(map(np.any, columns)):
        return None
    found = fit(columns, target)
    return found.factors if found is not None and found.residual <= EXACT else None


def exact_ratio(base: Vector, value: Vector) -> float | None:
    """Return f if value = f · base; else None."""
    square = float(base @ base)
    if not square or not np.all(np.isfinite(value)) or not np.any(value):
        return None
    factor = float(base @ value) / square
    exact = np.linalg.norm(value - factor * base) <= EXACT * np.linalg.norm(value)
    return factor if exact else None
