"""A pool of Gloo worker processes for tests, shared by a whole test session.

    @pytest.fixture(scope="session")
    def pool():
        with WorkerPool() as pool:
            yield pool

    def mean_of_ranks() -> float:                       # at module level: it is pickled by its name
        value = torch.tensor(float(torch.distributed.get_rank()))
        torch.distributed.all_reduce(value)
        return value.item() / torch.distributed.get_world_size()

    def test_the_mean_of_two_ranks(pool):
        assert pool.run(2, mean_of_ranks) == [0.5, 0.5]

Importing torch takes seconds; a fork of a process that has imported it takes about ten
milliseconds. One process, the nursery, imports the modules that workers need, and forks the workers
of every run. Each run has new processes, so that no state reaches the next run. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from lockstep.base.errors import LaunchError, UserError, WorkerError
from lockstep.base.processes import own_python
from lockstep.testing.leaks import Exempt
from lockstep.testing.worker import (
    DUMP_SIGNAL,
    FAILED,
    MOST_WORKERS,
    PACKET_BYTES,
    kill_group,
    loopback_store,
)

START_SECONDS = 120.0
# Seconds that a worker gets at the end of a run to destroy the process group and, with
# `check_leaks`, to wait for its threads and processes to end.
LEAVE_SECONDS = 30.0
DUMP_SECONDS = 2.0
# Seconds to wait for the end of a killed rank. Its sockets close a moment before its end is
# visible, so errors of other ranks may arrive first.
DEATH_SECONDS = 0.05
# Seconds to wait for further errors after the first. The rank that fails first may report last,
# because its hooks first save a checkpoint, or wait for other ranks.
CAUSE_SECONDS = 5.0
NURSERY = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from lockstep.testing.worker"
    " import nursery; "
)
NURSERY += "nursery(int(sys.argv.pop(1)), json.loads(sys.argv.pop(1)))"
# One thread per library, so that the nursery process can be forked; and a check for GPUs that does
# not initialise CUDA, because forks could then not use it.
NURSERY_ENVIRONMENT = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK"),
    "1",
)


class WorkerFailed(WorkerError):
    """A rank raised an exception, was killed, leaked a resource, or did not answer in time. The
    error text has the rank's traceback, or the stacks of the ranks."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank
        """The rank that failed first, or the lowest of the ranks that did not answer."""


@dataclass(slots=True)
class _Worker:
    rank: int
    process: int
    pipe: Connection
    dump: IO[bytes]
    end: int
    status: int | None = field(default=None)


