"""Counts what real processes exchange in a step. At module level, so that workers can be told its
names."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from planner.subjects import CHANGES, adamw, recipe
from torch import Tensor

import lockstep as ls
from lockstep.base.torch_private import TorchDispatchMode, tree_leaves
from lockstep.comm.world import World
from lockstep.planner.trace import CollectiveKind

LEFT_OUT = ("gather_values", "value_of", "value_from", "any", "gather_ragged", "leave")
"""Methods of `World` whose exchanges a trace does not have: JSON, flags, and rows of
evaluations."""
RESULT = -1
KINDS: dict[str, tuple[CollectiveKind, int]] = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", RESULT),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
}
"""Operations of `c10d` and `_c10d_functional` -> the collective, and the argument with all of its
bytes."""
WITHOUT_DATA = ("recv_", "barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd")
EACH_STEP = 2
"""The step that is counted. In the one before, DDP makes its buckets anew, and broadcasts them."""
Exchanges = Counter[tuple[str, int]]


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives by kind and bytes, whoever calls them: Python, autograd, or C++ such as
    DDP's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Exchanges = Counter()
        self._is_left_out = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.namespace in ("c10d", "_c10d_functional") and name not in WITHOUT_DATA:
            kind, place = KINDS[name]
            full = result if place == RESULT else args[place]
            if not self._is_left_out:
                self.found[
                    kind, sum(each.nbytes for each in tree_leaves(full) if isinstance(each, Tensor))
                ] += 1
        return result

    @contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Leave out the exchanges of `LEFT_OUT` while entered."""
        with ExitStack() as stack:
            for name in LEFT_OUT:
                stack.enter_context(
                    mock.patch.object(World, name, self._inside(getattr(World, name)))
                )
            yield

    def _inside(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*arguments: Any) -> Any:
            before, self._is_left_out = self._is_left_out, True
            try:
                return method(*arguments)
            finally:
                self._is_left_out = before

        return inside


class _OneStep(ls.Hook):
    """Counts a step. Exchanges of hooks between two steps, such as the time of each rank, are no
    part of it."""

    def __init__(self, counting: Counting) -> None:
        self._counting = counting

    def before_step(self, run: Any) -> None:
        if run.step == EACH_STEP:
            self._counting.__enter__()

    def after_step(self, run: Any) -> None:
        if run.step == EACH_STEP + 1:
            self._counting.__exit__(None, None, None)


def counted(plan: str, run_dir: str, changes: dict[str, Any]) -> Exchanges:
    """What this rank exchanges in a step."""
    counting = Counting()
    given = recipe(steps=EACH_STEP + 1, optimizer=adamw, **changes)
    with counting.leaving_out():
        ls.train(
            given,
            plan=f"{plan},transport=torch",
            run_dir=run_dir,
            hooks=[_OneStep(counting)],
            log_every=1000,
        )
    return counting.found


def counted_in_turn(cases: list[tuple[str, str]], folder: str) -> list[Exchanges]:
    """What this rank exchanges in a step of each plan and recipe, see `subjects.CHANGES`."""
    return [
        counted(plan, os.path.join(folder, str(place)), CHANGES[name])
        for place, (plan, name) in enumerate(cases)
    ]
