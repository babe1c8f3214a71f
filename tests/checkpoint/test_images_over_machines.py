"""Images in memory are read bit for bit though each rank sees only some of the parts, and on other
numbers of ranks."""

from __future__ import annotations

import pytest
from checkpoint.given_images import STEPS, read, written
from checkpoint.states import values

from lockstep.testing.pool import WorkerPool


@pytest.mark.parametrize(
    "seen",
    [
        [[0, 1, 2]],
        [[0, 1, 2], [0, 1, 2]],
        [[0], [1, 2]],
        [[0, 1, 2], []],
        [[], [2, 1, 0]],
        [[2], [0], [1]],
        [[0, 1], [1, 2], []],
    ],
    ids=str,
)
def test_every_rank_reads_what_only_others_see(pool: WorkerPool, seen: list[list[int]]) -> None:
    with written(pool, 3) as paths:
        found = pool.run(
            len(seen), read, [[path for rank in ranks for path in paths[rank]] for ranks in seen], 3
        )
    sent = {moved for _, _, moved in found}
    assert [(step, wrong) for step, wrong, _ in found] == [(STEPS, [])] * len(seen)
    assert len(sent) == 1
    assert (sent == {0}) == all(len(ranks) == 3 for ranks in seen), "what all see is not sent"


def test_only_what_a_rank_lacks_is_sent(pool: WorkerPool) -> None:
    """Here each rank has its own shards, and lacks some whole tensors."""
    with written(pool, 2) as paths:
        (step, wrong, moved), _ = pool.run(2, read, [*paths], 2, False)
    assert (step, wrong) == (STEPS, [])
    assert 0 < moved < values(0)["large"].nbytes / 8


def test_an_image_of_which_a_part_is_nowhere_does_not_count(pool: WorkerPool) -> None:
    with written(pool, 2, [1, 2]) as early, written(pool, 2, [3]) as late:
        assert (
            pool.run(2, read, [[*early[0], *late[0]], [*early[1]]], 2)
            == [(2, [], pytest.approx(0, abs=1e9))] * 2
        )
        assert pool.run(2, read, [early[0], early[0]], 2) == [(None, [], 0)] * 2
        assert pool.run(1, read, [[]], 2) == [(None, [], 0)]
