"""What tests start ends by signals, also under nohup, and does not outlive a test that fails."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import forked
import psutil
import pytest
import torch
from processes import IGNORED_IN_THE_BACKGROUND, ran, started

from lockstep.launch.recovery import rejoin
from lockstep.logging import recorder
from lockstep.testing.worker import loopback_store


@pytest.mark.parametrize("number", IGNORED_IN_THE_BACKGROUND)
def test_signals_that_this_process_ignores_end_what_it_starts(number: signal.Signals) -> None:
    source = f"""
        import signal, subprocess
        from processes import let_signals_end_what_tests_start
        signal.signal({int(number)}, signal.SIG_IGN)
        let_signals_end_what_tests_start()
        signal.raise_signal({int(number)})
        with subprocess.Popen(["sleep", "1000"]) as child:
            child.send_signal({int(number)})
        print(child.returncode)
    """
    ended = ran([sys.executable, "-c", dedent(source)], cwd=Path(__file__).parent)
    assert (ended.stdout, ended.stderr) == (f"{-number}\n", "")


def test_a_command_does_not_outlive_a_test_that_fails() -> None:
    children: list[psutil.Process] = []

    def fails() -> None:
        with started(["sh", "-c", "sleep 1000 & wait"], stdout=subprocess.PIPE) as command:
            while not children:
                children.extend(psutil.Process(command.pid).children())
            raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        fails()
    _, alive = psutil.wait_procs(children)
    assert not alive


TESTS_THAT_HANG = """
import pathlib, pytest, signal, subprocess, sys, time

earlier = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])

def start(name):
    command = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    pathlib.Path(__file__).with_name(name).write_text(str(command.pid))
    return command

def test_waits_for_what_it_started():
    with start("waits"):
        pass

@pytest.mark.forks
def test_waits_for_a_fork():
    pathlib.Path(__file__).with_name("asleep.py").write_text("import time; doze = lambda: time.sleep(1000); doze()")
    subprocess.run([sys.executable, pathlib.Path(__file__).with_name("asleep.py")])

def test_others_live():
    assert earlier.poll() is None

def test_is_where_no_signal_reaches_it():
    command = start("deaf")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(1000)

def test_right():
    earlier.kill()
    earlier.wait()
"""


@pytest.mark.command
def test_a_test_that_times_out_kills_what_it_started_and_lets_the_next_run(tmp_path: Path) -> None:
    for name in ("conftest.py", "before_torch.py", "forked.py", "processes.py", "tiers.py"):
        (tmp_path / name).write_text((Path(__file__).parent / name).read_text())
    (tmp_path / "test_it.py").write_text(TESTS_THAT_HANG)
    limits = [
        "timeout=1",
        "timeout_method=signal",
        "faulthandler_timeout=4",
        "faulthandler_exit_on_timeout=true",
    ]
    options = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-n", "1", "-c", os.devnull]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *options,
        *(word for limit in limits for word in ("-o", limit)),
        str(tmp_path),
    ]
    with started(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    ) as session:
        assert session.stdout is not None
        output = session.stdout.read()
    assert "3 failed, 2 passed" in output, output
    assert "Timeout (>1.0s)" in output
    assert (
        "worker 'gw0' crashed while running 'test_it.py::test_is_where_no_signal_reaches_it'"
        in output
    )
    assert "in <lambda>" in output, output
    for name in ("waits", "deaf"):
        with suppress(psutil.NoSuchProcess):
            psutil.Process(int((tmp_path / name).read_text())).wait(timeout=10)


def test_the_end_of_a_forked_command_waits_for_its_threads(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        "import atexit, threading, time\n"
        "atexit.register(print, 'end')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
    )
    with forked.use():
        ended = ran([sys.executable, str(tmp_path / "work.py")])
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "thread\nend\n", "")


COMPUTE = "import torch; torch.set_num_threads(2); torch.ones(1000, 1000).exp().sum()"


@pytest.mark.forks
def test_a_forked_command_computes_on_threads_of_its_own(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        exec(COMPUTE)
    finally:
        torch.set_num_threads(threads)
    (tmp_path / "compute.py").write_text(COMPUTE)
    subprocess.run([sys.executable, str(tmp_path / "compute.py")], check=True)


class Reports:
    def __init__(self, file: Path) -> None:
        self.file, self.itself = file, self

    def __del__(self) -> None:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()}\n")


@pytest.mark.forks
def test_a_forked_command_does_not_collect_the_garbage_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "collect.py").write_text("import gc; gc.collect()")
    Reports(tmp_path / "collected")
    subprocess.run([sys.executable, str(tmp_path / "collect.py")], check=True)
    gc.collect()
    assert (tmp_path / "collected").read_text() == f"{os.getpid()}\n"


def test_forks_of_a_forked_command_have_the_files_that_it_has_opened(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        dedent("""
            import os
            files = [os.open(__file__, os.O_RDONLY) for _ in range(40)]
            if os.fork() == 0:
                this = os.stat(__file__)
                os._exit(not all(os.path.samestat(os.fstat(file), this) for file in files))
            os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
        """)
    )
    loopback_store()  # libuv opens its pipe
    with forked.use():
        assert subprocess.run([sys.executable, str(script)], check=False).returncode == 0


def test_a_forked_command_has_not_trained_what_this_process_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_opened", [tmp_path / "run"])
    monkeypatch.setattr(rejoin, "_session_was_opened", True)
    (tmp_path / "script.py").write_text(
        dedent("""
            from lockstep.launch.recovery import rejoin
            from lockstep.logging import recorder
            print(recorder._opened, rejoin.session_was_opened())
        """)
    )
    with forked.use():
        script = [sys.executable, str(tmp_path / "script.py")]
        ended = ran(script)
    assert (ended.stdout, ended.stderr) == ("[] False\n", "")
