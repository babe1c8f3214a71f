"""Raises the error of one rank on all ranks, so that no rank waits for a rank that has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lockstep.base.errors import LockstepError, named_error
from lockstep.comm.world import World

T = TypeVar("T")
E = TypeVar("E", bound=LockstepError)


def raise_on_all_ranks(world: World, compute: Callable[[], T], base: type[LockstepError]) -> T:
    """Return the result of `compute` on this rank. If `compute` raises an error of class `base` on
    some ranks, every rank raises the error of the first of these ranks. Every rank must call this
    function."""
    mine, message = None, None
    try:
        result = compute()
    except base as error:
        mine, message = error, [type(error).__name__, str(error)]
    for rank, theirs in enumerate(world.gather_values(message)):
        if theirs is not None:
            raise mine if mine is not None and rank == world.rank else _same(theirs, base)
    return result


def on_rank_0(world: World, compute: Callable[[], T], base: type[LockstepError]) -> T:
    """Broadcast the JSON value that rank 0 computes. If rank 0 raises an error of class `base`,
    every rank raises it. Every rank must call this function."""
    mine: LockstepError | None = None

    def outcome() -> list[Any]:
        nonlocal mine
        try:
            return [compute(), None]
        except base as error:
            mine = error
            return [None, [type(error).__name__, str(error)]]

    result, message = world.value_from(0, outcome)
    if message is not None:
        raise mine or _same(message, base)
    received: T = result
    return received


def _same(told: list[str], base: type[E]) -> E:
    name, text = told
    return named_error(name, text, base) or base(text)
