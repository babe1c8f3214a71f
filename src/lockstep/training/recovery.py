"""Recovery in place: after the loss of another process, this process keeps its memory, waits for a
new rank, and continues training."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.base.contents import CodeReader, Part, digest_parts
from lockstep.base.dtypes import tensor_spec
from lockstep.base.errors import LockstepError, PlanError, RecipeError, UserError, first_few
from lockstep.base.torch_private import version
from lockstep.checkpoint.images import open_images
from lockstep.checkpoint.manifest import Manifest
from lockstep.comm.mesh import to_local
from lockstep.comm.regroup import leave_groups
from lockstep.comm.world import World
from lockstep.data.digests import differing_part
from lockstep.launch.recovery.rejoin import Rejoin, session_was_opened
from lockstep.launch.worker import prepare_process
from lockstep.plan import Plan
from lockstep.recipe.code import RecipeCode, code_and_objects_of
from lockstep.recipe.data import Stream
from lockstep.recipe.recipe import Recipe
from lockstep.training.run import Run
from lockstep.training.state import Stateful, StateReader, state_of
from lockstep.training.training import Training

MOST_BYTES = 2**26
"""Tensors above this size in a hook's attributes are compared by version counter, not by
content."""


@dataclass(frozen=True, slots=True)
class HookState:
    """Digests of the values that a user's hook holds or uses."""

    digests: Mapping[str, str]
    """Maps a path, such as an attribute's name, to a digest."""
    unread: list[str]
    """Paths of values that have no digest."""


def hook_states(training: Training) -> dict[str, HookState]:
    """Return the states of the users' hooks that have no state_dict."""
    hooks = [
        hook
        for hook in training.hooks.all
        if not type(hook).__module__.startswith("lockstep.") and not isinstance(hook, Stateful)
    ]
    return {
        f"{place} {type(hook).__name__}": HookState(
            *digest_parts(_HookReader(training).parts(hook))
        )
        for place, hook in enumerate(hooks)
    }


def why_not_set_back(before: Mapping[str, HookState], now: Mapping[str, HookState]) -> str | None:
    """Return the reason why a recovery cannot restore a hook. Return None if a recovery can restore
    all hooks."""
    for name, state in before.items():
        current = now[name]
        changed = [
            path
            for path in {**state.digests, **current.digests}
            if state.digests.get(path) != current.digests.get(path)
        ]
        for paths, what in (
            (changed, "has changed since the start"),
            (current.unread, "cannot be compared"),
        ):
            if paths:
                parts = first_few([path.removeprefix(".") or "it" for path in paths])
                return (
                    f"hook {name.partition(' ')[2]} has no state_dict, and {parts} {what}: it"
                    " cannot be set back; add one"
                )
    return None


class _HookReader(CodeReader):
    def __init__(self, training: Training) -> None:
        super().__init__()
        models = [part for module in training.modules for part in module.model.modules()]
        self._of_the_run = {id(each) for each in (*models, *_learned(training))}

    def read(self, value: Any, path: str) -> Iterator[Part]:
        if id(value) in self._of_the_run or type(value).__module__.startswith("lockstep."):
            yield path, [b"of the run"]
        else:
            yield from super().read(value, path)

    def _tensor_bytes(self, value: Any) -> Iterable[bytes] | None:
        return (
            super()._tensor_bytes(value)
            if value.nbytes <= MOST_BYTES
            else [f"{id(value)} {version(value)}".encode()]
        )

    def _array_bytes(self, value: Any) -> Iterable[bytes] | None:
        if value.nbytes <= MOST_BYTES:
            return super()._array_bytes(value)
        return [f"{id(value)}".encode()] if not value.flags.writeable else None


def _learned(training: Training) -> Iterator[Any]:
    for module in training.modules:
        yield from module.model.parameters()
        yield from module.model.buffers()
        yield from module.optimizers


@dataclass(frozen=True, slots=True)
class HeldState:
    """The full training state after a step, in a process that is not sharded. The held tensors are
    not copies."""

    step: int
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]

    @classmethod
    def of(cls, training: Training) -> HeldState:
        """The optimizer must have completed the last step."""
        state = state_of(training.modules, training.stateful)
        return cls(training.run.step, state.tensors, values_to_hold(training, state.values))


