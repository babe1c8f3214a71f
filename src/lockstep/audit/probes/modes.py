"""Watches what depends on train and eval mode: dropout, and BatchNorm with its running
statistics."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

from lockstep.audit.probes.draws import Draws
from lockstep.audit.probes.gradients import is_compiling
from lockstep.audit.probes.loaders import Loaders
from lockstep.audit.probes.recorder import RecordWriter, guarded, replace, wrap
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
MOST_STATISTICS = 8
"""Calls of BatchNorm between two backwards, or evaluation batches, whose statistics are
recorded."""


class Arguments:
    """Some arguments of a function, by name, from a call of it."""

    def __init__(self, function: Callable[..., Any], *names: str) -> None:
        parameters = inspect.signature(function).parameters
        self._places = [
            (name, list(parameters).index(name), parameters[name].default) for name in names
        ]

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The values of the arguments in a call, or their defaults."""
        return [
            kwargs.get(name, args[place] if place < len(args) else default)
            for name, place, default in self._places
        ]


class Modes:
    def __init__(self, recorder: RecordWriter, loaders: Loaders, draws: Draws) -> None:
        self._recorder, self._loaders, self._draws = recorder, loaders, draws
        self.calls = _no_calls()
        """Calls that the backward which runs has come to: in train mode, in eval mode, and of the
        latter those of dropout behind trained layers."""
        self._noted: set[Any] = set()
        self._statistics = 0
        self._place: Any = None
        self._is_updating = False
        """True while statistics are taken anew with `update_bn`, which is in train mode and no
        evaluation."""

    def install(self) -> None:
        for name in DROPOUTS:
            replace(F, name, self._watched_dropout(getattr(F, name)))
        replace(
            F,
            "scaled_dot_product_attention",
            self._watched_attention(F.scaled_dot_product_attention),
        )
        replace(F, "batch_norm", self._watched_batch_norm(F.batch_norm))
        wrap(
            self._recorder,
            swa_utils,
            "update_bn",
            before=lambda *_, **__: setattr(self, "_is_updating", True),
            after=lambda *_, **__: setattr(self, "_is_updating", False),
        )

    def begin_backward(self) -> None:
        self._statistics = 0

    def end_backward(self, number: int, line: str) -> None:
        """Write the calls that a backward came to."""
        calls, self.calls = self.calls, _no_calls()
        if any(calls.values()):
            self._recorder.write("modes", number=number, line=line, **calls)

    def _watched_dropout(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        values = Arguments(original, "input", "p", "training")

        @functools.wraps(original)
        def dropout(*args: Any, **kwargs: Any) -> Tensor:
            if is_compiling():
                return original(*args, **kwargs)
            input, p, training = values.of(args, kwargs)
            if p and training:
                guarded(self._recorder, self._draws.note)()
            output = original(*args, **kwargs)
            if p:
                guarded(self._recorder, self._note_dropout)(input, output, training)
            return output

        return dropout

    def _watched_attention(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Attention without dropout is not noted: its mode cannot be told."""

        @functools.wraps(original)
        def attention(*args: Any, **kwargs: Any) -> Tensor:
            if is_compiling() or not kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0):
                return original(*args, **kwargs)
            guarded(self._recorder, self._draws.note)()
            output = original(*args, **kwargs)
            guarded(self._recorder, self._note)("dropout", True, output)
            return output

        return attention

    def _watched_batch_norm(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        values = Arguments(original, "running_mean", "running_var", "training")

        @functools.wraps(original)
        def batch_norm(*args: Any, **kwargs: Any) -> Tensor:
            if is_compiling():
                return original(*args, **kwargs)
            mean, variance, training = values.of(args, kwargs)
            is_seen = mean is not None and not self._is_updating
            if is_seen:
                guarded(self._recorder, self._note_statistics)(mean, variance, training)
            output = original(*args, **kwargs)
            if is_seen:
                guarded(self._recorder, self._note)("batch_norm", training, output)
            return output

        return batch_norm

    def _note_dropout(self, input: Tensor, output: Tensor, training: bool) -> None:
        has_gradient = torch.is_grad_enabled() and input.requires_grad
        self._note(
            "dropout", training, output, is_off=not training and has_gradient and not _is_frozen()
        )

    def _note(self, what: str, training: bool, output: Tensor, *, is_off: bool = False) -> None:
        """Write the first call of each pass with its mode, and have a backward count the call that
        it comes to."""
        grad = torch.is_grad_enabled()
        key = (what, training, grad, self._loaders.last)
        number = None
        if (
            key not in self._noted
            and not torch_private.in_backward()
            and not (not grad and _is_checkpointed())
        ):
            self._noted.add(key)
            number = len(self._noted)
            loader, pass_number = self._loaders.last or (None, None)
            row = {
                "what": what,
                "training": training,
                "grad": grad,
                "loader": loader,
                "number": pass_number,
            }
            self._recorder.write(
                "mode", mode=number, line=self._recorder.line(caller_of_forward=True), **row
            )
        if output.requires_grad:
            hook = guarded(self._recorder, lambda _: self._reach(number, training, is_off))
            output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _reach(self, number: int | None, training: bool, is_off: bool) -> None:
        self.calls["train" if training else "eval"] += 1
        self.calls["off"] += is_off
        if number is not None:
            self._recorder.write("mode_reached", mode=number)

    def _note_statistics(self, mean: Tensor, variance: Tensor | None, training: bool) -> None:
        """Write the running statistics before they are used, or updated."""
        place = (torch.is_grad_enabled(), self._loaders.last)
        if place != self._place:
            self._place, self._statistics = place, 0
        self._statistics += 1
        if self._statistics > MOST_STATISTICS:
            return
        loader, number = self._loaders.last or (None, None)
        sketches = [sketch(mean), *([sketch(variance)] if variance is not None else [])]
        row = {
            "training": training,
            "grad": torch.is_grad_enabled(),
            "loader": loader,
            "number": number,
            "call": self._statistics,
        }
        self._recorder.write(
            "statistics", sketches=sketches, line=self._recorder.line(caller_of_forward=True), **row
        )


def _no_calls() -> dict[str, int]:
    return {"train": 0, "eval": 0, "off": 0}


def _is_checkpointed() -> bool:
    """True within reentrant activation checkpointing, whose forward has no gradients although it
    trains."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            return True
        frame = frame.f_back
    return False


def _is_frozen() -> bool:
    """True if the innermost module with parameters that runs trains none of them: it may be in eval
    mode on purpose."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and (parameters := list(module.parameters())):
            return not any(each.requires_grad for each in parameters)
        frame = frame.f_back
    return False
