"""The `Run` that hooks get, and its hooks."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base import accelerator
from lockstep.base.errors import CheckpointError, DataError, RecipeError, first_few
from lockstep.comm.mesh import full_tensor, to_local
from lockstep.data.generators import seed_generators
from lockstep.keys import RandomStream, key
from lockstep.logging.metrics import as_number
from lockstep.logging.recorder import ROW_NAMES
from lockstep.model.random_streams import ModuleRandomStreams
from lockstep.model.running_statistics import RunningStatistics
from lockstep.model.sync_batchnorm import SyncBatchNormExchange
from lockstep.recipe.recipe import Recipe
from lockstep.training.consensus import NOTHING, Consensus, Request, merge
from lockstep.training.context import Context
from lockstep.training.device_progress import DeviceProgress, EndedStep
from lockstep.training.hook import ControlHook, Hook
from lockstep.training.loop_state import LoopState
from lockstep.training.microbatches import Microbatches
from lockstep.training.set_up import Remark
from lockstep.training.state import Stateful
from lockstep.training.step_result import StepResult
from lockstep.training.train_module import TrainModule


class Hooks:
    """A list of hooks. Each moment calls only the hooks that override it, and the user's with
    seeded generators."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.all = list(hooks)
        self._at: dict[str, list[Callable[..., None]]] = {}
        self._requesting = [
            hook.request
            for hook in hooks
            if isinstance(hook, ControlHook) and type(hook).request is not ControlHook.request
        ]

    def requests(self, run: Run) -> list[Request]:
        """Return the requests of all hooks that have one."""
        return [request for ask in self._requesting if (request := ask(run)) is not NOTHING]

    def call(self, moment: str, *arguments: Any) -> None:
        """Call method `moment` of all hooks, in order."""
        methods = self._at.get(moment)
        if methods is None:
            default = getattr(ControlHook, moment)
            hooks = (
                self.all
                if hasattr(Hook, moment)
                else [hook for hook in self.all if isinstance(hook, ControlHook)]
            )
            called = [hook for hook in hooks if getattr(type(hook), moment) is not default]
            methods = self._at[moment] = [self._method(hook, moment) for hook in called]
        for method in methods:
            method(*arguments)

    def _method(self, hook: Hook, moment: str) -> Callable[..., None]:
        method: Callable[..., None] = getattr(hook, moment)
        if moment == "on_event" or type(hook).__module__.startswith("lockstep."):
            return method  # an event may be recorded amid a microbatch
        return partial(
            _call_seeded,
            method,
            (self.all.index(hook), [*vars(Hook), *vars(ControlHook)].index(moment)),
        )

    def call_every(self, moment: str, *arguments: Any) -> None:
        """Call method `moment` of all hooks even if one raises; the first error is raised at the
        end."""
        failure: BaseException | None = None
        for hook in self.all:
            try:
                getattr(hook, moment)(*arguments)
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure


def _call_seeded(
    method: Callable[..., None], place: tuple[int, int], run: Run, *arguments: Any
) -> None:
    seed_generators(key(run.context.seed, RandomStream.HOOK, run.step, *place), run.context.device)
    method(run, *arguments)


