"""Recovery in place: the workers that are left keep their processes, and get new ranks with one
that takes the lost one's place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent

import pytest

from lockstep.launch import worker_processes
from lockstep.launch.failures import Ending
from lockstep.launch.recovery import in_place

pytestmark = pytest.mark.usefixtures("no_spare")

Starter = Callable[..., Ending]

TRAINS = """
import json
from pathlib import Path
from lockstep.launch.recovery.rejoin import connect

aborted, waits_for = [], []
rejoin = connect(lambda: aborted.append(1), lambda: waits_for[0] if waits_for else None)
starts = []

def restarted(name):
    return json.loads(os.environ.get("LOCKSTEP_RESTARTED", "{}")).get(name)

def note():
    starts.append([os.getpid(), os.environ["MASTER_PORT"], restarted("in_place"), restarted("reason")])
    Path(f"starts-{os.getenv('RANK')}-{os.getpid()}").write_text(json.dumps(starts))

def times(rank):
    return len(list(Path(".").glob(f"starts-{rank}-*")))

def wait_until(condition):
    while not condition(): time.sleep(0.001)

advances = 0

def train(step, why_not=None, sizes=()):
    # As ls.train does: `attempt` is one start of the run in this process.
    while True:
        rejoin.join_at_first()
        rejoin.announce(why_not, sizes)
        note()  # afterwards: one that waits for this may be lost at once
        rejoin.end_recovery()
        try:
            return attempt()
        except Exception as error:
            if not rejoin.rejoined(error, lambda: -1, at=step + advances * len(starts)):
                raise

def both_are_able():
    return len(list(Path(".").glob("able-*"))) == 2

def lose_a_peer():
    wait_until(lambda: aborted)
    del aborted[:]
    raise ConnectionResetError("Connection reset by peer")

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def script(attempt: str, train: str = "train(7)") -> str:
    return TRAINS + "\ndef attempt():\n" + indent(dedent(attempt), "    ") + "\n" + train


def starts(folder: Path, rank: int) -> list[list[list[str]]]:
    """The starts in each process of a rank, in order."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"starts-{rank}-*")]
    return sorted(found, key=lambda each: bool(each[0][2]))


def test_the_others_keep_their_processes_and_get_a_new_store(
    run: Starter, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ending = run(
        script("""
            if restarted("in_place"): return
            if rank == 1:
                wait_until(lambda: times(0))
                die()
            lose_a_peer()
            """),
        max_restarts=2,
        recovery="in-place",
    )
    assert (ending.status, ending.finished, ending.report()) == (0, [0, 1], "")
    why = "rank 1 was killed by SIGKILL (often the kernel or the container, because memory ran out)"
    assert capfd.readouterr().err == f"lockstep: {why}; the others wait; recovery 1 of 2\n"
    ((first, second),) = starts(tmp_path, 0)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert second[2:] == [True, why]
    lost, replacement = starts(tmp_path, 1)
    assert lost[0][0] != replacement[0][0]
    assert replacement == [[replacement[0][0], second[1], True, why]]


def test_one_that_cannot_go_on_in_place_makes_all_start_again_with_the_reason(
    run: Starter, tmp_path: Path
) -> None:
    ending = run(
        script(
            """
            if os.environ.get("LOCKSTEP_RESTARTED"):
                return Path(f"why-{rank}").write_text(restarted("not_in_place"))
            if rank == 1:
                wait_until(lambda: times(0))
                die()
            raise ConnectionResetError("Connection reset by peer")
            """,
            "train(7, 'shard=2' if rank == 0 else None)",
        ),
        max_restarts=2,
        recovery="in-place",
    )
    assert ending.status == 0
    assert [len(starts(tmp_path, rank)) for rank in (0, 1)] == [2, 2]
    assert [(tmp_path / f"why-{rank}").read_text() for rank in (0, 1)] == ["rank 0: shard=2"] * 2


@pytest.mark.parametrize(("saves", "status"), [(True, 75), (False, 143)])
def test_a_request_to_end_amid_a_recovery_is_honoured_if_the_state_was_saved(
    run: Starter, saves: bool, status: int
) -> None:
    ending = run(
        script(
            """
            if rank == 1:
                wait_until(lambda: times(0))
                die()
            lose_a_peer()
            """,
            f"""
