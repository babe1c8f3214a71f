"""The `Run` that hooks get: values that they can read, and methods that influence the run."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base.errors import CheckpointError, DataError, RecipeError, first_few
from lockstep.base.torch_private import without_torch_function_modes
from lockstep.comm.mesh import full_tensor
from lockstep.logging.metrics import as_number
from lockstep.logging.recorder import ROW_NAMES
from lockstep.recipe.recipe import Recipe
from lockstep.training.context import Context
from lockstep.training.state import Stateful

if TYPE_CHECKING:
    from lockstep.training.training import Training


class Run:
    """A run, as hooks see it."""

    def __init__(self, context: Context, training: Training) -> None:
        self.context = context
        self.training = training
        """Private state of the run, for lockstep's own hooks."""
        self.recipe: Recipe | None = None
        """The recipe. None without `ls.train`."""
        self.step = 0
        """Number of optimizer steps done."""
        self.metrics: dict[str, float] = {}
        """Latest value of each evaluation metric."""
        self.metrics_at: dict[str, int] = {}
        """Maps a metric's name to the value of `step` at its latest measurement."""
        self.is_logging_step = False
        """True if the current step has a line in metrics.jsonl."""
        self.global_batch = 0
        """Number of samples in a global batch of the current loop."""
        self.microbatch: int | None = None
        """Number of samples in a microbatch. None if each rank computes one microbatch of any
        size."""
        self.total_steps = 0
        """Number of steps in the current loop, including completed steps."""

    @property
    def model(self) -> nn.Module:
        """The model that the user's factory built and lockstep parallelized. If several models are
        prepared, the first one."""
        return self.training.modules[0].model

    @property
    def rank(self) -> int:
        """The rank of this process. Rank 0 writes the run directory."""
        return self.context.world.rank

    @property
    def dir(self) -> Path:
        """The run directory."""
        return self.context.run_dir

    @property
    def stopping(self) -> str | None:
        """The reason for stopping, once all ranks have agreed to stop. None before."""
        return self.training.stopping

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of `model`."""
        return list(self.training.modules[0].optimizers)

    @property
    def epoch(self) -> int | None:
        """Number of epochs that the current loop has completed. In `before_step`, the epoch of the
        step's first sample, counted from 0. None before the first step, and for data without a
        length."""
        epoch_of, before = self.training.epoch_of, self.training.loop.steps_before
        return None if epoch_of is None else epoch_of(self.step - before)

    @property
    def has_ended_epoch(self) -> bool:
        """True if the latest step was the last step of an epoch."""
        epoch_of, done = self.training.epoch_of, self.step - self.training.loop.steps_before
        return epoch_of is not None and done > 0 and epoch_of(done) > epoch_of(done - 1)

    @property
    def loss(self) -> float:
        """The loss of the first model in its latest step that was not skipped: Σ total / Σ weight
        over the global batch."""
        return self.training.loss

    def stop(self, reason: str) -> None:
        """Ask all ranks to stop training. Any rank may call this method. All ranks stop at the next
        logging step, or after the current evaluation."""
        self.training.stop = reason

    def freeze(self, *patterns: str) -> None:
        """Stop training the parameters of `model` with these names, from the next step on. In a
        pattern, `*` stands for any text. The optimizer keeps the state of frozen parameters. Every
        rank must call this method, between two steps. Raises `RecipeError`."""
        self._set_trainable(patterns, to=False)

    def unfreeze(self, *patterns: str) -> None:
        """Train the parameters of `model` with these names, from the next step on. The optimizer
        must hold the parameters. Every rank must call this method, between two steps. Raises
        `RecipeError`."""
        self._set_trainable(patterns, to=True)

    def _set_trainable(self, patterns: Sequence[str], *, to: bool) -> None:
        verb, module = "unfreeze" if to else "freeze", self.training.modules[0]
        first, *others = self.context.world.gather_values([verb, *patterns])
        if any(other != first for other in others):
            raise RecipeError(
                f"run.{verb}{tuple(patterns)} on some ranks only; all train the same parameters;"
                " call it on every rank"
            )
        names = set(module.names)
        for pattern in patterns:
            matching = fnmatch.filter(module.held, pattern)
            if not matching:
                raise RecipeError(
                    f"run.{verb}({pattern!r}): the optimizer holds no such parameter; it holds"
                    f" {first_few(list(module.held))}; give the optimizer all parameters that are"
                    " trained at any time"
                )
            names = names | set(matching) if to else names - set(matching)
        if not names:
            raise RecipeError(
                f"run.{verb}{tuple(patterns)} would leave no trainable parameter; a step needs one;"
                " freeze fewer"
            )
        if names != set(module.names):
            module.set_trainable(names)
            self.event(
                "trainable-parameters", parameters=len(names), change=verb, patterns=list(patterns)
            )

    def evaluate(self) -> dict[str, float]:
        """Run the recipe's evaluations that have not run after this step, and return the metrics of
        all evaluations. Every rank must call this method, between two steps. Raises `RecipeError`
        if the recipe has no evaluation."""
        if self.training.measure is None:
            raise RecipeError(
                "run.evaluate() without Recipe.evaluation; it measures the recipe's"
                " evaluations; give ls.Evaluation(data=...)"
            )
        # `TorchFunctionMode`s that are active while a hook runs must not change an evaluation
        with without_torch_function_modes():
            self.training.measure()
        return dict(self.metrics)

    def event(self, name: str, step: int | None = None, **details: Any) -> None:
        """Record an event. Events of rank 0 are written to events.jsonl. `step` is the number of
        optimizer steps done at the event. With `step=None`, the number of steps done so far."""
        event = self.context.recorder.event(name, self.step if step is None else step, **details)
        if self.training.has_started:
            self.training.hooks.call("on_event", self, event)

    def log(self, values: Mapping[str, float]) -> None:
        """Add numbers to this step's line in metrics.jsonl and to the progress display. Only rank
        0's numbers are written. Raises `DataError` for a value that is not a number, or for a name
        that the line already has."""
        for name, value in values.items():
            if name in ROW_NAMES or name.startswith("lr/"):
                raise DataError(
                    f"log({{{name!r}: ...}}); every line has {name!r} already; choose another name"
                )
            self.training.logged[name] = as_number(name, value)

    def full_state_dict(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """Return a copy of the state dict of `model` with full tensors on the CPU, for example for
        `save_pretrained`. The copy is the same on every rank and under every plan. Optimizers that
        have modes are in evaluation mode during the copy. Every rank must call this method.
        `model=None`: the first model."""
        with ExitStack() as stack:
            for module in self.training.modules:
                stack.enter_context(module.modes.evaluating())
            state = self.context.mesh.union((model or self.model).state_dict())
            return {
                name: full_tensor(value.detach()).to("cpu", copy=True)
                for name, value in state.items()
            }

    def gradient_norms(self, model: nn.Module | None = None) -> dict[str, float]:
        """Return the gradient norm of each parameter that has a gradient, by name. Every rank must
        call this method, in `after_backward`. `model` is the hook's argument. If `model` is None,
        use the first model."""
        modules = self.training.modules
        module = next(each for each in modules if model is None or each.model is model)
        named = zip(module.names, module.parameters, strict=True)
        gradients = {name: p.grad for name, p in named if p.grad is not None}
        norms = module.norm.of_each(list(gradients.values()))
        scale = module.scale  # on an accelerator, the host waits for it
        mine = {name: norm / scale for name, norm in zip(gradients, norms, strict=True)}
        everyone = self.context.mesh.stages.gather_values(mine)
        return {name: norm for theirs in everyone for name, norm in theirs.items()}

    def save(self, name: str, state_dict: Mapping[str, Any]) -> None:
        """Write the tensors of `state_dict` to the safetensors file `name` in the run directory.
        Every rank must call this method. Sharded tensors are written in full."""
        self.context.recorder.save_tensors(name, self.context.mesh.union(state_dict))

    def include(self, name: str, state: Stateful) -> None:
        """Save the state of an object in the run's checkpoints, under `name`, and restore it when
        the run is resumed. Every rank must call this method, before a checkpoint is loaded: in
        `on_start` at the latest. Raises `CheckpointError`."""
        if not isinstance(state, Stateful):
            raise CheckpointError(
                f"include({name!r}, a {type(state).__name__}); it has no state_dict and"
                " load_state_dict; add both"
            )
        if name in self.training.stateful:
            raise CheckpointError(
                f"include({name!r}) a second time; names are unique; choose another"
            )
        self.training.stateful[name] = state
