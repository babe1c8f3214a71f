"""Calls a function in several processes of this machine, from a script or a notebook."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal, TypeVar, cast

from lockstep.base import accelerator
from lockstep.base.errors import LaunchError, UserError, WorkerError
from lockstep.base.system import refuse_on_windows, signals_blocked
from lockstep.launch.environment import count_processes
from lockstep.launch.failures import Ending, FailureRecord
from lockstep.launch.run_workers import run_workers
from lockstep.launch.seeding import SAFE_PATH, SeedingName
from lockstep.launch.spawned_call import SpawnedCall, work
from lockstep.launch.termination import preempted
from lockstep.options import RunOptions, check_run_dir
from lockstep.plan import Plan

T = TypeVar("T")

_UNGUARDED_STATUS = 97


def spawn(
    main: Callable[..., T],
    *,
    nproc: int | Literal["auto"] = "auto",
    args: tuple[Any, ...] = (),
    plan: str | None = None,
    run_dir: str | None = None,
) -> T:
    """Call `main(*args)` in `nproc` new processes on this machine, and return rank 0's result.

    `nproc="auto"` is the product of the plan's axes if all axes have a size, else one process per
    GPU, or one process without GPUs. `plan` and `run_dir` apply to every run that `main` trains.
    The result must be picklable.

    If `main` can be imported from a file, the processes are fresh interpreters: `args` must be
    picklable, and a script must call `spawn` under `if __name__ == "__main__":`. If `main` cannot
    be imported (notebook, prompt), the processes are forks of this one: CUDA must not be in use
    yet, and each process computes with one thread, because a fork lacks torch's other threads.

    A `UserError` in any process is raised here with the same type and text. Any other failure
    raises `WorkerError`, with the traceback of the rank that failed first. A failure stops all
    processes. Raises `LaunchError` and `PlanError` before any process starts.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A worker that imports the script reaches this call again, unless the call is guarded by
        # `__name__`; its parent reports that once.
        os._exit(_UNGUARDED_STATUS)
    _refuse_in_worker()
    refuse_on_windows("ls.spawn")
    check_run_dir(run_dir, "run_dir")
    count = count_processes(
        nproc, Plan.parse(plan) if plan is not None else None, accelerator.count, name="nproc="
    )
    directory = os.path.abspath(run_dir) if run_dir is not None else None
    with closing(_Starter(_start_method(main), main, args)) as starter:
        _raise_failure(
            run_workers(
                starter.start,
                count=count,
                launcher="spawn",
                options=RunOptions(plan=plan, run_dir=directory),
            )
        )
        result: T = starter.result()
    return result


def _refuse_in_worker() -> None:
    for name in ("LOCKSTEP_LAUNCHER", "TORCHELASTIC_RUN_ID"):
        if name in os.environ:
            raise LaunchError(
                f"ls.spawn in a process that a launcher started ({name}={os.environ[name]}); each"
                " of its processes would start more; call the function itself here, or start the"
                " script with python"
            )


def _start_method(main: Callable[..., Any]) -> Literal["spawn", "fork"]:
    if getattr(main, "__module__", None) != "__main__" or os.path.exists(
        getattr(sys.modules["__main__"], "__file__", "")
    ):
        return "spawn"
    if accelerator.is_initialized():
        raise LaunchError(
            f"{main!r} is defined in a notebook or at a prompt, so that its processes are forks of"
            " this one, and a GPU is in use here; a fork cannot use it after that; restart and"
            " call ls.spawn before anything touches a GPU, or import the function from a file"
        )
    return "fork"


def _raise_failure(ending: Ending) -> None:
    if ending.was_preempted:
        raise preempted(
            signal.SIGINT.name
            if ending.signal == signal.SIGINT
            else "its workers have saved and ended"
        )
    if ending.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if ending.signal is not None:
        # The previous handler is restored: the signal acts as without lockstep.
        os.kill(os.getpid(), ending.signal)
        raise WorkerError(ending.report())
    first = ending.first
    if first is None:
        return
    if first.record is None and first.returncode == _UNGUARDED_STATUS:
        raise LaunchError(
            "ls.spawn at the top level of a script; each process that it starts imports the script,"
            ' and comes to ls.spawn again; put the call under `if __name__ == "__main__":`'
        )
    if first.record is not None and first.record.user_error:
        raise _rebuild(first.record) from None
    raise WorkerError(ending.report())


def _rebuild(record: FailureRecord) -> UserError:
    module, _, name = record.kind.partition(":")
    home = sys.modules.get("__main__" if module == "__mp_main__" else module)
    found: Any = home
    for part in name.split("."):
        found = getattr(found, part, None)
    kind: type[UserError] = (
        found if isinstance(found, type) and issubclass(found, UserError) else UserError
    )
    # Does not call __init__, which may have other parameters than the text.
    error = kind.__new__(kind)
    error.args = (record.message,)
    return error


class _Starter:
    def __init__(
        self, method: Literal["spawn", "fork"], main: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self._forked = method == "fork"
        self._context: Any = multiprocessing.get_context(method)
        self._call = SpawnedCall(main, args)
        self._started: list[_FunctionProcess] = []

    def start(self, environment: Mapping[str, str]) -> _FunctionProcess:
        receiver, sender = self._context.Pipe(duplex=False) if not self._started else (None, None)
        process = self._context.Process(
            target=work,
            args=(self._call, sender, self._forked),
            name=SeedingName(f"rank-{environment['RANK']}"),
        )
        safe = {} if "PYTHONSAFEPATH" in os.environ else SAFE_PATH
        own = {"OMP_NUM_THREADS": "1"} if self._forked else safe
        # start multiprocessing's resource tracker without a worker's variables: it would be killed
        # with that worker
        with _environment(safe):
            resource_tracker.ensure_running()
        try:
            with _environment({**environment, **own}), signals_blocked():
                process.start()
        finally:
            if sender is not None:
                sender.close()
        started = _FunctionProcess(process, receiver)
        self._started.append(started)
        return started

    def result(self) -> Any:
        data = self._started[0].received
        return pickle.loads(data) if data is not None else None

    def close(self) -> None:
        for started in self._started:
            started.close()


class _FunctionProcess:
    def __init__(self, process: BaseProcess, result: Connection | None) -> None:
        self._process = process
        self._result = result
        self.received: bytes | None = None

    @property
    def pid(self) -> int:
        return cast(int, self._process.pid)

    def poll(self) -> int | None:
        returncode = self._process.exitcode
        self._receive()
        return returncode

    def _receive(self) -> None:
        try:
            if self._result is not None and self.received is None and self._result.poll():
                self.received = self._result.recv_bytes()
        except (EOFError, OSError):
            self.received = None  # the process ended before or while sending its result

    def close(self) -> None:
        if self._result is not None:
            self._result.close()
        with suppress(ValueError):  # the process still runs: not even SIGKILL ended it
            self._process.close()


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
