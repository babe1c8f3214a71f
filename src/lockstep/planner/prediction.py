"""The request of `lockstep plan` to the process of the user's script, and the predictions that the
process returns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from lockstep.plan import Plan
from lockstep.planner.trace import Peak
from lockstep.scripts.request import ScriptRequest

MARGIN = 0.08
"""Fraction of a device's memory that must stay free for fragmentation and libraries."""
SKEW = 2.0
"""Assumed load of the busiest rank's experts, in multiples of the mean load."""
OUTCOMES, ENDED = "outcomes.jsonl", "ended.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest(ScriptRequest):
    answered_by: ClassVar[str] = "lockstep.planner.worker"
    calls: str = "train"
    target: str
    plans: tuple[str, ...]
    memory_bytes: int | None
    slots: int
    folder: str
    is_here: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The message that a search over plans sends at its end. A script that fails does not send the
    message."""

    devices: int | None = None
    why: str | None = None

    def write(self, folder: Path) -> None:
        (folder / ENDED).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Ended | None:
        path = folder / ENDED
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skewed:
    """A step in which the experts of one rank get `SKEW` times the mean number of tokens."""

    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    plan: str
    microbatch: int
    microbatches: int
    seconds: float
    by_limit: Mapping[str, float]
    seconds_with_twice: Mapping[str, float]
    """Step time on a device with twice the FLOP/s (`arithmetic`), memory bandwidth (`memory`) or
    network bandwidth (`network`)."""
    samples: int
    tokens: float | None
    """Sum of `Recipe.weight` over a step's samples; None without `Recipe.weight`."""
    steps: int | None
    """Total number of training steps; None if the length of the data is unknown."""
    memory: Sequence[Peak]
    capacity_bytes: int | None
    overhead_bytes: int = 0
    """Device memory of CUDA, cuBLAS and NCCL."""
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    skewed: Skewed | None = None
    """The step with unbalanced expert routing; None without expert parallelism."""
    note: str | None = None

    @property
    def peak(self) -> Peak:
        return max(self.memory, key=lambda each: each.bytes)

    @property
    def needed_bytes(self) -> int:
        return self.needed_for(self.peak.bytes)

    def needed_for(self, peak_bytes: int) -> int:
        """Return the device memory that a step needs: `peak_bytes` of tensors, the memory of
        libraries, and `MARGIN`."""
        return math.ceil((peak_bytes + self.overhead_bytes) / (1 - MARGIN))

    @property
    def fits(self) -> bool:
        return self.capacity_bytes is None or self.needed_bytes <= self.capacity_bytes

    @property
    def limit(self) -> str:
        return max(self.by_limit, key=lambda name: self.by_limit[name])

    def as_json(self) -> dict[str, Any]:
        derived = {"fits": self.fits, "limit": self.limit, "needed_bytes": self.needed_bytes}
        return {**asdict(self), **derived}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Prediction:
        derived = ("fits", "limit", "needed_bytes")
        given = {name: value for name, value in told.items() if name not in derived}
        memory = [Peak(**each) for each in told["memory"]]
        skewed = told["skewed"] and Skewed(**told["skewed"])
        return cls(**{**given, "memory": memory, "skewed": skewed})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    plan: str
    prediction: Prediction | None = None
    reason: str | None = None
    is_refused: bool = False
    """True if the recipe cannot run under the plan, even with unlimited device memory."""

    @property
    def seconds(self) -> float:
        if self.prediction is None or self.reason is not None:
            return math.inf
        return self.prediction.seconds

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "prediction": self.prediction and self.prediction.as_json()}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Outcome:
        prediction = told["prediction"] and Prediction.from_json(told["prediction"])
        return cls(**{**told, "prediction": prediction})


def text(plan: Plan) -> str:
    axes = [f"{name}={size}" for name, size in plan.axis_sizes.items() if size != 1]
    rest = [part for part in str(plan).split(",") if part.split("=")[0] not in plan.axis_sizes]
    options = [part for part in rest if part != "numerics=fast"]
    return ",".join([*(axes or ["replicate=1"]), *options])
