"""The settings of optimizers (learning rates, betas) as their factory gave them: compared when a
run is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

EXECUTION = ("params", "foreach", "fused", "capturable", "differentiable", "initial_lr")
"""Fields of a parameter group that do not decide what is learned, or that a scheduler adds."""

Settings = list[list[dict[str, Any]]]
"""JSON: the settings of each group of each optimizer of a model."""


def settings_of(optimizers: Sequence[Optimizer]) -> Settings:
    return [
        [
            {name: _plain(value) for name, value in group.items() if name not in EXECUTION}
            for group in each.param_groups
        ]
        for each in optimizers
    ]


def differing(saved: Settings, now: Settings) -> Iterator[tuple[int, int, str]]:
    """Yield (optimizer, group, name) of each setting that differs. Groups that only one of the two
    has are left out."""
    for number, (theirs, ours) in enumerate(zip(saved, now, strict=False)):
        for group, (before, after) in enumerate(zip(theirs, ours, strict=False)):
            yield from (
                (number, group, name)
                for name in after
                if name in before and before[name] != after[name]
            )


def described(saved: Settings, now: Settings) -> list[str]:
    """Return the differences in words: `optimizer: lr of group 0: 0.1, now 0.01`."""
    return [
        f"optimizer{f' {number}' if len(now) > 1 else ''}: {name} of group {group}:"
        f" {saved[number][group][name]!r}, now {now[number][group][name]!r}"
        for number, group, name in differing(saved, now)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value if isinstance(value, bool | int | float | str | None) else type(value).__qualname__
