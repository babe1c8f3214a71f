"""Distances between the tensors of two traces. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lockstep.verify.trace_reader import Summaries, TensorSummary, Trace

SummaryPair = tuple[TensorSummary | None, TensorSummary | None]


def distance(one: TensorSummary | None, other: TensorSummary | None) -> float:
    """Return the L2 distance between two tensors, estimated from their projections.

    Zero if the bits are the same, or if neither tensor is finite (a step that overflowed and was skipped).
    Infinite if one of them is missing, or if their numbers of elements differ.
    """
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if one.sha256 == other.sha256:
        return 0.0
    if one.elements != other.elements:
        return math.inf
    if math.isnan(one.norm) and math.isnan(other.norm):
        return 0.0
    estimate = float(np.sqrt(np.mean((one.projection - other.projection) ** 2)))
    return estimate if math.isfinite(estimate) else math.inf


def tensor_distance(one: Trace, other: Trace, step: int, kind: str, name: str, summaries: SummaryPair) -> float:
    """Return `distance(*summaries)`, computed from the tensors themselves if both traces have them."""
    estimate = distance(*summaries)
    if estimate == 0.0 or math.isinf(estimate):
        return estimate
    x, y = one.tensor(step, kind, name), other.tensor(step, kind, name)
    if x is None or y is None or x.shape != y.shape:
        return estimate
    return float(np.linalg.norm(x - y))


def pooled(distances: Sequence[float], summaries: Summaries) -> float:
    """Return the distance of all tensors together, relative to the norm of all tensors in `summaries`."""
    total = math.sqrt(sum(summary.norm**2 for summary in summaries.values() if summary is not None))
    return math.sqrt(sum(value**2 for value in distances)) / total if total else 0.0