from lockstep.launch.worker_files import note_saved
signal.signal(signal.SIGTERM, lambda *_: None)  # as a training does
if rank == 1 and times(1):  # the replacement
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
try: train(7)
except ConnectionError:
    if {saves}: note_saved()
    raise
""",
        ),
        max_restarts=2,
        recovery="in-place",
    )
    assert (ending.status, ending.was_preempted) == (status, saves)


def test_a_second_loss_while_the_others_wait_is_one_recovery_more(
    run: Starter, tmp_path: Path
) -> None:
    ending = run(
        script(
            """
            if restarted("in_place"): return
            wait_until(lambda: times(0) and times(1) and times(2))
            if rank == 1: die()
            if rank == 2: threading.Thread(target=lambda: (wait_until(lambda: times("late")), die())).start()
            lose_a_peer()
            """,
            "import threading\n"
            "if rank == 1 and times(1): Path('starts-late-0').touch(); time.sleep(0.3)\n"
            "train(7)",
        ),
        count=3,
        max_restarts=3,
        recovery="in-place",
    )
    assert ending.status == 0
    assert [len(starts(tmp_path, rank)) for rank in range(3)] == [1, 2, 2]
    assert len(starts(tmp_path, 0)[0]) == 2


def test_one_that_is_lost_again_and_again_at_one_step_ends_the_run_with_its_error(
    run: Starter, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ending = run(
        script("""
            wait_until(lambda: times(0) and times(1))
            if rank == 1:
                rejoin.close(failed=True)
                raise ValueError("the culprit's")
            lose_a_peer()
            """),
        max_restarts=9,
        recovery="in-place",
    )
    assert ending.status == 1
    assert ending.report().startswith("rank 1 failed (exit status 1), first of 2")
    assert "ValueError: the culprit's" in ending.report()
    assert len(starts(tmp_path, 1)) == 3
    assert [line.rpartition("; ")[2] for line in capfd.readouterr().err.splitlines()] == [
        "recovery 1 of 9",
        "recovery 2 of 9",
    ]


def test_losses_at_different_steps_do_not_end_the_run(run: Starter, tmp_path: Path) -> None:
    """Though no process holds a state, as under `shard`: the images count."""
    ending = run(
        script(
            """
            wait_until(lambda: times(0) and times(1))
            if times(1) == 5: return
            if rank == 1: die()
            if len(starts) == 5: return
            lose_a_peer()
            """,
            "advances = 1\ntrain(7)",
        ),
        max_restarts=9,
        recovery="in-place",
    )
    assert ending.status == 0
    assert len(starts(tmp_path, 1)) == 5


def test_a_user_error_ends_the_run(run: Starter, tmp_path: Path) -> None:
    ending = run(
        script("""
            wait_until(lambda: times(0) and times(1))
            from lockstep.base.errors import DataError
            if rank == 1: raise DataError("value; rule; remedy")
            raise ConnectionResetError("Connection reset by peer")
            """),
        max_restarts=3,
        recovery="in-place",
    )
    assert (ending.status, ending.report()) == (2, "DataError: value; rule; remedy")
    assert [len(starts(tmp_path, rank)) for rank in (0, 1)] == [1, 1]


@pytest.mark.parametrize(
    "waits_for",
    ["", "waits_for.append('all_reduce of 4 float32')"],
    ids=["computes", "waits in a collective"],
)
def test_one_that_does_not_leave_its_step_in_time_is_replaced_too(
    run: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    monkeypatch.setattr(worker_processes, "HOLD_SECONDS", 300 if waits_for else 0.5)
    ending = run(
        script(f"""
            if restarted("in_place"): return
            wait_until(lambda: times(0) and times(1) and times(2))
            if rank == 1: die()
            if rank == 2:
                {waits_for}
                wait_until(lambda: False)
            lose_a_peer()
            """),
        count=3,
        max_restarts=1,
        recovery="in-place",
    )
    assert ending.status == 0
    assert [len(starts(tmp_path, rank)) for rank in range(3)] == [1, 2, 2]


def test_all_that_are_lost_are_replaced_and_have_the_time_that_the_script_took_before(
    run: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_place, "START_SECONDS", 0.1)
    ending = run(
        "time.sleep(0.3)\n"
        + script("""
            if restarted("in_place"): return
            wait_until(lambda: times(0) and times(1))
            die()
            """),
        max_restarts=1,
        recovery="in-place",
    )
    assert ending.status == 0
    assert [[each[0][2] for each in starts(tmp_path, rank)] for rank in range(2)] == [
        [None, True]
    ] * 2


def test_a_script_that_ends_on_one_rank_makes_the_others_end_as_without_recovery(
    run: Starter, tmp_path: Path
) -> None:
    ending = run(
        script("""
            if os.environ.get("LOCKSTEP_RESTARTED"): return
            wait_until(lambda: times(0) and times(1) and times(2))
            if rank == 2: os._exit(0)
            if rank == 1:
                time.sleep(0.3)
                die()
            raise ConnectionResetError("Connection reset by peer")
            """),
        count=3,
        max_restarts=1,
        recovery="in-place",
    )
    assert ending.status == 0
    assert [len(starts(tmp_path, rank)) for rank in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("how", ["sys.exit(0)", "wait_until(lambda: False)"], ids=["ends", "hangs"])
def test_where_the_replacement_does_not_come_to_its_training_the_run_goes_on(
    run: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(in_place, "START_SECONDS", 1.0)
    ending = run(
        script(
            """
            if os.environ.get("LOCKSTEP_RESTARTED"): return
            wait_until(lambda: times(0) and times(1))
            if rank == 1: die()
            lose_a_peer()
            """,
            "if rejoin.is_rejoining and not Path('tried').exists():\n    Path('tried').touch();"
            f" {how}\ntrain(7)",
        ),
        max_restarts=2,
        recovery="in-place",
    )
    assert ending.status == 0
    assert (tmp_path / "tried").exists()


def test_one_error_of_a_replacement_is_one_recovery_more(
    run: Starter, capfd: pytest.CaptureFixture[str]
) -> None:
    ending = run(
        script(
            """
            if restarted("in_place"): return
            wait_until(lambda: times(0) and times(1))
            if rank == 1: die()
            lose_a_peer()
            """,
            "if rejoin.is_rejoining and not Path('tried').exists():\n"
            "    Path('tried').touch(); raise ValueError('once')\n"
            "train(7)",
        ),
        max_restarts=3,
        recovery="in-place",
    )
    assert ending.status == 0
    assert [line.rpartition("; ")[2] for line in capfd.readouterr().err.splitlines()] == [
        "recovery 1 of 3",
        "recovery 2 of 3",
    ]


def test_a_loss_after_the_training_has_ended_is_no_recovery_in_place(
    run: Starter, tmp_path: Path
) -> None:
    ending = run(
        script(
            """
            wait_until(lambda: times(0) and times(1))
            """,
            "train(7)\n"
            "rejoin.close(failed=False)\n"
            "if why := restarted('not_in_place'): Path(f'why-{rank}').write_text(why)\n"
            "elif rank == 1: wait_until(lambda: Path('closed').exists()); die()\n"
            "else: Path('closed').touch(); time.sleep(60)",
        ),
        max_restarts=1,
        recovery="in-place",
    )
    assert ending.status == 0
    assert (tmp_path / "why-0").read_text() == "rank 0: the training has ended on this process"


def test_the_others_save_and_end_where_the_replacement_cannot_start(
    run: Starter, tmp_path: Path
) -> None:
    ending = run(
        script(
            """
            wait_until(lambda: times(0) and times(1))
            if rank == 1: die()
            try:
                lose_a_peer()
            finally:
                Path("left").touch()
            """,
            "if times(rank): raise ImportError('no module')\ntrain(7)",
        ),
        max_restarts=2,
        recovery="in-place",
    )
    assert ending.status == 1
    assert "ImportError: no module" in ending.report()
    assert (tmp_path / "left").exists()


def test_a_request_to_end_reaches_those_that_wait(run: Starter, tmp_path: Path) -> None:
    ending = run(
        script(
            """
            wait_until(lambda: times(0) and times(1))
            if rank == 1: die()
            lose_a_peer()
            """,
            "if times(rank): os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)\n"
            "signal.signal(signal.SIGTERM, lambda *_: None)\n"
            "try: train(7)\n"
            "except ConnectionResetError: Path('saved').touch()",
        ),
        max_restarts=2,
        recovery="in-place",
    )
    assert ending.signal == 15
    assert (tmp_path / "saved").exists()
