"""A process that has imported torch and lockstep, and forks a launcher for each trial, which forks
the trial's workers.

A trial of a small model starts in a fraction of a second: fresh processes would import torch each
time. It is started by `WarmParent`, and asked over a `Channel`. Each process ends with the one that
started it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from lockstep.base.descendants import descendants, kill_all
from lockstep.base.errors import LaunchError
from lockstep.base.files import write_atomically
from lockstep.base.parent import adopt_orphans, die_with_parent
from lockstep.base.python_process import own_python
from lockstep.base.temporary_folder import remove_left_folders
from lockstep.launch import worker
from lockstep.launch.failures import Ending
from lockstep.launch.recovery.channel import Channel, take_channel
from lockstep.launch.recovery.spare import prepare_process
from lockstep.launch.spawned_call import PASSED_ON, forget_parent, lead_session, signals_blocked
from lockstep.options import RunOptions, read_options

PARENT = "LOCKSTEP_WARM_PARENT_OF"
"""The variable with the process id of the search."""
ENDING = "ending.json"
OUTPUT = "output.txt"
"""In a trial's run directory: what its processes print."""
KILL_SECONDS = 2.0
"""Seconds that what a trial has left running is given to end after SIGKILL."""
DESCRIPTOR = "LOCKSTEP_TRIAL_DESCRIPTOR"
"""The variable with the number of the descriptor over which a trial's rank 0 reports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    """A launch that the warm parent is asked for."""

    number: int
    """The trial's number."""
    folder: str
    """The trial's run directory, which exists."""
    script: Sequence[str]
    """`[-m] SCRIPT ARGS...`"""
    processes: int
    max_restarts: int
    options: Mapping[str, str]
    """The variables of the `RunOptions` of its workers."""
    environment: Mapping[str, str]
    """Further variables of its workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchEnding:
    """The end of a trial's processes, as its launcher has seen it. JSON in the trial's
    `ending.json`."""

    status: int
    report: str
    """The launcher's report. Empty if all went well."""
    kind: str = ""
    """The class of the exception that failed first, as `module:qualified name`. Empty if there was
    none."""
    message: str = ""
    """Its text."""
    where: str = ""
    """The last frame of its traceback."""

    @classmethod
    def of(cls, ending: Ending) -> LaunchEnding:
        """Return the parts of `ending` that a search reads."""
        first = ending.first
        record = None if first is None else first.record
        if record is None:
            return cls(status=ending.status, report=ending.report())
        lines = [
            line.strip() for line in record.traceback.splitlines() if line.startswith("  File ")
        ]
        where = lines[-1] if lines else ""
        return cls(
            status=ending.status,
            report=ending.report(),
            kind=record.kind,
            message=record.message,
            where=where,
        )

    @classmethod
    def read(cls, folder: Path) -> LaunchEnding | None:
        """Return the ending of the latest launch in a trial's folder. None if it has written
        none."""
        try:
            return cls(**json.loads((folder / ENDING).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None


def main() -> None:
    """Import what training needs, and serve the search that has started this process."""
    die_with_parent(int(os.environ.pop(PARENT)))
    channel = take_channel(os.environ)
    assert channel is not None, "the search gives one"
    for name in ("lockstep.run", "lockstep.launch.agent.run_workers"):
        import_module(name)
    prepare_process()
    # of a search that was killed: this one may start no trial
    remove_left_folders(Path(tempfile.gettempdir()))
    channel.send("warm", gpus=import_module("lockstep.base.accelerator").count())
    _serve(channel)


def _serve(channel: Channel) -> None:
    """Start a launcher for each `start`, tell of its end, and pass `signal` on to one of them, or
    to all."""
    selector = selectors.DefaultSelector()
    selector.register(channel, selectors.EVENT_READ)
    launchers: dict[int, int] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is not channel:
                number, pid = key.data
                selector.unregister(key.fileobj)
                os.close(key.fd)
                del launchers[number]
                channel.send(
                    "ended", number=number, status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                )
                continue
            message = channel.receive()
            if message is None:
                os._exit(0)  # the launchers, its children, end with it
            if message["kind"] == "signal":
                for number, pid in launchers.items():
                    if message["number"] in (None, number):
                        os.kill(pid, message["signal"])
                continue
            request, (descriptor,) = LaunchRequest(**message["request"]), message["descriptors"]
            launchers[request.number] = pid = _fork_launcher(request, descriptor)
            os.close(descriptor)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (request.number, pid))


def _fork_launcher(request: LaunchRequest, descriptor: int) -> int:
    parent = os.getpid()
    with signals_blocked():
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(parent)
                adopt_orphans()
                forget_parent()
                lead_session()
                _launch(request, descriptor)
            finally:
                os._exit(1)
    return pid


def _launch(request: LaunchRequest, descriptor: int) -> NoReturn:
    """Run a trial's workers to their end, in a process of its own."""
    output = os.open(Path(request.folder, OUTPUT), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    from lockstep.launch.agent.run_workers import run_workers

    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    os.environ.update(request.environment)
    os.environ[DESCRIPTOR] = str(descriptor)
    try:
        ending = run_workers(
            lambda environment: ForkedWorker(request.script, environment),
            count=request.processes,
            launcher="lockstep",
            options=RunOptions(**read_options(request.options)),
            max_restarts=request.max_restarts,
        )
        told = LaunchEnding.of(ending)
    except LaunchError as error:
        told = LaunchEnding(
            status=2, report=str(error), kind="lockstep.base.errors:LaunchError", message=str(error)
        )
    # what the workers, forks of this process, have left
    kill_all(lambda: descendants([os.getpid()]), KILL_SECONDS)
    if told.report:
        print(f"lockstep: {told.report}", file=sys.stderr, flush=True)
    write_atomically(Path(request.folder, ENDING), json.dumps(asdict(told)))
    os._exit(told.status)


class ForkedWorker:
    """A worker that is a fork of this process."""

    def __init__(self, script: Sequence[str], environment: Mapping[str, str]) -> None:
        self._returncode: int | None = None
        with signals_blocked():
            self.pid = os.fork()
            if self.pid == 0:
                try:
                    _become_worker(script, environment)
                finally:
                    os._exit(1)

    def poll(self) -> int | None:
        """None while it runs; then its exit status, or minus the number of the signal that killed
        it."""
        if self._returncode is None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode


def _become_worker(script: Sequence[str], environment: Mapping[str, str]) -> None:
    forget_parent()
    lead_session()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    os.environ.update(environment)
    sys.orig_argv = own_python("-m", "lockstep.launch.worker", *script)
    worker.main(script)


if __name__ == "__main__":
    main()
