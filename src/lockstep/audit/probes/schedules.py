"""Watches learning rate schedules, seeds, and files that are saved."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim import lr_scheduler

from lockstep.audit.probes.draws import Draws
from lockstep.audit.probes.optimizers import Optimizers
from lockstep.audit.probes.recorder import RecordWriter, guarded, wrap


class Schedules:
    def __init__(self, recorder: RecordWriter, optimizers: Optimizers) -> None:
        self._recorder, self._optimizers = recorder, optimizers
        # of schedules that step others; and 1 while a schedule is made, which steps it too
        self._depth = 0

    def install(self) -> None:
        kinds = {
            each
            for each in vars(lr_scheduler).values()
            if isinstance(each, type) and issubclass(each, lr_scheduler.LRScheduler)
        }
        for kind in kinds:
            if "step" in vars(kind):
                self._count_steps(kind)
            if "__init__" in vars(kind):
                self._count_steps(kind, name="__init__", notes=False)

    def _count_steps(self, kind: type, *, name: str = "step", notes: bool = True) -> None:
        original = getattr(kind, name)

        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._depth and notes:
                guarded(self._recorder, self._note)(this)
            self._depth += 1
            try:
                return original(this, *args, **kwargs)
            finally:
                self._depth -= 1

        step.__name__, step.__doc__, step.__wrapped__ = name, original.__doc__, original  # type: ignore[attr-defined]
        setattr(kind, name, step)

    def _note(self, schedule: Any) -> None:
        self._recorder.write(
            "schedule",
            type=type(schedule).__name__,
            schedule=id(schedule),
            optimizer=self._optimizers.number(schedule.optimizer),
            epoch=getattr(schedule, "last_epoch", None),
            horizon=horizon(schedule),
            by=sys._getframe(3).f_globals.get("__name__", ""),
            line=self._recorder.line(),
        )


def horizon(schedule: Any) -> int | None:
    """The number of its steps after which a schedule has come to its end; None if it has none that
    can be seen."""
    for name in ("T_max", "total_iters", "total_steps"):
        if isinstance(value := getattr(schedule, name, None), int):
            return value
    for function in getattr(schedule, "lr_lambdas", ()):
        if isinstance(value := getattr(function, "keywords", {}).get("num_training_steps"), int):
            return value
    return None


class Seeds:
    """Watches `torch.manual_seed`."""

    def __init__(self, recorder: RecordWriter, optimizers: Optimizers, draws: Draws) -> None:
        self._recorder, self._optimizers, self._draws = recorder, optimizers, draws

    def install(self) -> None:
        wrap(
            self._recorder,
            torch,
            "manual_seed",
            before=self._note,
            around=self._draws.others,
        )
        torch.random.manual_seed = torch.manual_seed

    def _note(self, seed: Any, *_: Any) -> None:
        if line := self._recorder.line():
            self._recorder.write("seed", seed=int(seed), line=line, step=self._optimizers.steps)


class SavedFiles:
    """Watches `torch.save` and `torch.load`."""

    def __init__(self, recorder: RecordWriter, optimizers: Optimizers) -> None:
        self._recorder, self._optimizers = recorder, optimizers

    def install(self) -> None:
        wrap(self._recorder, torch, "save", before=self._note)
        torch.serialization.save = torch.save
        wrap(
            self._recorder,
            torch,
            "load",
            before=lambda *_, **__: self._recorder.write("load", line=self._recorder.line()),
        )

    def _note(self, saved: Any = None, to: Any = None, *_: Any, **kwargs: Any) -> None:
        to = kwargs.get("f", to)
        if not isinstance(to, str | os.PathLike):
            to = getattr(to, "name", None)
        if isinstance(to, str | os.PathLike) and str(to) != os.devnull:
            keys = [str(each) for each in saved][:50] if isinstance(saved, dict) else []
            path = str(Path(to).resolve())
            row = {
                "step": self._optimizers.steps,
                "line": self._recorder.line(),
                "existed": Path(path).exists(),
            }
            self._recorder.write("save", path=path, keys=keys, **row)