class WorkerPool:
    """Runs functions on new processes with a Gloo process group. Only one thread may use a pool at
    a time.

    `max_workers` is the largest world size. `preload` names modules that the nursery imports before
    the first run, in addition to torch and the modules of the functions. If an import fails, the
    run fails. With `check_leaks`, a run fails if a rank leaks a process, a thread, a listening
    port, an open descriptor or an environment variable.

    The nursery process starts with the pool, and imports modules in the background. `close`, or the
    exit from the `with` block, ends the nursery. Raises `LaunchError` if the platform has no
    `os.pidfd_open`.
    """

    def __init__(
        self, max_workers: int = 4, *, preload: Iterable[str] = (), check_leaks: bool = False
    ) -> None:
        if not hasattr(os, "pidfd_open"):
            raise LaunchError(
                f"WorkerPool on {sys.platform}; it needs Linux 5.3 or later, for pidfd_open; run"
                " these tests there"
            )
        if not 1 <= max_workers <= MOST_WORKERS:
            raise LaunchError(
                f"max_workers={max_workers}; a pool runs 1 to {MOST_WORKERS} workers; give a number"
                " between"
            )
        self.max_workers = max_workers
        self._preload = list(preload)
        self._check_leaks = check_leaks
        self._closed = False
        self._start()
        # libuv keeps a pipe after its first use; use it now, so that it does not count as a leak of
        # a test
        loopback_store()

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_seconds: float = 60.0,
    ) -> list[Any]:
        """Call `function(*args)` on ranks 0 to `world_size` - 1 at the same time. Returns the
        results in rank order.

        Each rank is a new process. The process has a default Gloo group over loopback (also at
        world size 1), this process's working directory, `sys.path` and environment, the variables
        that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
        MASTER_PORT), no visible GPU, one intra-op thread (OMP_NUM_THREADS=1 unless this process
        sets it), and fixed seeds of Python, NumPy and torch. The function must be at the top level
        of a module. The function, its arguments and its results are pickled.

        Raises a rank's own `UserError`, caused by a `WorkerFailed`; `WorkerFailed` for any other
        exception, for a rank that died or leaked a resource, and for ranks that do not answer
        within `timeout_seconds`, with their stacks. If a rank fails, the other ranks are killed at
        once. Raises `LaunchError` if `world_size` is more than `max_workers`, or if the function
        cannot be pickled.
        """
        if not 1 <= world_size <= self.max_workers:
            raise LaunchError(
                f"world_size={world_size}; this pool runs 1 to max_workers={self.max_workers}"
                " ranks; make a larger pool"
            )
        if self._closed:
            raise LaunchError(
                "this WorkerPool is closed; a closed pool cannot run anything; create another"
            )
        task = _task(function, timeout_seconds, self._check_leaks)
        try:
            payload = pickle.dumps((function, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise LaunchError(
                f"{function!r} and its arguments cannot be pickled ({error}); define it at the top"
                " level of a module"
            ) from error

        store = loopback_store()
        workers: list[_Worker] = []
        try:
            workers += self._fork(world_size, task)
            for worker in workers:
                header = {**task, "rank": worker.rank, "world_size": world_size, "port": store.port}
                _send(worker, json.dumps(header).encode(), payload)
            self._answers(workers, timeout_seconds)  # all have joined the group
            for worker in workers:
                _send(worker, b"all have joined")
            results = [pickle.loads(answer) for answer in self._answers(workers, timeout_seconds)]
            for worker in workers:
                _send(worker, b"all have answered")
            left = [json.loads(answer) for answer in self._answers(workers, LEAVE_SECONDS)]
        finally:
            self._end(workers)
            del store
        for rank, found in enumerate(left):
            if found:
                raise WorkerFailed(
                    rank, f"rank {rank} of {world_size} left behind:\n  " + "\n  ".join(found)
                )
        return results

    def close(self) -> None:
        """End the nursery and all processes that the pool started. May be called several times."""
        if not self._closed:
            self._closed = True
            if not self._ready:  # the nursery is still importing, and does not read its socket yet
                self._nursery.kill()
            self._end_nursery()

    @property
    def exempt(self) -> Exempt:
        """The pool's processes and descriptors, which `lockstep.testing.leaks` should leave out."""
        return Exempt(processes=(self._nursery.pid,), descriptors=(self._control.fileno(),))

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        command = own_python("-c", NURSERY, path, str(theirs.fileno()), json.dumps(self._preload))
        with theirs:
            self._nursery = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **NURSERY_ENVIRONMENT},
            )
        self._ready = False

    def _end_nursery(self, timeout_seconds: float = DUMP_SECONDS) -> int:
        self._control.close()
        try:
            return self._nursery.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            return self._nursery.wait()

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        try:
            if not self._ready:
                self._ready = bool(self._control.recv(PACKET_BYTES))
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            answer = self._control.recv(PACKET_BYTES)
            if not answer:
                raise ConnectionResetError("it closed its socket")
        except OSError as error:
            # the nursery is already ending, which takes a while on a busy machine
            status = self._replace_nursery(LEAVE_SECONDS)
            raise WorkerError(
                f"the pool's nursery process ended with status {status} ({error}); its stderr"
                " says why"
            ) from error
        # after an interrupt (Ctrl-C), the next request must not read the answer to this one
        except BaseException:
            self._replace_nursery()
            raise
        return dict(json.loads(answer))

    def _replace_nursery(self, timeout_seconds: float = DUMP_SECONDS) -> int:
        status = self._end_nursery(timeout_seconds)
        self._start()
        return status

    def _fork(self, world_size: int, task: dict[str, Any]) -> list[_Worker]:
        with contextlib.ExitStack() as mine, contextlib.ExitStack() as theirs:
            pipes, dumps, given = [], [], []
            for _ in range(world_size):
                pipe, their_pipe = socket.socketpair()
                pipes.append(mine.enter_context(pipe))
                dumps.append(mine.enter_context(tempfile.TemporaryFile()))
                given += [theirs.enter_context(their_pipe).fileno(), dumps[-1].fileno()]
            answer = self._ask(
                {
                    "do": "fork",
                    "module": task["module"],
                    "file": task["file"],
                    "path": task["path"],
                },
                given,
            )
            workers = [
                _Worker(rank, process, Connection(pipe.detach()), dump, os.pidfd_open(process))
                for rank, (process, pipe, dump) in enumerate(
                    zip(answer["processes"], pipes, dumps, strict=True)
                )
            ]
            mine.pop_all()
        return workers

    def _answers(self, workers: list[_Worker], timeout_seconds: float) -> list[bytes]:
        """Return one message from each worker, in rank order. Raises the error of the first worker
        that fails."""
        deadline = time.monotonic() + timeout_seconds
        answers: dict[int, bytes] = {}
        while len(answers) < len(workers):
            pending = [worker for worker in workers if worker.rank not in answers]
            ready = wait(
                [item for worker in pending for item in (worker.pipe, worker.end)],
                max(0.0, deadline - time.monotonic()),
            )
            if not ready:
                raise _timed_out(pending, len(workers), timeout_seconds)
            arrived = {
                worker.rank: _receive(worker)
                for worker in pending
                if worker.pipe in ready or worker.end in ready
            }
            if any(answer is None or answer[:1] == FAILED for answer in arrived.values()):
                raise self._failed(pending, _with_cause(pending, arrived), len(workers))
            answers.update(
                {rank: answer[1:] for rank, answer in arrived.items() if answer is not None}
            )
        return [answers[worker.rank] for worker in workers]

    def _failed(
        self, pending: list[_Worker], arrived: dict[int, bytes | None], world_size: int
    ) -> Exception:
        """Return the error of the rank that failed first. A rank that died counts as first, unless
        the earliest exception is a `UserError`. `arrived` has None for a rank that died."""
        reports = {
            rank: json.loads(answer[1:])
            for rank, answer in arrived.items()
            if answer is not None and answer[:1] == FAILED
        }
        first = min(reports, key=lambda rank: reports[rank]["time"], default=-1)
        if first >= 0 and reports[first]["error"] is not None:
            cause = WorkerFailed(
                first, f"rank {first} of {world_size} raised:\n{reports[first]['text']}"
            )
            error = _user_error(bytes.fromhex(reports[first]["error"]))
            error.__cause__ = cause
            return error
        dead = [
            worker for worker in pending if worker.rank in arrived and arrived[worker.rank] is None
        ]
        dead = dead or [
            worker
            for worker in pending
            if worker.end in wait([other.end for other in pending], DEATH_SECONDS)
        ]
        if not dead:
            return WorkerFailed(
                first, f"rank {first} of {world_size} raised:\n{reports[first]['text']}"
            )
        self._reap(dead)
        texts = [
            f"rank {worker.rank} of {world_size} {_ending(worker)}\n{_dumped(worker)}"
            for worker in dead
        ]
        texts += [
            f"rank {rank} then raised:\n{report['text']}"
            for rank, report in sorted(reports.items())
        ]
        return WorkerFailed(dead[0].rank, "\n".join(texts))

    def _reap(self, workers: list[_Worker]) -> None:
        unknown = [worker for worker in workers if worker.status is None]
        if not unknown:
            return
        for worker in unknown:
            kill_group(worker.process)
        answer = self._ask({"do": "reap", "processes": [worker.process for worker in unknown]})
        for worker, status in zip(unknown, answer["statuses"], strict=True):
            worker.status = status

    def _end(self, workers: list[_Worker]) -> None:
        try:
            self._reap(workers)
        finally:
            for worker in workers:
                worker.pipe.close()
                worker.dump.close()
                os.close(worker.end)


