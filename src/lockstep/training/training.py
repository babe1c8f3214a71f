"""The private state of a `Run`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lockstep.base import accelerator
from lockstep.base.errors import RecipeError
from lockstep.comm.mesh import to_local
from lockstep.data.digests import Digests
from lockstep.data.generators import seed_generators
from lockstep.data.positions import Position, position_in
from lockstep.keys import RandomStream, key, longer
from lockstep.model.random_streams import ModuleRandomStreams
from lockstep.model.running_statistics import RunningStatistics
from lockstep.model.sync_batchnorm import SyncBatchNormExchange
from lockstep.training.balance import ExpertBalance
from lockstep.training.consensus import NOTHING, Consensus, Request, merge
from lockstep.training.context import Context
from lockstep.training.device_progress import DeviceProgress, EndedStep
from lockstep.training.hook import ControlHook, Hook
from lockstep.training.microbatches import Microbatches
from lockstep.training.run import Run
from lockstep.training.set_up import Remark
from lockstep.training.state import Stateful
from lockstep.training.step_result import StepResult
from lockstep.training.train_module import TrainModule


@dataclass(slots=True)
class LoopState:
    """The position of a run in its loops of steps, saved in checkpoints as JSON."""

    loops: int = 0
    steps_before: int = 0  # optimizer steps done in earlier loops
    # name of a stream shard that this rank reads -> its position in the shard
    shards: dict[str, Position] = field(default_factory=dict)
    agreed: int | None = None
    """Number of optimizer steps done at the latest recomputation in which the gradients of all
    ranks agreed."""
    data: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    """Maps a loop's number and a sample's name to the digests of the sample's parts."""
    digest: Callable[[], Digests] | None = None
    """Returns the current digests of samples. None if the dataset cannot have changed in this
    process."""
    # the JSON of the checkpoint from which the run was resumed; `step` is its number of steps
    resumed: Mapping[str, Any] | None = None

    def begin_loop(self, steps_done: int) -> int:
        """Return the first step of the loop to compute. If the checkpoint was saved after the end
        of the loop, return `sys.maxsize`."""
        self.loops += 1
        self.steps_before = steps_done
        saved = 0 if self.resumed is None else self.resumed["loop"]
        if self.resumed is None or self.loops != saved:
            return 0 if self.loops > saved else sys.maxsize
        self.steps_before = self.resumed["steps_before"]
        return int(self.resumed["step"]) - self.steps_before

    def refresh_data(self) -> None:
        """Called before a checkpoint is saved, because a hook may have changed the dataset."""
        if self.digest is not None and str(self.loops) in self.data:
            self.data[str(self.loops)] = dict(self.digest().samples)

    @staticmethod
    def check(values: Mapping[str, Any], step: int) -> None:
        for shard, position in values["shards"].items():
            int(shard)
            position_in(position)
        numbers = [values["loop"], values["steps_before"], values.get("agreed") or 0]
        if (
            not all(type(each) is int and each >= 0 for each in numbers)
            or values["steps_before"] > step
        ):
            raise ValueError("the position in the data is not made of numbers of steps and samples")
        if not all(
            isinstance(parts, dict)
            for samples in values["data"].values()
            for parts in samples.values()
        ):
            raise TypeError("the digests of the data are not objects")

    def values(self) -> dict[str, Any]:
        return {
            "loop": self.loops,
            "steps_before": self.steps_before,
            "shards": self.shards,
            "agreed": self.agreed,
            "data": self.data,
        }


