"""Linear fits of tensors by their projections.

Projections are linear, so a sum of tensors has the sum of their projections.
"""

from __future__ import annotations

import numpy as np

from lockstep.verify.trace_reader import RankTrace, Summaries, Vector

FIT_TOLERANCE = 1e-3
"""Relative residual below which a fit is exact. Rounding is far below it, a wrong explanation far above."""
PROJECTIONS = 8
"""Numbers in a tensor's projection."""


def stacked(summaries: Summaries, names: list[str]) -> Vector:
    """Return the projections of these tensors, one after another; zeros for a tensor that does not exist."""
    found = [summaries.get(name) for name in names]
    if not found:
        return np.zeros(0)
    return np.concatenate([np.zeros(PROJECTIONS) if summary is None else summary.projection for summary in found])


def update(rank: RankTrace, step: int, names: list[str]) -> Vector:
    """Return what the step added to these parameters."""
    before = rank.steps[step - 1].tensors["parameters"] if step else rank.initial["parameters"]
    added: Vector = stacked(rank.steps[step].tensors["parameters"], names) - stacked(before, names)
    return added


def ratio(base: Vector, value: Vector) -> float | None:
    """Return f if value = f · base; else None."""
    square = float(base @ base)
    if not square or not np.all(np.isfinite(value)) or not np.any(value):
        return None
    factor = float(base @ value) / square
    return factor if np.linalg.norm(value - factor * base) <= FIT_TOLERANCE * np.linalg.norm(value) else None


def least_squares(columns: list[Vector], target: Vector) -> list[float] | None:
    """Return the factors with which the columns add up to the target; None if no factors do."""
    if not columns or len(columns) >= len(target) or not np.all(np.isfinite(target)):
        return None
    matrix = np.stack(columns, axis=1)
    solution, _, rank, _ = np.linalg.lstsq(matrix, target, rcond=None)
    if rank < len(columns) or np.linalg.norm(matrix @ solution - target) > FIT_TOLERANCE * np.linalg.norm(target):
        return None
    return [float(value) for value in solution]
