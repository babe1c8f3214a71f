"""The lower level that `train` is written on, for loops that a recipe cannot express: GANs, reinforcement learning."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.errors import LossError, PlanError, RecipeError
from lockstep.base.events import Event
from lockstep.checkpoint.folder import Storage
from lockstep.checkpoint.load import Reader
from lockstep.checkpoint.store import folder_at
from lockstep.comm.mesh import Mesh
from lockstep.comm.world import exact_sum, join
from lockstep.data.generators import seed_generators
from lockstep.data.loader import Loader, StreamLoader
from lockstep.hooks.checkpointing import Keeper, saved_recipe
from lockstep.hooks.hang.collective_check import Checked
from lockstep.hooks.metrics import Reports
from lockstep.hooks.out_of_memory import Memory
from lockstep.hooks.preemption import Wishes
from lockstep.hooks.watching import Watching
from lockstep.keys import RandomStream, key
from lockstep.launch.environment import Environment, check_alike, check_run_dir
from lockstep.launch.failure import account
from lockstep.launch.grace import needing_time
from lockstep.launch.slurm.commands import set_task_variables
from lockstep.launch.termination import Preempted, Termination
from lockstep.logging.loggers import Logger
from lockstep.logging.phases import Phases
from lockstep.logging.recorder import Recorder
from lockstep.model.initialization.initial_model import InitialModel
from lockstep.model.parallelize import check_devices, parallelize
from lockstep.model.pipeline.stages import check_microbatches
from lockstep.model.sync_batchnorm import SyncBatchNormExchange, split_microbatches, use_exchange
from lockstep.plan import Plan
from lockstep.recipe import (
    Precision,
    Weights,
    check_batch,
    check_comm,
    check_count,
    check_data,
    check_length,
    check_precision,
    check_seed,
    keeps_rest,
)
from lockstep.recipe import Stream as DataStream
from lockstep.saving import Resume, Saving, check_may_differ, check_resume, interval
from lockstep.train import optim as optimizers
from lockstep.train import precision as precisions
from lockstep.train.loop_state import Course
from lockstep.train.microbatches import Length, Microbatches, from_data, from_indices, from_stream
from lockstep.train.optimizer_meshes import separate_meshes
from lockstep.train.pretrained import Start
from lockstep.train.set_up import (
    Remark,
    batchnorm,
    check_comm_fits,
    check_microbatch_is_fixed,
    check_same,
    check_settled,
    remarks,
    resolved,
    set_up_computation,
)
from lockstep.train.state import Stateful
from lockstep.train.step import Step
from lockstep.train.step_result import no_weight
from lockstep.train.train_module import Pair
from lockstep.verify.probe import Traced, TracedPair, TracedStep


class Session:
    """The processes, the run directory and the models of one run. Every rank makes one, and makes the same calls on it.

    Use it in a `with`. `plan` and `run_dir` of the launcher go before the ones given here. Raises `PlanError`, `LaunchError` and
    `RunDirectoryError` on entering.
    """

    def __init__(
        self,
        *,
        run_dir: str | None = None,
        seed: int = 0,
        plan: str | Plan | None = None,
        precision: Precision = "fp32",
        comm: str = "exact",
        log_every: int = 10,
        recipe: dict[str, Any] | None = None,
        saving: Saving | None = None,
        resume: Resume = "auto",
        may_differ: Collection[str] = (),
        loggers: Sequence[Logger] = (),
    ) -> None:
        """`precision`, `comm`: as in `Recipe`. `log_every`: steps between lines of metrics.jsonl. `recipe`: what to say of it in run.json.

        `saving`: when to save, and what to keep; None: `Saving()`. `resume`: what to do where `run_dir` holds an unfinished run.
        `may_differ`: fields of the recipe that may be others than when that was saved. The launcher's go before `saving.every` and
        `resume`.
        """
        check_count("log_every", log_every, "steps")
        check_precision(precision)
        check_comm(comm)
        check_seed(seed)
        check_run_dir(run_dir, "run_dir")
        if not isinstance(plan, Plan | str | None):
            raise PlanError(f"plan={plan!r} (a {type(plan).__name__}); it is an ls.Plan, or text such as 'replicate=2,numerics=bitwise'")
        self.seed = seed
        self.log_every = log_every
        self._traced = Traced.read(os.environ)
        self.precision = precision if self._traced is None else self._traced.precision(precision)
        self._asked_comm = comm
        self.comm = comm if self._traced is None else self._traced.comm(comm)
        self._given_plan = Plan.parse(plan) if isinstance(plan, str) else plan
        self._given_run_dir = run_dir
        self._recipe = recipe
        self._saving = Saving() if saving is None else saving
        self._resume = check_resume(resume, "resume")
        self._may_differ = check_may_differ(may_differ)
        self._loggers = loggers
        self.pairs: list[Pair] = []
        """What `prepare` has prepared."""
        self._listeners: list[Callable[[Event], object]] = []
        self._stack = ExitStack()
        self.evaluated: Mapping[str, float] = {}
        """What was measured after the latest step; empty where nothing was."""
        self.stopping: str | None = None
        """Why no further step is taken, once `stop` has taken effect."""
        self.phases = Phases()
        """What this rank is at."""
        self._watching: Watching | None = None
        self._termination = Termination()
        self._exchange = SyncBatchNormExchange()
        self._told_of_batchnorm = False

    def __enter__(self) -> Session:
        set_task_variables(os.environ)
        environment = Environment.read(os.environ)
        with ExitStack() as stack:
            self.world = join(
                rank=environment.rank,
                size=environment.world_size,
                local_rank=environment.local_rank,
                local_size=environment.local_world_size,
            )
            everyone = self.world.gather_values([environment.alike(), self._given(environment.plan)])
            check_alike([told for told, _ in everyone])
            check_same([given for _, given in everyone])
            launched = Plan.parse(environment.plan) if environment.plan is not None else None
            given = (launched or self._given_plan or Plan()).resolve(self.world.size)
            check_devices(given, self.world.device)
            check_comm_fits(given, self.comm)
            if environment.check and self.world.size > 1:
                given = replace(given, transport="torch")  # which is what can be compared
                stack.enter_context(Checked(dist.distributed_c10d._get_default_store(), self.world.rank))
            self.mesh = Mesh.of(self.world, given)
            stack.callback(self.mesh.close)
            if environment.resume is not None:
                self._resume = check_resume(environment.resume, "LOCKSTEP_RESUME")
            if environment.save_every is not None:
                self._saving = replace(self._saving, every=interval(environment.save_every, "LOCKSTEP_SAVE_EVERY"))
            self._may_differ |= environment.may_differ
            stack.enter_context(self._termination)
            self.recorder = Recorder(
                environment.run_dir or self._given_run_dir,
                self.world,
                resume=self._resume,
                default=environment.default_run_dir,
                loggers=() if self._traced is not None else self._loggers,
            )
            stack.callback(self.recorder.close)
            stack.callback(self._close_pairs)
            self.course = Course(self.mesh, self.pairs, self.event)
            self._wishes = Wishes(self.mesh, self._termination, stop_at=environment.stop_at, save_is_due=self.course.save_is_due)
            self._memory = Memory.of(self.mesh, given, environment, self.recorder, self.event)
            self.plan = self._memory.plan
            set_up_computation(self.plan, self.world, environment.threads, stack)
            self._start(environment, given, launched)
            if self._traced is None:
                self._watching = Watching(
                    self.mesh, self.pairs, self.phases, self.recorder, environment, event=self.event, rescue=self.course.rescue, stack=stack
                )
            self._stack = stack.pop_all()
        return self

    def _given(self, launched: str | None) -> dict[str, Any]:
        """What the script must give on all ranks alike, as JSON; its plan counts where none is `launched`."""
        learned = {"seed": self.seed, "precision": self.precision, "comm": self.comm, **(self._recipe or {})}
        executed = {"plan": launched or str(self._given_plan or Plan()), "log_every": self.log_every, "resume": self._resume}
        return {**learned, **executed, "saving": str(self._saving), "may_differ": sorted(self._may_differ)}

    def _start(self, environment: Environment, given: Plan, launched: Plan | None) -> None:
        self.recorder.start(
            plan=self.plan,
            world=self.world,
            launcher=environment.launcher,
            seed=self.seed,
            recipe=self._recipe,
            checkpoints=self._saving.folder,
        )
        self.event("run-started", plan=str(self.plan), world_size=self.world.size)
        if environment.restarted is not None:
            self.event("restarted", reason=environment.restarted, restarts=environment.restarts)
        for name, by_script, launched_as in (
            ("plan", self._given_plan and resolved(self._given_plan, self.world.size), launched and str(given)),
            ("run_dir", self._given_run_dir, environment.run_dir),
        ):
            if by_script and launched_as and by_script != launched_as:
                self.event("launcher-overrides-script", what=name, script=by_script, launcher=launched_as)
        self._memory.tell(given, self.recorder.message)
        for remark in remarks(self.plan, self.mesh, self.precision):
            self._tell(remark)

    def _tell(self, remark: Remark) -> None:
        self.event(remark.event, **remark.details)
        if remark.line is not None:
            self.recorder.message(remark.line)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._watching is not None and self._watching.ends_the_run:
            threading.Event().wait()
        self._termination.hold()
        self.phases.enter("ending")
        if isinstance(error, Preempted):
            self.event("preempted", reason=error.reason)
        elif error is not None:
            self.event("run-failed", **account(error))
            in_a_step = self.course.step is not None
            found = self._memory.after(error, self.steps_done, in_a_step=in_a_step) if self._traced is None else None
            kept = self.course.rescue(error)
            if found is not None:
                error.add_note(self._memory.advice(found, step=self.steps_done if kept else None))
        elif self.course.keeper is not None:
            if self._recipe is None:  # `train` writes the model itself
                self.course.save_end()
            self.course.keeper.finish()
            self.recorder.end({"steps": self.steps_done, "plan": str(self.plan), "world_size": self.world_size})
        self._stack.close()
        if error is None:
            self.world.leave()

    @property
    def rank(self) -> int:
        """0 for the process that writes."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def device(self) -> torch.device:
        """Where this rank computes: its GPU, or the CPU."""
        return self.world.device

    def prepare(
        self,
        build_model: Callable[[], Any],
        build_optimizer: Callable[[Any], Any],
        *,
        schedule: Callable[[Any], Any] | None = None,
        blocks: Sequence[str] | None = None,
        tensor: Mapping[str, str] | None = None,
        stages: Sequence[str] | None = None,
        weights: Weights | str | os.PathLike[str] | None = None,
    ) -> tuple[Any, Any]:
        """Build a model and its optimizer (or list of optimizers) for training. Every rank calls it.

        Returns what the two functions returned, the model on this rank's device. Its initial values follow from the session's seed,
        whatever the plan, or are `weights`. `blocks`, `tensor`, `stages` and `weights`: as in `Recipe`. May be called again, for another
        pair, unless the plan has a pipeline. Raises `RecipeError`.
        """
        if self.pairs and self.mesh.axis("pipeline").size > 1:
            raise RecipeError(
                f"a second session.prepare with pipeline={self.plan.pipeline}; a pipeline computes one model's stages; use another "
                "plan, or make the two one model"
            )
        if self._traced is not None:
            build_model = self._traced.factory(build_model)
        built = InitialModel.build(build_model, key(self.seed, RandomStream.MODEL, len(self.pairs)), self.mesh)
        if built.reason is not None:
            self.event("model-built-whole", reason=built.reason)
        model = built.module
        bitwise = self.plan.numerics == "bitwise"
        optimizers.check_gradients(model, optimizers.trainable(model), bitwise=bitwise)
        given = Weights.of(weights)
        start = None if given is None else Start.of(given, model, self.world)
        if start is not None:
            built.given = frozenset(start.theirs)
        if built.deferred is None and self.plan.split == 1:
            model.to(self.device)
        model.train()
        use_exchange(model, self._exchange)
        begin = partial(seed_generators, device=self.device)
        laid = parallelize(built, self.mesh, self.plan, begin=begin, blocks=blocks, tensor=tensor, stages=stages)
        built.check_values(self.world)
        if start is not None:
            self.event("weights-loaded", **start.fill(model, self.world))
            if self._traced is not None:
                self._traced.loaded(model)
        build = partial(optimizers.built, build_optimizer, model, in_part=laid.pipeline is not None)
        made = build() if laid.pipeline is None else laid.pipeline.raise_on_all_ranks(build)
        if bitwise and optimizers.unfuse(made):
            self.event("optimizer-not-fused", reason="a fused kernel rounds differently on a part of a tensor than on the whole")
        for optimizer in made:
            separate_meshes(optimizer)
            optimizers.allocate_state(optimizer)
        kind = Pair if self._traced is None else TracedPair
        self.pairs.append(
            kind(
                model,
                optimizers.trainable(model),
                made,
                laid=laid,
                mesh=self.mesh,
                precision=self.precision,
                comm=self.comm,
                schedule=schedule,
                bitwise=bitwise,
            )
        )
        return model, made if len(made) > 1 else made[0]

    def steps(
        self,
        data: Any,
        *,
        global_batch: int,
        microbatch: int | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        weight: Callable[[Any], Any] | None = None,
    ) -> Iterator[Step]:
        """The steps of training, each the same on every rank. Arguments are those of `Recipe`.

        `data=None`: there is no dataset; a microbatch is a `range` of indices in the global batch, the same in every step (the environments
        of reinforcement learning). After each step the pairs must be committed. Raises `DataError`, `RecipeError`, `LossError`.
        """
        check_settled(self.plan, microbatch)
        check_batch(global_batch, microbatch)
        check_length(steps, epochs)
        if data is not None:
            check_data("data", data, global_batch=global_batch, microbatch=microbatch, epochs=epochs)
        if not self.pairs:
            raise RecipeError("session.steps before session.prepare; a step needs a model and an optimizer; prepare them first")
        if self._traced is not None:
            self._stack.callback(self._traced.close)
            facts = {"global_batch": global_batch, "precision": self.precision, "comm": self._asked_comm}
            asked, microbatch = microbatch, self._traced.begin(self.pairs, self.plan, microbatch, facts)
            if isinstance(data, DataStream) and microbatch != asked:
                raise RecipeError(
                    f"microbatch={microbatch} instead of {asked} with an ls.Stream; other microbatches read from other shards, so the "
                    "same samples cannot be cut otherwise; leave the microbatch as it is"
                )
        check_microbatch_is_fixed(self.plan, global_batch, microbatch)
        mesh = split_microbatches([pair.model for pair in self.pairs], self.mesh, self.plan, microbatch=microbatch or global_batch)
        self._exchange.world = mesh.data if mesh.assignment.slices else None
        for pair in self.pairs:
            pair.deal(mesh)
        if isinstance(data, DataStream) and mesh.assignment.slices:
            raise RecipeError(
                f"SyncBatchNorm on {mesh.data.size} data ranks with an ls.Stream; it splits each microbatch over the ranks, and a shard is "
                "read by one of them; use plain BatchNorm, whose statistics are one microbatch's, or a map-style dataset"
            )
        length = Length(
            samples=global_batch if data is None or isinstance(data, DataStream) else len(data),
            global_batch=global_batch,
            microbatch=microbatch,
            steps=steps,
            epochs=epochs,
            mesh=mesh,
            halvings=self.plan.halvings,
        )
        self._memory.begin([pair.model for pair in self.pairs], data, largest=length.largest)
        if not self._told_of_batchnorm and (remark := batchnorm([pair.model for pair in self.pairs], length)) is not None:
            self._told_of_batchnorm = True
            self._tell(remark)
        if (pipeline := self.pairs[0].pipeline) is not None:
            pipeline.exchange = self._exchange if mesh.assignment.slices else None
            rounds = [len(mesh.assignment.with_dummies(length.most_microbatches, rank)) for rank in range(mesh.assignment.ranks)]
            check_microbatches(min(rounds), pipeline.stages)
        first = self.course.begin_loop(self._keep)
        if self._watching is not None:
            self._watching.begin_loop(self.steps_done)
        return self._run(self._sources(data, length, collate, first), length, weight)

    def _sources(self, data: Any, length: Length, collate: Callable[[list[Any]], Any] | None, first: int) -> Iterator[Microbatches]:
        """The steps' microbatches, from step `first` on."""
        if data is None:
            return from_indices(length, seed=self.seed, first=first)
        workers, prefetch = int(self.plan.workers), int(self.plan.prefetch)
        if isinstance(data, DataStream):
            streamed = StreamLoader(data, collate=collate, seed=self.seed, workers=workers, prefetch=prefetch, device=self.device)
            self._stack.callback(streamed.close)
            return from_stream(streamed, length, seed=self.seed, first=first, positions=self.course.shards(data.shards))
        loader = Loader(data, collate=collate, seed=self.seed, workers=workers, prefetch=prefetch, device=self.device)
        self._stack.callback(loader.close)
        return from_data(loader, length, seed=self.seed, first=first)

    @property
    def measures(self) -> bool:
        """Whether what is left to measurement is measured: not where runs are compared, which compute alike."""
        return self._traced is None

    def saved_recipe(self) -> dict[str, Any]:
        """What the recipe was in the checkpoint that the run may go on from, but for what may differ. Every rank calls it."""
        if self._traced is not None:
            return {}
        found = saved_recipe(self._checkpoints(), self.world)
        return {name: value for name, value in found.items() if name not in self._may_differ}

    def _checkpoints(self) -> Storage:
        return folder_at(self._saving.folder or self.recorder.path / "checkpoints")

    def include(self, name: str, state: Stateful) -> None:
        """Have something of the user's own saved with the run, and given its saved values where the run goes on. Before `steps`.

        `state`: has `state_dict` and `load_state_dict`; the same on every rank. Every rank calls it. Raises `CheckpointError` where it
        cannot be saved.
        """
        self.course.include(name, state)

    def _keep(self) -> tuple[Keeper | None, Reader | None]:
        """Begin to keep checkpoints, and take up the newest one that is there. Returns what keeps them, and what this run goes on from."""
        if self._traced is not None:
            return None, None
        keeper = Keeper(
            self.world,
            self.mesh,
            self._checkpoints(),
            self.recorder.attempt,
            self._saving,
            self.pairs,
            self.course.others,
            self.recorder.facts,
            metrics=lambda: self.evaluated,
            compare=partial(self._compare, now=True),
            tell=self.event,
            warn=self.recorder.message,
        )
        self._stack.callback(keeper.close)
        found = keeper.restore(self._resume, may_differ=self._may_differ)
        step = 0 if found is None else found.manifest.step
        self.recorder.go_on(step, str(keeper.folder))
        keeper.begin(step)
        if found is not None and keeps_rest(self.comm) and Plan.parse(found.manifest.facts["plan"]).replicate != 1:
            self.event("unsent-rest-dropped", comm=self.comm, reason="what was not sent of the gradients before the save is not in it")
        return keeper, found

    def _run(self, sources: Iterator[Microbatches], length: Length, weight: Callable[[Any], Any] | None) -> Iterator[Step]:
        self.reports = reports = Reports(self.pairs, self.recorder, self.event)
        self.recorder.show(length.steps)
        terms: list[str] | None = None
        kind = Step if self._traced is None else TracedStep
        for source in self.phases.during("data", sources):
            self.phases.step = source.step
            if weight is not None:
                terms = source.weigh(weight, terms)
                for name, total in (source.weights or {}).items():
                    if not total:
                        raise LossError(no_weight(source.step, name))
            if len(self.pairs) > 1:
                source.keep()
            logs = (source.step + 1) % self.log_every == 0 or source.step + 1 == length.steps
            step = kind(
                source.step,
                source,
                self.pairs,
                self._exchange,
                logs=logs,
                asks=partial(self._wishes.there_are, stops=logs),
                phases=self.phases,
            )
            self.course.step, self.evaluated = step, {}
            if self._watching is not None:
                self._watching.before(step)
            self.phases.enter("compute")
            yield step
            self.phases.enter("between steps")
            if self._watching is not None:
                self._watching.after(step)
            self._check_committed(step)
            self.course.end_step(step)
            reports.add(step)
            if logs or self.stopping is not None:
                reports.read()
            if logs:
                reports.log(step, {} if self._watching is None else {"memory_bytes": self._watching.log(step.index + 1)})
            self._attend(step, logs=logs)
            if self.stopping is not None:
                self.event("stopped", reason=self.stopping)
                break
        reports.check_any_applied(self.steps_done)

    def _attend(self, step: Step, *, logs: bool) -> None:
        """After a step: do what any rank asks for, and save where it is time to. Every rank calls it. Raises `Preempted`."""
        keeper, asked = self.course.keeper, self._wishes.exchanged(list(step.committed.values()), stops=logs)
        self.stopping = self.stopping or asked.stop
        if asked.end is not None:
            self.reports.read()
            if keeper is not None:
                with needing_time():
                    keeper.save_now(self.steps_done)
            raise Preempted(asked.end)
        self._compare(self.steps_done, now=False)
        if keeper is not None:
            self.phases.enter("saving")
            keeper.after(self.steps_done, asked=asked.save)

    def _compare(self, step: int, *, now: bool) -> None:
        if self._watching is not None:
            self._watching.compare(step, now=now)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context that forwards run in, for the session's precision. Backwards and commits stay outside."""
        return precisions.autocast(self.precision, self.device)

    def mean(self, values: Tensor) -> float:
        """The mean over all values of all ranks, the same on each; NaN where there is none. `values`: any shape. Every rank calls it."""
        everyone = self.world.gather_ragged(values.detach().reshape(-1).double().cpu())
        return exact_sum(everyone.tolist()) / len(everyone) if len(everyone) else math.nan

    def stop(self, reason: str) -> None:
        """Ask for the end of training. Any rank may; it takes effect on all at the next logging step or evaluation."""
        self._wishes.stop = reason

    @property
    def steps_done(self) -> int:
        """Optimizer steps that all pairs have committed, in all loops, and before this process went on with the run."""
        return self.course.steps_done

    def event(self, name: str, step: int | None = None, **details: Any) -> None:
        """Write down that something happened; rank 0's events are in events.jsonl. `step`: steps done then; None: those done by now."""
        event = self.recorder.event(name, self.steps_done if step is None else step, **details)
        for listener in self._listeners:
            listener(event)

    def on_event(self, listener: Callable[[Event], object]) -> None:
        """Call `listener` with every event from now on."""
        self._listeners.append(listener)

    def on_exit(self, close: Callable[[], object]) -> None:
        """Call `close` when the session ends, however it ends."""
        self._stack.callback(close)

    def take_stop(self) -> None:
        """Learn why any rank wants to stop, if one does. Every rank calls it."""
        self.stopping = self._wishes.agree_to_stop()

    def _check_committed(self, step: Step) -> None:
        if len(step.committed) < len(self.pairs):
            raise LossError(
                f"step {step.index} ended with {len(step.committed)} of {len(self.pairs)} prepared pairs committed; call "
                "step.commit(optimizer) for each on every rank, in every step"
            )

    def _close_pairs(self) -> None:
        for pair in self.pairs:
            pair.close()
        self._exchange.world = None
