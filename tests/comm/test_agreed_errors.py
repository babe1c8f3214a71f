"""An error of one rank that every rank raises."""

from __future__ import annotations

from worlds import all_ranks

from lockstep.base.errors import LockstepError, PlanError, RecipeError, UserError, named_error
from lockstep.comm.agreed_errors import on_rank_0, raise_on_all_ranks
from lockstep.testing.pool import WorkerPool

Told = list[str]


def agreed() -> list[Told]:
    """What each of several calls raises on this rank, or returns."""
    world = all_ranks()

    def fail(*ranks: int) -> int:
        if world.rank in ranks:
            raise PlanError(f"of rank {world.rank}")
        return world.rank

    def caught(call: object) -> Told:
        assert callable(call)
        try:
            return ["returned", str(call())]
        except LockstepError as error:
            return [type(error).__name__, str(error)]

    return [
        caught(lambda: raise_on_all_ranks(world, fail, UserError)),
        caught(lambda: raise_on_all_ranks(world, lambda: fail(1, 2), UserError)),
        caught(lambda: on_rank_0(world, lambda: fail(1, 2), UserError)),
        caught(lambda: on_rank_0(world, lambda: fail(0), UserError)),
    ]


def test_every_rank_raises_the_error_of_the_first_rank_that_fails(pool: WorkerPool) -> None:
    for rank, found in enumerate(pool.run(3, agreed)):
        assert found == [
            ["returned", str(rank)],
            ["PlanError", "of rank 1"],
            ["returned", "0"],
            ["PlanError", "of rank 0"],
        ]


def test_an_error_is_made_again_from_its_name_if_it_has_the_base_that_is_asked_for() -> None:
    assert type(named_error("RecipeError", "text", UserError)) is RecipeError
    assert named_error("ValueError", "text", UserError) is None
    assert named_error("HangError", "text", UserError) is None
