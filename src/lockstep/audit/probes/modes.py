"""Watches what depends on train and eval mode: dropout, and BatchNorm with its running statistics."""

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

from lockstep.audit.probes.gradients import is_compiling
from lockstep.audit.probes.loaders import Loaders
from lockstep.audit.probes.recorder import RecordWriter, guarded, replace, wrap
from lockstep.audit.probes.sketch import sketch

DROPOUTS = ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")
MOST_STATISTICS = 8
"""Calls of BatchNorm between two backwards, or evaluation batches, whose statistics are recorded."""


class Arguments:
    """Some arguments of a function, by name, from a call of it."""

    def __init__(self, function: Callable[..., Any], *names: str) -> None:
        parameters = inspect.signature(function).parameters
        self._places = [(name, list(parameters).index(name), parameters[name].default) for name in names]

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The values of the arguments in a call, or their defaults."""
        return [kwargs.get(name, args[place] if place < len(args) else default) for name, place, default in self._places]


class Modes:
    def __init__(self, recorder: RecordWriter, loaders: Loaders) -> None:
        self._recorder, self._loaders = recorder, loaders
        loaders.on_batch.append(lambda: self.take())
        self.calls = {"train": 0, "eval": 0, "off": 0}
        """Calls with gradients since the last batch or backward: in train mode, in eval mode, and of the latter those
        of dropout behind trained layers."""
        self._noted: set[Any] = set()
        self._statistics = 0
        self._place: Any = None
        self._is_updating = False
        """True while statistics are taken anew with `update_bn`, which is in train mode and no evaluation."""

    def install(self) -> None:
        for name in DROPOUTS:
            replace(F, name, self._watched_dropout(getattr(F, name)))
        replace(F, "batch_norm", self._watched_batch_norm(F.batch_norm))
        wrap(
            swa_utils,
            "update_bn",
            before=guarded(self._recorder, lambda *_, **__: setattr(self, "_is_updating", True)),
            after=guarded(self._recorder, lambda *_, **__: setattr(self, "_is_updating", False)),
        )

    def take(self) -> dict[str, int]:
        """Return the calls since the last call of this, and begin again."""
        taken, self.calls = self.calls, {"train": 0, "eval": 0, "off": 0}
        self._statistics = 0
        return taken

    def _watched_dropout(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        values = Arguments(original, "input", "p", "training")

        @functools.wraps(original)
        def dropout(*args: Any, **kwargs: Any) -> Tensor:
            if not is_compiling():
                guarded(self._recorder, self._note_dropout)(*values.of(args, kwargs))
            return original(*args, **kwargs)

        return dropout

    def _watched_batch_norm(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        values = Arguments(original, "running_mean", "running_var", "training")

        @functools.wraps(original)
        def batch_norm(*args: Any, **kwargs: Any) -> Tensor:
            if not is_compiling():
                guarded(self._recorder, self._note_batch_norm)(*values.of(args, kwargs))
            return original(*args, **kwargs)

        return batch_norm

    def _note_dropout(self, input: Tensor, p: float, training: bool) -> None:
        if p:
            self._note("dropout", training)
            self.calls["off"] += not training and torch.is_grad_enabled() and input.requires_grad and not _is_frozen()

    def _note_batch_norm(self, mean: Tensor | None, variance: Tensor | None, training: bool) -> None:
        if mean is not None and not self._is_updating:
            self._note("batch_norm", training)
            self._note_statistics(mean, variance, training)

    def _note(self, what: str, training: bool) -> None:
        """Count a call, and write the first of each pass with its mode."""
        grad = torch.is_grad_enabled()
        self.calls["train" if training else "eval"] += grad
        key = (what, training, grad, self._loaders.last)
        if key not in self._noted:
            self._noted.add(key)
            loader, number = self._loaders.last or (None, None)
            line = self._recorder.line(caller_of_forward=True)
            self._recorder.write("mode", what=what, training=training, grad=grad, loader=loader, number=number, line=line)

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
        row = {"training": training, "grad": torch.is_grad_enabled(), "loader": loader, "number": number, "call": self._statistics}
        self._recorder.write("statistics", sketches=sketches, line=self._recorder.line(caller_of_forward=True), **row)


def _is_frozen() -> bool:
    """True if the innermost module with parameters that runs trains none of them: it may be in eval mode on purpose."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and (parameters := list(module.parameters())):
            return not any(each.requires_grad for each in parameters)
        frame = frame.f_back
    return False
