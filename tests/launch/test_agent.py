"""Workers are started, watched and ended by the agent. No torch in the workers here, so that each
starts in 0.1 s."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lockstep.base.system import PASSED_ON
from lockstep.launch import worker_processes
from lockstep.launch.environment import threads_per_process
from lockstep.launch.failures import Ending
from lockstep.launch.rendezvous import LoopbackRendezvous
from lockstep.launch.run_workers import run_workers
from lockstep.launch.worker_processes import GRACE_SECONDS
from lockstep.options import RunOptions

Starter = Callable[..., Ending]


def wait_for_end(process: int) -> None:
    """Of a killed process that is not our child: whoever adopted it has to take note."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(process).wait()


def test_workers_get_what_torchrun_sets_and_our_own(
    run: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "OMP_NUM_THREADS",
        "PYTHONHASHSEED",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ):
        monkeypatch.delenv(name, raising=False)
    ending = run(
        "import json; open(f'rank-{rank}', 'w').write(json.dumps(dict(os.environ)))",
        plan="replicate=2",
        run_dir=str(tmp_path / "run"),
    )
    assert (ending.status, ending.finished, ending.report()) == (0, [0, 1], "")
    for rank in (0, 1):
        environment = json.loads((tmp_path / f"rank-{rank}").read_text())
        added = {
            name: value for name, value in environment.items() if os.environ.get(name) != value
        }
        run_id, port, error_file = (
            added.pop(name)
            for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE")
        )
        assert run_id.startswith("lockstep-")
        assert int(port) > 0
        assert not Path(error_file).parent.exists()
        started_by = added.pop("LOCKSTEP_STARTED_BY")
        assert Path(started_by).name == f"rank-{rank}"
        assert Path(started_by).parent == Path(error_file).parent
        added.pop("LC_CTYPE", None)  # Python's own
        assert added == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "ROLE_WORLD_SIZE": "2",
            "ROLE_NAME": "default",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "OMP_NUM_THREADS": str(threads_per_process(2)),
            "PYTHONHASHSEED": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "LOCKSTEP_LAUNCHER": "lockstep",
            "LOCKSTEP_PLAN": "replicate=2",
            "LOCKSTEP_RUN_DIR": str(tmp_path / "run"),
        }


@pytest.mark.parametrize("is_used", [True, False], ids=["used", "the script names another"])
def test_the_report_names_the_launchers_own_directory_if_the_run_wrote_to_it(
    run: Starter, tmp_path: Path, is_used: bool
) -> None:
    default = tmp_path / "runs" / "train-1"
    make = f"os.makedirs({str(default)!r}, exist_ok=True)" if is_used else "pass"
    end = "from lockstep.launch.termination import Preempted; raise Preempted('SIGTERM')"
    ending = run(f"{make}\n{end}", count=1, default_run_dir=str(default))
    assert ending.was_preempted
    assert ending.new_run_dir == (str(default) if is_used else "")


def test_what_the_user_has_set_is_kept(
    run: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "OMP_NUM_THREADS": "7",
        "GLOO_SOCKET_IFNAME": "eth7",
        "NCCL_SOCKET_IFNAME": "eth8",
    }.items():
        monkeypatch.setenv(name, value)
    source = (
        "open('found', 'w').write(' '.join(os.environ[name] for name in ('OMP_NUM_THREADS',"
        " 'GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME')))"
    )
    assert run(source, count=1).status == 0
    assert (tmp_path / "found").read_text() == "7 eth7 eth8"


def test_cores_are_shared_out_and_each_process_has_one_thread_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert [threads_per_process(count) for count in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]


def test_the_store_listens_on_loopback_alone() -> None:
    rendezvous = LoopbackRendezvous()
    found = rendezvous.next_rendezvous()
    try:
        listening = [
            c.laddr
            for c in psutil.Process().net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        ]
        assert found.bootstrap_store_info is not None
        assert ("127.0.0.1", found.bootstrap_store_info.master_port) in listening
        assert {address.ip for address in listening} == {"127.0.0.1"}
        found.store.set("key", "value")
        assert found.store.get("key") == b"value"
    finally:
        del found
        rendezvous.shutdown()


