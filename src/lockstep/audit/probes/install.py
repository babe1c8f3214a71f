"""Installs all probes in this process, and joins what they see into the record of each backward and
each step."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lockstep.audit.probes.collectives import Collectives
from lockstep.audit.probes.draws import Draws, generator_state
from lockstep.audit.probes.gradients import Gradients, divisors, scalar
from lockstep.audit.probes.loaders import Loaders
from lockstep.audit.probes.losses import Losses
from lockstep.audit.probes.models import Models
from lockstep.audit.probes.modes import Modes
from lockstep.audit.probes.optimizers import Optimizers
from lockstep.audit.probes.recorder import RecordWriter, guarded, originals, wrap
from lockstep.audit.probes.schedules import SavedFiles, Schedules, Seeds
from lockstep.audit.request import AuditRequest

_installed: list[Probes] = []


class Probes:
    def __init__(self, request: AuditRequest) -> None:
        self.recorder = recorder = RecordWriter(request)
        self.gradients = Gradients(recorder)
        self.models = Models(recorder)
        self.optimizers = Optimizers(recorder, self.gradients, self.models)
        self.draws = Draws(recorder)
        self.loaders = Loaders(recorder, self.draws)
        self.losses = Losses(recorder, self.gradients)
        self.modes = Modes(recorder, self.loaders, self.draws)
        self.others: list[Any] = [
            Collectives(recorder),
            Schedules(recorder, self.optimizers),
            Seeds(recorder, self.optimizers, self.draws),
            SavedFiles(recorder, self.optimizers),
        ]

    def install(self) -> None:
        parts = (self.models, self.optimizers, self.draws, self.loaders, self.losses, self.modes)
        for each in (*parts, *self.others):
            each.install()
        self.gradients.install_backward(
            guarded(self.recorder, self._before_backward),
            guarded(self.recorder, self._after_backward),
        )
        _watch_torchscript()
        self.optimizers.on_step.append(self._add_to_step)

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

    def _after_backward(self) -> None:
        self.modes.end_backward(self.gradients.backward, self.gradients.line)

    def _add_to_step(self, row: dict[str, Any]) -> None:
        row["losses"] = self.losses.take()


def _watch_torchscript() -> None:
    """Have TorchScript compile torch's own functions rather than probes."""
    original = torch.jit.script

    @functools.wraps(original)
    def script(*args: Any, **kwargs: Any) -> Any:
        # names are looked up in the frame of the caller
        kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1
        with originals():
            return original(*args, **kwargs)

    torch.jit.script = script


def after_import(module: ModuleType, request: AuditRequest) -> None:
    """Install the probes that a module of torch is needed for, which has just been imported."""
    if module.__name__ == "torch":
        _installed.append(Probes(request))
        _installed[0].install()
        fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
        if fsdp is not None:
            _installed[0].gradients.install_fsdp(fsdp)
    elif _installed and module.__name__ == "accelerate.accelerator":
        recorder = _installed[0].recorder
        wrap(
            recorder,
            module.Accelerator,
            "gather_for_metrics",
            before=lambda *_, **__: recorder.write("gather_for_metrics"),
        )
    elif _installed:
        _installed[0].gradients.install_fsdp(module)