def _task(
    function: Callable[..., Any], timeout_seconds: float, check_leaks: bool
) -> dict[str, Any]:
    inner = getattr(function, "func", function)  # a functools.partial
    module = str(getattr(inner, "__module__", type(inner).__module__))
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" and file is None:
        raise LaunchError(
            f"{function!r} was defined interactively; workers import it from a file; put it in a"
            " module"
        )
    return {
        "module": module,
        "file": os.path.abspath(file) if file is not None else None,
        "path": [entry for entry in sys.path if isinstance(entry, str)],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "timeout_seconds": timeout_seconds,
        "check_leaks": check_leaks,
    }


def _send(worker: _Worker, *messages: bytes) -> None:
    try:
        for message in messages:
            worker.pipe.send_bytes(message)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the worker has ended; the wait for its answer reports that


def _with_cause(
    pending: list[_Worker], arrived: dict[int, bytes | None]
) -> dict[int, bytes | None]:
    """Return the answers by rank. Waits for more answers if no answer has a `UserError`. A rank may
    have failed because it lost the connection to a rank that is about to report an error."""
    deadline = time.monotonic() + CAUSE_SECONDS
    while all(answer is not None and not _is_user_error(answer) for answer in arrived.values()):
        others = [worker for worker in pending if worker.rank not in arrived]
        ready = (
            wait([worker.pipe for worker in others], max(0.0, deadline - time.monotonic()))
            if others
            else []
        )
        if not ready:
            break
        arrived |= {worker.rank: _receive(worker) for worker in others if worker.pipe in ready}
    return arrived