class Run:
    """A run, as hooks see it."""

    def __init__(self, context: Context, hooks: Sequence[Hook]) -> None:
        self.context = context
        self.hooks = Hooks(hooks)
        self.recipe: Recipe | None = None
        self.code: Mapping[str, str] | None = None
        """Digests of the recipe's functions. None without `ls.train`, as is `recipe`."""
        self.modules: list[TrainModule] = []
        self.statistics: list[RunningStatistics] = []
        """Running statistics of all models, in the current loop."""
        self.streams: list[tuple[int, ModuleRandomStreams]] = []
        """The random streams of the models that have some, with the model's number, in the current
        loop."""
        self.stateful: dict[str, Stateful] = {"run": self}
        """Further objects whose state is saved in checkpoints, by name."""
        self.step = 0
        """Optimizer steps done."""
        self.results: dict[int, StepResult] = {}
        """Results of the latest step, by the number of the model; none for a model that has skipped
        it."""
        self.latest: StepResult | None = None
        """The first model's result in the latest step that it has not skipped."""
        self.metrics_at: dict[str, int] = {}
        self.metrics: dict[str, float] = {}
        """The latest value of each metric of the evaluations; `metrics_at` is `step` at that
        time."""
        self.measure: Callable[[], None] | None = None
        """Measures the recipe's evaluations. None if it has none."""
        self.logged: dict[str, float] = {}
        """The script's numbers for this step's line of metrics.jsonl."""
        self.measured: dict[str, float] = {}
        """The numbers of lockstep's own hooks for this step's line."""
        self.is_logging_step = False
        """True if the current step has a line in metrics.jsonl."""
        self.progress = DeviceProgress() if accelerator.has_streams(context.device) else None
        """The progress of the device, if the host may be ahead of it."""
        self._devices_of: dict[int, list[torch.device]] = {}
        """The number of models -> `_devices`."""
        self.is_consistent = True
        """False from the first change of a model in a step until the script's part of the step has
        ended."""
        self.is_consistent_in_steps = True
        """False if the script itself may change the saved state during a step."""
        self.stopping: str | None = None
        """The reason, once all ranks have agreed to stop."""
        self.is_committed = False
        """True from the commit of all models in a step until the next step begins."""
        self.loop = LoopState()
        self.global_batch = 0
        """Samples of a step of the current loop."""
        self.total_steps = 0
        """Steps of the current loop, from its beginning."""
        self.microbatch: int | None = None
        """Samples of a microbatch; None: one microbatch for each rank."""
        self.source: Microbatches | None = None
        """The microbatches of the current step on this rank."""
        self.epoch_of: Callable[[int], int] | None = None
        """(step of the current loop) -> its epoch. None if the data has no length."""
        self.microbatches = 0
        """Microbatches that this rank has begun in loops over them, in all steps."""
        self.exchange = SyncBatchNormExchange()
        self.consensus = Consensus(context.mesh, context.phases, self._request)
        self._has_started = self._has_ended = False
        self._stop: str | None = None
        self._saved_loss = math.nan

    @property
    def model(self) -> nn.Module:
        """The user's own module; the first one if there are several."""
        return self.modules[0].model

    @property
    def rank(self) -> int:
        """The rank of this process. 0 for the one that writes the run directory."""
        return self.context.world.rank

    @property
    def dir(self) -> Path:
        """The run directory."""
        return self.context.run_dir

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of `model`."""
        return list(self.modules[0].optimizers)

    @property
    def epoch(self) -> int | None:
        """Epochs of the current loop's data that the steps done have ended, from 0: in
        `before_step`, the epoch of the step's first sample. None before the first step, and for
        data without a length."""
        return None if self.epoch_of is None else self.epoch_of(self.step - self.loop.steps_before)

    @property
    def has_ended_epoch(self) -> bool:
        """True if the latest step was the last one of an epoch."""
        done = self.step - self.loop.steps_before
        return (
            self.epoch_of is not None and done > 0 and self.epoch_of(done) > self.epoch_of(done - 1)
        )

    @property
    def loss(self) -> float:
        """The first model's loss in the latest step that it has not skipped: Σ total / Σ weight of
        the global batch."""
        return self._saved_loss if self.latest is None else self.latest.loss()

    @property
    def speeds(self) -> tuple[float, ...]:
        """The measured speeds of the data ranks in the latest step; empty if all count as equal."""
        return () if self.source is None else self.source.layout.assignment.speeds

    def stop(self, reason: str) -> None:
        """Ask for the end of training, on any rank. All stop at the next logging step, or after
        this evaluation."""
        self._stop = reason

    def freeze(self, *patterns: str) -> None:
        """Train without the parameters of `model` with these names from the next step on; `*`
        stands for any text. Every rank calls it, between two steps. The optimizer keeps their
        state. Raises `RecipeError`."""
        self._set_trainable(patterns, to=False)

    def unfreeze(self, *patterns: str) -> None:
        """Train the parameters of `model` with these names from the next step on. The optimizer
        must hold them. Every rank calls it, between two steps. Raises `RecipeError`."""
        self._set_trainable(patterns, to=True)

    def _set_trainable(self, patterns: Sequence[str], *, to: bool) -> None:
        verb, module = "unfreeze" if to else "freeze", self.modules[0]
        first, *others = self.context.world.gather_values([verb, *patterns])
        if any(other != first for other in others):
            raise RecipeError(
                f"run.{verb}{tuple(patterns)} on some ranks alone; all train the same parameters;"
                " call it on every rank"
            )
        names = set(module.names)
        for pattern in patterns:
            found = fnmatch.filter(module.held, pattern)
            if not found:
                raise RecipeError(
                    f"run.{verb}({pattern!r}), and the optimizer holds no such parameter; it holds"
                    f" {first_few(list(module.held))}; give the optimizer all parameters that are"
                    " trained at any time"
                )
            names = names | set(found) if to else names - set(found)
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
        """Measure all of the recipe's evaluations that were not measured after this step, and
        return the metrics of all. Every rank calls it, between two steps. Raises `RecipeError` if
        the recipe has none."""
        if self.measure is None:
            raise RecipeError(
                "run.evaluate() without Recipe.evaluation; it measures those of the recipe; give"
                " ls.Evaluation(data=...)"
            )
        self.measure()
        return dict(self.metrics)

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        """Note what was measured after the latest step."""
        self.metrics |= metrics
        self.metrics_at |= dict.fromkeys(metrics, self.step)

    def metric(self, name: str, of: str) -> float | None:
        """Return a metric if it was measured after the latest step, else None. `of`: who asks, for
        the message of the `RecipeError` if no evaluation has this metric."""
        if name in self.metrics:
            return self.metrics[name] if self.metrics_at[name] == self.step else None
        awaited = (
            []
            if self.recipe is None
            else [
                prefix for prefix in self.recipe.evaluations if f"{prefix}loss" not in self.metrics
            ]
        )
        if awaited:
            return None
        raise RecipeError(
            f"{of}, which is not measured; measured are {', '.join(self.metrics)}; choose one of"
            " these"
        )

    def event(self, name: str, step: int | None = None, **details: Any) -> None:
        """Record an event; rank 0's are in events.jsonl. `step`: optimizer steps done then; None:
        those done now."""
        event = self.context.recorder.event(name, self.step if step is None else step, **details)
        if self._has_started:
            self.hooks.call("on_event", self, event)

    def remark(self, remark: Remark) -> None:
        """Record an event, and show its line to the user if it has one."""
        self.event(remark.event, **remark.details)
        if remark.line is not None:
            self.context.recorder.message(remark.line)

    def log(self, values: Mapping[str, float]) -> None:
        """Add numbers to this step's line in metrics.jsonl and to the progress display; rank 0's
        are written.

        Raises `DataError` for a value that is not a number, or a name that the line has already.
        """
        for name, value in values.items():
            if name in ROW_NAMES or name.startswith("lr/"):
                raise DataError(
                    f"log({{{name!r}: ...}}); every line has {name!r} already; choose another name"
                )
            self.logged[name] = as_number(name, value)

    def full_state_dict(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """Return a copy of the state dict of `model` with full tensors on the CPU, on every rank
        and under every plan: for `save_pretrained`. Optimizers that have modes are in evaluation
        mode then. Every rank calls it. None: the first model."""
        with ExitStack() as stack:
            for module in self.modules:
                stack.enter_context(module.modes.evaluating())
            state = self.context.mesh.union((model or self.model).state_dict())
            return {
                name: full_tensor(value.detach()).to("cpu", copy=True)
                for name, value in state.items()
            }

    def gradient_norms(self, model: nn.Module | None = None) -> dict[str, float]:
        """Return the norm of the gradient of each parameter that has one, by name. Every rank calls
        it, in `after_backward`. `model`: that of the hook; None: the first."""
        module = next(each for each in self.modules if model is None or each.model is model)
        scale = 1.0 if module.loss_scale is None else module.loss_scale.value
        named = zip(module.names, module.parameters, strict=True)
        gradients = {name: p.grad for name, p in named if p.grad is not None}
        norms = module.norm.of_each(list(gradients.values()))
        mine = {name: norm / scale for name, norm in zip(gradients, norms, strict=True)}
        everyone = self.context.mesh.stages.gather_values(mine)
        return {name: norm for theirs in everyone for name, norm in theirs.items()}

    def save(self, name: str, state_dict: Mapping[str, Any]) -> None:
        """Write tensors to a safetensors file in the run directory. Every rank calls it; rank 0
        writes those of all."""
        self.context.recorder.save_tensors(name, self.context.mesh.union(state_dict))

    def include(self, name: str, state: Stateful) -> None:
        """Save `state` with the run, under `name`. Raises `CheckpointError`."""
        if not isinstance(state, Stateful):
            raise CheckpointError(
                f"include({name!r}, a {type(state).__name__}); it has no state_dict and"
                " load_state_dict; add both"
            )
        if name in self.stateful:
            raise CheckpointError(
                f"include({name!r}) a second time; names are unique; choose another"
            )
        self.stateful[name] = state

    def include_hooks(self, hooks: Sequence[Hook]) -> None:
        """Save those of the user's hooks that have a state with the run."""
        for place, hook in enumerate(hooks):
            if isinstance(hook, Stateful):
                self.include(f"{place}-{type(hook).__qualname__}", hook)

    def start(self) -> None:
        """Call the hooks' `on_start`, and their `on_event` from now on."""
        self._has_started = True
        self.hooks.call("on_start", self)

    def begin_step(self, source: Microbatches) -> None:
        self.source, self.logged, self.is_committed = source, {}, False
        self.hooks.call("before_step", self)

    def begin_change(self) -> None:
        """Called before the first change of a model in a step."""
        self.is_consistent = False
        if self.progress is not None:
            self.progress.begin_change()

    def end_step(self, source: Microbatches) -> None:
        """Called when the script's part of the step has ended: the saved state is consistent
        again."""
        self.is_consistent = True
        self.loop.shards = {str(shard): at for shard, at in (source.positions or {}).items()}
        if self.progress is not None:
            metrics, at = dict(self.metrics), dict(self.metrics_at)
            modules = [module.host_values() for module in self.modules]
            ended = EndedStep(
                self.step, metrics, at, self.latest, self._saved_loss, self.loop.values(), modules
            )
            self.progress.end_step(ended, self._devices())

    def _devices(self) -> list[torch.device]:
        """The accelerators that hold a part of the state, or compute it."""
        devices = self._devices_of.get(len(self.modules))
        if devices is None:
            found = {
                to_local(parameter).device
                for module in self.modules
                for parameter in module.held.values()
            }
            devices = sorted(
                (each for each in found | {self.context.device} if accelerator.has_streams(each)),
                key=str,
            )
            self._devices_of = {len(self.modules): devices}
        return devices

    def end_updates(self, results: dict[int, StepResult]) -> None:
        """Called when all models have committed or skipped the step."""
        self.results, self.latest = results, results.get(0, self.latest)
        self.step += 1
        self.is_committed = True

    def agree(self) -> None:
        """Do what the ranks agree on after a step. Every rank calls it."""
        agreed = self.consensus.agree(list(self.results.values()), may_stop=self.is_logging_step)
        self.stopping = self.stopping or agreed.stop
        self.hooks.call("on_agreement", self, agreed)

    def agree_to_stop(self) -> None:
        """Let a request to stop take effect now. Every rank calls it."""
        self.stopping = self.consensus.agree_to_stop()

    def end(self) -> None:
        """Record, once, that the run has ended as it should."""
        if not self._has_ended:
            self._has_ended = True
            self.event("run-ended")

    def close(self) -> None:
        """Called at the end of the run, even after an error."""
        try:
            self.hooks.call_every("on_end", self)
        finally:
            for module in self.modules:
                module.close()
            self.exchange.world = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "metrics": self.metrics,
            "metrics_at": self.metrics_at,
            "loss": self.loss,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.metrics, self.metrics_at = (
            state["step"],
            state["metrics"],
            state["metrics_at"],
        )
        self._saved_loss = state["loss"]

    def _request(self) -> Request:
        requests = [] if self._stop is None else [Request(stop=self._stop)]
        return merge([*requests, *self.hooks.requests(self)])
