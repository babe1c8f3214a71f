"""A server process for Linux that imports torch once, and forks the processes of each trial. A
training of a small model starts in a fraction of a second. A forked process ends when the process
that started it ends."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from lockstep.base.errors import LaunchError
from lockstep.base.files import from_json, read_object, write_atomically
from lockstep.base.processes import (
    adopt_orphans,
    descendants,
    die_with_parent,
    kill_all,
    own_python,
)
from lockstep.base.system import PASSED_ON, signals_blocked
from lockstep.base.temporary_folder import remove_left_folders, remove_own_folders
from lockstep.launch import worker
from lockstep.launch.failures import Ending
from lockstep.launch.recovery.channel import Channel, open_channel
from lockstep.launch.seeding import HASH_SEED
from lockstep.launch.spawned_call import forget_parent, lead_session
from lockstep.options import RunOptions, read_options
from lockstep.scripts.process import KILL_SECONDS, OUTPUT, ended_by_signals
from lockstep.scripts.request import write_request

ENDING = "ending.json"
END_SECONDS = (3.0, 5.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    number: int
    folder: str
    """The existing run directory of the trial."""
    line: Sequence[str]
    processes: int
    max_restarts: int
    options: Mapping[str, str]
    request: Mapping[str, Any]
    """JSON. The server adds `channel`, the file descriptor of rank 0's channel."""
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchEnding:
    status: int
    report: str
    kind: str = ""
    """Class of the first exception, as `module:qualified name`; empty without an exception."""
    message: str = ""
    where: str = ""
    """Last frame in the traceback of the first exception."""

    @classmethod
    def of(cls, ending: Ending) -> LaunchEnding:
        record = None if ending.first is None else ending.first.record
        if record is None:
            return cls(status=ending.status, report=ending.report())
        frames = [
            line.strip() for line in record.traceback.splitlines() if line.startswith("  File ")
        ]
        where = frames[-1] if frames else ""
        return cls(
            status=ending.status,
            report=ending.report(),
            kind=record.kind,
            message=record.message,
            where=where,
        )

    @classmethod
    def read(cls, folder: Path) -> LaunchEnding | None:
        with suppress(OSError, ValueError):
            return from_json(cls, read_object(folder, ENDING))
        return None


class ForkServer:
    def __init__(self) -> None:
        self.channel, theirs = _open_channel()
        with theirs:
            self._process = subprocess.Popen(
                own_python("-m", __name__, str(os.getpid()), str(theirs.fileno())),
                env={**os.environ, **HASH_SEED},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._gpus: int | None = None

    def gpus(self) -> int:
        if self._gpus is None:
            message = self.channel.receive()
            if message is None:
                raise LaunchError(
                    f"torch cannot be imported by {sys.executable}; what that process said stands"
                    " above; fix its installation"
                )
            self._gpus = int(message["gpus"])
        return self._gpus

    def start(self, request: LaunchRequest) -> Channel:
        ours, theirs = _open_channel()
        with theirs:
            self.channel.send("start", descriptors=[theirs.fileno()], request=asdict(request))
        return ours

    def signal(self, number: int, launch: int | None = None) -> None:
        self.channel.send("signal", signal=number, number=launch)

    def close(self) -> None:
        self.channel.close()
        if self._gpus is None:  # the server is still importing torch, and has started nothing
            self._process.kill()
        self._process.wait()


def _open_channel() -> tuple[Channel, socket.socket]:
    if (ends := open_channel()) is None:
        raise LaunchError(
            f"lockstep search on {sys.platform}; its trials are forks of one process, on Linux; "
            "run it there"
        )
    return ends


def main() -> None:
    parent, descriptor = map(int, sys.argv[1:])
    die_with_parent(parent)
    adopt_orphans()
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    import lockstep.launch.run_workers
    import lockstep.run  # noqa: F401
    from lockstep.base import accelerator

    worker.prepare_process()
    remove_left_folders(
        Path(tempfile.gettempdir())
    )  # the command was killed: this process may start nothing
    channel.send("warm", gpus=accelerator.count())
    _serve(channel)


def _serve(channel: Channel) -> None:
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
                selector.unregister(channel)
                _end(launchers, selector)
                kill_all(lambda: descendants([os.getpid()]), KILL_SECONDS)
                # temporary folders of launchers that were killed
                remove_left_folders(Path(tempfile.gettempdir()))
                os._exit(0)
            if message["kind"] == "signal":
                for number, pid in launchers.items():
                    if message["number"] in (None, number):
                        os.kill(pid, message["signal"])
                continue
            request, (descriptor,) = LaunchRequest(**message["request"]), message["descriptors"]
            launchers[request.number] = pid = _fork_launcher(request, descriptor)
            os.close(descriptor)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (request.number, pid))


def _end(launchers: dict[int, int], selector: selectors.BaseSelector) -> None:
    for seconds in END_SECONDS:
        deadline = time.monotonic() + seconds
        while selector.get_map() and (rest := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(rest):
                del launchers[key.data[0]]
                selector.unregister(key.fileobj)
        for pid in launchers.values():
            os.kill(pid, signal.SIGTERM)


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
    output = os.open(Path(request.folder, OUTPUT), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    from lockstep.launch.run_workers import run_workers

    asked = write_request(Path(request.folder), {**request.request, "channel": descriptor})
    os.environ.update({**request.environment, **asked})
    try:
        # also before and after the workers run, so that the folder is removed
        with ended_by_signals():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
            ending = run_workers(
                lambda environment: ForkedWorker(request.line, environment),
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
    finally:
        remove_own_folders()
    kill_all(
        lambda: descendants([os.getpid()]), KILL_SECONDS
    )  # processes left over by the workers, which are forks of this process
    if told.report:
        print(f"lockstep: {told.report}", file=sys.stderr, flush=True)
    write_atomically(Path(request.folder, ENDING), json.dumps(asdict(told)))
    os._exit(told.status)


class ForkedWorker:
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
