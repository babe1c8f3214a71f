"""Settings of checkpoints: when a run saves, which checkpoints it keeps, where it keeps them, and
how it resumes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

from lockstep.base.errors import CheckpointError, PlanError
from lockstep.base.field_docs import with_field_docs
from lockstep.base.units import parse_duration

T = TypeVar("T")
Resume = Literal["auto", "never", "must"]
"""`auto` resumes an unfinished run in the run directory, or starts a new run. `never` refuses to
resume an unfinished run. `must` refuses to start a new run."""

OutOfMemory = Literal["retry", "halve", "same-bits", "stop"]
"""The change of the plan after an out-of-memory error. `halve` takes the next fallback among
checkpointing, offload and microbatch_splits. `same-bits` takes the next fallback that does not
change bits. `retry` is `same-bits` under bitwise numerics, else `halve`. `stop` keeps the plan, and
the run ends."""


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """When a run saves, and which checkpoints it keeps. Raises `CheckpointError` for an invalid
    value."""

    every: int | str = "10m"
    """Steps between checkpoints, a time between them ("90s", "10m", "1h30m"), or "epoch" (after
    each epoch)."""
    last: int = 2
    """Number of newest checkpoints to keep, at least 1."""
    keep_every: int | None = None
    """Checkpoints at multiples of this number of steps are never deleted. With None, no checkpoint
    is kept because of its step."""
    keep: Literal["log"] | None = None
    """`log` keeps older checkpoints at distances that double with their age, about 2 log2(n) of n,
    so that `lockstep replay` can begin near any old step. With None, no checkpoint is kept because
    of its age."""
    best: str | None = None
    """Name of an evaluation metric. The run is saved at each new best value, independently of
    `every`. The checkpoint with the best value is kept until the metric improves. With None, no
    checkpoint is kept for a metric."""
    mode: Literal["min", "max"] = "min"
    """`min` if a smaller value of the metric is better, `max` if a larger value is better."""
    folder: str | None = None
    """Folder of the checkpoints, or the URL of an fsspec file system (s3://bucket/run). None for
    the run directory."""
    failures: int = 3
    """Number of consecutive failed saves after which the run ends with an error."""

    def __post_init__(self) -> None:
        for name, least in (
            ("last", 1),
            ("failures", 1),
            *((("keep_every", 1),) if self.keep_every is not None else ()),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise CheckpointError(
                    f"Saving({name}={value!r}); it must be a whole number of at least {least}"
                )
        if self.mode not in ("min", "max"):
            raise CheckpointError(
                f"Saving(mode={self.mode!r}); it must be 'min' if a smaller value is better, else"
                " 'max'"
            )
        if self.keep not in (None, "log"):
            raise CheckpointError(
                f"Saving(keep={self.keep!r}); it must be 'log' to keep old checkpoints at distances"
                " that double with their age, or None"
            )
        if not self.each_epoch and not (
            parse_duration(self.every)
            if isinstance(self.every, str)
            else type(self.every) is int and self.every >= 1
        ):
            raise CheckpointError(
                f"Saving(every={self.every!r}); it must be a number of steps, at least 1, a time"
                " such as '10m', or 'epoch'"
            )
        if self.folder == "":
            raise CheckpointError(
                "Saving(folder=''); it names a folder or a URL; leave it out for `checkpoints` in"
                " the run directory"
            )

    def improves(self, value: float, before: float | None) -> bool:
        """True if `value` of the metric is better than the best previous value, `before`. A NaN
        `value` is never better. `before` is None if there is no previous value."""
        if math.isnan(value):
            return False
        return before is None or (value < before if self.mode == "min" else value > before)

    def best_of(self, values: Mapping[T, float]) -> T | None:
        """Return the first key with the best value. Return None if all values are NaN."""
        best: T | None = None
        for key, value in values.items():
            if self.improves(value, None if best is None else values[best]):
                best = key
        return best

    @property
    def each_epoch(self) -> bool:
        """True if the run is saved after each epoch."""
        return self.every == "epoch"

    @property
    def steps(self) -> int | None:
        """Number of steps between saves. None if the interval is in seconds or epochs."""
        return None if isinstance(self.every, str) else self.every

    @property
    def seconds(self) -> float | None:
        """Seconds from one save to the next. None if the interval is in steps or epochs."""
        return (
            parse_duration(self.every)
            if isinstance(self.every, str) and not self.each_epoch
            else None
        )


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best evaluation of a run by `Saving.best`. The earliest evaluation wins among equal
    values."""

    metric: str
    """Name of the metric, as in `Saving.best`."""
    value: float
    """Value of the metric."""
    step: int
    """Optimizer steps done."""
    checkpoint: str | None
    """Name of the checkpoint of this evaluation. None if the best model is the final model,
    `model.safetensors` in the run directory."""
    weights: str
    """Path or URL of the weights of this evaluation, for `ls.evaluate`, `Recipe.weights` and
    `ls.load`."""


def interval(text: str, name: str) -> int | str:
    """Parse a number of steps ("500"), a time ("10m") or "epoch". `name` is the setting's name, for
    the error."""
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    if text != "epoch" and not parse_duration(text):
        raise CheckpointError(
            f"{name}={text!r}; it must be a number of steps, at least 1, a time with its unit, or"
            " epoch: 500, 90s, 10m, 1h30m, epoch"
        )
    return text


def check_resume(value: Any, name: str) -> Resume:
    if value not in get_args(Resume):
        raise CheckpointError(f"{name}={value!r}; it must be one of {', '.join(get_args(Resume))}")
    resume: Resume = value
    return resume


def check_allow_change(value: Collection[str]) -> frozenset[str]:
    """Refuse a single str, whose letters would be taken for names of fields."""
    if isinstance(value, str):
        raise CheckpointError(
            f"allow_change={value!r}; it must be a list of fields of the recipe:"
            f" allow_change={value.split(',')!r}"
        )
    return frozenset(value)


def check_out_of_memory(value: str, name: str) -> OutOfMemory:
    if value not in get_args(OutOfMemory):
        raise PlanError(f"{name}={value!r}; it must be one of {', '.join(get_args(OutOfMemory))}")
    return cast(OutOfMemory, value)


def differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, allow_change: frozenset[str] = frozenset()
) -> list[str]:
    """Return the differences between two recipes, as texts such as `steps: 100, now 200`. Nested
    fields have paths such as evaluation.every."""
    lines = []
    for name in sorted(saved.keys() | now.keys()):
        if name in allow_change:
            continue
        before, after = saved.get(name), now.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            inner = frozenset(
                each.removeprefix(f"{name}.")
                for each in allow_change
                if each.startswith(f"{name}.")
            )
            lines += [f"{name}.{line}" for line in differences(before, after, allow_change=inner)]
        elif before != after:
            lines.append(f"{name}: {before!r}, now {after!r}")
    return lines
