"""The out-of-memory fallbacks: changes to the plan, one after another, each on top of those before.

A process that ran out of memory mends nothing in itself. It writes the next plan down in the run directory and ends; whoever starts the
run again starts processes that surely have their memory back, and they go on under that plan. Choosing it is pure arithmetic on plans.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.base.errors import PlanError, RunDirectoryError
from lockstep.base.files import write_atomically
from lockstep.comm.world import World
from lockstep.launch.failures import error_details
from lockstep.plan import WORDS, Plan
from lockstep.saving import OutOfMemory

FILE = "out-of-memory.json"
"""In the run directory."""
FALLBACKS = ("checkpointing", "offload", "microbatch_splits")
"""The fields of a plan that are changed, in this order. All but the last leave the bits as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenFallbacks:
    """The fallbacks that a run has taken, as fields of `Plan`, and the failures behind them."""

    checkpointing: str = "none"
    offload: bool = False
    microbatch_splits: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Each with `step` (those done), `rank`, `error`, and `then`: what was changed for it."""

    @classmethod
    def parse(cls, text: str, path: Path) -> TakenFallbacks:
        """Raises `RunDirectoryError` where it is not what `write` wrote."""
        try:
            found = cls(**json.loads(text))
            Plan(checkpointing=found.checkpointing, microbatch_splits=found.microbatch_splits)  # type: ignore[arg-type]  # which it checks
            complete = all({"step", "rank", "error", "then"} <= each.keys() for each in found.failures)
            if isinstance(found.offload, bool) and found.failures and complete:
                return found
        except (ValueError, TypeError, AttributeError, PlanError):
            pass
        raise RunDirectoryError(
            f"{path} is not as a run writes it; it holds what the run changed in its plan when memory ran out; remove it to go on without"
        ) from None

    def write(self, path: Path) -> None:
        """Write the file atomically. Raises `OSError`."""
        write_atomically(path, json.dumps(asdict(self), indent=2) + "\n")

    def over(self, plan: Plan, device: str) -> Plan:
        """The plan, with all that is remembered and that it has not yet, as far as it can have it on such a `device`."""
        for name in FALLBACKS:
            remembered = getattr(self, name)
            if _strength(name, remembered) > _strength(name, getattr(plan, name)):
                plan = _changed(plan, name, remembered, device) or plan
        return plan

    def with_plan(self, plan: Plan, failure: dict[str, Any]) -> TakenFallbacks:
        """This, and what the plan has of the rungs, which it was given because of the failure."""
        strongest = {name: max(getattr(self, name), getattr(plan, name), key=lambda value: _strength(name, value)) for name in FALLBACKS}
        return TakenFallbacks(**strongest, failures=[*self.failures, failure])


def next_plan(plan: Plan, device: str, setting: OutOfMemory, *, largest: int | None, whole: str | None) -> Plan | str:
    """The plan for the next try, or why there is none, in words.

    `device`: the type of the devices, "cuda" or "cpu". `largest`: samples of the largest microbatch as it is computed now; None: memory ran
    out before there was one, so that only what holds less of the model can help. `whole`: why no microbatch can be halved, in words.
    """
    if setting == "stop":
        return "it was told to change nothing (--out-of-memory stop)"
    if largest is not None and (found := _changed(plan, "checkpointing", "full", device)) is not None:
        return found
    if (found := _changed(plan, "offload", True, device)) is not None:
        return found
    if largest is None:
        return "no step had begun, and the model itself is what there is no room for; cut it over more processes (shard, tensor, pipeline)"
    if largest == 1:
        return "microbatches have one sample each; cut the model over more processes (shard, tensor, pipeline), or make it smaller"
    if whole is not None:
        return f"what is left is to compute each microbatch in halves, and {whole}; cut the model over more processes"
    if setting == "same-bits" or (setting == "retry" and plan.numerics == "bitwise"):
        said = "it was told to keep the bits (--out-of-memory same-bits)" if setting == "same-bits" else "in numerics=bitwise it does not"
        return (
            f"what is left is to compute each microbatch in halves, which changes the bits from there on, and {said}; allow it with "
            "--out-of-memory halve (LOCKSTEP_OUT_OF_MEMORY=halve), or cut the model over more processes"
        )
    return replace(plan, microbatch_splits=plan.microbatch_splits + 1)


def changes(before: Plan, after: Plan) -> str:
    """Return the fallbacks that the second plan has and the first has not, as the text of a plan."""
    names = [name for name in FALLBACKS if getattr(before, name) != getattr(after, name)]
    return ",".join(f"{name}={'yes' if getattr(after, name) is True else getattr(after, name)}" for name in names)


def said(plan: Plan, found: Plan | str, *, folder: Path, step: int | None) -> str:
    """Return the advice that goes with the error. `found`: from `next_plan`. `step`: steps done and saved; None: unsaved."""
    if isinstance(found, str):
        tried = changes(Plan(), plan)
        return f"lockstep: memory ran out{f' with {tried}' if tried else ''}; {found}"
    where = "begins anew" if step == 0 else f"goes on from step {step}" if step else "goes on from its last checkpoint, or begins anew,"
    then = changes(plan, found)
    return f"lockstep: the run in {folder} {where} with {then} when the same command is given again, with that run directory"


def remember_fallback(
    plan: Plan, found: Plan | str, remembered: TakenFallbacks, error: BaseException, *, folder: Path, step: int, rank: int
) -> Plan | str:
    """Write down what `next_plan` has `found`, for the next start. Returns it, or why that could not be."""
    if isinstance(found, str):
        return found
    failure = {"step": step, "rank": rank, "error": error_details(error)["error"], "then": changes(plan, found)}
    try:
        remembered.with_plan(found, failure).write(folder / FILE)
    except OSError as problem:
        return f"what to change could not be written down: {problem}"
    return found


def fallback_since(known: TakenFallbacks, folder: Path) -> str | None:
    """Return, in words, the fallback that any rank of the run in `folder` has written since `known` was read; None if there is none."""
    try:
        found = TakenFallbacks.parse((folder / FILE).read_text(encoding="utf-8"), folder / FILE)
    except (OSError, UnicodeDecodeError, RunDirectoryError):
        return None
    last = found.failures[-1]
    return f"memory ran out in step {last['step']} on rank {last['rank']}, {last['then']} from there" if found != known else None


def read_fallbacks(world: World, folder: Path, *, is_resumed: bool) -> TakenFallbacks:
    """Return the fallbacks of the run in `folder` if it is resumed. Every rank calls it. Raises `RunDirectoryError`."""
    text = None
    if world.rank == 0 and is_resumed:
        try:
            text = (folder / FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError):
            text = ""  # which no rank can parse
    text = world.value_of(0, text)
    return TakenFallbacks() if text is None else TakenFallbacks.parse(text, folder / FILE)


def _changed(plan: Plan, name: str, value: Any, device: str) -> Plan | None:
    """The plan with one field changed. None: it has that value already, or cannot have it."""
    if getattr(plan, name) == value or (name == "offload" and device == "cpu"):
        return None
    try:
        return replace(plan, **{name: value})
    except PlanError:
        return None


def _strength(name: str, value: Any) -> int:
    return WORDS[name].index(value) if name in WORDS else int(value)
