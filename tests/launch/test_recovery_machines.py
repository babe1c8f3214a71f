"""Recovery in place over several machines, which are threads here: the workers of all wait in their
processes until all machines have met again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from launch.test_recovery import script, starts

from lockstep.launch.failures import Ending
from lockstep.launch.machines import Machines
from lockstep.launch.rendezvous import ElasticRendezvous

pytestmark = pytest.mark.usefixtures("no_spare")

Starter = Callable[..., Ending]


@pytest.fixture(autouse=True)
def notes_of_the_able(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that has said that it can recover in place writes a file, for which scripts
    wait."""
    note = ElasticRendezvous.note_able

    def note_and_write(self: ElasticRendezvous) -> None:
        note(self)
        (tmp_path / f"able-{id(self)}").touch()

    monkeypatch.setattr(ElasticRendezvous, "note_able", note_and_write)


def on_two_machines(run: Starter, port: int, source: str, **given: Any) -> list[Ending]:
    place = Machines(2, 2, "127.0.0.1", port)
    with ThreadPoolExecutor() as pool:
        both = [
            pool.submit(run, source, machines=place, recovery="in-place", **given) for _ in range(2)
        ]
        return [each.result() for each in both]


def test_the_workers_of_the_other_machine_keep_their_processes(
    run: Starter, tmp_path: Path, port: int
) -> None:
    endings = on_two_machines(
        run,
        port,
        script("""
            if restarted("in_place"): return
            wait_until(lambda: all(map(times, range(4))))
            wait_until(both_are_able)
            if rank == 3: die()
            lose_a_peer()
            """),
        count=2,
        max_restarts=1,
    )
    assert [ending.status for ending in endings] == [0, 0]
    assert [len(starts(tmp_path, rank)) for rank in range(4)] == [1, 1, 1, 2]
    assert starts(tmp_path, 0)[0][1][3].startswith("rank 3 was killed by SIGKILL")


def test_a_machine_without_a_worker_left_starts_new_ones(
    run: Starter, tmp_path: Path, port: int
) -> None:
    endings = on_two_machines(
        run,
        port,
        script("""
            if restarted("in_place"): return
            wait_until(lambda: times(0) and times(1))
            wait_until(both_are_able)
            if rank == 1: die()
            lose_a_peer()
            """),
        count=1,
        max_restarts=1,
    )
    assert [ending.status for ending in endings] == [0, 0]
    assert [len(starts(tmp_path, rank)) for rank in range(2)] == [1, 2]


def test_where_one_machine_cannot_all_start_again(run: Starter, tmp_path: Path, port: int) -> None:
    endings = on_two_machines(
        run,
        port,
        script(
            """
            if os.environ.get("LOCKSTEP_RESTARTED"):
                return Path(f"why-{rank}").write_text(restarted("not_in_place"))
            wait_until(lambda: times(0) and times(1))
            if rank == 1: die()
            raise ConnectionResetError("Connection reset by peer")
            """,
            "train(7, 'a reason' if rank == 0 else None)",
        ),
        count=1,
        max_restarts=1,
    )
    assert [ending.status for ending in endings] == [0, 0]
    assert [len(starts(tmp_path, rank)) for rank in range(2)] == [2, 2]
    why = "the training had not begun on all machines, or cannot recover in place there"
    assert [(tmp_path / f"why-{rank}").read_text() for rank in range(2)] == [why] * 2
