"""What all ranks agree on between two steps: by requests that are merged, and flags that ride on
the gradients' exchange."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from lockstep.logging.phases import Phases
from lockstep.training.consensus import NOTHING, Consensus, Request, merge

REASONS = st.none() | st.sampled_from(["enough", "a signal", "time is over"])
REQUESTS = st.builds(Request, REASONS, st.booleans(), REASONS)


@given(st.lists(REQUESTS, max_size=6))
def test_what_any_rank_asks_for_is_agreed_on(requests: list[Request]) -> None:
    agreed = merge(requests)
    assert bool(agreed) == any(map(bool, requests))
    assert agreed.save == any(each.save for each in requests)
    for name in ("stop", "end"):
        given_reasons = [reason for each in requests if (reason := getattr(each, name)) is not None]
        assert getattr(agreed, name) == (given_reasons[0] if given_reasons else None)


@given(st.lists(REQUESTS, max_size=4), st.lists(REQUESTS, max_size=4))
def test_requests_may_be_merged_in_parts(first: list[Request], second: list[Request]) -> None:
    assert merge([merge(first), merge(second)]) == merge([*first, *second])


class Ranks:
    """Stands in for the mesh of one rank among several: `others` is what the other ranks ask
    for."""

    def __init__(self, others: list[Request], *, data_ranks: int) -> None:
        self.exchanges = 0
        self.votes = 0
        self._others = others
        self.summed = lambda: SimpleNamespace(size=data_ranks)
        self.world = self
        self.size = 1 + len(others)

    def any(self, flag: bool) -> bool:
        self.votes += 1
        return flag or any(map(bool, self._others))

    def gather_values(self, mine: Any) -> list[Any]:
        self.exchanges += 1
        theirs = [
            [each.stop, each.save, each.end] if isinstance(mine, list) else each.stop
            for each in self._others
        ]
        return [mine, *theirs]


def step(flags: Any) -> Any:
    return SimpleNamespace(flags=flags)


def consensus(
    mine: Request, others: list[Request], *, data_ranks: int | None = None
) -> tuple[Consensus, Ranks]:
    ranks = Ranks(others, data_ranks=1 + len(others) if data_ranks is None else data_ranks)
    mesh: Any = ranks
    return Consensus(mesh, Phases(), lambda: mine), ranks


def test_where_nobody_asks_nothing_is_exchanged() -> None:
    agreeing, ranks = consensus(NOTHING, [NOTHING])
    assert agreeing.agree([step(False), step(torch.tensor(0.0))], may_stop=True) == NOTHING
    assert (ranks.exchanges, ranks.votes) == (0, 0)


@pytest.mark.parametrize("flags", [[True], [False, True], [torch.tensor(2.0)]])
def test_a_flag_of_any_model_is_enough(flags: list[Any]) -> None:
    agreeing, ranks = consensus(NOTHING, [Request(save=True)])
    assert agreeing.agree([step(flag) for flag in flags], may_stop=False) == Request(save=True)
    assert ranks.exchanges == 1


@pytest.mark.parametrize("may_stop", [False, True])
def test_a_stop_counts_at_logging_steps_only(may_stop: bool) -> None:
    agreeing, _ = consensus(Request(stop="enough"), [])
    assert agreeing.flag(may_stop=may_stop) == may_stop
    assert agreeing.agree([step(True)], may_stop=may_stop) == (
        Request(stop="enough") if may_stop else NOTHING
    )


def test_a_save_or_an_end_counts_in_every_step() -> None:
    for request in (Request(save=True), Request(end="a signal"), Request("enough", end="a signal")):
        assert consensus(request, [])[0].flag(may_stop=False)


def test_ranks_that_exchange_no_gradients_are_asked_too() -> None:
    """Each tensor-parallel rank of one data rank, say: a flag tells only the data ranks of one
    column."""
    agreeing, ranks = consensus(NOTHING, [Request(end="a signal")], data_ranks=1)
    assert agreeing.agree([step(False)], may_stop=False) == Request(end="a signal")
    assert (ranks.votes, ranks.exchanges) == (1, 1)


def test_a_stop_between_two_steps_needs_no_flag() -> None:
    assert consensus(NOTHING, [NOTHING, Request(stop="enough")])[0].agree_to_stop() == "enough"
    assert consensus(Request(save=True), [Request(end="a signal")])[0].agree_to_stop() is None
