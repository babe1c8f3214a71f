"""Opens a run: joins the processes, agrees on the plan, opens the run directory, and makes the
`Context`."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from lockstep.base.errors import CheckpointError, PlanError, RecipeError, did_you_mean
from lockstep.base.torch_private import default_store
from lockstep.checkpoint.object_store import open_storage
from lockstep.checkpoint.storage import Storage
from lockstep.comm.devices import check_carries
from lockstep.comm.mesh import Mesh
from lockstep.comm.regroup import join_over, launcher_store
from lockstep.comm.world import World, join
from lockstep.hooks.hang.collective_check import CollectiveCheck
from lockstep.hooks.out_of_memory import TakenFallbacks, read_fallbacks
from lockstep.launch.environment import Environment
from lockstep.launch.recovery.rejoin import refuse_recovery
from lockstep.launch.seeding import SEED
from lockstep.launch.slurm import set_task_variables
from lockstep.launch.termination import Termination
from lockstep.launch.worker_files import note_options_read
from lockstep.logging.loggers import Logger
from lockstep.logging.phases import Phases
from lockstep.logging.recorder import Recorder
from lockstep.logging.run_directory import device_kind
from lockstep.model.parallelize import check_plan_devices
from lockstep.options import check_run_dir, check_shared_options
from lockstep.plan import FIXED_IN_BITWISE, Plan
from lockstep.recipe.checks import (
    Precision,
    check_compression,
    check_count,
    check_precision,
    check_seed,
)
from lockstep.recipe.code import Digests, other_sources, programs, sources
from lockstep.recipe.parameters import declared
from lockstep.recipe.recipe import Evaluation
from lockstep.saving import Resume, Saving, check_allow_change, check_resume, differences, interval
from lockstep.scripts.request import answered_by
from lockstep.training.context import Context, Overrides
from lockstep.training.hook import Hook
from lockstep.training.loop import NUMBERS, SETTINGS
from lockstep.training.recovery import Recovery
from lockstep.training.set_up import (
    Remark,
    check_compression_fits,
    check_recomputation,
    check_same,
    check_same_code,
    check_same_devices,
    check_same_programs,
    check_torch,
    lost_with_container,
    remarks,
    resolved,
    set_up_computation,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """The run that a script requests: the arguments of `Session`. Options of the launcher replace
    options of the script."""

    run_dir: str | None
    seed: int
    plan: Plan | None
    precision: Precision
    gradient_compression: str
    log_every: int
    recipe: dict[str, Any] | None
    code: Mapping[str, str]
    code_and_objects: Digests
    """Digests of the recipe's functions, which are compared between ranks and with the resumed
    run."""
    saving: Saving
    resume: Resume
    allow_change: frozenset[str]
    loggers: Sequence[Logger]

    @classmethod
    def checked(
        cls,
        *,
        plan: str | Plan | None,
        saving: Saving | None,
        resume: Resume,
        allow_change: Collection[str],
        evaluations: Mapping[str, Evaluation] | None,
        **given: Any,
    ) -> RunRequest:
        check_count("log_every", given["log_every"], "steps")
        check_precision(given["precision"])
        check_compression(given["gradient_compression"])
        check_seed(given["seed"])
        check_run_dir(given["run_dir"], "run_dir")
        if evaluations is None:
            _refuse_own_loop(os.environ)
        if saving is not None and saving.best is not None:
            _check_best(saving.best, evaluations)
        if not isinstance(plan, Plan | str | None):
            raise PlanError(
                f"plan={plan!r} (a {type(plan).__name__}); it must be an ls.Plan, or text such as"
                " 'replicate=2,numerics=bitwise'"
            )
        return cls(
            plan=Plan.parse(plan) if isinstance(plan, str) else plan,
            saving=Saving() if saving is None else saving,
            resume=check_resume(resume, "resume"),
            allow_change=check_allow_change(allow_change),
            **given,
        )

    def over(self, environment: Environment) -> RunRequest:
        saving, resume = self.saving, self.resume
        if environment.save_every is not None:
            saving = replace(saving, every=interval(environment.save_every, "LOCKSTEP_SAVE_EVERY"))
        if environment.resume is not None:
            resume = check_resume(environment.resume, "LOCKSTEP_RESUME")
        return replace(
            self,
            plan=self.plan if environment.plan is None else Plan.parse(environment.plan),
            saving=saving,
            resume=resume,
            allow_change=self.allow_change | environment.allow_change,
        )

    def check_same_as(self, ended: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` if the ended run in this run directory had another recipe.
        `ended` is the run.json of the ended run."""
        recipe, code, versions = (
            ended.get("recipe"),
            ended.get("code"),
            ended.get("environment", {}).get("versions", {}),
        )
        if not isinstance(recipe, Mapping) or not isinstance(code, Mapping) or self.recipe is None:
            return
        measured = frozenset(name for name, value in self.recipe.items() if value == "auto")
        changes = differences(recipe, self.recipe, allow_change=self.allow_change | measured)
        if versions.get("python") == platform.python_version():
            edited = [
                name for name, digest in self.code.items() if code.get(name, digest) != digest
            ]
            changes += [
                f"{name}: its code has changed, or a value that it uses"
                for name in edited
                if name not in self.allow_change
            ]
        if changes:
            raise CheckpointError(
                "the recipe has changed since the run in its run directory ended:"
                f" {'; '.join(changes)}; train with the recipe that it had, choose another run"
                " directory, or remove the run's"
            )

    def checkpoints(self, context: Context) -> Storage:
        if (begin_at := context.overrides.begin_at) is not None:
            return open_storage(begin_at.folder)
        return open_storage(self.saving.folder or context.run_dir / "checkpoints")

    def context(
        self,
        *,
        world: World,
        mesh: Mesh,
        plan: Plan,
        recorder: Recorder,
        overrides: Overrides,
        recompute_every: int = 0,
        recovered_from: str | None = None,
    ) -> Context:
        return Context(
            world=world,
            mesh=mesh,
            plan=plan,
            precision=overrides.precision or self.precision,
            gradient_compression=overrides.gradient_compression or self.gradient_compression,
            requested_compression=self.gradient_compression,
            seed=self.seed,
            log_every=self.log_every,
            recompute_every=recompute_every,
            recipe=self.recipe,
            recorder=recorder,
            phases=Phases(),
            overrides=overrides,
            recovered_from=recovered_from,
        )

    def compared(self, launched: str | None) -> dict[str, Any]:
        """Return the values that must be the same on all ranks. `launched` is the plan that the
        launcher gives instead of the script."""
        learned = {
            "seed": self.seed,
            "precision": self.precision,
            "gradient_compression": self.gradient_compression,
            **(self.recipe or {}),
        }
        executed = {
            "plan": launched or str(self.plan or Plan()),
            "log_every": self.log_every,
            "resume": self.resume,
        }
        parameters = {f"parameters.{name}": value for name, value in declared.values.items()}
        # parameters are compared separately, before values that are computed from them
        learned.pop("parameters", None)
        return {
            **parameters,
            **learned,
            **executed,
            "saving": str(self.saving),
            "allow_change": sorted(self.allow_change),
        }


