"""The request of `lockstep plan` to the process that runs the user's script, and the predictions
that this process returns in files. Pure."""

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
"""Fraction of a device's memory that is kept free, for fragmentation and libraries."""
SKEW = 2.0
"""Assumed imbalance of expert routing: rows that the experts of the busiest rank get, in multiples
of the mean over the ranks."""
OUTCOMES, ENDED = "outcomes.jsonl", "ended.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest(ScriptRequest):
    answered_by: ClassVar[str] = "lockstep.planner.worker"
    calls: str = "train"
    target: str
    """The devices, such as `64 x H100`."""
    plans: tuple[str, ...]
    """The plans; empty: search for plans."""
    memory_bytes: int | None
    slots: int
    """Number of plans that are predicted at the same time."""
    folder: str
    is_here: bool
    """True if plans are for this machine, so that the data loader's speed is measured too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The message that a search over plans has ended, written as a JSON file. If the file is
    missing, the script has failed."""

    devices: int | None = None
    """Number of devices that the plans use, if they cannot use all."""
    why: str | None = None
    """The reason why plans cannot use all devices, and what to change."""

    def write(self, folder: Path) -> None:
        (folder / ENDED).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Ended | None:
        """Read the file that `write` wrote to this folder; None if the search has not ended."""
        path = folder / ENDED
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skewed:
    """The prediction of a step with unbalanced routing, in which the experts of one rank get `SKEW`
    times the mean number of rows. All other predictions assume that the router chooses all experts
    equally often."""

    seconds: float
    peak_bytes: int
    """Peak memory of the rank with the most rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    plan: str
    microbatch: int
    """Number of samples in a microbatch."""
    microbatches: int
    """Number of microbatches on the rank with the most."""
    seconds: float
    by_limit: Mapping[str, float]
    """Part of the step (`matmul`, `memory`, `launches`, a mesh axis, …) -> the seconds that the
    slowest rank spends on it."""
    seconds_with_twice: Mapping[str, float]
    """Seconds of a step if `arithmetic`, `memory` or `network` were twice as fast."""
    samples: int
    """Number of samples in a step."""
    tokens: float | None
    """Number of tokens in a step: the sum of `Recipe.weight` over its samples; None without
    `Recipe.weight`."""
    steps: int | None
    """Number of steps of the training; None for epochs of data without a length."""
    memory: Sequence[Peak]
    """Peak memory of one rank of each pipeline stage; without a pipeline, of one rank."""
    capacity_bytes: int | None
    """Usable memory of a device; None: unlimited."""
    overhead_bytes: int = 0
    """Device memory that CUDA, cuBLAS, NCCL and the like use."""
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes that rank 0 sends in a step, by collective and mesh axis."""
    skewed: Skewed | None = None
    """The step with unbalanced expert routing; None if the plan has no expert parallelism."""
    note: str | None = None
    """Note on how the step was traced."""

    @property
    def peak(self) -> Peak:
        return max(self.memory, key=lambda each: each.bytes)

    @property
    def needed_bytes(self) -> int:
        """Memory that a device must have to run this plan, in bytes."""
        return self.needed_for(self.peak.bytes)

    def needed_for(self, peak_bytes: int) -> int:
        """Return the memory that a device must have if tensors take `peak_bytes`: with the device's
        libraries, and the reserve for fragmentation."""
        return math.ceil((peak_bytes + self.overhead_bytes) / (1 - MARGIN))

    @property
    def fits(self) -> bool:
        return self.capacity_bytes is None or self.needed_bytes <= self.capacity_bytes

    @property
    def limit(self) -> str:
        """Name of what takes the largest part of the step's time."""
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
    """A plan with the prediction of its step, and the reason if it cannot run or does not fit."""

    plan: str
    prediction: Prediction | None = None
    reason: str | None = None
    """The reason why the plan cannot run or does not fit; None if it does."""
    is_refused: bool = False
    """True if the plan cannot run even with unlimited memory."""

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinite if it cannot run."""
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
    """Return a plan as text, in the form of `--plans`."""
    axes = [f"{name}={size}" for name, size in plan.axis_sizes.items() if size != 1]
    rest = [part for part in str(plan).split(",") if part.split("=")[0] not in plan.axis_sizes]
    options = [part for part in rest if part != "numerics=fast"]
    return ",".join([*(axes or ["replicate=1"]), *options])
