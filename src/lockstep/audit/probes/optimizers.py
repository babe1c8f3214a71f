"""Watches optimizers: a record of each step, with the gradients, parameters and settings that it
used."""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lockstep.audit.probes.gradients import Gradients, Sketch, local_sketch, scalar
from lockstep.audit.probes.models import Models
from lockstep.audit.probes.recorder import RecordWriter, guarded, wrap
from lockstep.audit.probes.sharded_trial import updates_shards_as_wholes
from lockstep.base import torch_private
from lockstep.evidence.noise import perturb_parameters

_OPTIMIZER_FILE = inspect.getfile(Optimizer)
"""The file with the function that torch wraps every optimizer's step in."""


class Optimizers:
    def __init__(self, recorder: RecordWriter, gradients: Gradients, models: Models) -> None:
        self._recorder, self._gradients, self._models = recorder, gradients, models
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count()
        self._steps: dict[int, int] = {}
        self._made_at: dict[int, str] = {}
        # optimizers in whose step this process is: the outermost first
        self._stepping: list[int] = []
        self._row: dict[str, Any] = {}
        self._clip: dict[str, Any] | None = None
        self._clipped: list[dict[str, Any]] = []  # since the last step
        self._scaler: Any = None
        self._is_unscaled = False
        self.on_step: list[Callable[[dict[str, Any]], None]] = []
        """Called with the row of each step before it is written: other probes add what they saw."""

    @property
    def steps(self) -> int:
        """The number of steps of the optimizer that has taken most."""
        return max(self._steps.values(), default=0)

    def number(self, optimizer: Any) -> int:
        """The number of an optimizer, in the order in which they were made. A wrapper has that of
        what it wraps."""
        while not isinstance(optimizer, Optimizer) or (
            hasattr(optimizer, "optimizer") and isinstance(optimizer.optimizer, Optimizer)
        ):
            if not hasattr(optimizer, "optimizer"):
                return -1
            optimizer = optimizer.optimizer
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._count)
        return self._numbers[optimizer]

    def install(self) -> None:
        guard = self._recorder
        wrap(guard, Optimizer, "add_param_group", after=self._after_group)
        wrap(guard, Optimizer, "zero_grad", after=self._after_zero_grad)
        wrap(
            guard,
            torch.nn.Module,
            "zero_grad",
            after=lambda _, module, *__, **___: self._gradients.clear(module.parameters()),
        )
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(guarded(guard, self._after_step))
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
                self._wrap_clip(owner, name)
        scaler = torch.amp.GradScaler
        wrap(guard, scaler, "scale", before=self._before_scale)
        wrap(guard, scaler, "unscale_", after=lambda *_: setattr(self, "_is_unscaled", True))
        wrap(
            guard,
            scaler,
            "step",
            before=self._before_scaler_step,
            after=self._after_scaler_step,
        )
        wrap(
            guard,
            scaler,
            "update",
            after=lambda *_, **__: setattr(self, "_is_unscaled", False),
        )

    # Steps

    def _after_group(self, _: Any, optimizer: Optimizer, group: Any) -> None:
        self._made_at.setdefault(self.number(optimizer), self._recorder.line())
        given = optimizer.param_groups[-1]["params"]
        if self._recorder.request.perturb:
            perturb_parameters(torch.nn.ParameterList(given), self._recorder.request.perturb)
        self._gradients.watch(given)

    def _after_zero_grad(self, _: Any, optimizer: Optimizer, *__: Any, **___: Any) -> None:
        self._gradients.clear(each for group in optimizer.param_groups for each in group["params"])

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._recorder.is_suspended:
            return None
        if _steps_on_the_stack() < 2:
            self._stepping.clear()  # of a step that has raised
        self._stepping.append(id(optimizer))
        if len(self._stepping) > 1:
            return None
        if (
            self.steps >= self._recorder.request.steps
            and self._steps.get(self.number(optimizer), 0) >= self._recorder.request.steps
        ):
            self._recorder.flush_and_end("steps")
        closure = kwargs.get("closure") or next((each for each in args if callable(each)), None)
        if closure is None:
            guarded(self._recorder, self._begin)(optimizer)
            return None

        def watched() -> Any:
            result = closure()
            guarded(self._recorder, self._begin)(optimizer)
            return result

        return tuple(watched if each is closure else each for each in args), {
            name: watched if each is closure else each for name, each in kwargs.items()
        }

    def _begin(self, optimizer: Optimizer) -> None:
        """Note the gradients that the step applies."""
        number = self.number(optimizer)
        is_again = bool(self._row)  # a closure that is called several times in a step
        index = self._steps.get(number, 0)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        names = self._models.names(parameters, again=index == 0)
        added: dict[int, dict[str, Sketch]] = {}
        row: dict[str, Any] = {
            "applied": {},
            "sharded": [],
            "stale": [],
            "before": {},
            "unused": [],
            "reduced": {},
        }
        for parameter, name in zip(parameters, names, strict=True):
            seen = self._gradients.take(parameter)
            for backward, each in seen.added:
                sums = added.setdefault(backward, {})
                sums[name] = (
                    [a + b for a, b in zip(sums[name], each, strict=True)] if name in sums else each
                )
            if seen.is_stale:
                row["stale"].append(name)
            row["applied"][name], is_shard = self._gradients.of(parameter)
            if is_shard or torch_private.is_distributed(parameter):
                row["sharded"].append(name)
            if seen.reduced is not None:
                row["reduced"][name] = seen.reduced
            if index == 0:
                row["before"][name] = local_sketch(parameter)[0]
            if parameter.requires_grad and parameter.grad is None:
                row["unused"].append(name)
        self._row = row | {
            "optimizer": number,
            "type": type(optimizer).__name__,
            "index": index,
            "line": self._recorder.line(),
            "made_at": self._made_at.get(number, ""),
            "backward_line": self._gradients.line,
            "lr": [scalar(group.get("lr")) for group in optimizer.param_groups],
            "scale": self._scale(),
            "added": {str(backward): sketches for backward, sketches in sorted(added.items())},
            "clip": self._clip,
            "clipped": self._clipped,
            "several_closures": is_again,
        }
        self._clip, self._clipped = None, []
        if index == 0:
            self._row["states_before"] = self._states(optimizer, parameters, names)
            self._row["untrained"] = self._models.untrained(self._all_parameters())
            if row["sharded"]:
                self._row["shards_right"] = self._try_shards(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepping = (
            self._stepping[: self._stepping.index(id(optimizer))]
            if id(optimizer) in self._stepping
            else []
        )
        if self._stepping or not self._row:
            return
        row, self._row = self._row, {}
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        names = self._models.names(parameters)
        row["parameters"] = {
            name: local_sketch(parameter)[0]
            for parameter, name in zip(parameters, names, strict=True)
        }
        row["states"] = self._states(optimizer, parameters, names)
        row["buffers"] = {
            name: local_sketch(each)[0]
            for name, each in self._models.buffers()
            if each.is_floating_point()
        }
        for each in self.on_step:
            each(row)
        self._recorder.write("step", **row)
        self._steps[row["optimizer"]] = row["index"] + 1

    def _states(
        self, optimizer: Optimizer, parameters: Sequence[Tensor], names: Sequence[str]
    ) -> dict[str, Sketch | None]:
        return {
            f"{name}/{key}": local_sketch(value)[0]
            for parameter, name in zip(parameters, names, strict=True)
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }

    def _all_parameters(self) -> set[int]:
        return {
            id(each)
            for optimizer in self._numbers
            for group in optimizer.param_groups
            for each in group["params"]
        }

    def _try_shards(self, optimizer: Optimizer) -> bool | None:
        self._recorder.is_suspended = True
        try:
            return updates_shards_as_wholes(optimizer)
        finally:
            self._recorder.is_suspended = False

    # Clipping and the loss scale

    def _wrap_clip(self, owner: Any, name: str) -> None:
        def before(parameters: Any, *args: Any, **kwargs: Any) -> None:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self._clip = {
                "line": self._recorder.line(),
                "scaled": not self._is_unscaled and self._scale() not in (None, 1.0),
                "backward": self._gradients.backward,
                "reduced": {
                    name: self._gradients.of(each)[0]
                    for each, name in zip(given, self._models.names(given), strict=True)
                    if each.grad is not None
                },
            }

        def after(result: Any, *args: Any, **kwargs: Any) -> None:
            if self._clip is not None:
                self._clip["norm"] = scalar(result)
                self._clipped.append(
                    {"backward": self._gradients.backward, "line": self._clip["line"]}
                )

        original = getattr(owner, name)

        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            given = parameters if isinstance(parameters, Tensor) else list(parameters)
            guarded(self._recorder, before)(given, *args, **kwargs)
            result = original(given, *args, **kwargs)
            guarded(self._recorder, after)(result)
            return result

        if not getattr(original, "is_audited", False):
            clip.is_audited = True  # type: ignore[attr-defined]
            clip.__name__, clip.__doc__ = original.__name__, original.__doc__
            setattr(owner, name, clip)

    def _before_scale(self, scaler: Any, *_: Any, **__: Any) -> None:
        self._scaler = scaler

    def _before_scaler_step(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        self._steps_before = dict(self._steps)

    def _after_scaler_step(self, _: Any, scaler: Any, optimizer: Any, *__: Any, **___: Any) -> None:
        if scaler.is_enabled() and self._steps_before == self._steps:
            self._recorder.write(
                "skipped_step", optimizer=self.number(optimizer), line=self._recorder.line()
            )

    def _scale(self) -> float | None:
        return (
            float(self._scaler.get_scale())
            if self._scaler is not None and self._scaler.is_enabled()
            else None
        )


def _steps_on_the_stack() -> int:
    """The number of optimizers' steps that are being run, one within the other: an optimizer may
    wrap another one."""
    count, frame = 0, sys._getframe(1).f_back
    while frame is not None:
        count += frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == _OPTIMIZER_FILE
        frame = frame.f_back
    return count
