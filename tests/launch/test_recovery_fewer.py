"""Recovery in place with fewer processes: for good, or until a new one that takes long joins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launch.test_recovery import script, starts

from lockstep.launch.failures import Ending
from lockstep.launch.recovery.in_place import is_quick

pytestmark = pytest.mark.usefixtures("no_spare")

Starter = Callable[..., Ending]


@pytest.mark.parametrize(
    ("sizes", "left"),
    [
        pytest.param([1, 2, 3, 4], [0, 2, 3], id="replicate=auto"),
        pytest.param([2, 4], [0, 2], id="one more than fits"),
    ],
)
def test_those_that_are_left_go_on_with_fewer(
    run: Starter, tmp_path: Path, sizes: list[int], left: list[int]
) -> None:
    ending = run(
        script(
            """
            if restarted("in_place"):
                return Path(f"was-{rank}").write_text(f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
            wait_until(lambda: all(map(times, range(4))))
            if rank == 1: die()
            lose_a_peer()
            """,
            f"train(7, sizes={sizes})",
        ),
        count=4,
        max_restarts=1,
        recovery="shrink",
    )
    assert (ending.status, ending.finished) == (0, list(range(len(left))))
    found = {path.name: path.read_text() for path in tmp_path.glob("was-*")}
    assert found == {f"was-{old}": f"{new} of {len(left)}" for new, old in enumerate(left)}


def test_the_others_go_on_until_a_process_that_takes_long_joins(
    run: Starter, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ending = run(
        script(
            """
            if restarted("in_place") and os.environ["WORLD_SIZE"] == "2": return
            wait_until(lambda: times(0) and times(1))
            if rank == 1: die()
            lose_a_peer()
            """,
            "train(7, sizes=[1, 2])",
        ),
        max_restarts=1,
        recovery="in-place",
    )
    assert (ending.status, ending.finished) == (0, [0, 1])
    (alone,), (_, newcomer) = (starts(tmp_path, rank) for rank in range(2))
    assert len(alone) == 3
    assert len({start[0] for start in alone}) == 1
    assert newcomer[0][3] == "a new process joined"
    assert "lockstep: a new process joins: the workers wait for it\n" in capfd.readouterr().err


def test_without_a_process_that_takes_long_and_fails_the_others_go_on(
    run: Starter, capfd: pytest.CaptureFixture[str]
) -> None:
    ending = run(
        script(
            """
            if restarted("in_place"):
                wait_until(Path("fails").exists)
                return time.sleep(1.5)
            wait_until(lambda: times(0) and times(1))
            if rank == 1: die()
            lose_a_peer()
            """,
            "if rejoin.is_rejoining:\n"
            "    Path('fails').touch()\n"
            "    raise ImportError('no module')\n"
            "train(7, sizes=[1, 2])",
        ),
        max_restarts=1,
        recovery="in-place",
    )
    assert (ending.status, ending.finished) == (0, [0])
    assert (
        "ImportError: no module; it was to take the place of a lost one, and the run goes on"
        " without it" in capfd.readouterr().err
    )


def test_where_fewer_do_not_fit_the_lost_one_is_replaced(run: Starter, tmp_path: Path) -> None:
    ending = run(
        script(
            """
            if restarted("in_place"): return
            wait_until(lambda: times(0) and times(1))
            if rank == 1: die()
            lose_a_peer()
            """,
            "train(7, sizes=[2])",
        ),
        max_restarts=1,
        recovery="shrink",
    )
    assert ending.status == 0
    assert [len(starts(tmp_path, rank)) for rank in range(2)] == [1, 2]


@pytest.mark.parametrize(
    ("lost", "script_seconds", "import_seconds", "quick"),
    [
        pytest.param(1, 3.5, 3.0, True, id="imports are most of the script"),
        pytest.param(1, 3.5, 2.0, False, id="the script takes long"),
        pytest.param(1, 0.5, None, False, id="no spare is ready"),
        pytest.param(2, 3.5, 3.0, False, id="more are lost than there are spares"),
        pytest.param(0, 3.5, None, True, id="none is lost: another machine joins"),
    ],
)
def test_a_lost_process_is_waited_for_if_a_spare_is_ready_and_the_script_is_short(
    lost: int, script_seconds: float, import_seconds: float | None, quick: bool
) -> None:
    assert is_quick(lost, script_seconds=script_seconds, import_seconds=import_seconds) is quick
