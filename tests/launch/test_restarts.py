"""After a failure all workers start again, and nothing is left of those before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousInfo

from lockstep.base.processes import parents
from lockstep.launch import agent, run_workers as run_workers_module, worker_processes
from lockstep.launch.failures import Ending
from lockstep.launch.rendezvous import LoopbackRendezvous

Starter = Callable[..., Ending]
FIRST = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"


def test_after_a_failure_all_start_again_and_are_told_why(
    run: Starter, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ending = run(
        f"""
        import json
        wanted = ("TORCHELASTIC_RESTART_COUNT", "LOCKSTEP_RESTARTED", "LOCKSTEP_RESUME", "MASTER_PORT")
        with open(f"rank-{{rank}}", "a") as file:
            print(json.dumps([os.environ.get(name) for name in wanted]), file=file)
        if not {FIRST}: sys.exit(0)
        if rank == 1:
            while not os.path.exists("rank-0"): pass
            raise ValueError("boom\\nand more")
        signal.pause()
        """,
        max_restarts=2,
        resume="never",
    )
    assert (ending.status, ending.finished, ending.report()) == (0, [0, 1], "")
    assert (
        capfd.readouterr().err
        == "lockstep: rank 1 failed (exit status 1): ValueError: boom; restart 1 of 2\n"
    )
    for rank in (0, 1):
        first, second = [
            json.loads(line) for line in (tmp_path / f"rank-{rank}").read_text().splitlines()
        ]
        assert first[:3] == ["0", None, "never"]
        assert (second[0], second[2]) == ("1", "auto")
        why = json.loads(second[1])["reason"]
        assert why == "rank 1 failed (exit status 1): ValueError: boom"
        assert first[3] != second[3]


def test_restarts_are_counted_in_all_and_the_last_failure_is_reported(
    run: Starter, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ending = run(
        """
        open("starts", "a").write("x")
        if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2: os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the last")
        """,
        count=1,
        max_restarts=2,
    )
    assert (tmp_path / "starts").read_text() == "xxx"
    assert [line.rpartition("; ")[2] for line in capfd.readouterr().err.splitlines()] == [
        "restart 1 of 2",
        "restart 2 of 2",
    ]
    assert ending.status == 1
    assert ending.report().endswith("ValueError: the last")


def test_a_rank_that_lost_its_peer_is_not_the_reason(
    run: Starter, capfd: pytest.CaptureFixture[str]
) -> None:
    ending = run(
        f"""
        if not {FIRST}: sys.exit(0)
        if rank == 0:
            while not os.path.exists("rank-1"): pass
            raise ConnectionResetError("Connection reset by peer")
        open("rank-1", "w").close()
        time.sleep(0.5)
        raise ValueError("the cause")
        """,
        max_restarts=1,
    )
    assert ending.status == 0
    assert (
        capfd.readouterr().err
        == "lockstep: rank 1 failed (exit status 1): ValueError: the cause; restart 1 of 1\n"
    )


def test_when_workers_start_again_nothing_is_left_of_those_before(
    run: Starter, tmp_path: Path
) -> None:
    ending = run(
        f"""
        import subprocess
        if {FIRST}:
            sleeper = subprocess.Popen(["sleep", "1000"])
            detached = subprocess.Popen(["setsid", "sh", "-c", "sleep 1000 & wait"], start_new_session=True)
            if (fork := os.fork()) == 0:
                os.setsid()
                while True: signal.pause()
            open(f"started-{{rank}}.part", "w").write(f"{{os.getpid()}} {{sleeper.pid}} {{detached.pid}} {{fork}}")
            os.rename(f"started-{{rank}}.part", f"started-{{rank}}")
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while not (os.path.exists("started-0") and os.path.exists("started-1")): pass
            if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
            while True: signal.pause()
        def lives(number):
            try: return open(f"/proc/{{number}}/stat").read().rpartition(")")[2].split()[0] != "Z"
            except FileNotFoundError: return False
        open(f"left-{{rank}}", "w").write(repr([p for f in ("started-0", "started-1") for p in open(f).read().split() if lives(p)]))
        """,
        max_restarts=1,
    )
    assert ending.status == 0
    assert [(tmp_path / f"left-{rank}").read_text() for rank in (0, 1)] == ["[]", "[]"]


def test_what_is_left_after_a_good_end_is_killed_and_told(
    run: Starter, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ending = run(
        """
        import subprocess
        subprocess.Popen(["sleep", "0.2"], start_new_session=True)  # as a tool that sends its last numbers
        left = [subprocess.Popen(["sleep", "1000"], start_new_session=new).pid for new in (True, False)]
        open("left", "w").write(" ".join(map(str, left)))
        """,
        count=1,
    )
    first, second = map(int, (tmp_path / "left").read_text().split())
    assert not [pid for pid in (first, second) if pid in parents()]
    assert ending.status == 0
    left_running = f"sleep (process {first}), sleep (process {second})"
    assert (
        capfd.readouterr().err
        == f"lockstep: killed what the script had started and left running: {left_running}\n"
    )


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("from lockstep.base.errors import DataError; raise DataError('value; rule; remedy')", 2),
        ("from lockstep.launch.termination import Preempted; raise Preempted('SIGTERM')", 75),
        ("os.kill(os.getppid(), signal.SIGINT); signal.pause()", 130),
    ],
    ids=["a user's mistake", "saved and ended", "a signal to the launcher"],
)
def test_what_no_restart_mends_is_not_tried_again(
    run: Starter, tmp_path: Path, end: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    ending = run(f"open('starts', 'a').write('x')\n{end}", count=1, max_restarts=3)
    assert (ending.status, (tmp_path / "starts").read_text()) == (status, "x")
    asked = "lockstep: interrupted: the workers are asked to end; Ctrl-C again ends them at once\n"
    assert capfd.readouterr().err == (asked if status == 130 else "")


def test_one_that_saves_when_another_fails_is_waited_for_before_all_start_again(
    run: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_processes, "STOP_SECONDS", 1.5)
    ending = run(
        f"""
        from lockstep.launch.worker_files import defer_kill
        if not {FIRST}: sys.exit(0 if os.path.exists("saved") else 9)
        if rank == 1:
            while not os.path.exists("ready"): pass
            os.kill(os.getpid(), signal.SIGKILL)
        def save(*_):
            with defer_kill():
                time.sleep(2)
                open("saved", "w").close()
            sys.exit(143)
        signal.signal(signal.SIGTERM, save)
        open("ready", "w").close()
        while True: signal.pause()
        """,
        max_restarts=1,
    )
    assert ending.status == 0


def test_one_that_ends_itself_because_the_run_is_over_has_not_failed(run: Starter) -> None:
    ending = run("""
        from lockstep.launch.worker_files import is_shutting_down
        if rank == 1: sys.exit(5)
        while not is_shutting_down(): time.sleep(0.01)
        os._exit(143)
        """)
    assert ([failure.rank for failure in ending.failures], ending.stopped, ending.status) == (
        [1],
        [0],
        5,
    )


def test_workers_that_saved_because_another_machine_asked_start_again(
    run: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Regrouping(LoopbackRendezvous):
        """This machine hears of the one that joins only some time after its workers have ended."""

        starts = waiting = 0

        def next_rendezvous(self) -> RendezvousInfo:
            found = super().next_rendezvous()
            self.starts += 1
            if self.starts == 1:
                found.store.set("lockstep/regroups", "")
            return found

        def num_nodes_waiting(self) -> int:
            self.waiting += 1
            return int(self.starts == 1 and self.waiting > 40)

    monkeypatch.setattr(run_workers_module, "LoopbackRendezvous", Regrouping)
    ending = run(
        """
        from lockstep.launch.termination import Preempted
        if not os.path.exists("saved"):
            open("saved", "w").close()
            raise Preempted("SIGTERM")
        """,
        count=1,
    )
    assert (ending.status, ending.finished) == (0, [0])


TWO, THREE = ["a", "b"], ["a", "a", "b"]


@pytest.mark.parametrize(
    ("everyone", "now", "why"),
    [
        ([[0, [], None], [0, [], None]], TWO, None),
        (
            [[1, TWO, [1, "rank 0 lost a peer"]], [1, TWO, [0, "rank 3 was killed"]]],
            TWO,
            "rank 3 was killed",
        ),
        (
            [[1, TWO, [1, "rank 0 lost a peer"]], [1, TWO, [1, "rank 3 lost a peer"]]],
            TWO,
            "rank 0 lost a peer",
        ),
        (
            [[1, THREE, [1, "rank 0 lost a peer"]], [1, THREE, [1, "rank 3 lost a peer"]]],
            TWO,
            "a machine was lost: a; 2 of 3 are left",
        ),
        ([[0, ["a"], [2, "another machine joined"]], [0, [], None]], TWO, "another machine joined"),
    ],
    ids=["first start", "a cause elsewhere", "peers alone", "a machine lost", "a machine joined"],
)
def test_the_machines_agree_on_why_the_workers_start_again(
    everyone: list[Any], now: list[str], why: str | None
) -> None:
    assert agent.restart_reason(everyone, now) == why
