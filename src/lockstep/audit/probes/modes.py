"""Records the train or eval mode of dropout and BatchNorm."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

from lockstep.audit.probes.draws import Draws
from lockstep.audit.probes.loaders import Loaders
from lockstep.audit.probes.recorder import RecordWriter, frames
from lockstep.base import torch_private
from lockstep.evidence.sketch import sketch

DROPOUTS = (
    "dropout",
    "alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
)
_CHECKPOINT_FILE = inspect.getfile(checkpoint)
Parameters = Mapping[str, inspect.Parameter]
MOST_STATISTICS = 8


class Modes:
    def __init__(self, recorder: RecordWriter, loaders: Loaders, draws: Draws) -> None:
        self._recorder, self._loaders, self._draws = recorder, loaders, draws
        self._calls = {"train": 0, "eval": 0, "off": 0}
        """Number of calls of dropout and BatchNorm that the backward has reached, by mode. `off`
        counts dropout in eval mode after trained layers."""
        self._noted: set[Any] = set()
        self._statistics = 0
        self._place: Any = None
        self._is_updating = False
        """True inside `update_bn`, which computes statistics in train mode."""

    def install(self) -> None:
        for name in DROPOUTS:
            parameters = inspect.signature(getattr(F, name)).parameters
            self._recorder.watch(F, name, partial(self._dropout, parameters), traced=True)
        attention = "scaled_dot_product_attention"
        self._recorder.watch(F, attention, self._attention, traced=True)
        batch_norm = partial(self._batch_norm, inspect.signature(F.batch_norm).parameters)
        self._recorder.watch(F, "batch_norm", batch_norm, traced=True)
        self._recorder.wrap(
            swa_utils,
            "update_bn",
            before=lambda *_, **__: setattr(self, "_is_updating", True),
            after=lambda *_, **__: setattr(self, "_is_updating", False),
        )

    def begin_backward(self) -> None:
        self._statistics = 0

    def end_backward(self, number: int, line: str) -> None:
        calls, self._calls = self._calls, dict.fromkeys(self._calls, 0)
        if any(calls.values()):
            self._recorder.write("modes", number=number, line=line, **calls)

    def _dropout(
        self,
        parameters: Parameters,
        original: Callable[..., Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        input, p, training = _values(parameters, args, kwargs, "input", "p", "training")
        if p and training:
            self._recorder.safely(self._draws.note)
        output = original(*args, **kwargs)
        if p:
            self._recorder.safely(self._note_dropout, input, output, training)
        return output

    def _attention(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Record `scaled_dot_product_attention`. The mode of a call without dropout is unknown."""
        drops = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        if drops:
            self._recorder.safely(self._draws.note)
        output = original(*args, **kwargs)
        if drops:
            self._recorder.safely(self._note, "dropout", True, output)
        return output

    def _batch_norm(
        self,
        parameters: Parameters,
        original: Callable[..., Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        names = ("running_mean", "running_var", "training")
        mean, variance, training = _values(parameters, args, kwargs, *names)
        is_seen = mean is not None and not self._is_updating
        if is_seen:
            self._recorder.safely(self._note_statistics, mean, variance, training)
        output = original(*args, **kwargs)
        if is_seen:
            self._recorder.safely(self._note, "batch_norm", training, output)
        return output

    def _note_dropout(self, input: Tensor, output: Tensor, training: bool) -> None:
        has_gradient = torch.is_grad_enabled() and input.requires_grad
        is_off = not training and has_gradient and not _is_frozen()
        self._note("dropout", training, output, is_off=is_off)

    def _note(self, what: str, training: bool, output: Tensor, *, is_off: bool = False) -> None:
        grad = torch.is_grad_enabled()
        key = (what, training, grad, self._loaders.last)
        number = None
        is_again = torch_private.in_backward() or (not grad and _is_checkpointed())
        if key not in self._noted and not is_again:
            self._noted.add(key)
            number = len(self._noted)
            self._write("mode", mode=number, what=what, training=training)
        if output.requires_grad:
            reach = lambda _: self._reach(number, training, is_off)  # noqa: E731
            output.register_hook(partial(self._recorder.safely, reach))  # type: ignore[no-untyped-call]

    def _reach(self, number: int | None, training: bool, is_off: bool) -> None:
        self._calls["train" if training else "eval"] += 1
        self._calls["off"] += is_off
        if number is not None:
            self._recorder.write("mode_reached", mode=number)

    def _note_statistics(self, mean: Tensor, variance: Tensor | None, training: bool) -> None:
        place = (torch.is_grad_enabled(), self._loaders.last)
        if place != self._place:
            self._place, self._statistics = place, 0
        self._statistics += 1
        if self._statistics <= MOST_STATISTICS:
            sketches = [sketch(each) for each in (mean, variance) if each is not None]
            self._write("statistics", sketches=sketches, training=training, call=self._statistics)

    def _write(self, kind: str, **row: Any) -> None:
        loader, number = self._loaders.last or (None, None)
        line = self._recorder.line(caller_of_forward=True)
        grad = torch.is_grad_enabled()
        self._recorder.write(kind, line=line, grad=grad, loader=loader, number=number, **row)


def _values(parameters: Parameters, args: Any, kwargs: Any, *names: str) -> list[Any]:
    values = {name: each.default for name, each in parameters.items()}
    values.update(zip(parameters, args, strict=False))
    values.update(kwargs)
    return [values[name] for name in names]


def _is_checkpointed() -> bool:
    """Return True inside reentrant activation checkpointing, which runs the forward without
    gradients."""
    return any(frame.f_code.co_filename == _CHECKPOINT_FILE for frame in frames())


def _is_frozen() -> bool:
    """Return True if the innermost running module with parameters has only frozen parameters. A
    module without trained parameters may be in eval mode on purpose."""
    for frame in frames():
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and (parameters := list(module.parameters())):
            return not any(each.requires_grad for each in parameters)
    return False