class Hooks:
    """Calls a list of hooks. Users' hooks are called with seeded random generators."""

    def __init__(self, hooks: Sequence[Hook], context: Context) -> None:
        self.all = list(hooks)
        self._context = context
        self.requesting = [
            hook.request
            for hook in hooks
            if isinstance(hook, ControlHook) and type(hook).request is not ControlHook.request
        ]
        self._at: dict[str, list[Callable[..., None]]] = {}

    def call(self, moment: str, *arguments: Any) -> None:
        if moment not in self._at:  # looked up late: a hook may set its methods in `on_start`
            self._at[moment] = [
                self._method(hook, moment)
                for hook in self.all
                if (isinstance(hook, ControlHook) or hasattr(Hook, moment))
                and getattr(type(hook), moment) is not getattr(ControlHook, moment)
            ]
        for method in self._at[moment]:
            method(*arguments)

    def _method(self, hook: Hook, moment: str) -> Callable[..., None]:
        method: Callable[..., None] = getattr(hook, moment)
        if moment == "on_event" or type(hook).__module__.startswith("lockstep."):
            return method  # not seeded: an event may occur in the middle of a microbatch
        number = [*vars(Hook), *vars(ControlHook)].index(moment)
        own = key(self._context.seed, RandomStream.HOOK, self.all.index(hook), number)
        seeded = partial(_call_seeded, method, own, self._context.device)
        if self._context.plan.divides("layers"):
            seeded = partial(_with_stage_draws, seeded)
        return seeded if not self._context.plan.state_divided else partial(_with_full_draws, seeded)

    def call_every(self, moment: str, *arguments: Any) -> None:
        """Call a method of all hooks, even if a hook raises an error. After all calls, raise the
        first error."""
        failure: BaseException | None = None
        for hook in self.all:
            try:
                getattr(hook, moment)(*arguments)
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure


def _call_seeded(
    method: Callable[..., None], key: int, device: torch.device, run: Run, *arguments: Any
) -> None:
    seed_generators(longer(key, run.step), device)
    method(run, *arguments)


def _with_stage_draws(method: Callable[..., None], run: Run, *arguments: Any) -> None:
    from lockstep.model.stage_draws import StageDraws  # imports tensor parallelism

    models = [module.model for module in run.training.modules]
    with StageDraws(models, run.context.mesh.stages.size):
        method(run, *arguments)


def _with_full_draws(method: Callable[..., None], run: Run, *arguments: Any) -> None:
    from lockstep.model.full_draws import FullDraws  # imports DTensors

    with FullDraws():
        method(run, *arguments)