def values_to_hold(training: Training, values: Mapping[str, Any]) -> dict[str, Any]:
    learned = {"recipe": training.context.recorder.summary.get("recipe"), "code": training.code}
    return {**values, **training.loop.values(), **learned, "step": training.run.step}


class ReplicaReader:
    """Reads the newest state in the memory of any rank. Ranks without the state receive a
    broadcast."""

    def __init__(self, held: HeldState | None, world: World) -> None:
        """Every rank must create a `ReplicaReader`."""
        steps = world.gather_values(-1 if held is None else held.step)
        newest = max(steps)
        self._source = steps.index(newest)
        self._held = held if held is not None and held.step == newest else None
        self._is_held_by_all = min(steps) == newest
        described = None
        if self._held is not None and world.rank == self._source:
            specs = {name: tensor_spec(tensor) for name, tensor in self._held.tensors.items()}
            described = [specs, dict(self._held.values)]
        specs, values = world.value_of(self._source, described) or ({}, {})
        self.manifest = Manifest(step=newest, files={}, values=values, metadata={})
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {
            name: (dtype, tuple(shape)) for name, (dtype, shape) in specs.items()
        }

    @torch.no_grad()
    def load_into(self, state: Mapping[str, Tensor], world: World) -> None:
        """Every rank must call this method, with the same names."""
        for name, target in state.items():
            local = to_local(target).detach()
            if self._held is not None:
                local.copy_(to_local(self._held.tensors[name]))
            if not self._is_held_by_all:
                sent = local.contiguous()
                flat = torch.view_as_real(sent) if sent.is_complex() else sent
                world.broadcast(flat.reshape(-1).view(torch.uint8), self._source)
                if sent is not local:
                    local.copy_(sent)


T = TypeVar("T")


