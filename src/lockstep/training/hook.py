"""The hook protocol: when users' hooks and lockstep's own are called, and the `Run` that they get."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.base.errors import CheckpointError, RecipeError
from lockstep.base.events import Event
from lockstep.data.fetch import ShardPosition
from lockstep.model.sync_batchnorm import SyncBatchNormExchange
from lockstep.recipe.recipe import Recipe
from lockstep.training.consensus import NOTHING, Consensus, Request, merge
from lockstep.training.context import Context
from lockstep.training.microbatches import Microbatches
from lockstep.training.set_up import Remark
from lockstep.training.state import Stateful
from lockstep.training.step_result import StepResult
from lockstep.training.train_module import TrainModule


class Hook:
    """Methods that are called on every rank, in the order in which the hooks were given. All do nothing unless
    overridden.

    A hook with `state_dict` and `load_state_dict` is saved with the run. `run.step` is the number of optimizer steps
    done.
    """

    def on_start(self, run: Run) -> None:
        """Before the first step, and before a checkpoint is loaded."""

    def before_step(self, run: Run) -> None:
        """Before the first forward of each step."""

    def after_backward(self, run: Run, model: nn.Module) -> None:
        """After the last backward of a step. Every `.grad` of `model` is summed over all ranks, but not yet clipped,
        nor unscaled in fp16. Called for each model if several are prepared."""

    def after_step(self, run: Run) -> None:
        """After each step, even if fp16 overflowed and the model was not updated."""

    def before_evaluation(self, run: Run) -> None:
        """Before each evaluation."""

    def after_evaluation(self, run: Run, metrics: Mapping[str, float]) -> None:
        """After each evaluation, with its metrics, which are the same on every rank."""

    def on_finish(self, run: Run) -> None:
        """After the last step and the last evaluation, before the result is written. Not after an error."""

    def on_save(self, run: Run) -> None:
        """After the final weights were written to the run directory."""

    def on_event(self, run: Run, event: Event) -> None:
        """After an event was written to events.jsonl, but not before `on_start`."""

    def on_error(self, run: Run, error: BaseException) -> None:
        """When an error ends the run on this rank. Other ranks may be gone: do not call collectives."""

    def on_end(self, run: Run) -> None:
        """Called at the end of the run, even after an error. Do not call collectives."""


class ControlHook(Hook):
    """One of lockstep's own hooks, which may also stop, save or end the run."""

    def request(self, run: Run) -> Request:
        """Return this rank's request to all ranks. Called in each step."""
        return NOTHING

    def before_steps(self, run: Run) -> None:
        """Before the first step of a loop of steps, and after a checkpoint was loaded."""

    def between_steps(self, run: Run) -> None:
        """After each step, after all hooks' `after_step`."""

    def after_steps(self, run: Run) -> None:
        """After the last step of a loop of steps."""

    def on_agreement(self, run: Run, agreed: Request) -> None:
        """After `between_steps`, with what all ranks agreed on. Every rank calls it."""


