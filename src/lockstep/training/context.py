"""The settings and process groups of a run, fixed before models and data are set up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.comm.mesh import Mesh
from lockstep.comm.world import World
from lockstep.data.loader import Microbatch, SamplesLeftOut
from lockstep.logging.phases import Phases
from lockstep.logging.recorder import Recorder
from lockstep.plan import Plan
from lockstep.recipe.checks import Precision


class Probe(Protocol):
    """Observes the forward and the backward of each microbatch, for `lockstep verify`."""

    def forward(self) -> AbstractContextManager[None]:
        """The context exits when the next microbatch is requested."""

    def before_backward(
        self, module: int, microbatch: int, total: Tensor, grad_output: Tensor
    ) -> None:
        """Called before the backward of `grad_output * total`. `module` is the index of the model
        in the session."""

    def without_backward(self, module: int, microbatch: int) -> None:
        """Called instead of `before_backward` if a pipeline schedule has computed the backward."""

    def result(self, name: str, value: float) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginAt:
    """The checkpoint of another run from which this run starts. An `auto` setting of this run gets
    the measured value of the other run."""

    folder: str
    """Path or URL of the other run's folder, which is only read."""
    before: int | None
    """Start from the newest undamaged checkpoint with fewer steps than this number. With None,
    start at step 0 without a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overrides:
    """Changes that `lockstep verify`, `lockstep plan` and `lockstep replay` make to a script's
    run."""

    precision: Precision | None = None
    gradient_compression: str | None = None
    microbatch: int | None = None  # samples
    # called with each model that a script's factory returns, before it is parallelized
    change_model: Callable[[nn.Module], None] | None = None
    change_loaded: Callable[[nn.Module], None] | None = None
    # called with each microbatch of a step and its batch on the device; returns the batch to use
    # instead
    change_batch: Callable[[Microbatch, Any], Any] | None = None
    probe: Probe | None = None
    begin_at: BeginAt | None = None
    left_out: SamplesLeftOut | None = None
    without_values: bool = False  # parameters and buffers are left empty, for `lockstep plan`
    bare: bool = False
    """True: no checkpoints, autotuning or loggers, and only the hooks that training needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    world: World
    mesh: Mesh
    plan: Plan
    precision: Precision
    gradient_compression: str
    requested_compression: str  # the script's `gradient_compression`, before overrides
    seed: int
    log_every: int  # steps between two lines of metrics.jsonl
    # interval in steps at which ranks recompute each other's microbatches; 0: never
    recompute_every: int
    # the recipe that the script gave, as JSON; None without `ls.train`
    recipe: dict[str, Any] | None
    recorder: Recorder
    phases: Phases
    overrides: Overrides
    # why a process was lost, if this run was opened again in a recovery in place
    recovered_from: str | None = None

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def bitwise(self) -> bool:
        return self.plan.numerics == "bitwise"

    @property
    def run_dir(self) -> Path:
        return self.recorder.path
