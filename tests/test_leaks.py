"""Each kind of thing that code can leave behind is found, named, and gone from the report once it
is gone."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest
from processes import ran

from lockstep.testing import leaks

LISTENER = (
    "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1],"
    " flush=True); input()"
)


@contextmanager
def a_process() -> Iterator[str]:
    with subprocess.Popen(["sleep", "3600"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield f"process: {process.pid} (T): sleep 3600"
        process.kill()


@contextmanager
def a_process_nobody_waited_for() -> Iterator[str]:
    process = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    yield f"process: {process} has ended and was not waited for"
    os.waitpid(process, 0)


@contextmanager
def a_thread() -> Iterator[str]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left-over", daemon=True)
    thread.start()
    yield "thread: left-over (daemon, Thread)"
    end.set()
    thread.join()


@contextmanager
def a_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"port: {server.getsockname()[1]} is listened on by this process"


@contextmanager
def a_port_of_a_child() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield f"port: {process.stdout.readline().strip()} is listened on by process {process.pid}"
        process.communicate("\n")


@contextmanager
def a_descriptor() -> Iterator[str]:
    with open(os.devnull) as file:
        yield f"descriptor: {file.fileno()} -> /dev/null"


@contextmanager
def a_variable() -> Iterator[str]:
    os.environ["LOCKSTEP_TEST"] = "left"
    yield "environment: LOCKSTEP_TEST='left' was set"
    del os.environ["LOCKSTEP_TEST"]


@contextmanager
def a_changed_variable() -> Iterator[str]:
    before, os.environ["TMPDIR"] = os.environ["TMPDIR"], "/elsewhere"
    yield "environment: TMPDIR='/elsewhere' was set"
    os.environ["TMPDIR"] = before


@contextmanager
def a_removed_variable() -> Iterator[str]:
    value = os.environ.pop("TMPDIR")
    yield "environment: TMPDIR was removed"
    os.environ["TMPDIR"] = value


@contextmanager
def a_working_directory() -> Iterator[str]:
    before = os.getcwd()
    os.chdir("/")
    yield "environment: the working directory became /"
    os.chdir(before)


@contextmanager
def a_shared_memory_segment() -> Iterator[str]:
    segment = shared_memory.SharedMemory(create=True, size=4096)
    resource_tracker.unregister(f"/{segment.name}", "shared_memory")
    # mapped meanwhile: other processes of pytest, which see it too, know whose it is
    yield f"shared-memory: /dev/shm/{segment.name}"
    segment.close()
    os.unlink(f"/dev/shm/{segment.name}")


@contextmanager
def a_temporary_file() -> Iterator[str]:
    with tempfile.NamedTemporaryFile(delete=False) as file:
        pass
    yield f"temporary-file: {file.name}"
    os.unlink(file.name)


KINDS = [
    a_process,
    a_process_nobody_waited_for,
    a_thread,
    a_port,
    a_port_of_a_child,
    a_descriptor,
    a_variable,
    a_changed_variable,
    a_removed_variable,
    a_working_directory,
    a_shared_memory_segment,
    a_temporary_file,
]


@pytest.mark.parametrize("leak", KINDS, ids=lambda leak: leak.__name__)
def test_a_leak_is_named_while_it_lasts(leak: Callable[[], AbstractContextManager[str]]) -> None:
    before = leaks.take()
    with leak() as text:
        found = leaks.remaining(before, timeout_seconds=0)
    assert any(text in line for line in found), (text, found)
    assert leaks.remaining(before) == []


def test_processes_are_found_where_the_kernel_lists_no_children_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, end = [], threading.Event()

    def start() -> None:
        script = "import subprocess; subprocess.run(['sleep', '3600'])"
        started.append(subprocess.Popen([sys.executable, "-c", script], process_group=0))
        end.wait()

    before = set(leaks.take(["process"]).found["process"])
    thread = threading.Thread(target=start)  # the kernel lists the children of each thread
    thread.start()
    while len(listed := set(leaks.take(["process"]).found["process"]) - before) < 2:
        time.sleep(0.01)
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert set(leaks.take(["process"]).found["process"]) - before == listed
    os.killpg(started[0].pid, signal.SIGKILL)
    started[0].wait()
    end.set()
    thread.join()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("answers", ["the kernel", "a file", "a file, as netlink is forbidden"])
def test_listening_ports_are_found_however_the_kernel_tells_them(
    family: socket.AddressFamily, answers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = {"the kernel": leaks._asked_listening, "a file": leaks._read_listening}.get(
        answers, leaks._listening_inodes
    )
    if answers == "a file, as netlink is forbidden":
        monkeypatch.setattr(socket, "AF_NETLINK", 999)
    with socket.create_server(("", 0), family=family) as server:
        found = find()
        assert found[os.readlink(f"/proc/self/fd/{server.fileno()}")] == server.getsockname()[1]
        with (
            socket.create_connection(server.getsockname()[:2]) as client,
            socket.socket(family) as unused,
        ):
            for other in (client, unused):
                assert os.readlink(f"/proc/self/fd/{other.fileno()}") not in find()


@pytest.mark.command
def test_every_kind_has_a_leak_here() -> None:
    named = set()
    before = leaks.take()
    for leak in KINDS:
        with leak():
            named |= {line.partition(":")[0] for line in leaks.remaining(before, timeout_seconds=0)}
    assert named == set(leaks.KINDS)


def test_only_the_kinds_asked_for_are_looked_at() -> None:
    before = leaks.take(["thread"])
    with a_descriptor():
        assert leaks.remaining(before) == []


def test_what_is_gone_is_no_leak() -> None:
    with a_descriptor(), a_thread():
        before = leaks.take()
    assert leaks.compare(before, leaks.take()) == []


def test_what_is_ending_is_waited_for() -> None:
    before = leaks.take()
    thread = threading.Timer(0.3, lambda: None)
    thread.start()
    assert leaks.remaining(before) == []
    thread.join()


def test_a_descriptor_in_a_cycle_is_collected_first() -> None:
    class Holder:
        pass

    gc.disable()
    try:
        before = leaks.take()
        holder = Holder()
        holder.itself, holder.socket = holder, socket.socketpair()  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del holder
            assert leaks.compare(before, leaks.take()) != []
            assert leaks.remaining(before, timeout_seconds=0) == []
    finally:
        gc.enable()


def test_a_cycle_that_a_thread_holds_during_the_first_collection_is_collected_later() -> None:
    collected = threading.Event()

    def hold() -> None:
        cycle: list[object] = [socket.socketpair()]
        cycle.append(cycle)
        collected.wait()

    def seen(phase: str, _: object) -> None:
        if phase == "stop":
            collected.set()

    gc.disable()
    gc.callbacks.append(seen)
    try:
        before = leaks.take()
        thread = threading.Thread(target=hold)
        thread.start()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            assert leaks.remaining(before) == []
        thread.join()
    finally:
        gc.callbacks.remove(seen)
        gc.enable()


def test_exempt_processes_are_left_out_with_their_descendants() -> None:
    before = leaks.take()
    with subprocess.Popen(
        ["sh", "-c", "sleep 3600 & echo started; wait"], stdout=subprocess.PIPE, process_group=0
    ) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        exempt = leaks.Exempt(processes=[shell.pid], descriptors=[shell.stdout.fileno()])
        assert leaks.remaining(before, exempt, timeout_seconds=0) == []
        assert (
            len(
                [
                    line
                    for line in leaks.remaining(before, timeout_seconds=0)
                    if line.startswith("process: ")
                ]
            )
            == 2
        )
        os.killpg(shell.pid, 9)


def test_the_interpreters_own_resource_tracker_is_no_leak() -> None:
    before = leaks.take()
    with subprocess.Popen(
        [sys.executable, "-c", "input()", "multiprocessing.resource_tracker"], stdin=subprocess.PIPE
    ) as process:
        assert [
            line
            for line in leaks.remaining(before, timeout_seconds=0)
            if line.startswith("process: ")
        ] == []
        process.communicate(b"\n")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("path", id="under its name"),
        # as the process that makes a semaphore does
        pytest.param("'/dev/shm/of-before'", id="under a name since removed"),
    ],
)
def test_shared_memory_that_a_stranger_maps_is_no_leak(name: str) -> None:
    script = f"""
