"""A prediction of a plan, and its days, cost and goodput. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.plan import Plan

MARGIN = 0.08
"""Part of a device's memory that stays free: fragmentation, and libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeak:
    """The most memory that a rank needs."""

    rank: int
    bytes: int
    by_cause: Mapping[str, int]
    moment: str
    """The place in the step, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    plan: str
    microbatch: int
    """Samples of a microbatch."""
    microbatches: int
    """Microbatches of the rank with the most."""
    seconds: float
    by_limit: Mapping[str, float]
    """Seconds of the slowest rank by what they go to."""
    seconds_with_twice: Mapping[str, float]
    """Seconds of a step with twice the `arithmetic`, `memory` or `network`."""
    samples: int
    """Samples of a step."""
    tokens: float | None
    """Sum of a step's weights; None without `Recipe.weight`."""
    steps: int | None
    """None for epochs of data without a length."""
    memory: Sequence[RankPeak]
    """One for each kind of rank."""
    capacity_bytes: int | None
    """Usable memory of a device; None: nobody asks."""
    overhead_bytes: int = 0
    """Memory of the device's libraries."""
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes that rank 0 sends, by collective and axis."""
    note: str | None = None
    """Note on how the step was traced."""

    @property
    def peak(self) -> RankPeak:
        return max(self.memory, key=lambda each: each.bytes)

    @property
    def needed_bytes(self) -> int:
        """Memory that a device must have."""
        return math.ceil((self.peak.bytes + self.overhead_bytes) / (1 - MARGIN))

    @property
    def fits(self) -> bool:
        return self.capacity_bytes is None or self.needed_bytes <= self.capacity_bytes

    @property
    def limit(self) -> str:
        """The largest part of the step, in a word."""
        return max(self.by_limit, key=lambda name: self.by_limit[name])

    def as_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan,
            "fits": self.fits,
            "seconds": self.seconds,
            "limit": self.limit,
            "by_limit": dict(self.by_limit),
            "seconds_with_twice": dict(self.seconds_with_twice),
            "samples": self.samples,
            "tokens": self.tokens,
            "steps": self.steps,
            "microbatch": self.microbatch,
            "microbatches": self.microbatches,
            "needed_bytes": self.needed_bytes,
            "capacity_bytes": self.capacity_bytes,
            "overhead_bytes": self.overhead_bytes,
            "memory": [
                {
                    "rank": each.rank,
                    "bytes": each.bytes,
                    "by_cause": dict(each.by_cause),
                    "moment": each.moment,
                }
                for each in self.memory
            ],
            "sent_bytes": dict(self.sent_bytes),
            "note": self.note,
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Prediction:
        """Invert `as_json`."""
        derived = ("fits", "limit", "needed_bytes", "memory")
        return cls(
            **{name: value for name, value in told.items() if name not in derived},
            memory=[RankPeak(**each) for each in told["memory"]],
        )


def text(plan: Plan) -> str:
    """Return a plan as a user writes it."""
    axes = [f"{name}={size}" for name, size in plan.axis_sizes.items() if size != 1]
    rest = [part for part in str(plan).split(",") if part.split("=")[0] not in plan.axis_sizes]
    return ",".join(
        [*(axes or ["replicate=1"]), *(part for part in rest if part != "numerics=fast")]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    days: float
    device_hours: float
    cost: float | None
    goodput: float
    """Part of the time in steps that are not lost again."""


def budget(
    seconds: float,
    *,
    steps: float,
    devices: int,
    price_per_hour: float | None,
    hours_between_failures: float,
    save_seconds: float,
    restart_seconds: float,
) -> Budget:
    """Return a training's budget. `hours_between_failures`: a device's. Checkpoints are optimal
    (Young, "A first order approximation to the optimum checkpoint interval", 1974)."""
    rate = devices / (hours_between_failures * 3600)
    # At the interval √(2 × save_seconds / rate), saving takes as long as the steps that a failure
    # loses.
    goodput = max(0.0, 1 - math.sqrt(2 * save_seconds * rate) - rate * restart_seconds)
    total = math.inf if goodput == 0 else seconds * steps / goodput
    hours = total * devices / 3600
    return Budget(
        days=total / 86400,
        device_hours=hours,
        cost=None if price_per_hour is None else hours * price_per_hour,
        goodput=goodput,
    )