class Training:
    """The progress of a run. The training loop updates the object, and lockstep's own hooks read
    it."""

    def __init__(self, context: Context, hooks: Sequence[Hook]) -> None:
        self.context = context
        self.run = Run(context, self)
        self.hooks = Hooks(hooks, context)
        self.code: Mapping[str, str] | None = None
        """None without `ls.train`."""
        self.modules: list[TrainModule] = []
        self.statistics: list[RunningStatistics] = []
        self.streams: list[tuple[int, ModuleRandomStreams]] = []
        self.stateful: dict[str, Stateful] = {"run": self}
        self.results: dict[int, StepResult] = {}
        self.latest: StepResult | None = None
        """The first model's result in its latest step that was not skipped."""
        self.measure: Callable[[], None] | None = None
        self.logged: dict[str, float] = {}
        """The script's numbers for this step's line of metrics.jsonl."""
        self.measured: dict[str, float] = {}
        """lockstep's own numbers for this step's line of metrics.jsonl."""
        self.checksum: str | None = None
        self.progress = DeviceProgress() if accelerator.has_streams(context.device) else None
        """None on a CPU."""
        self.is_consistent = True
        """False from the first change of a model in a step until the script's part of the step has
        ended. A checkpoint must not be saved while the state is inconsistent."""
        self.is_consistent_in_steps = True
        """False if the script has included objects in the checkpoints: the script may change them
        at any moment."""
        self.stopping: str | None = None
        self.is_committed = False
        """True from the last model's commit in a step until the next step begins."""
        self.loop = LoopState()
        self.source: Microbatches | None = None
        self.epoch_of: Callable[[int], int] | None = None
        """Returns the epoch of a step of the current loop. None for data without a length."""
        self.microbatches = 0
        """Number of microbatches that this rank has begun, over all steps."""
        self.exchange = SyncBatchNormExchange()
        self.consensus = Consensus(context.mesh, context.phases, self._request)
        self.has_started = False
        self.stop: str | None = None
        """Reason why this rank asks all ranks to stop."""
        self._devices_of: dict[int, list[torch.device]] = {}
        self._has_ended = False
        self._saved_loss = math.nan

    @property
    def current(self) -> Microbatches:
        assert self.source is not None, "a step has begun"
        return self.source

    @property
    def balances(self) -> list[ExpertBalance]:
        return [module.balance for module in self.modules if module.balance is not None]

    @property
    def loss(self) -> float:
        return self._saved_loss if self.latest is None else self.latest.loss()

    @property
    def speeds(self) -> tuple[float, ...]:
        """The speeds by which the latest step's microbatches were assigned. Empty if all speeds are
        equal."""
        return () if self.source is None else self.source.layout.assignment.speeds

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        self.run.metrics |= metrics
        self.run.metrics_at |= dict.fromkeys(metrics, self.run.step)

    def metric(self, name: str, of: str) -> float | None:
        """Return None if no evaluation has measured the metric after the latest step."""
        run = self.run
        if name in run.metrics:
            return run.metrics[name] if run.metrics_at[name] == run.step else None
        evaluations = () if run.recipe is None else run.recipe.evaluations
        if any(f"{prefix}loss" not in run.metrics for prefix in evaluations):
            return None
        raise RecipeError(
            f"{of}, which is not measured; measured are {', '.join(run.metrics)}; choose one of"
            " these"
        )

    def remark(self, remark: Remark) -> None:
        self.run.event(remark.event, **remark.details)
        if remark.line is not None:
            self.context.recorder.message(remark.line)

    def include_hooks(self, hooks: Sequence[Hook]) -> None:
        for place, hook in enumerate(hooks):
            if isinstance(hook, Stateful):
                self.run.include(f"{place}-{type(hook).__qualname__}", hook)

    def start(self) -> None:
        self.has_started = True
        self.hooks.call("on_start", self.run)

    def begin_step(self, source: Microbatches) -> None:
        self.source, self.logged, self.is_committed = source, {}, False
        self.hooks.call("before_step", self.run)

    def begin_change(self) -> None:
        """Called before a step's first change of a model."""
        self.is_consistent = False
        if self.progress is not None:
            self.progress.begin_change()

    def end_updates(self, results: dict[int, StepResult]) -> None:
        self.results, self.latest = results, results.get(0, self.latest)
        self.run.step += 1
        self.is_committed = True

    def end_step(self, source: Microbatches) -> None:
        """Called when the script's part of the step has ended."""
        self.is_consistent = True
        self.loop.shards = {str(shard): at for shard, at in (source.positions or {}).items()}
        if self.progress is not None:
            run = self.run
            ended = EndedStep(
                run.step,
                dict(run.metrics),
                dict(run.metrics_at),
                self.latest,
                self._saved_loss,
                self.loop.values(),
                [module.host_values() for module in self.modules],
            )
            self.progress.end_step(ended, self._devices())

    def _devices(self) -> list[torch.device]:
        devices = self._devices_of.get(len(self.modules))
        if devices is None:
            parameters = [p for module in self.modules for p in module.held.values()]
            found = {self.context.device, *(to_local(parameter).device for parameter in parameters)}
            devices = sorted(filter(accelerator.has_streams, found), key=str)
            self._devices_of = {len(self.modules): devices}
        return devices

    def agree(self) -> None:
        """Every rank must call this method."""
        agreed = self.consensus.agree(
            list(self.results.values()), may_stop=self.run.is_logging_step
        )
        self.stopping = self.stopping or agreed.stop
        self.hooks.call("on_agreement", self.run, agreed)

    def agree_to_stop(self) -> None:
        """Every rank must call this method."""
        self.stopping = self.consensus.agree_to_stop()

    def _request(self) -> Request:
        requests = [] if self.stop is None else [Request(stop=self.stop)]
        for ask in self.hooks.requesting:
            if (request := ask(self.run)) is not NOTHING:
                requests.append(request)
        return merge(requests)

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self.run.event("run-ended")

    def close(self) -> None:
        """Called at the end of the run, even after an error."""
        try:
            self.hooks.call_every("on_end", self.run)
        finally:
            for module in self.modules:
                module.close()
            self.exchange.world = None

    def state_dict(self) -> dict[str, Any]:
        run = self.run
        return {
            "step": run.step,
            "metrics": run.metrics,
            "metrics_at": run.metrics_at,
            "loss": self.loss,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        run = self.run
        run.step, run.metrics, run.metrics_at = state["step"], state["metrics"], state["metrics_at"]
        self._saved_loss = state["loss"]