@dataclass(frozen=True, slots=True)
class Opened:
    context: Context
    environment: Environment
    hooks: Sequence[Hook]
    """Hooks that a lockstep command such as `lockstep verify` has requested."""
    request: RunRequest
    given_plan: Plan
    """The requested plan, without changes after out-of-memory errors."""
    taken_fallbacks: TakenFallbacks
    """Changes of the plan that earlier out-of-memory errors of the run have caused."""


def open_run(
    request: RunRequest,
    termination: Termination,
    stack: ExitStack,
    recovery: Recovery | None = None,
) -> Opened:
    """Open a run. The run is closed when `stack` exits. Every rank must call this function."""
    check_torch(torch.__version__)
    set_task_variables(os.environ)
    environment = Environment.read(os.environ)
    note_options_read()
    overrides, hooks = read_probe(os.environ)
    if recovery is None:
        refuse_recovery(
            "the script has its own loop, and only the loop of ls.train can be entered again"
        )
    world, devices = _join(request, environment, recovers=recovery is not None)
    settings = request.over(environment)
    given = (settings.plan or Plan()).resolve(world.size)
    check_plan_devices(given, world.device)
    check_carries(given, world.device)
    unequal = check_same_devices(devices, given.numerics)
    check_compression_fits(given, overrides.gradient_compression or request.gradient_compression)
    recompute_every = 0 if overrides.bare else environment.recompute_every or 0
    check_recomputation(given, recompute_every)
    if environment.check and world.size > 1:
        # only torch's collectives can be compared by --check
        given = replace(given, transport="torch")
        stack.enter_context(CollectiveCheck(default_store(), world.rank))
    _check_allow_change(settings)
    mesh = Mesh.of(world, given)
    stack.callback(mesh.close)
    stack.enter_context(termination)
    recorder = Recorder(
        request.run_dir,
        world,
        resume=settings.resume,
        launched=environment.run_dir
        or (environment.default_run_dir if request.run_dir is None else None),
        loggers=() if overrides.bare else request.loggers,
        extend=not settings.allow_change.isdisjoint({"steps", "epochs"}),
        restarted=environment.restarted is not None or environment.restarts > 0,
        again=recovery is not None and recovery.times > 0,
        lost_holders=() if recovery is None else recovery.lost_holders(world),
        check_ended=settings.check_same_as,
    )
    if recovery is not None:
        recovery.holder = recorder.holder
        recovery.sizes = (settings.plan or Plan()).sizes(world.size)
    stack.callback(recorder.close)
    fallbacks = read_fallbacks(world, recorder.path, resumes=recorder.is_resumed)
    plan = fallbacks.apply_to(given, world.device.type)
    lacking = set_up_computation(plan, world, environment.threads, stack)
    restart = environment.restarted
    context = request.context(
        world=world,
        mesh=mesh,
        plan=plan,
        recorder=recorder,
        overrides=overrides,
        recompute_every=recompute_every,
        recovered_from=restart.reason if restart is not None and restart.in_place else None,
    )
    opened = Opened(context, environment, hooks, settings, given, fallbacks)
    _record_start(opened, request, [unequal, *lacking])
    return opened