class Recovery:
    """Recovers a run in place. After the loss of another process, this process closes the run and
    opens it again."""

    def __init__(self, rejoin: Rejoin, recipe: Recipe, watchers: Collection[Any] = ()) -> None:
        self.rejoin, self._recipe, self._watchers = rejoin, recipe, watchers
        self.code = RecipeCode.of(recipe)
        rejoin.trainings += 1
        self._too_late = (
            None
            if rejoin.trainings == 1
            else "the script has trained before, and a new process would have to do that again"
        )
        if session_was_opened():
            self._too_late = (
                "the script has opened a session before, and a new process would have to do that"
                " again"
            )
        self.sizes: Sequence[int] = ()
        """Numbers of processes that the plan supports."""
        self.holder: dict[str, Any] | None = None
        """The process that writes the run directory."""
        self._held: HeldState | None = None
        self._distrusts = False  # True if the states in the ranks' memory may be wrong
        self.why_no_state = "no process holds the state, and there is no image"
        self._is_restored = False
        self.can_replace = False
        """True once all processes can recover in place. The value is the same on all ranks."""
        # True if this process has the whole state: no tensor is sharded, and the data is no stream
        self.is_replica = False
        # the largest step that this process has reached since its state was last restored
        self._reached = -1
        self._hooks_before: Mapping[str, HookState] = {}
        self.times = 0

    def run(self, attempt: Callable[[], T]) -> T:
        """Call `attempt`, which opens the run and trains. Call `attempt` again after each loss of
        another process, with the rank that the launcher assigns."""
        while True:
            self._is_restored = False
            prepare_process()
            self.rejoin.announce(self._too_late)
            self.rejoin.join_at_first()
            try:
                result = attempt()
            except BaseException as error:
                if not self.rejoined(error, None):
                    self.rejoin.close(failed=True)
                    is_mistake = isinstance(error, UserError) and not isinstance(error, PlanError)
                    if self.is_under_way and is_mistake:
                        # This error did not occur before the process was lost, so starting all
                        # processes again may avoid it.
                        self.rejoin.refuse(str(error))
                        raise LockstepError(
                            f"the run cannot be opened again in this process: {error}"
                        ) from error
                    raise
                lost = error
            else:
                self.rejoin.close(failed=False)
                return result
            self._leave(lost)

    @property
    def is_under_way(self) -> bool:
        """True after the loss of a process, until the state is restored."""
        return self.rejoin.is_rejoining

    def lost_holders(self, world: World) -> list[dict[str, Any]]:
        """Every rank must call this method."""
        return (
            [each for each in world.gather_values(self.holder) if each is not None]
            if self.is_under_way
            else []
        )

    def distrust(self) -> None:
        """Make the next recovery use a checkpoint. Called after a rank has computed wrong
        results."""
        self._distrusts = True

    def check_recipe(self, training: Training) -> None:
        """Every rank must call this method."""
        set_back = [*self._watchers, *training.stateful.values(), *_learned(training)]
        mine = code_and_objects_of(self._recipe, set_back)
        first, *others = training.context.world.gather_values(mine)
        for other in others:
            for field, digests in first.items():
                if (part := differing_part(digests, other.get(field, {}))) is not None:
                    raise RecipeError(
                        f"{field} uses {part or 'a class'}, which has changed since the start and"
                        " cannot be set back; keep it in a hook with a state_dict, where the"
                        " recipe's functions may read it"
                    )

    def announce(self, run: Run, data: Any) -> None:
        """Tell the launcher whether all processes can recover in place. Every rank must call this
        method."""
        plan = run.context.plan
        self.is_replica = not plan.state_divided and not isinstance(data, Stream)
        self._hooks_before = hook_states(run.training)
        mine = (
            self._too_late
            or why_not(run)
            or why_not_set_back(self._hooks_before, self._hooks_before)
        )
        reason = next(
            (each for each in run.context.world.gather_values(mine) if each is not None), None
        )
        self.can_replace = reason is None
        self.rejoin.announce(reason, self.sizes)

    def reader(self, world: World, plan: Plan) -> tuple[str, StateReader] | None:
        """Return the newest state in memory: "replica" of a surviving process, or "image" from the
        launcher. Every rank must call this method."""
        held = ReplicaReader(self._held if not plan.state_divided else None, world)
        self._reached = max(world.gather_values(self._reached))
        if any(world.gather_values(self._distrusts)):
            self.why_no_state = "the states in memory may be wrong: a rank computed wrong results"
            return None
        images = open_images(
            [f"/proc/self/fd/{descriptor}" for descriptor in self.rejoin.images], world
        )
        newest = images.newest
        if newest is not None and newest.step > held.manifest.step:
            return "image", images.reader(newest)
        return ("replica", held) if held.manifest.step >= 0 else None

    def restored(self, step: int) -> dict[str, float]:
        """Return the seconds until all processes were ready, the seconds of the restore after that,
        and the number of steps to recompute."""
        lost_at, rejoined_at = self.rejoin.lost_at, self.rejoin.rejoined_at
        figures = {
            "wait_seconds": round(rejoined_at - lost_at, 3),
            "open_seconds": round(time.time() - rejoined_at, 3),
        }
        figures["repeated_steps"] = max(0, self._reached - step)
        self._held, self._is_restored, self._reached = None, True, -1
        self._distrusts = False
        self.rejoin.end_recovery()
        # modules contain reference cycles: collect them now, to free their memory
        gc.collect()
        return figures

    def rejoined(
        self, error: BaseException, run: Run | None, stop_watching: Callable[[], None] | None = None
    ) -> bool:
        """Wait for a new rank if `error` came from the loss of another process."""

        def hold() -> int | str:
            if stop_watching is not None:
                stop_watching()
            return self._hold(run)

        return self.rejoin.rejoined(error, hold, at=-1 if run is None else run.step)

    def _leave(self, error: BaseException) -> None:
        self.times += 1
        link: BaseException | None = error
        while link is not None:
            traceback.clear_frames(link.__traceback__)
            link.__traceback__, link = None, link.__context__
        self.rejoin.leave(partial(leave_groups, collect=False))

    def _hold(self, run: Run | None) -> int | str:
        """Return the step of the state in this process's memory, or the reason why the process
        cannot recover in place."""
        if run is not None:
            self._reached = max(self._reached, run.step)
        if run is not None and self._is_restored and run.training.is_consistent and self.is_replica:
            self._held = HeldState.of(run.training)
        if (
            run is not None
            and (reason := why_not_set_back(self._hooks_before, hook_states(run.training)))
            is not None
        ):
            return reason
        return -1 if self._held is None else self._held.step


def why_not(run: Run) -> str | None:
    context = run.context
    if context.world.size > 1 and not context.world.owns_group:
        return "the script has made the process group itself"
    if context.device.type != "cpu":
        return f"on the device {context.device.type} it has never been tried"
    return None
