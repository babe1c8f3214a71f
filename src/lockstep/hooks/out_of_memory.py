"""Changes the plan after an out-of-memory error, by one fallback after another. A process cannot
reliably free all its memory. The process writes the next plan to the run directory and ends, and
new processes continue under the new plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.base.errors import PlanError, RecipeError, RunDirectoryError
from lockstep.base.files import write_atomically
from lockstep.comm.world import World
from lockstep.launch.failures import error_details, out_of_memory
from lockstep.launch.worker_files import request_restart
from lockstep.model.sync_batchnorm import training_batchnorms
from lockstep.plan import WORDS, Plan
from lockstep.recipe.data import Stream
from lockstep.saving import OutOfMemory as Setting
from lockstep.training.hook import ControlHook
from lockstep.training.optim.element_wise import needing_whole_tensors
from lockstep.training.run import Run

FILE = "out-of-memory.json"  # in the run directory
FALLBACKS = ("checkpointing", "offload", "microbatch_splits")
"""The changes of the plan, in the order in which they are tried. Only the last fallback can change
results."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenFallbacks:
    """The changes of the plan that a run has made after out-of-memory errors."""

    checkpointing: str = "none"
    offload: bool = False
    microbatch_splits: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Each failure has `step` (steps done), `rank`, `error`, and `then` (the change of the plan, as
    text)."""

    @classmethod
    def parse(cls, text: str, path: Path) -> TakenFallbacks:
        try:
            taken = cls(**json.loads(text))
            Plan(checkpointing=taken.checkpointing, microbatch_splits=taken.microbatch_splits)  # type: ignore[arg-type]  # Plan checks them
            complete = all(
                {"step", "rank", "error", "then"} <= each.keys() for each in taken.failures
            )
            if isinstance(taken.offload, bool) and taken.failures and complete:
                return taken
        except (ValueError, TypeError, AttributeError, PlanError):
            pass
        raise RunDirectoryError(
            f"{path} is damaged; it holds the changes that the run made to its plan when it ran out"
            " of memory; remove it to continue without them"
        ) from None

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self), indent=2) + "\n")

    def apply_to(self, plan: Plan, device: str) -> Plan:
        """Return `plan` with the fallbacks. Omits fallbacks that are weaker than the settings of
        `plan`, and fallbacks that the device type does not allow."""
        for name in FALLBACKS:
            taken = getattr(self, name)
            if _strength(name, taken) > _strength(name, getattr(plan, name)):
                plan = _changed(plan, name, taken, device) or plan
        return plan

    def with_plan(self, plan: Plan, failure: dict[str, Any]) -> TakenFallbacks:
        strongest = {
            name: max(
                getattr(self, name), getattr(plan, name), key=lambda value: _strength(name, value)
            )
            for name in FALLBACKS
        }
        return TakenFallbacks(**strongest, failures=[*self.failures, failure])


def next_plan(
    plan: Plan,
    device: str,
    setting: Setting,
    *,
    largest: int | None,
    unsplittable: str | None,
    offloadable: bool = True,
) -> Plan | str:
    """Return a plan with one more fallback, or the reason why no fallback is left. `largest` is the
    number of samples in the largest microbatch. None if no step had started."""
    if setting == "stop":
        return "--out-of-memory stop allows no change of the plan"
    changed = None
    if largest is not None:
        changed = _changed(plan, "checkpointing", "full", device)
    if changed is None and offloadable:
        changed = _changed(plan, "offload", True, device)
    if changed is not None:
        return changed
    if largest is None:
        return (
            "no step had begun, so the model itself is too large; shard it over more processes"
            " (shard, tensor, pipeline)"
        )
    if largest == 1:
        return (
            "microbatches have one sample each; shard the model over more processes (shard, tensor,"
            " pipeline), or make it smaller"
        )
    if unsplittable is not None:
        return (
            f"the only fallback left is to split each microbatch, and {unsplittable}; shard the"
            " model over more processes"
        )
    if setting == "same-bits" or (setting == "retry" and plan.numerics == "bitwise"):
        rule = "--out-of-memory same-bits" if setting == "same-bits" else "numerics=bitwise"
        return (
            "the only fallback left is to split each microbatch, which changes the bits from there"
            f" on, and {rule} does not allow that; allow it with --out-of-memory halve"
            " (LOCKSTEP_OUT_OF_MEMORY=halve), or shard the model over more processes"
        )
    return replace(plan, microbatch_splits=plan.microbatch_splits + 1)


def changes(before: Plan, after: Plan) -> str:
    """Return the new fallbacks as text, such as "checkpointing=full,offload=yes"."""
    values = {name: getattr(after, name) for name in FALLBACKS}
    return ",".join(
        f"{name}={'yes' if value is True else value}"
        for name, value in values.items()
        if value != getattr(before, name)
    )


def advice(plan: Plan, found: Plan | str, *, folder: Path, step: int | None) -> str:
    if isinstance(found, str):
        tried = changes(Plan(), plan)
        return f"lockstep: memory ran out{f' with {tried}' if tried else ''}; {found}"
    start = "starts again" if step == 0 else f"resumes after step {step}"
    if step is None:
        start = "resumes from its last checkpoint, or starts again,"
    return (
        f"lockstep: the run in {folder} {start} with {changes(plan, found)} if the same command is"
        " given again with that run directory"
    )


def failure_since(known: TakenFallbacks, folder: Path) -> dict[str, Any] | None:
    try:
        found = TakenFallbacks.parse((folder / FILE).read_text(encoding="utf-8"), folder / FILE)
    except (OSError, UnicodeDecodeError, RunDirectoryError):
        return None
    return found.failures[-1] if found != known else None


def fallback_since(known: TakenFallbacks, folder: Path) -> str | None:
    if (last := failure_since(known, folder)) is None:
        return None
    return (
        f"memory ran out after step {last['step']} on rank {last['rank']}, {last['then']} from"
        " there"
    )


def read_fallbacks(world: World, folder: Path, *, resumes: bool) -> TakenFallbacks:
    """Read the fallbacks from the run directory. Every rank must call this function."""
    text = None
    if world.rank == 0 and resumes:
        try:
            text = (folder / FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError):
            text = ""  # no rank can parse this, so all raise the same error
    text = world.value_of(0, text)
    return TakenFallbacks() if text is None else TakenFallbacks.parse(text, folder / FILE)


def _changed(plan: Plan, name: str, value: Any, device: str) -> Plan | None:
    if getattr(plan, name) == value or (name == "offload" and device == "cpu"):
        return None
    try:
        return replace(plan, **{name: value})
    except PlanError:
        return None


def _can_offload(run: Run) -> bool:
    plan = run.context.plan
    if plan.offload or not plan.divides("parameters"):
        return False
    try:
        for module in run.training.modules:
            needing_whole_tensors(module.optimizers, replace(plan, offload=True))
    except (PlanError, RecipeError):
        return False
    return True


def _strength(name: str, value: Any) -> int:
    return WORDS[name].index(value) if name in WORDS else int(value)


@dataclass(eq=False)
class OutOfMemory(ControlHook):
    """After an out-of-memory error, writes a plan that needs less memory, and asks the launcher for
    a restart."""

    given: Plan
    taken: TakenFallbacks
    setting: Setting
    is_restarted: bool  # True if the launcher restarts the run when asked to
    _largest: int | None = None  # samples of the largest microbatch
    _unsplittable: str | None = None
    _next: Plan | str | None = None

    def report_change(self, run: Run) -> None:
        given = self.given
        plan = self.taken.apply_to(given, run.context.device.type)
        if plan == given:
            return
        last, change = self.taken.failures[-1], changes(given, plan)
        reason = f"memory ran out after step {last['step']} on rank {last['rank']}: {last['error']}"
        details = {"reason": reason, "change": change, "given": str(given), "plan": str(plan)}
        if plan.microbatch_splits > given.microbatch_splits:
            details["note"] = (
                "each microbatch has its own random streams: smaller ones have other dropout masks,"
                " and another rounding"
            )
        run.event("plan-changed", last["step"], **details)
        run.context.recorder.message(f"continues with {change}: {reason}")

    def begin_loop(self, run: Run, models: Sequence[nn.Module], data: Any, *, largest: int) -> None:
        """Disable the fallback that splits microbatches if the data or a model does not allow it.
        Every rank must call this method."""
        mine = [name for name, _ in training_batchnorms(models)]
        layers = [name for theirs in run.context.mesh.stages.gather_values(mine) for name in theirs]
        if layers:
            self._unsplittable = (
                f"BatchNorm ({layers[0]!r}) takes its statistics over one microbatch, so half a"
                " microbatch has others"
            )
        elif isinstance(data, Stream):
            self._unsplittable = (
                "an ls.Stream reads each microbatch from a shard of its own, so half a microbatch"
                " would have other samples"
            )
        elif any(each.balance.is_of_microbatches for each in run.training.balances):
            self._unsplittable = (
                "Balance(over='microbatch') takes the load of experts over one microbatch, so half"
                " a microbatch has another balance loss"
            )
        splits = run.context.plan.microbatch_splits
        if splits and self._unsplittable is not None:
            raise RecipeError(
                f"microbatch_splits={splits}, and {self._unsplittable}; leave microbatch_splits"
                " out, or give a smaller microbatch"
            )
        self._largest = largest

    def on_error(self, run: Run, error: BaseException) -> None:
        context = run.context
        if isinstance(error, Exception) and out_of_memory(error):
            following = next_plan(
                context.plan,
                context.device.type,
                self.setting,
                largest=self._largest if run.training.source is not None else None,
                unsplittable=self._unsplittable,
                offloadable=_can_offload(run),
            )
            if not isinstance(following, str):
                following = self._write(run, following, error)
            self._next = following
            if isinstance(following, str):
                run.event("out-of-memory", why_not=following)
            else:
                run.event("out-of-memory", then=changes(context.plan, following))
        # rank 0 alone writes events.jsonl
        elif (other := failure_since(self.taken, context.run_dir)) is not None:
            run.event("out-of-memory", rank=other["rank"], then=other["then"])
        if self.is_restarted and (why := fallback_since(self.taken, context.run_dir)):
            request_restart(why)

    def _write(self, run: Run, plan: Plan, error: BaseException) -> Plan | str:
        failure = {
            "step": run.step,
            "rank": run.context.world.rank,
            "error": error_details(error)["error"],
            "then": changes(run.context.plan, plan),
        }
        try:
            self.taken.with_plan(plan, failure).write(run.context.run_dir / FILE)
        except OSError as problem:
            return f"the change of the plan could not be written: {problem}"
        return plan

    def advise(self, run: Run, error: BaseException, *, saved: bool) -> None:
        if self._next is not None:
            plan, folder = run.context.plan, run.context.run_dir
            step = run.step if saved else None
            error.add_note(advice(plan, self._next, folder=folder, step=step))
