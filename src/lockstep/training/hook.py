"""The hook protocol: the moments of a run at which users' hooks and lockstep's own are called, and what they see of the run."""

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
from lockstep.recipe import Recipe
from lockstep.training.consensus import NOTHING, Consensus, Request, merge
from lockstep.training.context import Context
from lockstep.training.microbatches import Microbatches
from lockstep.training.set_up import Remark
from lockstep.training.state import Stateful
from lockstep.training.step_result import StepResult
from lockstep.training.train_module import TrainModule


class Hook:
    """Methods that are called on every rank alike, in the order in which the hooks were given. All do nothing unless overridden.

    A hook with `state_dict` and `load_state_dict` is saved with the run. Steps are counted as in the logs: `run.step` is the number
    of optimizer steps done.
    """

    def on_start(self, run: Run) -> None:
        """Before the first step, and before a checkpoint is loaded."""

    def before_step(self, run: Run) -> None:
        """Before the first forward of each step."""

    def after_backward(self, run: Run, model: nn.Module) -> None:
        """After the last backward of a step. Every `.grad` of `model` is summed over all ranks, but not yet clipped, nor unscaled in fp16.
        Called for each model if several are prepared."""

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
        """After an event was written to events.jsonl. Events before `on_start` are not told."""

    def on_error(self, run: Run, error: BaseException) -> None:
        """When an error ends the run on this rank. Other ranks may be gone: do not call collectives."""

    def on_end(self, run: Run) -> None:
        """Called at the end of the run, even after an error. Do not call collectives."""


class ControlHook(Hook):
    """A hook of lockstep's own, which may also decide what all ranks do next."""

    def request(self, run: Run) -> Request:
        """Return this rank's request to all ranks. Called in each step."""
        return NOTHING

    def before_steps(self, run: Run) -> None:
        """Before the first step of a loop of steps, and after a checkpoint was loaded."""

    def between_steps(self, run: Run) -> None:
        """After each step, after all hooks' `after_step`: the script's part of the step has ended."""

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
            idle = getattr(ControlHook, moment)
            hooks = self.all if hasattr(Hook, moment) else [hook for hook in self.all if isinstance(hook, ControlHook)]
            methods = self._at[moment] = [getattr(hook, moment) for hook in hooks if getattr(type(hook), moment) is not idle]
        for method in methods:
            method(*arguments)

    def call_every(self, moment: str, *arguments: Any) -> None:
        """The same, but a hook that raises does not keep the others from being called; the first error is raised at the end."""
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
    """The position of a run in its loops of steps. The same on every rank, and saved in checkpoints as JSON."""

    loops: int = 0
    """Loops begun."""
    steps_before: int = 0
    """Optimizer steps done in earlier loops."""
    shards: dict[str, ShardPosition] = field(default_factory=dict)
    """The position of each stream shard that this rank reads."""
    resumed: Mapping[str, Any] | None = None
    """The JSON values of the checkpoint that the run was resumed from, with `step`; None if it was not."""

    def begin_loop(self, steps_done: int) -> int:
        """Begin another loop. Returns its first step: a huge number if the whole loop was done before the checkpoint."""
        self.loops += 1
        self.steps_before = steps_done
        saved = 0 if self.resumed is None else self.resumed["loop"]
        if self.resumed is None or self.loops != saved:
            return 0 if self.loops > saved else sys.maxsize
        self.steps_before = self.resumed["steps_before"]
        return int(self.resumed["step"]) - self.steps_before

    def values(self) -> dict[str, Any]:
        """The JSON that is saved."""
        return {"loop": self.loops, "steps_before": self.steps_before, "shards": self.shards}


class Run:
    """A run under way: what hooks see of it, and may do."""

    def __init__(self, context: Context, hooks: Sequence[Hook]) -> None:
        self.context = context
        self.hooks = Hooks(hooks)
        self.recipe: Recipe | None = None
        """None for a loop of the script's own."""
        self.modules: list[TrainModule] = []
        """The prepared models, each with its optimizers."""
        self.stateful: dict[str, Stateful] = {}
        """Further objects whose state is saved in checkpoints, by name."""
        self.step = 0
        """Optimizer steps done."""
        self.results: list[StepResult] = []
        """The results of the latest step, one for each model."""
        self.metrics: dict[str, float] = {}
        """The latest evaluation."""
        self.evaluated_at: int | None = None
        """`step` at that evaluation."""
        self.logged: dict[str, float] = {}
        """More numbers for the current step's line of metrics.jsonl."""
        self.measured: dict[str, float] = {}
        """Numbers that lockstep's own hooks measured, for the same line."""
        self.is_logging_step = False
        """True if the current step is written to metrics.jsonl."""
        self.is_whole = True
        """False from the first change of the model in a step until the script's part of the step has ended."""
        self.is_whole_in_a_step = True
        """False if the script itself changes what is saved, at moments that lockstep does not know."""
        self.stopping: str | None = None
        """Why no further step is taken, once all ranks have agreed to stop."""
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
        """The exchange of statistics for SyncBatchNorm layers."""
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
        """Ask for the end of training. Any rank may. It takes effect on all ranks after the evaluation that is under way, else at the
        next logging step."""
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
        """Write tensors to a safetensors file in the run directory. Every rank calls it; rank 0 writes all ranks' tensors."""
        self.context.recorder.save_tensors(name, self.context.mesh.union(state_dict))

    def include(self, name: str, state: Stateful) -> None:
        """Save `state` with the run, under `name`. Raises `CheckpointError`."""
        if not isinstance(state, Stateful):
            raise CheckpointError(f"include({name!r}, a {type(state).__name__}); it has no state_dict and load_state_dict; give it both")
        if name in self.stateful:
            raise CheckpointError(f"include({name!r}) for a second time; each name is for one; choose another")
        self.stateful[name] = state

    def start(self) -> None:
        """Call the hooks' `on_start`. From now on they are told of events."""
        self._has_started = True
        self.hooks.call("on_start", self)

    def begin_step(self, source: Microbatches) -> None:
        """A step begins, with `source`'s microbatches."""
        self.source, self.logged, self.is_committed = source, {}, False
        self.hooks.call("before_step", self)

    def end_step(self, source: Microbatches) -> None:
        """The script's part of the step has ended: what is saved is whole again."""
        self.is_whole = True
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
        """The end, however the run ended."""
        try:
            self.hooks.call_every("on_end", self)
        finally:
            for module in self.modules:
                module.close()
            self.exchange.world = None

    def state_dict(self) -> dict[str, Any]:
        """The run's own numbers, besides its models and hooks."""
        return {"step": self.step, "metrics": self.metrics, "evaluated_at": self.evaluated_at, "loss": self.loss}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.step, self.metrics, self.evaluated_at = state["step"], state["metrics"], state["evaluated_at"]
        self._saved_loss = state["loss"]

    def _request(self) -> Request:
        asked = [hook.request(self) for hook in self.hooks.all if isinstance(hook, ControlHook)]
        return merge([Request(stop=self._stop), *asked])


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
                    f"{type(hook).__name__}.{name} would never be called; the moments of an ls.Hook are {moments}; choose one of them, or "
                    "begin the method's name otherwise"
                )
    if several is not hooks:
        raise RecipeError(f"hooks={hooks!r}; it is a list of hooks; give hooks=[...]")
