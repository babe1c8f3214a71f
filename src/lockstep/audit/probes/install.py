"""Installs all probes in this process, and writes a record of each backward pass and each step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lockstep.audit.probes.balance import loads_of_balance
from lockstep.audit.probes.draws import Draws, generator_state
from lockstep.audit.probes.events import Events
from lockstep.audit.probes.gradients import Gradients, divisors, scalar
from lockstep.audit.probes.loaders import Loaders
from lockstep.audit.probes.losses import Losses
from lockstep.audit.probes.models import Models
from lockstep.audit.probes.modes import Modes
from lockstep.audit.probes.optimizers import Optimizers
from lockstep.audit.probes.packing import Packing
from lockstep.audit.probes.recorder import RecordWriter
from lockstep.audit.request import AuditRequest

_installed: list[Probes] = []


class Probes:
    def __init__(self, request: AuditRequest) -> None:
        self.recorder = recorder = RecordWriter(request)
        self.gradients = Gradients(recorder)
        self.models = Models(recorder)
        self.losses = Losses(recorder, self.gradients)
        self.optimizers = Optimizers(recorder, self.gradients, self.models, self.losses)
        self.draws = Draws(recorder)
        self.loaders = Loaders(recorder, self.draws)
        self.modes = Modes(recorder, self.loaders, self.draws)
        self.packing = Packing(recorder)
        self.events = Events(recorder, self.optimizers, self.draws)

    def install(self) -> None:
        self.models.install()
        self.optimizers.install()
        self.draws.install()
        self.loaders.install()
        self.losses.install()
        self.modes.install()
        self.events.install()
        self.gradients.install_backward(
            self._before_backward,
            lambda: self.modes.end_backward(self.gradients.backward, self.gradients.line),
        )
        self.recorder.watch(torch.jit, "script", self._script)

    def _before_backward(self, roots: Any) -> None:
        root = roots if isinstance(roots, Tensor) else next(iter(roots), None)
        self.models.note_backward()
        self.modes.begin_backward()
        loader, number = self.loaders.last_trained or (None, None)
        state = generator_state()
        drawn, is_unplaced = self.draws.take(state)
        self.recorder.write(
            "backward",
            number=self.gradients.backward,
            line=self.recorder.line(),
            value=scalar(root),
            divisors=divisors(root) if isinstance(root, Tensor) else [],
            loader=loader,
            pass_number=number,
            passes=self.loaders.take(),
            state=state,
            state_at_batch=self.loaders.state,
            drawn=drawn,
            other_draws=is_unplaced,
        )
        if isinstance(root, Tensor) and (loads := loads_of_balance(root)):
            line, number = self.recorder.line(), self.gradients.backward
            self.recorder.write("balance", number=number, line=line, loads=loads)

    def _script(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make TorchScript compile torch's functions, not the probes."""
        # names are looked up in the caller's frame
        kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 2
        with self.recorder.originals():
            return original(*args, **kwargs)


def after_import(module: ModuleType, request: AuditRequest) -> None:
    if module.__name__ == "torch":
        _installed.append(Probes(request))
        _installed[0].install()
        fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
        if fsdp is not None:
            _installed[0].gradients.install_fsdp(fsdp)
    elif _installed and module.__name__ == "accelerate.accelerator":
        recorder = _installed[0].recorder
        recorder.wrap(
            module.Accelerator,
            "gather_for_metrics",
            before=lambda *_, **__: recorder.write("gather_for_metrics"),
        )
    elif _installed and module.__name__.startswith("transformers."):
        _installed[0].packing.install(module)
    elif _installed:
        _installed[0].gradients.install_fsdp(module)
