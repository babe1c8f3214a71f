"""A replayed step: its microbatches, and its comparison with the run's step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.logging.run_files import CHECKSUM
from lockstep.replay.not_finite import NotFinite, first_not_finite

ROUNDING = 0.01
"""Relative difference of the loss or gradient norm that rounding may cause."""
STEP = "step.json"


def microbatch_file(rank: int) -> str:
    return f"microbatches-{rank}.json"


def block_of(name: str) -> str:
    """Return the block of a parameter: the parameter's name up to the first number, or else the
    name of its module.

    >>> block_of("transformer.h.3.attn.weight"), block_of("head.weight"), block_of("scale")
    ('transformer.h.3', 'head', 'scale')
    """
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    if number is not None:
        return ".".join(parts[: number + 1])
    return ".".join(parts[:-1]) or name


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedMicrobatch:
    """A microbatch in a replayed step, with its samples, its loss and the size of its gradient."""

    microbatch: int
    samples: Sequence[int | str]
    model: int = 0
    total: float | None = None
    """The loss that the script returned."""
    part: float | None = None
    """The term that the microbatch adds to the step's loss."""
    squares: Mapping[str, float] | None = None
    """Squared gradient norm of the microbatch, by block of the model. None under a plan that
    divides the model or sequences."""

    by_sample: Sequence[float] | None = None
    """Squared norm of the gradient that flows through each sample's rows of the model's output.
    None if the norms were not requested or cannot be measured."""
    places: Sequence[NotFinite] = ()
    """Computations whose result is not finite, in order. Empty if the plan divides or compiles the
    model."""

    @property
    def norm(self) -> float | None:
        return None if self.squares is None else math.sqrt(math.fsum(self.squares.values()))

    @property
    def name(self) -> str:
        return f"microbatch {self.microbatch}" + (f" of model {self.model}" if self.model else "")

    @property
    def is_finite(self) -> bool:
        return all(each is None or math.isfinite(each) for each in (self.total, self.norm))


def joined_parts(parts: Iterable[ReplayedMicrobatch]) -> list[ReplayedMicrobatch]:
    """Add the losses of ranks that computed parts of the same microbatch."""
    by_index: dict[tuple[int, int], ReplayedMicrobatch] = {}
    for each in parts:
        place = each.model, each.microbatch
        if (other := by_index.get(place)) is not None:
            each = replace(
                each,
                total=_sum(each.total, other.total),
                part=_sum(each.part, other.part),
                places=(*other.places, *each.places),
            )
        by_index[place] = each
    return [by_index[place] for place in sorted(by_index)]


