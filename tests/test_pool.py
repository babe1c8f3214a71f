"""What `lockstep.testing.pool` promises: group, environment, fresh processes, and an end to every
kind of failure."""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import ran
from torch import distributed

from lockstep.base.errors import LaunchError, PlanError, UserError, WorkerError
from lockstep.testing import leaks, pool as pool_module
from lockstep.testing.pool import WorkerFailed, WorkerPool
from lockstep.testing.worker import FAILED, import_for

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "GLOO_SOCKET_IFNAME",
)
FOREVER = 3600.0


class TwoPartError(UserError):
    def __init__(self, value: int, remedy: str) -> None:
        super().__init__(f"value={value}; {remedy}")


def sum_of_ranks() -> float:
    value = torch.tensor(float(distributed.get_rank()))
    distributed.all_reduce(value)
    return value.item()


def world() -> tuple[int, int, dict[str, str], bool]:
    variables = {name: os.environ[name] for name in VARIABLES}
    return (
        distributed.get_rank(),
        distributed.get_world_size(),
        variables,
        os.environ["MASTER_PORT"].isdecimal(),
    )


def surroundings() -> tuple[str | None, str, int, torch.dtype]:
    return (
        os.environ.get("LOCKSTEP_TEST"),
        os.getcwd(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
    )


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


def draw_from_seed_0() -> tuple[float, float, float]:
    torch_draw = torch.rand((), generator=torch.Generator().manual_seed(0)).item()
    return random.Random(0).random(), float(np.random.RandomState(0).random()), torch_draw


def disturb() -> int:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.manual_seed(7)
    os.environ["LOCKSTEP_TEST"] = "disturbed"
    os.chdir("/")
    return os.getpid()


def join_as_torchrun_does() -> float:
    distributed.destroy_process_group()
    distributed.init_process_group("gloo")
    return sum_of_ranks()


def is_imported(name: str) -> bool:
    return name in sys.modules


def add(left: torch.Tensor, right: dict[str, int]) -> torch.Tensor:
    return left + right["value"] + distributed.get_rank()


def say(text: str) -> None:
    print(text, flush=True)


def rank_1_raises() -> None:
    if distributed.get_rank() == 1:
        raise ZeroDivisionError("rank 1 divided by zero")
    distributed.barrier()


def rank_1_hangs() -> None:
    if distributed.get_rank() == 1:
        time.sleep(FOREVER)
    distributed.barrier()


def rank_1_dies(number: int) -> None:
    if distributed.get_rank() == 1:
        os.kill(os.getpid(), number)
    distributed.barrier()


def rank_1_exits() -> None:
    if distributed.get_rank() == 1:
        os._exit(3)
    distributed.barrier()


def rank_1_stops() -> None:
    if distributed.get_rank() == 1:
        sys.exit("enough")
    distributed.barrier()


def rank_1_hangs_up_and_dies_when_told(fifo: str) -> None:
    if distributed.get_rank() == 1:
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                if connection.family == socket.AF_INET and connection.getpeername():
                    connection.shutdown(socket.SHUT_RDWR)
        Path(fifo).read_bytes()
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()


def interrupt_and_hang(parent: int) -> None:
    if distributed.get_rank() == 0:
        os.kill(parent, signal.SIGINT)
    time.sleep(FOREVER)


def refuse() -> None:
    raise PlanError(f"shard=3 on rank {distributed.get_rank()}; give shard=2")


def refuse_in_two_parts() -> None:
    raise TwoPartError(3, "give 2")


def return_a_lambda() -> object:
    return lambda: None


def leave_a_process_a_thread_and_a_variable() -> None:
    subprocess.Popen(["sleep", str(FOREVER)])
    threading.Thread(target=time.sleep, args=(FOREVER,), daemon=True, name="left-over").start()
    os.environ["LOCKSTEP_TEST"] = "left"


def start_a_process_and_hang(path: str) -> None:
    child = subprocess.Popen(["sleep", str(FOREVER)])
    Path(path).write_text(str(child.pid))
    time.sleep(FOREVER)


@pytest.fixture(scope="module")
def lenient() -> Iterator[WorkerPool]:
    with WorkerPool(max_workers=2, preload=["plistlib"]) as pool:
        yield pool


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_form_one_group_and_results_come_in_rank_order(
    pool: WorkerPool, world_size: int
) -> None:
    assert pool.run(world_size, sum_of_ranks) == [sum(range(world_size))] * world_size
    assert [rank for rank, *_ in pool.run(world_size, world)] == list(range(world_size))


def test_ranks_see_the_environment_that_torchrun_sets(pool: WorkerPool) -> None:
    for expected, (rank, size, variables, has_port) in enumerate(pool.run(2, world)):
        assert (rank, size, has_port) == (expected, 2, True)
        values = (str(expected), "2", str(expected), "2", "127.0.0.1", "lo")
        assert variables == dict(zip(VARIABLES, values, strict=True))


def test_a_function_may_make_its_own_group_from_the_environment(pool: WorkerPool) -> None:
    assert pool.run(2, join_as_torchrun_does) == [1.0, 1.0]


def test_workers_share_the_callers_environment_and_folder(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST", "from the test")
    monkeypatch.chdir(tmp_path)
    assert pool.run(1, surroundings) == [("from the test", str(tmp_path), 1, torch.float32)]


def test_what_a_run_changes_does_not_reach_the_next(lenient: WorkerPool) -> None:
    before, drawn = lenient.run(2, surroundings), lenient.run(2, draw)
    disturbed = lenient.run(2, disturb)
    assert lenient.run(2, surroundings) == before
    assert lenient.run(2, draw) == drawn
    assert drawn == [draw_from_seed_0()] * 2
    assert not set(disturbed) & set(lenient.run(2, os.getpid))


def test_arguments_and_results_may_be_tensors(pool: WorkerPool) -> None:
    large = torch.arange(1_000_000)
    first, second = pool.run(2, add, large, {"value": 5})
    assert torch.equal(first, large + 5)
    assert torch.equal(second, large + 6)


@pytest.mark.slow
def test_the_output_of_workers_is_the_tests_own(
    pool: WorkerPool, capfd: pytest.CaptureFixture[str]
) -> None:
    # The nursery holds the descriptors of when it was made, so a pool made inside the capture is
    # what capfd sees.
    with WorkerPool(max_workers=1) as inner:
        inner.run(1, say, "a line from a rank")
    assert "a line from a rank" in capfd.readouterr().out


def test_the_rank_that_raises_is_named_with_its_traceback(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed, match="rank 1 of 2 raised") as caught:
        pool.run(2, rank_1_raises)
    assert caught.value.rank == 1
    assert "ZeroDivisionError: rank 1 divided by zero" in str(caught.value)
    assert "in rank_1_raises" in str(caught.value)
    assert "worker.py" not in str(caught.value)
    assert pool.run(2, sum_of_ranks) == [1.0, 1.0]


def test_a_user_error_comes_back_as_itself(pool: WorkerPool) -> None:
    with pytest.raises(PlanError, match=r"^shard=3 on rank [01]; give shard=2$") as caught:
        pool.run(2, refuse)
    assert isinstance(caught.value.__cause__, WorkerFailed)
    assert "in refuse" in str(caught.value.__cause__)


def test_a_user_error_that_cannot_be_pickled_keeps_its_type_and_text(pool: WorkerPool) -> None:
    with pytest.raises(TwoPartError, match=r"^value=3; give 2$"):
        pool.run(1, refuse_in_two_parts)


def test_ranks_that_do_not_answer_are_named_with_their_stacks(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed, match=r"of 2 ranks, 0, 1 did not answer within 5 s") as caught:
        pool.run(2, rank_1_hangs, timeout_seconds=5)
    zero, _, one = str(caught.value).partition("rank 1:")
    assert "in barrier" in zero
    assert "in rank_1_hangs" in one
    assert "in barrier" not in one
    assert pool.run(2, sum_of_ranks) == [1.0, 1.0]


def test_only_ranks_that_did_not_answer_are_named(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed, match=r"of 3 ranks, 2 did not answer within 5 s") as caught:
        pool.run(3, hang_on_the_last_rank, timeout_seconds=5)
    assert caught.value.rank == 2


def hang_on_the_last_rank() -> None:
    if distributed.get_rank() == distributed.get_world_size() - 1:
        time.sleep(FOREVER)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_is_killed_is_named_before_those_that_complain(
    pool: WorkerPool, number: signal.Signals
) -> None:
    with pytest.raises(WorkerFailed, match=f"^rank 1 of 2 was killed by {number.name}") as caught:
        pool.run(2, rank_1_dies, number)
    assert caught.value.rank == 1
    assert ("Segmentation fault" in str(caught.value)) == (number == signal.SIGSEGV)
    assert pool.run(2, sum_of_ranks) == [1.0, 1.0]


def test_a_death_goes_before_a_complaint_that_arrived_earlier(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    receive = pool_module._receive

    def receive_and_tell(worker: object) -> bytes | None:
        answer = receive(worker)  # type: ignore[arg-type]
        if answer is not None and answer[:1] == FAILED:
            fifo.write_bytes(b"die")
        return answer

    monkeypatch.setattr(pool_module, "_receive", receive_and_tell)
    monkeypatch.setattr(pool_module, "DEATH_SECONDS", 30.0)
    with pytest.raises(
        WorkerFailed,
        match=r"^rank 1 of 2 was killed by SIGKILL(.|\n)*rank 0 then raised(.|\n)*in barrier",
    ):
        pool.run(2, rank_1_hangs_up_and_dies_when_told, str(fifo))


def test_a_rank_that_ends_by_itself_is_named_with_its_status(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed, match=r"^rank 1 of 2 ended with status 3 before it answered"):
        pool.run(2, rank_1_exits)
    with pytest.raises(WorkerFailed, match="SystemExit: enough"):
        pool.run(2, rank_1_stops)


def test_a_result_that_cannot_be_pickled_is_a_failure_of_its_rank(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed, match=r"rank 0 of 1 raised(.|\n)*local object"):
        pool.run(1, return_a_lambda)


def test_what_a_rank_leaves_behind_is_named(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed, match=r"^rank 0 of 1 left behind:") as caught:
        pool.run(1, leave_a_process_a_thread_and_a_variable)
    for text in (
        r"process: \d+ \(S\): sleep",
        "thread: left-over",
        "environment: LOCKSTEP_TEST='left' was set",
    ):
        assert re.search(text, str(caught.value))


def test_processes_that_a_rank_started_end_with_its_run(
    lenient: WorkerPool, tmp_path: Path
) -> None:
    path = tmp_path / "process"
    with pytest.raises(WorkerFailed, match="did not answer"):
        lenient.run(1, start_a_process_and_hang, str(path), timeout_seconds=5)
    assert_ends(int(path.read_text()))


def test_a_run_interrupted_while_ranks_work_leaves_the_pool_usable(pool: WorkerPool) -> None:
    with pytest.raises(KeyboardInterrupt):
        pool.run(2, interrupt_and_hang, os.getpid())
    assert pool.run(2, sum_of_ranks) == [1.0, 1.0]


@pytest.mark.slow
def test_a_run_interrupted_while_it_forks_leaves_the_pool_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = socket.send_fds

    def send_and_be_interrupted(*arguments: Any) -> None:
        send(*arguments)
        raise KeyboardInterrupt

    with WorkerPool(max_workers=2) as pool:
        pool.run(1, sum_of_ranks)
        monkeypatch.setattr(socket, "send_fds", send_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.run(2, sum_of_ranks)
        monkeypatch.undo()
        assert pool.run(2, sum_of_ranks) == [1.0, 1.0]


def test_modules_named_to_be_preloaded_are_there(lenient: WorkerPool) -> None:
    assert lenient.run(1, is_imported, "plistlib") == [True]


@pytest.mark.command
def test_a_module_that_cannot_be_preloaded_fails_the_first_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with (
        WorkerPool(max_workers=1, preload=["no_such_module"]) as pool,
        pytest.raises(WorkerError, match="nursery process ended with status 1"),
    ):
        pool.run(1, sum_of_ranks)
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def test_a_module_is_imported_from_its_file_whatever_else_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module_of_a_test.py").write_text(f"FOLDER = {folder!r}")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "one"), *sys.path])
    two = str(tmp_path / "two" / "module_of_a_test.py")
    try:
        assert import_for("module_of_a_test", None).FOLDER == "one"
        assert import_for("module_of_a_test", two).FOLDER == "two"
        assert import_for("package_that_is_not_there.module_of_a_test", two).FOLDER == "two"
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            import_for("no_such_module", None)
    finally:
        sys.modules.pop("module_of_a_test", None)
        sys.modules.pop("package_that_is_not_there.module_of_a_test", None)


@pytest.mark.command
def test_the_page_on_testing_runs(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "testing.md").read_text()
    for name, block in re.findall(
        r"^```py\n# (\w+\.py)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE
    ):
        (tmp_path / name).write_text(block)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        str(tmp_path),
    ]
    ended = ran(command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 passed" in ended.stdout


@pytest.mark.slow
def test_a_nursery_that_dies_is_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    with WorkerPool(max_workers=1) as pool:
        pool.run(1, sum_of_ranks)
        (nursery,) = pool.exempt.processes
        os.kill(nursery, signal.SIGKILL)
        with pytest.raises(Exception, match="nursery process ended with status -9"):
            pool.run(1, sum_of_ranks)
        assert pool.run(1, sum_of_ranks) == [0.0]


def test_a_closed_pool_has_left_nothing() -> None:
    before = leaks.take()
    with WorkerPool(max_workers=2) as pool:
        pool.run(2, sum_of_ranks)
    assert leaks.remaining(before) == []
    pool.close()
    with pytest.raises(LaunchError, match="this WorkerPool is closed"):
        pool.run(1, sum_of_ranks)


@pytest.mark.command
def test_workers_end_when_the_process_that_made_the_pool_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        nursery, worker = (int(number) for number in process.stdout.readline().split())
        process.kill()
    assert_ends(nursery)
    assert_ends(worker)


SCRIPT = f"""
import os, time
from lockstep.testing.pool import WorkerPool

def report_and_hang(nursery):
    print(nursery, os.getpid(), flush=True)
    time.sleep({FOREVER})

if __name__ == "__main__":
    pool = WorkerPool(max_workers=1)
    pool.run(1, report_and_hang, *pool.exempt.processes)
"""


def assert_ends(process: int) -> None:
    """Wait, as long as the test's own timeout lets it, for the end of a process that is not a child
    of this one."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    select.select([descriptor], [], [])
    os.close(descriptor)


def test_a_world_larger_than_the_pool_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(
        LaunchError,
        match=r"world_size=5; this pool runs 1 to max_workers=4 ranks; make a larger pool",
    ):
        pool.run(5, sum_of_ranks)
    with pytest.raises(LaunchError, match=r"world_size=0; this pool runs 1 to max_workers=4 ranks"):
        pool.run(0, sum_of_ranks)
    with pytest.raises(LaunchError, match=r"max_workers=0; a pool runs 1 to 100 workers"):
        WorkerPool(max_workers=0)
    with pytest.raises(LaunchError, match=r"max_workers=101; a pool runs 1 to 100 workers"):
        WorkerPool(max_workers=101)


def test_a_function_that_is_not_at_module_level_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(
        LaunchError, match=r"cannot be pickled .* define it at the top level of a module"
    ):
        pool.run(1, lambda: None)
