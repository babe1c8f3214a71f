"""How a run keeps itself: when it saves, which checkpoints it keeps, and where. Part of how it is executed, not of what is learned."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from lockstep.base.errors import CheckpointError, PlanError
from lockstep.base.units import duration

Resume = Literal["auto", "never", "must"]
"""Where the run directory holds an unfinished run: `auto` goes on with it, `never` refuses; `must` refuses where there is none."""

OutOfMemory = Literal["retry", "halve", "same-bits", "stop"]
"""What changes in the plan when memory runs out. `retry`: the next of checkpointing, offload and microbatch_splits, but in bitwise numerics none
that changes bits; `halve`: the next, whatever the numerics; `same-bits`: none that changes bits, whatever the numerics; `stop`: nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """When a run saves, and what it keeps. Raises `CheckpointError` for what cannot be."""

    every: int | str = "10m"
    """Steps between checkpoints, or a time between them: "90s", "10m", "1h30m"."""
    last: int = 2
    """So many of the newest checkpoints are kept, at least 1."""
    keep_every: int | None = None
    """Checkpoints at multiples of so many steps are kept for good. None: no others than the last."""
    best: str | None = None
    """A metric of the evaluation: the checkpoint where it was best is kept. None: none is kept for that."""
    mode: Literal["min", "max"] = "min"
    """Whether less of that metric is better, or more."""
    folder: str | None = None
    """Where checkpoints go: a folder, or a URL of any fsspec file system (s3://bucket/run). None: `checkpoints` in the run directory."""
    failures: int = 3
    """Saves that may fail in a row before the run ends with an error."""

    def __post_init__(self) -> None:
        for name, least in (("last", 1), ("failures", 1), *((("keep_every", 1),) if self.keep_every is not None else ())):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise CheckpointError(f"Saving({name}={value!r}); it is a whole number of at least {least}")
        if self.mode not in ("min", "max"):
            raise CheckpointError(f"Saving(mode={self.mode!r}); it is 'min' where less is better, or 'max'")
        if not (duration(self.every) if isinstance(self.every, str) else type(self.every) is int and self.every >= 1):
            raise CheckpointError(f"Saving(every={self.every!r}); it is a number of steps, at least 1, or a time such as '10m'")
        if self.folder == "":
            raise CheckpointError("Saving(folder=''); it names a folder or a URL; leave it out for `checkpoints` in the run directory")

    @property
    def steps(self) -> int | None:
        """Between checkpoints; None where a time is."""
        return None if isinstance(self.every, str) else self.every

    @property
    def seconds(self) -> float | None:
        """Between checkpoints; None where steps are counted."""
        return duration(self.every) if isinstance(self.every, str) else None


def interval(text: str, name: str) -> int | str:
    """`--save-every`: steps ("500") or a time ("10m"). Raises `CheckpointError`."""
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    if not duration(text):
        raise CheckpointError(f"{name}={text!r}; it is a number of steps, at least 1, or a time with its unit: 500, 90s, 10m, 1h30m")
    return text


def check_resume(value: Any, name: str) -> Resume:
    """Raises `CheckpointError` unless it is one of `Resume`."""
    if value not in get_args(Resume):
        raise CheckpointError(f"{name}={value!r}; it is one of {', '.join(get_args(Resume))}")
    found: Resume = value
    return found


def check_allow_change(value: Collection[str]) -> frozenset[str]:
    """Raises `CheckpointError` where it is one text, whose letters would be taken for fields."""
    if isinstance(value, str):
        raise CheckpointError(f"allow_change={value!r}; it is a list of fields of the recipe: allow_change={value.split(',')!r}")
    return frozenset(value)


def check_out_of_memory(value: str, name: str) -> OutOfMemory:
    """Raises `PlanError` unless it is one of `OutOfMemory`."""
    if value not in get_args(OutOfMemory):
        raise PlanError(f"{name}={value!r}; it is one of {', '.join(get_args(OutOfMemory))}")
    return cast(OutOfMemory, value)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], *, allow_change: frozenset[str] = frozenset()) -> list[str]:
    """What two recipes as `Recipe.describe` gives them differ in: `steps: 100, now 200`. Nested ones by their path: evaluation.every."""
    found = []
    for name in sorted(saved.keys() | now.keys()):
        if name in allow_change:
            continue
        before, after = saved.get(name), now.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            inner = frozenset(each.removeprefix(f"{name}.") for each in allow_change if each.startswith(f"{name}."))
            found += [f"{name}.{line}" for line in differences(before, after, allow_change=inner)]
        elif before != after:
            found.append(f"{name}: {before!r}, now {after!r}")
    return found
