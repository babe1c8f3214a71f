"""Records each step of an optimizer, with its gradients, parameters and settings."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lockstep.audit.probes.gradients import Gradients, Sketch, local_sketch, scalar
from lockstep.audit.probes.losses import Losses
from lockstep.audit.probes.models import Models
from lockstep.audit.probes.recorder import RecordWriter, frames
from lockstep.base import torch_private
from lockstep.evidence.noise import perturb_parameters
from lockstep.training.optim.element_wise import TOLERANCE, updated

_OPTIMIZER_FILE = inspect.getfile(Optimizer)
COLUMNS, TRIED_STEPS = 12, 2
"""An optimizer is tried on a matrix with this number of columns, for this number of steps."""


class Optimizers:
    def __init__(
        self, recorder: RecordWriter, gradients: Gradients, models: Models, losses: Losses
    ) -> None:
        self._recorder, self._gradients, self._models = recorder, gradients, models
        self._losses = losses
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count()
        self._steps: dict[int, int] = {}
        self._made_at: dict[int, str] = {}
        # optimizers whose step is running, the outermost first
        self._stepping: list[int] = []
        self._row: dict[str, Any] = {}
        self._clip: dict[str, Any] | None = None
        self._clipped: list[dict[str, Any]] = []  # calls of clipping since the last step
        self._scaler: Any = None
        self._is_unscaled = False

    @property
    def steps(self) -> int:
        return max(self._steps.values(), default=0)

    def number(self, optimizer: Any) -> int:
        """Return the number of an optimizer. A wrapper has the number of the wrapped optimizer."""
        while not isinstance(optimizer, Optimizer) or isinstance(
            getattr(optimizer, "optimizer", None), Optimizer
        ):
            if not hasattr(optimizer, "optimizer"):
                return -1
            optimizer = optimizer.optimizer
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._count)
        return self._numbers[optimizer]

    def install(self) -> None:
        recorder, scaler = self._recorder, torch.amp.GradScaler
        recorder.wrap(Optimizer, "add_param_group", after=self._after_group)
        recorder.wrap(Optimizer, "zero_grad", after=self._after_zero_grad)
        recorder.wrap(torch.nn.Module, "zero_grad", after=self._after_zero_grad)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(partial(recorder.safely, self._after_step))
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            recorder.watch([torch.nn.utils, clip_grad], name, self._clip_gradients)
        recorder.wrap(scaler, "scale", before=self._before_scale)
        recorder.wrap(scaler, "unscale_", after=lambda *_: setattr(self, "_is_unscaled", True))
        recorder.watch(scaler, "step", self._scaler_step)
        recorder.wrap(scaler, "update", after=lambda *_, **__: setattr(self, "_is_unscaled", False))

    # Steps

    def _after_group(self, _: Any, optimizer: Optimizer, group: Any) -> None:
        self._made_at.setdefault(self.number(optimizer), self._recorder.line())
        given = optimizer.param_groups[-1]["params"]
        if self._recorder.request.perturb:
            perturb_parameters(torch.nn.ParameterList(given), self._recorder.request.perturb)
        self._gradients.watch(given)

    def _after_zero_grad(self, _: Any, owner: Any, *__: Any, **___: Any) -> None:
        is_module = isinstance(owner, torch.nn.Module)
        self._gradients.clear(owner.parameters() if is_module else _parameters(owner))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._recorder.is_suspended:
            return None
        if _steps_on_the_stack() < 2:
            self._stepping.clear()  # left from a step that has raised
        self._stepping.append(id(optimizer))
        if len(self._stepping) > 1:
            return None
        most = self._recorder.request.steps
        if self.steps >= most and self._steps.get(self.number(optimizer), 0) >= most:
            self._recorder.flush_and_end("steps")
        closure = kwargs.get("closure") or next((each for each in args if callable(each)), None)
        if closure is None:
            self._recorder.safely(self._begin, optimizer)
            return None

        def watched() -> Any:
            result = closure()
            self._recorder.safely(self._begin, optimizer)
            return result

        return tuple(watched if each is closure else each for each in args), {
            name: watched if each is closure else each for name, each in kwargs.items()
        }

    def _begin(self, optimizer: Optimizer) -> None:
        number = self.number(optimizer)
        index = self._steps.get(number, 0)
        parameters = _parameters(optimizer)
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
                before = sums.get(name, [0.0] * len(each))
                sums[name] = [a + b for a, b in zip(before, each, strict=True)]
            if seen.is_stale:
                row["stale"].append(name)
            row["applied"][name], is_shard = local_sketch(parameter.grad)
            if is_shard or torch_private.is_distributed(parameter):
                row["sharded"].append(name)
            if seen.reduced is not None:
                row["reduced"][name] = seen.reduced
            if index == 0:
                row["before"][name] = local_sketch(parameter)[0]
            if parameter.requires_grad and parameter.grad is None:
                row["unused"].append(name)
        row |= {
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
            # True for a closure that is called several times in a step
            "several_closures": bool(self._row),
        }
        self._row, self._clip, self._clipped = row, None, []
        if index == 0:
            row["states_before"] = self._states(optimizer, names)
            everyone = {id(each) for known in self._numbers for each in _parameters(known)}
            row["untrained"] = self._models.untrained(everyone)
            if row["sharded"]:
                row["shards_right"] = self._try_shards(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        within = id(optimizer) in self._stepping
        self._stepping = self._stepping[: self._stepping.index(id(optimizer))] if within else []
        if self._stepping or not self._row:
            return
        row, self._row = self._row, {}
        parameters = _parameters(optimizer)
        names = self._models.names(parameters)
        named = zip(names, parameters, strict=True)
        row["parameters"] = {name: local_sketch(each)[0] for name, each in named}
        row["states"] = self._states(optimizer, names)
        row["buffers"] = {
            name: local_sketch(each)[0]
            for name, each in self._models.buffers()
            if each.is_floating_point()
        }
        row["losses"] = self._losses.take()
        self._recorder.write("step", **row)
        self._steps[row["optimizer"]] = row["index"] + 1

    def _states(self, optimizer: Optimizer, names: Sequence[str]) -> dict[str, Sketch | None]:
        return {
            f"{name}/{key}": local_sketch(value)[0]
            for parameter, name in zip(_parameters(optimizer), names, strict=True)
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }

    def _try_shards(self, optimizer: Optimizer) -> bool | None:
        self._recorder.is_suspended = True
        try:
            return updates_shards_as_wholes(optimizer)
        finally:
            self._recorder.is_suspended = False

    # Clipping and the loss scale

    def _clip_gradients(
        self, original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # an iterator can be read only once
        given = parameters if isinstance(parameters, Tensor) else list(parameters)
        self._recorder.safely(self._before_clip, given)
        result = original(given, *args, **kwargs)
        self._recorder.safely(self._after_clip, result)
        return result

    def _before_clip(self, parameters: Any) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        self._clip = {
            "line": self._recorder.line(),
            "scaled": not self._is_unscaled and self._scale() not in (None, 1.0),
            "backward": self._gradients.backward,
            "reduced": {
                name: local_sketch(each.grad)[0]
                for each, name in zip(given, self._models.names(given), strict=True)
                if each.grad is not None
            },
        }

    def _after_clip(self, result: Any) -> None:
        if self._clip is not None:
            self._clip["norm"] = scalar(result)
            self._clipped.append({"backward": self._gradients.backward, "line": self._clip["line"]})

    def _before_scale(self, scaler: Any, *_: Any, **__: Any) -> None:
        self._scaler = scaler

    def _scaler_step(
        self,
        original: Callable[..., Any],
        scaler: Any,
        /,
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        before = dict(self._steps)
        result = original(scaler, optimizer, *args, **kwargs)
        if scaler.is_enabled() and before == self._steps:
            self._recorder.safely(self._note_skipped, optimizer)
        return result

    def _note_skipped(self, optimizer: Any) -> None:
        number = self.number(optimizer)
        self._recorder.write("skipped_step", optimizer=number, line=self._recorder.line())

    def _scale(self) -> float | None:
        is_scaled = self._scaler is not None and self._scaler.is_enabled()
        return float(self._scaler.get_scale()) if is_scaled else None


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _steps_on_the_stack() -> int:
    """Return the number of nested optimizer steps."""
    codes = (frame.f_code for frame in frames())
    return sum(code.co_name == "wrapper" and code.co_filename == _OPTIMIZER_FILE for code in codes)


def updates_shards_as_wholes(optimizer: Optimizer) -> bool | None:
    """Return True if the optimizer updates the shards of a small matrix like the whole matrix.
    Return None if the optimizer could not be tried. All ranks must call this function."""
    for group in optimizer.param_groups:
        sharded = [
            each
            for each in group["params"]
            if torch_private.is_distributed(each) and each.dim() >= 2
        ]
        if sharded and sharded[0].device_mesh.ndim == 1:
            found = _try(optimizer, group, sharded[0].device_mesh)
            if found is not None:
                return found
    return None


def _try(optimizer: Optimizer, group: dict[str, Any], mesh: Any) -> bool | None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    generator = torch.Generator().manual_seed(0)
    rows = 2 * mesh.size() + 1  # the last rank has fewer
    values = [
        torch.randn(rows, COLUMNS, generator=generator).to(mesh.device_type)
        for _ in range(TRIED_STEPS + 1)
    ]
    rank = mesh.get_local_rank()
    parts = values[0].chunk(mesh.size())

    def sharded(value: Tensor) -> Any:
        own = value.chunk(mesh.size())[rank] if rank < len(parts) else value[:0]
        return DTensor.from_local(
            own.clone(), mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride()
        )

    def replicated(value: Tensor) -> Any:
        return DTensor.from_local(value.clone(), mesh, [Replicate()], run_check=False)

    def result(made: Callable[[Tensor], Any]) -> Tensor:
        first, *gradients = map(made, values)
        return torch_private.to_local(updated(optimizer, group, first, gradients))

    try:
        whole, part = result(replicated), result(sharded)
    except Exception:
        return None
    if rank >= len(parts):
        return True
    first = sum(len(each) for each in parts[:rank])
    right = whole[first : first + len(part)]
    return bool((part - right).norm() <= TOLERANCE * (right - parts[rank]).norm())