def test_output_is_the_scripts_own_and_nothing_else(
    run: Starter, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("print('line of', rank); print('error of', rank, file=sys.stderr)").status == 0
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == ["line of 0", "line of 1"]
    assert sorted(captured.err.splitlines()) == ["error of 0", "error of 1"]


def test_when_a_rank_fails_the_others_are_stopped_and_its_traceback_is_reported_once(
    run: Starter,
) -> None:
    ending = run("if rank == 1: raise ValueError('boom')\nsignal.pause()", count=3)
    assert (ending.status, ending.stopped, ending.finished) == (1, [0, 2], [])
    lines = ending.report().splitlines()
    assert lines[0] == "rank 1 failed (exit status 1):"
    assert lines[-2:] == ["ValueError: boom", "The others: ranks 0, 2 were stopped."]
    assert ending.report().count("Traceback") == 1


@pytest.mark.command
def test_ranks_that_ignore_sigterm_or_hang_at_their_exit_are_killed_with_all_they_started(
    run: Starter, tmp_path: Path
) -> None:
    ending = run("""
        import atexit, subprocess
        sleeper = subprocess.Popen(["sleep", "1000"])
        open(f"sleeper-{rank}", "w").write(str(sleeper.pid))
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.mkfifo("ready")
            open("ready").read()
        if rank == 1:
            while not os.path.exists("ready"): pass
            atexit.register(signal.pause)
            open("ready", "w").close()
            raise ValueError("boom")
        signal.pause()
        """)
    assert (ending.status, ending.stopped) == (1, [0])
    for rank in (0, 1):
        wait_for_end(int((tmp_path / f"sleeper-{rank}").read_text()))


def test_a_rank_that_exits_with_a_status_stops_the_others_with_that_status(run: Starter) -> None:
    ending = run("if rank == 0: sys.exit(7)\nsignal.pause()")
    assert (ending.status, ending.report()) == (
        7,
        "rank 0 failed (exit status 7)\nThe others: rank 1 was stopped.",
    )


def test_a_rank_that_ends_without_a_word_is_seen(run: Starter) -> None:
    assert (
        run("if rank == 0: os._exit(3)\nsignal.pause()").report()
        == "rank 0 failed (exit status 3)\nThe others: rank 1 was stopped."
    )


def test_a_killed_rank_is_named_with_its_signal_and_what_it_started_ends(
    run: Starter, tmp_path: Path
) -> None:
    ending = run("""
        import subprocess
        if rank == 1:
            open("sleeper", "w").write(str(subprocess.Popen(["sleep", "1000"]).pid))
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
        """)
    wait_for_end(int((tmp_path / "sleeper").read_text()))
    assert ending.status == 137
    assert ending.report().startswith(
        "rank 1 was killed by SIGKILL (often the kernel or the container, because memory ran out)\n"
    )


def test_a_crash_is_reported_with_the_python_stack(run: Starter) -> None:
    ending = run(
        "import ctypes\ndef inner(): ctypes.string_at(0)\nif rank == 1: inner()\nsignal.pause()"
    )
    assert ending.status == 128 + signal.SIGSEGV
    assert (
        "rank 1 was killed by SIGSEGV (a crash in native code):\nFatal Python error: Segmentation"
        " fault" in ending.report()
    )
    assert "in inner" in ending.report()
    assert "worker.py" not in ending.report()


def test_ranks_that_lose_their_peer_do_not_hide_the_one_that_went(run: Starter) -> None:
    ending = run("""
        import socket
        here = "socket"
        if rank == 0:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind("binding"), listener.listen(), os.rename("binding", here)
            peer, _ = listener.accept()
            if not peer.recv(1): raise ConnectionResetError("Connection reset by peer")
        while not os.path.exists(here): pass
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(here)
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    assert ending.first is not None
    assert ending.first.rank == 1
    assert ending.report().splitlines()[-1] == "The others: rank 0 lost a peer."


def test_where_all_that_failed_lost_a_peer_the_cause_is_waited_for(
    run: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_processes, "FAILURES_SECONDS", 0.0)
    monkeypatch.setattr(worker_processes, "PEER_FAILURES_SECONDS", 30.0)
    stalls = itertools.count(0.0, 10.0)
    clock = SimpleNamespace(monotonic=lambda: next(stalls), sleep=time.sleep)
    monkeypatch.setattr(worker_processes, "time", clock)
    ending = run("""
        if rank == 0: raise ConnectionResetError("Connection reset by peer")
        record = os.environ["TORCHELASTIC_ERROR_FILE"].replace("rank-1.torch", "rank-0.failure")
        while not os.path.exists(record): pass
        time.sleep(0.5)  # as a process dies that writes a core file
        raise ValueError("the cause")
        """)
    assert ending.first is not None
    assert ending.first.rank == 1


def test_a_rank_that_failed_may_end_its_exit_functions_while_the_others_are_stopped(
    run: Starter, tmp_path: Path
) -> None:
    ending = run("""
        import atexit
        if rank == 0:
            def stop(*_):
                open("stopped", "w").close()
                sys.exit(0)
            signal.signal(signal.SIGTERM, stop)
            open("ready", "w").close()
            while True: signal.pause()
        def upload():
            while not os.path.exists("stopped"): pass
            open("uploaded", "w").close()
        atexit.register(upload)
        while not os.path.exists("ready"): pass
        raise ValueError("boom")
        """)
    assert (ending.status, ending.stopped) == (1, [0])
    assert (tmp_path / "uploaded").exists()


def test_a_lost_peer_that_ended_well_is_reported_as_such(run: Starter) -> None:
    ending = run("if rank == 1: raise ConnectionResetError('Connection reset by peer')")
    assert (ending.status, ending.finished) == (1, [0])
    assert ending.report().splitlines()[-1] == "The others: rank 0 had finished."


def test_a_script_that_records_its_failure_as_torch_does_is_read(run: Starter) -> None:
    ending = run(
        """
        import json
        extra = {"py_callstack": "Traceback of main", "timestamp": "1"}
        json.dump({"message": {"message": "ValueError: boom", "extraInfo": extra}}, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
        os._exit(4)
        """,
        count=1,
    )
    assert (ending.status, ending.report()) == (
        4,
        "rank 0 failed (exit status 4):\nTraceback of main",
    )


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_to_the_launcher_ends_all_workers(
    run: Starter, number: signal.Signals, status: int
) -> None:
    before = {each: signal.getsignal(each) for each in PASSED_ON}
    ending = run(f"if rank == 1: os.kill(os.getppid(), {int(number)})\nsignal.pause()", count=3)
    assert (ending.status, ending.stopped, ending.finished) == (status, [0, 1, 2], [])
    assert ending.report() == f"stopped by {number.name}; no worker is left"
    assert {each: signal.getsignal(each) for each in PASSED_ON} == before


def test_a_signal_is_passed_on_to_all_that_a_worker_started_and_they_may_save(
    run: Starter, tmp_path: Path
) -> None:
    ending = run(
        """
        import subprocess
        child = subprocess.Popen(["sh", "-c", "trap 'exit 7' TERM; echo up; while :; do sleep 0.05; done"], stdout=subprocess.PIPE)
        child.stdout.readline()
        def save(*_):
            open("saved", "w").write(f"child {child.wait()}")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        os.kill(os.getppid(), signal.SIGTERM)
        while True: signal.pause()
        """,
        count=1,
    )
    assert (ending.status, ending.stopped) == (143, [0])
    assert (tmp_path / "saved").read_text() == "child 7"


def test_a_second_signal_does_not_wait(run: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRACE_SECONDS, signal.SIGTERM, 1000.0)
    ending = run(
        """
        seen = []
        def refuse(*_):
            seen.append(1)
            os.kill(os.getppid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, refuse)
        os.kill(os.getppid(), signal.SIGTERM)
        while True: signal.pause()
        """,
        count=1,
    )
    assert ending.status == 143


def test_a_signal_that_is_ignored_stays_ignored(run: Starter) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run("os.kill(os.getppid(), signal.SIGHUP)", count=1).status == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_name_service_is_not_asked(run: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    def getfqdn(name: str = "") -> str:
        raise AssertionError("without a network this takes seconds")

    monkeypatch.setattr(socket, "getfqdn", getfqdn)
    assert run("pass", count=1).status == 0


def test_workers_run_from_a_thread_too(run: Starter) -> None:
    endings: list[Ending] = []
    thread = threading.Thread(target=lambda: endings.append(run("pass")))
    thread.start()
    thread.join()
    assert [ending.status for ending in endings] == [0]


@pytest.mark.command
def test_a_worker_that_cannot_be_started_stops_the_others() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        if started:
            raise OSError("no more processes")
        started.append(subprocess.Popen(["sleep", "1000"], start_new_session=True))
        return started[0]

    with pytest.raises(OSError, match="no more processes"):
        run_workers(start, count=2, launcher="lockstep", options=RunOptions())
    assert started[0].poll() == -signal.SIGTERM


def test_the_signals_that_are_passed_on_are_those_that_are_blocked_while_a_worker_starts() -> None:
    assert set(GRACE_SECONDS) == set(PASSED_ON)


@pytest.mark.command
def test_a_process_that_does_not_end_is_left_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(worker_processes, "KILL_SECONDS", 0.1)
    sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)

    class Held:
        """As the kernel would hold it: its end cannot be seen."""

        pid = sleeper.pid

        def poll(self) -> int | None:
            return None

    def start(environment: Mapping[str, str]) -> worker_processes.WorkerProcess:
        return (
            Held()
            if environment["RANK"] == "1"
            else subprocess.Popen(["false"], start_new_session=True)
        )

    ending = run_workers(start, count=2, launcher="lockstep", options=RunOptions())
    assert sleeper.wait() == -signal.SIGTERM
    assert (ending.status, ending.stopped, ending.unkillable) == (1, [1], [1])
