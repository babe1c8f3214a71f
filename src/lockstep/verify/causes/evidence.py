"""The evidence for a cause: two traces, the first step at which they differ, and linear fits of
tensors by their projections.

Projections are linear, so a sum of tensors has the sum of their projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.verify.compare import Difference
from lockstep.verify.trace_reader import MicrobatchTrace, RankTrace, Summaries, Trace, Vector

FIT_TOLERANCE = 1e-3
"""Relative residual below which a fit is exact. Rounding is far below it, a wrong explanation far
above."""
PROJECTIONS = 8
"""Numbers in a tensor's projection."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The first step at which something differs, and its differences in the order of the
    computation."""

    reference: Trace
    plan: Trace
    differences: Sequence[Difference]

    @property
    def first(self) -> Difference:
        return self.differences[0]

    @property
    def step(self) -> int:
        return self.first.step

    @property
    def expected_microbatches(self) -> dict[int, MicrobatchTrace]:
        """The reference's microbatches of the step, by index."""
        return {m.index: m for m in self.reference.microbatches_of(self.step)}

    @property
    def microbatches(self) -> list[MicrobatchTrace]:
        """The plan's microbatches of the step, on all ranks."""
        return self.plan.microbatches_of(self.step)

    def of(self, *checks: str) -> list[Difference]:
        return [difference for difference in self.differences if difference.check in checks]

    def names(self, *checks: str) -> list[str]:
        """Return the names of the tensors that these checks found to differ, each once."""
        return list(dict.fromkeys(difference.name for difference in self.of(*checks)))


def listed(items: Sequence[object]) -> str:
    """Return the items as in a sentence: "1, 2 and 3"."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def wrong_factor(factor: float, world_size: int, what: str) -> str:
    """Return the cause for something that is `factor` times what it should be."""
    text = f"a wrong factor: {what} is {factor:.4g} times what it should be"
    for power, words in (
        (-1, "divided by the world size once too often"),
        (1, "multiplied by the world size"),
    ):
        if (
            abs(factor - float(world_size) ** power) < FIT_TOLERANCE * max(1.0, factor)
            and world_size > 1
        ):
            return f"{text}, {words}"
    return text


def stacked(summaries: Summaries, names: list[str]) -> Vector:
    """Return the projections of these tensors, one after another; zeros for a tensor that does not
    exist."""
    found = [summaries.get(name) for name in names]
    if not found:
        return np.zeros(0)
    return np.concatenate(
        [np.zeros(PROJECTIONS) if summary is None else summary.projection for summary in found]
    )


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
    return (
        factor
        if np.linalg.norm(value - factor * base) <= FIT_TOLERANCE * np.linalg.norm(value)
        else None
    )


def least_squares(columns: list[Vector], target: Vector) -> list[float] | None:
    """Return the factors with which the columns add up to the target; None if no factors do."""
    if not columns or len(columns) >= len(target) or not np.all(np.isfinite(target)):
        return None
    matrix = np.stack(columns, axis=1)
    solution, _, rank, _ = np.linalg.lstsq(matrix, target, rcond=None)
    if rank < len(columns) or np.linalg.norm(
        matrix @ solution - target
    ) > FIT_TOLERANCE * np.linalg.norm(target):
        return None
    return [float(value) for value in solution]
