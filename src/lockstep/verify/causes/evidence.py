"""The evidence for a cause: two traces, and the first step in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.base.errors import first_few
from lockstep.base.words import enumerated
from lockstep.evidence.tensors import COMPUTE_EPS, EXACT, PROJECTIONS, Summaries, Vector
from lockstep.evidence.trace import MicrobatchTrace, RankTrace, Trace
from lockstep.verify.compare import Difference

MOST_NAMED = 4
Wrong = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The traces of the reference run and of a plan's run, and the differences in the first step
    that differs."""

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
        return {m.index: m for m in self.reference.microbatches_of(self.step)}

    @property
    def microbatches(self) -> list[MicrobatchTrace]:
        return self.plan.microbatches_of(self.step)

    @property
    def token_tolerance(self) -> float:
        return float(COMPUTE_EPS[self.reference.metadata.get("precision", "fp32")] ** 0.5)

    def tensors(self, kind: str, name: str) -> tuple[Vector, Vector] | None:
        expected, actual = (
            trace.tensor(self.step, kind, name) for trace in (self.reference, self.plan)
        )
        if expected is None or actual is None or expected.shape != actual.shape:
            return None
        return expected, actual

    def of(self, *checks: str) -> list[Difference]:
        return [difference for difference in self.differences if difference.check in checks]

    def names(self, *checks: str) -> list[str]:
        return list(dict.fromkeys(difference.name for difference in self.of(*checks)))


def differ(expected: Vector, found: Vector, tolerance: float) -> Wrong:
    typical = float(np.sqrt(np.mean(expected**2)))
    away = np.sqrt(np.mean((found - expected) ** 2, axis=-1))
    wrong: Wrong = ~(away <= tolerance * typical)
    return wrong


def listed_places(places: Sequence[int]) -> str:
    return enumerated(places) if len(places) <= MOST_NAMED else first_few(places)


def wrong_factor(factor: float, evidence: Evidence, what: str) -> str:
    text = f"a wrong factor: {what} is {factor:.4g} times what it should be"
    sizes = {
        len(m.together): "the number of ranks that share out a sequence"
        for m in evidence.microbatches
        if m.together
    }
    sizes[evidence.plan.world_size] = "the world size"
    for size, name in sizes.items():
        said = {-1: f"divided by {name} once too often", 1: f"multiplied by {name}"}
        for power, words in said.items():
            if abs(factor - float(size) ** power) < EXACT * max(1.0, factor) and size > 1:
                return f"{text}, {words}"
    return text


def stacked(summaries: Summaries, names: list[str]) -> Vector:
    tensors = [summaries.get(name) for name in names]
    if not tensors:
        return np.zeros(0)
    return np.concatenate(
        [np.zeros(PROJECTIONS) if summary is None else summary.projection for summary in tensors]
    )


def update(rank: RankTrace, step: int, names: list[str]) -> Vector:
    before = rank.steps[step - 1].tensors["parameters"] if step else rank.initial["parameters"]
    added: Vector = stacked(rank.steps[step].tensors["parameters"], names) - stacked(before, names)
    return added