def _refuse_own_loop(environ: Mapping[str, str]) -> None:
    if answered_by(environ, "train", "evaluate"):
        raise RecipeError(
            "a script with its own loop was started by a command that needs the model, loss and"
            " data of a recipe; call ls.train(recipe)"
        )


def _check_best(metric: str, evaluations: Mapping[str, Evaluation] | None) -> None:
    if evaluations is None:
        raise CheckpointError(
            f"Saving(best={metric!r}) in your own loop, which has no evaluations; it names a"
            " metric of Recipe.evaluation; call ls.train with a recipe, or keep the best model in"
            " the loop: session.full_state_dict()"
        )
    if all(each.every is None for each in evaluations.values()):
        raise CheckpointError(
            f"Saving(best={metric!r}) without Recipe.evaluation, or with every=None; it must be a"
            " metric of evaluations; give ls.Evaluation(every=...)"
        )


def _check_allow_change(asked: RunRequest) -> None:
    fields = {*NUMBERS, *SETTINGS, *FIXED_IN_BITWISE, "optimizer", "data", *(asked.recipe or {})}
    if unknown := sorted(
        name for name in asked.allow_change if name.partition(".")[0] not in fields
    ):
        of = (
            "fields of the recipe, which are"
            if asked.recipe
            else "what is compared when the run is resumed:"
        )
        raise CheckpointError(
            f"allow_change={unknown[0]!r}; it names {of} {', '.join(sorted(fields))}"
            f"{did_you_mean(unknown[0], fields)}"
        )


def _join(
    request: RunRequest, environment: Environment, *, recovers: bool
) -> tuple[World, Sequence[Mapping[str, str]]]:
    """Join the process group, and compare the settings of all ranks. Also returns each rank's
    device properties."""
    joins = (
        partial(join_over, launcher_store(os.environ))
        if recovers and environment.world_size > 1
        else join
    )
    world = joins(**environment.place)
    mine = [
        environment.shared(),
        sources(),
        request.compared(environment.plan),
        request.code_and_objects,
        device_kind(world.device),
    ]
    launched, versions, given, code, devices = zip(*world.gather_values(mine), strict=True)
    check_shared_options(launched)
    if edited := sorted({name for other in versions for name in other_sources(versions[0], other)}):
        check_same_programs(world.gather_values(programs(edited)))
    check_same(given)
    check_same_code(code)
    declared.check_all_used(os.environ)
    return world, devices


def _record_start(opened: Opened, request: RunRequest, devices: Sequence[Remark | None]) -> None:
    context, environment, recorder = opened.context, opened.environment, opened.context.recorder
    recorder.start(
        plan=context.plan,
        world=context.world,
        launcher=environment.launcher,
        seed=context.seed,
        recipe=context.recipe,
        code=opened.request.code,
        checkpoints=opened.request.saving.folder,
    )
    recorder.event("run-started", 0, plan=str(context.plan), world_size=context.world.size)
    if environment.launcher in ("lockstep", "spawn"):
        recorder.event("generators-seeded", 0, seed=SEED)
    restart = environment.restarted
    if restart is not None and not restart.in_place:
        why_not = {"not_in_place": restart.not_in_place} if restart.not_in_place else {}
        fields = {"reason": restart.reason, "restarts": environment.restarts}
        recorder.event("restarted", 0, **fields, **why_not)
    launched_plan = str(opened.given_plan) if environment.plan is not None else None
    for name, by_script, launched in (
        ("plan", request.plan and resolved(request.plan, context.world.size), launched_plan),
        ("run_dir", request.run_dir, environment.run_dir),
    ):
        if by_script and launched and by_script != launched:
            recorder.event(
                "launcher-overrides-script", 0, what=name, script=by_script, launcher=launched
            )
    for remark in filter(
        None,
        (
            *devices,
            lost_with_container(recorder.path),
            *remarks(context.plan, context.mesh, context.precision),
        ),
    ):
        recorder.event(remark.event, 0, **remark.details)
        if remark.line is not None:
            recorder.message(remark.line)


def read_probe(environ: Mapping[str, str]) -> tuple[Overrides, tuple[Hook, ...]]:
    """Return the settings to override and the hooks to add that a lockstep command has requested.
    An environment variable of the script's process contains the request."""
    name = answered_by(environ, "install")
    if name is None:
        return Overrides(), ()
    overrides, hooks = import_module(name).install(environ)
    return overrides, tuple(hooks)
