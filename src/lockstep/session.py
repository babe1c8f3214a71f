"""The lower level on which `train` is written, for training loops that a recipe cannot express:
GANs, reinforcement learning."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from lockstep.base.errors import CheckpointError, UserError
from lockstep.comm.first_failure import FirstFailure
from lockstep.comm.gather import gather, mean
from lockstep.comm.segment import CallsDiffer, PeerStopped
from lockstep.comm.world import World
from lockstep.house_hooks import HouseHooks
from lockstep.launch.failures import lost_a_peer
from lockstep.launch.termination import Termination
from lockstep.logging.loggers import Logger
from lockstep.model.block_wrappers import error_of_compiling
from lockstep.model.shard import error_of_sharding
from lockstep.model.weight_casts import error_of_autocast
from lockstep.opening import Opened, RunRequest, open_run
from lockstep.plan import Plan
from lockstep.recipe.balance import Balance
from lockstep.recipe.checks import Precision
from lockstep.recipe.code import Digests
from lockstep.recipe.recipe import Evaluation, Weights
from lockstep.recipe.sequence import Sequence as RecipeSequence
from lockstep.saving import Resume, Saving
from lockstep.training import loop, precision as precisions
from lockstep.training.context import Context
from lockstep.training.deterministic import error_of_determinism
from lockstep.training.hook import Hook, check_hooks
from lockstep.training.prepare import ModelOptions, prepare
from lockstep.training.recovery import Recovery
from lockstep.training.state import Stateful
from lockstep.training.step import Step
from lockstep.training.training import Training

TELLING_SECONDS = 1.0
"""Time that this rank waits for the error of another rank that has ended."""


class Session:
    """The processes, the run directory and the models of one run. Every rank makes one, and calls
    its methods in the same order. Use a session in a `with` statement. A plan or run directory of
    the launcher replaces the arguments. Raises `PlanError`, `LaunchError` and `RunDirectoryError`
    on entering."""

    # the evaluations of `train`; None in a session that a script makes
    _evaluations: Mapping[str, Evaluation] | None = None
    code: Mapping[str, str] = MappingProxyType({})
    """Digests of the recipe's functions. An empty mapping in the session of a script without a
    recipe."""
    _code_and_objects: Digests = MappingProxyType({})
    _recovery: Recovery | None = None  # the recovery of `train`, if the run can recover in place
    _open: Callable[[RunRequest, Termination, ExitStack, Recovery | None], Opened] = staticmethod(
        open_run
    )

    def __init__(
        self,
        *,
        run_dir: str | None = None,
        seed: int = 0,
        plan: str | Plan | None = None,
        precision: Precision = "fp32",
        gradient_compression: str = "none",
        log_every: int = 10,
        hooks: Sequence[Hook] = (),
        recipe: dict[str, Any] | None = None,
        saving: Saving | None = None,
        resume: Resume = "auto",
        allow_change: Collection[str] = (),
        loggers: Sequence[Logger] = (),
    ) -> None:
        """- `run_dir`, `plan`, `hooks`, `log_every`, `saving`, `resume`, `loggers`: as for `train`.
        - `seed`, `precision`, `gradient_compression`: as in `Recipe`.
        - `recipe`: values of the script that decide what is learned. The values are recorded in
          run.json, and compared when the run is resumed.
        - `allow_change`: fields of `recipe`, and arguments of `Session` and `steps`, that may
          differ from their saved values at a resume.
        """
        check_hooks(hooks)
        self.hooks = hooks
        given: dict[str, Any] = {
            "seed": seed,
            "precision": precision,
            "gradient_compression": gradient_compression,
            "recipe": recipe,
        }
        given |= {
            "code": dict(self.code),
            "code_and_objects": dict(self._code_and_objects),
            "run_dir": run_dir,
            "log_every": log_every,
            "loggers": loggers,
            "evaluations": self._evaluations,
        }
        self._request = RunRequest.checked(
            plan=plan, saving=saving, resume=resume, allow_change=allow_change, **given
        )
        self._finished = False
        self._stack = ExitStack()
        self._termination = Termination()
        self._failure: FirstFailure | None = None

    def _resolve(self, opened: Opened) -> Context:
        """`RecipeSession` overrides this method to measure `auto` settings."""
        return opened.context

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            opened = self._open(self._request, self._termination, stack, self._recovery)
            self.house = HouseHooks(
                opened,
                self._termination,
                hooks=self.hooks,
                evaluations=self._evaluations or {},
                recovery=self._recovery,
            )
            stack.callback(self.house.hang.close)
            self.training = Training(self._resolve(opened), self.house.in_order)
            self.run = self.training.run
            self.training.include_hooks(self.hooks)
            stack.callback(self.training.close)
            self.house.hang.watch(self.run)
            self.house.out_of_memory.report_change(self.run)
            if self.world.size > 1:
                self._failure = self.house.hang.failure = FirstFailure(self.world)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # the watchdog ends the process once it has saved; until then, ignore signals
        while self.house.hang.ends_the_process:
            with suppress(BaseException):
                threading.Event().wait()
        rejoins = (
            error is not None
            and self.house.hang.mistake is None
            and self._recovery is not None
            and self._recovery.rejoined(error, self.run, self.house.hang.close)
        )
        self._termination.hold(failed=error is not None)
        self.context.phases.enter("ending")
        explained, shards = None, self.plan.divides("parameters")
        if shards or self.plan.divides("features"):
            explained = error_of_sharding(error, self.plan)
        if shards and self.plan.numerics == "fast" and self.context.precision != "fp32":
            explained = explained or error_of_autocast(error, self.plan)
        if self.plan.compile:
            explained = explained or error_of_compiling(error, self.plan)
        if self.plan.numerics == "bitwise":
            explained = explained or error_of_determinism(error, self.plan)
        if error is not None and not rejoins and self._failure is not None:
            explained = _shared(self._failure, explained, error, self.house.hang.mistake)
        with self._stack:
            if not rejoins:
                self._end(explained or error)
        if explained is not None:
            raise explained from error
        if error is None:
            self.world.leave()

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self.house.end_with(self.run, error)
        elif self.training.loop.loops:
            try:
                self.finish()
                self.house.checkpointing.wait()
                self.training.end()
            except BaseException as failure:
                self._end(failure)
                raise
            self.context.recorder.end(
                {"steps": self.run.step, "plan": str(self.plan), "world_size": self.world_size}
            )

    def finish(self) -> None:
        """Put optimizers that have modes into evaluation mode, and call the hooks' `on_finish`.
        Every rank must call this method. `__exit__` calls `finish` if the script does not."""
        if not self._finished:
            self._finished = True
            for module in self.training.modules:
                module.modes.evaluate()
            self.training.hooks.call("on_finish", self.run)

    @property
    def context(self) -> Context:
        """The context of the run: processes, mesh, plan, run directory."""
        return self.run.context

    @property
    def world(self) -> World:
        """The process group of the run: all of its processes."""
        return self.context.world

    @property
    def rank(self) -> int:
        """The rank of this process. Rank 0 writes files."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.world.size

    @property
    def device(self) -> torch.device:
        """The device of this rank: its GPU, or the CPU."""
        return self.world.device

    @property
    def plan(self) -> Plan:
        """The plan of the run, with every `auto` resolved."""
        return self.context.plan

    @property
    def steps_done(self) -> int:
        """Number of optimizer steps that all models have committed, in all loops, including steps
        before a resume."""
        return self.run.step

    @property
    def epoch(self) -> int | None:
        """Number of epochs that the current loop has completed. Within a step, the epoch (from 0)
        of the step's first sample. None before the first step, and for data without a length."""
        return self.run.epoch

    @property
    def stopping(self) -> str | None:
        """The reason why training stops, after `stop` has taken effect. Otherwise None."""
        return self.training.stopping

    def prepare(
        self,
        build_model: Callable[[], Any],
        build_optimizer: Callable[[Any], Any],
        *,
        schedule: Callable[[Any], Any] | None = None,
        blocks: Sequence[str] | None = None,
        tensor: Mapping[str, str] | None = None,
        stages: Sequence[str] | None = None,
        sequence: RecipeSequence | None = None,
        head: str | None = None,
        experts: Sequence[str] | None = None,
        weights: Weights | str | os.PathLike[str] | None = None,
        balance: Balance | None = None,
    ) -> tuple[Any, Any]:
        """Build a model and its optimizer (or list of optimizers). Every rank must call this
        method. Returns the results of the two functions. The model is on this rank's device. The
        model's initial values depend on the session's seed, and not on the plan. `weights` replaces
        the initial values. `blocks`, `tensor`, `stages`, `sequence`, `head`, `experts`, `weights`
        and `balance` are as in `Recipe`. May be called several times, for several models, unless
        the plan has a pipeline. Raises `RecipeError`."""
        how = ModelOptions(
            blocks=blocks,
            tensor=tensor,
            stages=stages,
            sequence=sequence,
            head=head,
            experts=experts,
            balance=balance,
        )
        module = prepare(
            self.training,
            build_model,
            build_optimizer,
            how,
            schedule=schedule,
            weights=Weights.of(weights),
        )
        return module.model, (
            module.optimizers if len(module.optimizers) > 1 else module.optimizers[0]
        )

    def steps(
        self,
        data: Any,
        *,
        global_batch: int | None = None,
        microbatch: int | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        weight: Callable[[Any], Any] | None = None,
        sampler: Callable[[int, int], Any] | None = None,
        batch_sampler: Callable[[int, int], Any] | None = None,
    ) -> Iterator[Step]:
        """Yields the training steps, which are the same on every rank. The arguments are as in
        `Recipe`. Every rank must call this method. With `data=None`, a microbatch is a `range` of
        indices in the global batch, the same in every step (the environments of reinforcement
        learning). If `data` is a DataLoader and `sampler` or `batch_sampler` is given, only its
        dataset and collate_fn are used. Each step must commit all models. Raises `DataError`,
        `RecipeError`, `LossError`."""
        training, run = self.training, self.run
        for each in training.balances:
            weight = each.joined_weight(weight)
        sizes = (global_batch, microbatch, steps, epochs, drop_last)
        options = loop.LoopOptions(data, *sizes, collate, weight, sampler, batch_sampler)
        batching = loop.set_up_loop(training, options)
        self.house.out_of_memory.begin_loop(
            run,
            [module.model for module in training.modules],
            options.data,
            largest=batching.largest,
        )
        if not training.loop.loops:
            training.start()
            loop.report_layout(training, options, batching)
            if (begin_at := self.context.overrides.begin_at) is not None:
                if begin_at.before is not None:
                    self.house.checkpointing.begin_before(run, begin_at.before)
            elif not self.context.overrides.bare:
                self.house.checkpointing.resume(run, self._recovery, options.data)
        first = training.loop.begin_loop(run.step)
        batches = loop.microbatches_of_steps(
            training, options, batching, first, self._stack.callback
        )
        return loop.steps(training, batches, total=batching.steps, weight=weight)

    def include(self, name: str, state: Stateful) -> None:
        """Save `state` with the run, and load it when the run is resumed. Every rank must call this
        method, before `steps`. `state` has `state_dict` and `load_state_dict`, and is the same on
        every rank. Raises `CheckpointError`."""
        if self.training.loop.loops:
            raise CheckpointError(
                f"include({name!r}) after steps have begun; a checkpoint is loaded then; include it"
                " before"
            )
        self.run.include(name, state)
        self.training.is_consistent_in_steps = False

    def autocast(self) -> AbstractContextManager[Any]:
        """The context manager for forwards in the session's precision. Call `backward` and `commit`
        outside of this context."""
        return precisions.autocast(
            self.context.precision, self.device, keep_casts=precisions.keeps_casts(self.plan)
        )

    def mean(self, values: Tensor) -> float:
        """The mean of the values (of any shape) of all ranks. NaN if there are no values. Every
        rank must call this method."""
        return self._seen("session.mean", mean(values, self.world))

    def gather(self, rows: Tensor) -> Tensor:
        """The rows (dim 0) of all data ranks, concatenated in rank order. Ranks may have different
        numbers of rows. The gradient of `rows` is summed over the ranks. Every rank must call this
        method."""
        gathered = gather(rows, self.context.mesh.data)
        if self.context.overrides.probe is not None:
            self._seen("rows of session.gather", len(gathered))
            self._seen(
                "sum of session.gather",
                math.fsum(gathered.detach().double().abs().flatten().tolist()),
            )
        return gathered

    def _seen(self, name: str, value: float) -> float:
        if (probe := self.context.overrides.probe) is not None:
            probe.result(name, value)
        return value

    def full_state_dict(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """A copy of a prepared model's state dict, with full tensors on the CPU, on every rank and
        under every plan. Call `torch.save` on one rank to save the copy. Every rank must call this
        method. With `model=None`, the first prepared model."""
        return self.run.full_state_dict(model)

    def stop(self, reason: str) -> None:
        """Ask all ranks to stop training for `reason`. Any rank may call this method. All ranks
        stop at the next logging step or evaluation."""
        self.run.stop(reason)

    def event(self, name: str, step: int | None = None, **details: Any) -> None:
        """Record an event. Events of rank 0 are in events.jsonl. `step` is the number of optimizer
        steps done at the event. With `step=None`, the number of steps done so far."""
        self.run.event(name, step, **details)


def _shared(
    failure: FirstFailure,
    explained: UserError | None,
    error: BaseException,
    found: UserError | None,
) -> UserError | None:
    """Return the mistake of another rank that caused `error`, to raise instead. A cause that is not
    a mistake is added to `error` as a note. An error of this rank is reported to all ranks. `found`
    is the mistake for which the watchdog has ended the exchanges."""
    # a rank that has failed in a forward makes a different call than the other ranks
    differ = isinstance(error, CallsDiffer)
    if differ or (explained is None and lost_a_peer(error)):
        # the other rank may have stopped this rank's exchange, and may be leaving its script
        waits = differ or found is not None or isinstance(error, PeerStopped)
        seconds = TELLING_SECONDS if waits else 0.0
        if (cause := failure.cause(wait_seconds=seconds)) is not None:
            if (mistake := cause.as_user_error()) is not None:
                return mistake
            error.add_note(cause.line)
            return None
        explained = explained or found
        if explained is None and not differ:
            return None
    if isinstance(error, Exception):
        failure.tell(explained or error)
    return explained
