"""The hook that finds values that a script's own loop carries in a variable from one step into the
loss of a later one: a running reward, a hidden state."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base.contents import Reader, digest_parts
from lockstep.base.errors import first_few
from lockstep.base.loop_flow import carried_into_loss
from lockstep.hooks.loop_variables import frame_of_script, local_variables, loop_of
from lockstep.hooks.loss_check import tell_state
from lockstep.training.hook import ControlHook
from lockstep.training.run import Run
from lockstep.training.set_up import Remark

STEPS = 3
"""Number of steps to watch."""
_REMEDY = (
    "compute it by session.mean or session.gather, and keep it in an object with state_dict and"
    " load_state_dict that session.include saves"
)
_CONTAINERS = (list, tuple, dict, set, deque, np.ndarray)


class CarriedVariables(ControlHook):
    """Reports variables of a script's loop whose value goes into a later step's loss. A variable
    counts if it changes twice: one that is filled once is a cache."""

    def __init__(self) -> None:
        self._steps = 0
        self._names: list[str] | None = None
        self._values: dict[str, Any] = {}
        self._changes: dict[str, int] = {}

    def before_step(self, run: Run) -> None:
        if run.recipe is not None or self._steps > STEPS or run.context.recovered_from is not None:
            return
        frame = frame_of_script()
        if self._names is None:
            loop = loop_of(frame)
            self._names = [] if loop is None else carried_into_loss(loop)
        variables = {**frame.f_globals, **local_variables(frame)} if self._names else {}
        values = {name: _value_of(variables, name, run) for name in self._names}
        for name, value in values.items():
            if self._steps and not _is_same(self._values[name], value):
                self._changes[name] = self._changes.get(name, 0) + 1
        self._values = values
        if self._steps == STEPS:
            self._tell(run)
            self._values = {}
        self._steps += 1

    def _tell(self, run: Run) -> None:
        """Every rank calls it."""
        mine = {
            name: _as_number(self._values[name])
            for name, changes in self._changes.items()
            if changes > 1
        }
        everyone = run.context.world.gather_values(mine)
        names = sorted({name for found in everyone for name in found})
        if not names:
            return
        differing = [name for name in names if len({repr(each.get(name)) for each in everyone}) > 1]
        what = "the loss uses {}, which the loop carries from one step to the next in a variable"
        if differing:
            name = differing[0]
            values = (f"{found.get(name)} on rank {rank}" for rank, found in enumerate(everyone))
            tell_state(
                run,
                f"{what.format(first_few(differing))}, and {name} is {first_few(list(values))}:"
                f" what is learned depends on the number of processes; {_REMEDY}",
            )
        if only_lost := [name for name in names if name not in differing]:
            line = (
                f"warning: {what.format(first_few(only_lost))}: no checkpoint holds it, and a"
                f" resumed run goes on with another value; {_REMEDY}"
            )
            run.training.remark(Remark("variables-not-saved", {"variables": only_lost}, line))


def _value_of(variables: Mapping[str, Any], path: str, run: Run) -> Any:
    """Return a number, tensor or container; None for any other object, and for a saved one."""
    name, *attributes = path.split(".")
    value = variables.get(name)
    saved = [id(each) for each in run.training.stateful.values()]
    for attribute in attributes:
        if isinstance(value, nn.Module | Optimizer) or id(value) in saved:
            return None
        value = getattr(value, "__dict__", {}).get(attribute)
    if isinstance(value, _CONTAINERS):
        return digest_parts(Reader(most_bytes=1 << 20).parts(value))[0]
    is_number = isinstance(value, bool | int | float | np.generic)
    return value if is_number or isinstance(value, Tensor) else None


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other  # `LoopVariables` finds those that are changed in place
    return one is other or repr(one) == repr(other)


def _as_number(value: Any) -> float | None:
    """Return a number to be compared between ranks. None for anything else: ranks may keep states
    of their own environments."""
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, bool | int | float | np.number) else None