def _sum(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else one + other


@dataclass(frozen=True, kw_only=True, slots=True)
class StepComparison:
    """A logged step of the run, compared with the same step in the replay."""

    step: int
    checksum: bool | None
    """True if the gradients have the same bits. None if the run has no checksum for the step."""
    loss: tuple[float, float]
    norm: tuple[float, float]

    @property
    def difference(self) -> float:
        """The larger relative difference of the loss and of the gradient norm."""
        return max(_relative(*self.loss), _relative(*self.norm))


def _relative(before: float, now: float) -> float:
    if before == now or not (math.isfinite(before) or math.isfinite(now)):
        return 0.0
    if not (math.isfinite(before) and math.isfinite(now)):
        return math.inf
    return abs(now - before) / max(abs(before), abs(now))


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    step: int
    begin: int
    """Number of steps in the checkpoint at which the replay began; 0 without a checkpoint."""
    plan: str
    run_plan: str
    loss: float
    squares: Mapping[str, float]
    """Squared gradient norm of the step, by block, before clipping. Empty if the loss of the step
    is not finite."""
    microbatches: Sequence[ReplayedMicrobatch]
    before: Sequence[Mapping[str, float]] = ()
    on_the_way: Sequence[StepComparison] = ()
    """The logged steps from the checkpoint to the replayed step, except steps that leave out
    samples."""
    without: Sequence[int] = ()
    environment: Sequence[str] = field(default_factory=list)
    """Differences of the recipe, code, machine and versions between the run and the replay."""
    ended_the_run: bool = False

    @property
    def norm(self) -> float | None:
        return math.sqrt(math.fsum(self.squares.values())) if self.squares else None

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and (self.norm is None or math.isfinite(self.norm))

    @property
    def first_not_finite(self) -> list[tuple[ReplayedMicrobatch, NotFinite | None]]:
        places = first_not_finite([(each.is_finite, each.places) for each in self.microbatches])
        return [
            (each, place)
            for each, place in zip(self.microbatches, places, strict=True)
            if not each.is_finite
        ]

    @property
    def is_bitwise(self) -> bool:
        return "numerics=bitwise" in self.run_plan and "numerics=bitwise" in self.plan

    @property
    def first_difference(self) -> StepComparison | None:
        return next((each for each in self.on_the_way if each.checksum is False), None)

    @property
    def first_unlike(self) -> StepComparison | None:
        """The first replayed step that differs from the run. With numerics=bitwise, different bits
        count; otherwise a difference larger than rounding."""
        if self.is_bitwise:
            return self.first_difference
        return next((each for each in self.on_the_way if each.difference > ROUNDING), None)

    @property
    def same_bits(self) -> bool:
        return bool(self.on_the_way) and all(each.checksum for each in self.on_the_way)

    def verdict(self) -> str:
        if self.ended_the_run and not self.without and self.is_finite:
            return (
                "in the run, the loss or the gradient of this step is not finite, and here both are"
            )
        count = len(self.on_the_way)
        if not count and self.ended_the_run and not self.without:
            return "as in the run, the loss or the gradient of this step is not finite"
        if not count:
            return (
                "the run has logged no step on the way, so nothing is compared; more steps are"
                " logged with log_every=1"
            )
        steps = f"{count} logged steps" if count > 1 else "1 logged step"
        if self.same_bits:
            where = "before it" if self.without else "up to here"
            return f"the gradients of {steps} {where} have the bits of the run"
        most = max(each.difference for each in self.on_the_way)
        differs = f"loss and norm differ by at most {most:.1e} (relative)"
        if not self.is_bitwise:
            return (
                f"numerics=fast: only up to rounding is it the step of the run; in {steps}"
                f" {differs}"
            )
        if self.first_difference is None:
            return f"the run has no checksums of {steps}; {differs}"
        return (
            f"from step {self.first_difference.step} on, the gradients have other bits than in the"
            f" run; {differs}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "begin": self.begin,
            "plan": self.plan,
            "run_plan": self.run_plan,
            "without": list(self.without),
            "loss": _finite(self.loss),
            "gradient_norm": _finite(self.norm),
            "blocks": {name: _finite(math.sqrt(value)) for name, value in self.squares.items()},
            "same_bits": self.same_bits if self.is_bitwise else None,
            "verdict": self.verdict(),
            "environment": list(self.environment),
            "ended_the_run": self.ended_the_run,
            "steps": [
                {
                    "step": each.step,
                    "same_bits": each.checksum,
                    "loss": [_finite(value) for value in each.loss],
                    "gradient_norm": [_finite(value) for value in each.norm],
                }
                for each in self.on_the_way
            ],
            "microbatches": [
                {
                    "microbatch": each.microbatch,
                    "model": each.model,
                    "samples": list(each.samples),
                    "loss": _finite(each.total),
                    "part_of_loss": _finite(each.part),
                    "gradient_norm": _finite(each.norm),
                    "blocks": None
                    if each.squares is None
                    else {name: _finite(math.sqrt(at)) for name, at in each.squares.items()},
                }
                for each in self.microbatches
            ],
            "not_finite": [
                {
                    "microbatch": each.microbatch,
                    "model": each.model,
                    "first": None if place is None else place.as_json(),
                }
                for each, place in self.first_not_finite
            ],
        }


def _finite(value: float | None) -> float | str | None:
    """Convert a number that is not finite to text ("inf", "nan"), because JSON has no such
    numbers."""
    return value if value is None or math.isfinite(value) else str(value)


def compared(
    run: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], *, after: int, to: int
) -> list[StepComparison]:
    theirs = {row["step"]: row for row in run if after < row["step"] <= to and "loss" in row}
    comparisons = []
    for row in now:
        if "loss" not in row or (before := theirs.get(row["step"])) is None:
            continue
        sums = before.get(CHECKSUM), row.get(CHECKSUM)
        comparisons.append(
            StepComparison(
                step=row["step"],
                checksum=None if None in sums else sums[0] == sums[1],
                loss=(_number(before, "loss"), _number(row, "loss")),
                norm=(_number(before, "gradient_norm"), _number(row, "gradient_norm")),
            )
        )
    return comparisons


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(row.get("not_finite", {}).get(name, "nan")) if value is None else float(value)
