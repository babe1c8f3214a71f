"""Findings of an audit: the cause, the evidence, the line of the user's script, and the remedy.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from lockstep.audit.remedies import CAUSES


class Cause(Enum):
    """The faults that an audit can name. The value is the name in JSON, and the key of its texts in
    `remedies`."""

    SAME_SAMPLES = "same_samples"
    SAME_ORDER = "same_order"
    SAMPLES_REPEATED = "samples_repeated"
    SAMPLES_MISSING = "samples_missing"
    EVALUATION_REPEATS = "evaluation_repeats"
    DATASETS_DIFFER = "datasets_differ"
    NOT_REDUCED = "not_reduced"
    WRONG_SCALE = "wrong_scale"
    REDUCED_EVERY_MICROBATCH = "reduced_every_microbatch"
    UNUSED_PARAMETER = "unused_parameter"
    LOCAL_CLIPPING = "local_clipping"
    CLIPPED_SCALED = "clipped_scaled"
    STALE_GRADIENTS = "stale_gradients"
    MEAN_OF_MEANS = "mean_of_means"
    INITIAL_VALUES_DIFFER = "initial_values_differ"
    REPLICAS_DRIFT = "replicas_drift"
    BUFFERS_DIFFER = "buffers_differ"
    OPTIMIZER_STATE_DIFFERS = "optimizer_state_differs"
    OPTIMIZER_NEEDS_WHOLE_TENSORS = "optimizer_needs_whole_tensors"
    NOT_TRAINED = "not_trained"
    NOT_FINITE = "not_finite"
    SAME_RANDOM_NUMBERS = "same_random_numbers"
    SAME_AUGMENTATION = "same_augmentation"
    SEED_RESET = "seed_reset"
    SCHEDULE_SPEED = "schedule_speed"
    SCHEDULE_ON_SKIPPED_STEP = "schedule_on_skipped_step"
    LEARNING_RATES_DIFFER = "learning_rates_differ"
    COLLECTIVE_MISMATCH = "collective_mismatch"
    UNEVEN_INPUTS = "uneven_inputs"
    RANK_LEFT = "rank_left"
    HANG = "hang"
    EVALUATION_IN_TRAIN_MODE = "evaluation_in_train_mode"
    TRAINING_IN_EVAL_MODE = "training_in_eval_mode"
    SAVED_BY_EVERY_RANK = "saved_by_every_rank"
    RESUME_DATA = "resume_data"
    RESUME_RANDOM = "resume_random"
    RESUME_SCHEDULE = "resume_schedule"
    RESUME_OPTIMIZER = "resume_optimizer"
    RESUME_MODEL = "resume_model"
    DEPENDS_ON_PROCESSES = "depends_on_processes"


class Area(Enum):
    """The things that an audit looks at: a row of the report each, also where all is right."""

    SAMPLES = "samples"
    GRADIENTS = "gradients"
    LOSS = "weights of the loss"
    REPLICAS = "replicas"
    RANDOM = "random numbers"
    SCHEDULE = "learning rate"
    COLLECTIVES = "collectives"
    MODE = "training and evaluation mode"
    FILES = "files"
    RESUME = "resume"
    COMPARE = "number of processes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault."""

    cause: Cause
    area: Area
    evidence: str
    """The facts that were seen, with their numbers, ranks and samples."""
    line: str = ""
    """File and line of the user's script, as `train.py:12`. Empty if no line of it is concerned."""
    step: int | None = None
    """The first optimizer step at which it was seen, from 0."""
    names: Sequence[str] = ()
    """The parameters, buffers or files concerned."""

    @property
    def title(self) -> str:
        return CAUSES[self.cause.value].title

    @property
    def law(self) -> str:
        return CAUSES[self.cause.value].law

    @property
    def remedy(self) -> str:
        return CAUSES[self.cause.value].remedy

    def as_json(self) -> dict[str, Any]:
        row = asdict(self) | {
            "cause": self.cause.value,
            "area": self.area.value,
            "names": list(self.names),
        }
        return row | {"title": self.title, "law": self.law, "remedy": self.remedy}


@dataclass(kw_only=True, slots=True)
class Audit:
    """The result of an audit."""

    script: str
    processes: int
    steps: int
    """Optimizer steps that every rank took."""
    findings: list[Finding] = field(default_factory=list)
    right: dict[Area, str] = field(default_factory=dict)
    """Areas in which all that was seen is right, and what was seen."""
    unseen: dict[Area, list[str]] = field(default_factory=dict)
    """Areas of which something could not be seen, and why."""
    notes: list[str] = field(default_factory=list)
    error: str = ""
    """Last lines of a script that failed; empty if it did not."""
    status: int = 0
    """Exit status of the script. 0 also if the audit ended it after the requested steps."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.findings

    @property
    def extent(self) -> str:
        """The processes and steps that were looked at."""
        processes = _count(self.processes, "process", "processes")
        return f"{processes}, {_count(self.steps, 'step', 'steps')}"

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        count = len(self.findings)
        found = _count(count, "finding", "findings") if count else "nothing found"
        return f"{found}; the script failed" if self.error else found

    def as_json(self) -> dict[str, Any]:
        return {
            "script": self.script,
            "passed": self.passed,
            "processes": self.processes,
            "steps": self.steps,
            "findings": [each.as_json() for each in self.findings],
            "right": {area.value: text for area, text in self.right.items()},
            "unseen": {area.value: texts for area, texts in self.unseen.items()},
            "notes": self.notes,
            "error": self.error,
            "exit_status": self.status,
            "seconds": self.seconds,
        }


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