import mmap, os, sys
path = sys.argv[1]
if path != {name}: os.link(path, {name})
file = open({name}, "r+b")
memory = mmap.mmap(file.fileno(), 0)
if path != {name}: os.unlink({name})
print("mapped", flush=True)
input()
"""
    # The shell ends at once, so that the process which it started becomes somebody else's child.
    orphan = ["sh", "-c", 'exec 3<&0; "$@" <&3 &', "sh", sys.executable, "-c", script]
    before = leaks.take(["shared-memory"])
    with a_shared_memory_segment() as text:
        path = text.removeprefix("shared-memory: ")
        with subprocess.Popen(
            [*orphan, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as shell:
            assert shell.stdout is not None
            assert shell.stdout.readline() == b"mapped\n"
            shell.wait()
            assert leaks.remaining(before, timeout_seconds=0) == []
            shell.communicate(b"\n")
        assert leaks.remaining(before, timeout_seconds=0) == [text]


TESTS_OF_A_SESSION = """
import os, tempfile, threading

def test_clean():
    with tempfile.TemporaryFile():
        pass

def test_leaky():
    tempfile.mkstemp(prefix="left-over-")
    threading.Thread(target=threading.Event().wait, daemon=True, name="left-over").start()
    os.environ["LOCKSTEP_TEST"] = "left"

def test_failing():
    os.environ["LOCKSTEP_TEST"] = "a failing test is not blamed twice"
    raise ValueError
"""


@pytest.mark.command
def test_the_session_fails_a_test_that_passes_and_leaves_something(tmp_path: Path) -> None:
    for name in ("conftest.py", "before_torch.py", "forked.py", "processes.py", "tiers.py"):
        (tmp_path / name).write_text((Path(__file__).parent / name).read_text())
    (tmp_path / "test_it.py").write_text(TESTS_OF_A_SESSION)
    options = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-c", os.devnull]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *options,
        "-o",
        f"pythonpath={tmp_path}",
        str(tmp_path),
    ]
    ended = ran(command, cwd=tmp_path)
    assert "1 failed, 2 passed, 1 error" in ended.stdout, ended.stdout + ended.stderr
    _, _, report = ended.stdout.partition("ERROR at teardown of test_leaky")
    for text in (
        "thread: left-over",
        "temporary-file: ",
        "environment: LOCKSTEP_TEST='left' was set",
    ):
        assert text in report