def _is_user_error(answer: bytes) -> bool:
    return answer[:1] == FAILED and json.loads(answer[1:])["error"] is not None


def _receive(worker: _Worker) -> bytes | None:
    try:
        return worker.pipe.recv_bytes() if worker.pipe.poll(0) else None
    except (EOFError, ConnectionResetError):
        return None


def _timed_out(pending: list[_Worker], world_size: int, timeout_seconds: float) -> WorkerFailed:
    # Stop all ranks first, so that no rank fails because of another's end before it has written its
    # own stacks.
    for number in (signal.SIGSTOP, DUMP_SIGNAL, signal.SIGCONT):
        for worker in pending:
            os.kill(worker.process, number)
    late = time.monotonic() + DUMP_SECONDS
    for worker in pending:
        wait([worker.end], max(0.0, late - time.monotonic()))
    ranks = ", ".join(str(worker.rank) for worker in pending)
    stacks = [
        f"rank {worker.rank}:\n{_dumped(worker) or '  (it wrote no stacks)'}" for worker in pending
    ]
    text = (
        f"of {world_size} ranks, {ranks} did not answer within {timeout_seconds:g} s; their"
        " stacks:\n"
    )
    return WorkerFailed(pending[0].rank, text + "\n".join(stacks))


def _dumped(worker: _Worker) -> str:
    worker.dump.seek(0)
    return worker.dump.read().decode(errors="replace")


def _ending(worker: _Worker) -> str:
    if worker.status is None or worker.status >= 0:
        return f"ended with status {worker.status} before it answered"
    return f"was killed by {signal.Signals(-worker.status).name}"


def _user_error(payload: bytes) -> UserError:
    loaded = pickle.loads(payload)
    if isinstance(loaded, UserError):
        return loaded
    kind, text = loaded
    error: UserError = kind.__new__(kind, text)
    return error