class Hooks:
    """A list of hooks. Each moment calls only the hooks that override it."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.all = list(hooks)
        self._at: dict[str, list[Callable[..., None]]] = {}

    def call(self, moment: str, *arguments: Any) -> None:
        """Call method `moment` of all hooks, in order."""
        methods = self._at.get(moment)
        if methods is None:
            default = getattr(ControlHook, moment)
            hooks = self.all if hasattr(Hook, moment) else [hook for hook in self.all if isinstance(hook, ControlHook)]
            methods = self._at[moment] = [getattr(hook, moment) for hook in hooks if getattr(type(hook), moment) is not default]
        for method in methods:
            method(*arguments)

    def call_every(self, moment: str, *arguments: Any) -> None:
        """Call method `moment` of all hooks even if one raises; the first error is raised at the end."""
        failure: BaseException | None = None
        for hook in self.all:
            try:
                getattr(hook, moment)(*arguments)
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure


@dataclass(slots=True)
class LoopState:
    """The position of a run in its loops of steps: saved in checkpoints as JSON."""

    loops: int = 0
    steps_before: int = 0  # optimizer steps done in earlier loops
    shards: dict[str, ShardPosition] = field(default_factory=dict)  # each stream shard that this rank reads
    resumed: Mapping[str, Any] | None = None  # the JSON of the checkpoint that the run was resumed from, with `step`

    def begin_loop(self, steps_done: int) -> int:
        """Begin another loop. Returns its first step: `sys.maxsize` if the loop had ended before the checkpoint."""
        self.loops += 1
        self.steps_before = steps_done
        saved = 0 if self.resumed is None else self.resumed["loop"]
        if self.resumed is None or self.loops != saved:
            return 0 if self.loops > saved else sys.maxsize
        self.steps_before = self.resumed["steps_before"]
        return int(self.resumed["step"]) - self.steps_before

    def values(self) -> dict[str, Any]:
        return {"loop": self.loops, "steps_before": self.steps_before, "shards": self.shards}


class Run:
    """A run, as hooks see it."""

    def __init__(self, context: Context, hooks: Sequence[Hook]) -> None:
        self.context = context
        self.hooks = Hooks(hooks)
        self.recipe: Recipe | None = None
        """None without `ls.train`."""
        self.code: dict[str, str] | None = None
        """Digests of the recipe's functions. None without `ls.train`."""
        self.modules: list[TrainModule] = []
        self.stateful: dict[str, Stateful] = {}
        """Further objects whose state is saved in checkpoints, by name."""
        self.step = 0
        """Optimizer steps done."""
        self.results: list[StepResult] = []
        """Results of the latest step, one for each model."""
        self.metrics: dict[str, float] = {}
        """The latest evaluation."""
        self.evaluated_at: int | None = None
        """`step` at that evaluation."""
        self.logged: dict[str, float] = {}
        """The script's numbers for this step's line of metrics.jsonl."""
        self.measured: dict[str, float] = {}
        """The numbers of lockstep's own hooks for this step's line."""
        self.is_logging_step = False
        """True if the current step has a line in metrics.jsonl."""
        self.is_consistent = True
        """False from the first change of a model in a step until the script's part of the step has ended."""
        self.is_consistent_in_steps = True
        """False if the script itself may change the saved state during a step."""
        self.stopping: str | None = None
        """The reason, once all ranks have agreed to stop."""
        self.is_committed = False
        """True from the commit of all models in a step until the next step begins."""
        self.loop = LoopState()
        self.global_batch = 0
        """Samples of a step of the current loop."""
        self.microbatch: int | None = None
        """Samples of a microbatch; None: one microbatch for each rank."""
        self.source: Microbatches | None = None
        """The microbatches of the current step on this rank."""
        self.exchange = SyncBatchNormExchange()
        self.consensus = Consensus(context.mesh, self._request)
        self._has_started = False
        self._stop: str | None = None
        self._saved_loss = math.nan

    @property
    def model(self) -> nn.Module:
        """The user's own module; the first one if there are several."""
        return self.modules[0].model

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of `model`."""
        return list(self.modules[0].optimizers)

    @property
    def loss(self) -> float:
        """The loss of the latest step: Σ total / Σ weight over its global batch."""
        return self.results[0].loss() if self.results else self._saved_loss

    def stop(self, reason: str) -> None:
        """Ask for the end of training, on any rank. All stop at the next logging step, or after this evaluation."""
        self._stop = reason

    def event(self, name: str, step: int | None = None, **details: Any) -> None:
        """Record an event; rank 0's are in events.jsonl. `step`: optimizer steps done then; None: those done now."""
        event = self.context.recorder.event(name, self.step if step is None else step, **details)
        if self._has_started:
            self.hooks.call("on_event", self, event)

    def remark(self, remark: Remark) -> None:
        """Record an event, and show its line to the user if it has one."""
        self.event(remark.event, **remark.details)
        if remark.line is not None:
            self.context.recorder.message(remark.line)

    def save(self, name: str, state_dict: Mapping[str, Any]) -> None:
        """Write tensors to a safetensors file in the run directory. Every rank calls it; rank 0 writes those of all."""
        self.context.recorder.save_tensors(name, self.context.mesh.union(state_dict))

    def include(self, name: str, state: Stateful) -> None:
        """Save `state` with the run, under `name`. Raises `CheckpointError`."""
        if not isinstance(state, Stateful):
            raise CheckpointError(f"include({name!r}, a {type(state).__name__}); it has no state_dict and load_state_dict; add both")
        if name in self.stateful:
            raise CheckpointError(f"include({name!r}) a second time; names are unique; choose another")
        self.stateful[name] = state

    def start(self) -> None:
        """Call the hooks' `on_start`, and their `on_event` from now on."""
        self._has_started = True
        self.hooks.call("on_start", self)

    def begin_step(self, source: Microbatches) -> None:
        self.source, self.logged, self.is_committed = source, {}, False
        self.hooks.call("before_step", self)

    def end_step(self, source: Microbatches) -> None:
        """Called when the script's part of the step has ended: the saved state is consistent again."""
        self.is_consistent = True
        self.loop.shards = {str(shard): at for shard, at in (source.positions or {}).items()}

    def agree(self) -> None:
        """Do what the ranks agree on after a step. Every rank calls it."""
        agreed = self.consensus.agree(self.results, may_stop=self.is_logging_step)
        self.stopping = self.stopping or agreed.stop
        self.hooks.call("on_agreement", self, agreed)

    def agree_to_stop(self) -> None:
        """Let a request to stop take effect now. Every rank calls it."""
        self.stopping = self.consensus.agree_to_stop()

    def close(self) -> None:
        """Called at the end of the run, even after an error."""
        try:
            self.hooks.call_every("on_end", self)
        finally:
            for module in self.modules:
                module.close()
            self.exchange.world = None

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "metrics": self.metrics, "evaluated_at": self.evaluated_at, "loss": self.loss}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.metrics, self.evaluated_at = state["step"], state["metrics"], state["evaluated_at"]
        self._saved_loss = state["loss"]

    def _request(self) -> Request:
        requests = [hook.request(self) for hook in self.hooks.all if isinstance(hook, ControlHook)]
        if self._stop is not None:
            requests.insert(0, Request(stop=self._stop))
        return merge(requests)


def check_hooks(hooks: Any) -> None:
    """Raise `RecipeError` unless `hooks` is a sequence of `Hook`s whose methods are called at moments that exist."""
    several = hooks if isinstance(hooks, Sequence) else [hooks]
    for hook in several:
        if not isinstance(hook, Hook):
            raise RecipeError(f"hooks has {hook!r}; a hook is an object of a subclass of ls.Hook; make it one")
        for name in dir(type(hook)):
            if name.startswith(("on_", "before_", "after_")) and not hasattr(ControlHook, name):
                moments = ", ".join(each for each in vars(Hook) if not each.startswith("_"))
                raise RecipeError(
                    f"{type(hook).__name__}.{name} would never be called; the methods of an ls.Hook are {moments}; use one of them, or a "
                    "name with another beginning"
                )
    if several is not hooks:
        raise RecipeError(f"hooks={hooks!r}; it is a list of hooks; give hooks=[...]")
