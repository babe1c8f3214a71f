"""Starts contenders, each with its own processes, and lets them run in turns.

All contenders of a row are alive at once, and one of them runs. At the end of its turn all of its
processes (launcher, training processes, loader workers) are stopped by SIGSTOP; they continue by
SIGCONT at its next turn. So no contender works during another's turn, for example by reading data
ahead.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from launchers import command
from workloads import Task

PATIENCE_SECONDS = 300.0
"""Seconds to wait for a contender's next message."""
ENDING_SECONDS = 60.0


class ContenderError(Exception):
    """A contender failed, or trained something else."""


class Turn(NamedTuple):
    """Seconds of a turn: wall time until the last process is done, and processor time of all
    processes."""

    wall: float
    processor: float


class Contender:
    """One contender's processes. After `start` they are stopped except in `turn` and `finish`."""

    def __init__(self, name: str, task: Task) -> None:
        self.name = name
        self.threads: list[int] = []
        """Number of threads of each process."""
        self._folder = tempfile.TemporaryDirectory(prefix=f"peers-{name}-")
        self._task = replace(task, scratch=self._folder.name)
        self._log = Path(self._folder.name, "log")
        self._channels: list[Any] = []
        self._family: list[psutil.Process] = []
        """Processes as last seen. The children of a launcher that has ended have no parent, but
        must still be ended."""

    def start(self) -> float:
        """Return the seconds until all processes have finished the first step."""
        address = f"{self._folder.name}/turns"
        arguments, environment = command(self.name, address, self._task)
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("w") as log:
            listener.bind(address)
            listener.listen(self._task.processes)
            listener.settimeout(0.2)
            began = time.perf_counter()
            self._process = subprocess.Popen(
                arguments,
                env=environment,
                cwd=self._folder.name,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            while len(self._channels) < self._task.processes:
                self._accept(listener, began)
        hellos = [self._hear(channel) for channel in self._channels]
        seconds = time.perf_counter() - began
        if sorted(hello["rank"] for hello in hellos) != list(range(self._task.processes)):
            raise self._failed(
                f"its processes are not {self._task.processes} that know of each other: {hellos}"
            )
        self.threads = [hello["threads"] for hello in hellos]
        self._freeze()
        return seconds

    def turn(self, steps: int) -> Turn:
        self._thaw()
        began = time.perf_counter()
        self._tell(steps)
        said = [self._hear(channel) for channel in self._channels]
        turn = Turn(time.perf_counter() - began, sum(each["processor"] for each in said))
        self._freeze()
        return turn

    def finish(self) -> list[float]:
        """End the processes and return the mean loss over all of them for each step."""
        self._thaw()
        self._tell(0)
        losses = [self._hear(channel)["losses"] for channel in self._channels]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_SECONDS)
        if self._process.poll() != 0:
            raise self._failed(f"it ended with status {self._process.poll()} after its last step")
        return [sum(ranks) / len(ranks) for ranks in zip(*losses, strict=True)]

    def close(self) -> None:
        """End all processes that are left."""
        for process in {*self._family, *self._tree()}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        for channel in self._channels:
            channel.close()
        self._folder.cleanup()

    def _accept(self, listener: socket.socket, began: float) -> None:
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.settimeout(PATIENCE_SECONDS)
            self._channels.append(connection.makefile("rw"))
            return
        if self._process.poll() is not None:
            raise self._failed(f"it ended with status {self._process.poll()} before its first step")
        if time.perf_counter() - began > PATIENCE_SECONDS:
            raise self._failed(f"it made no step in {PATIENCE_SECONDS:.0f} s")

    def _tell(self, steps: int) -> None:
        for channel in self._channels:
            channel.write(f"{steps}\n")
            channel.flush()

    def _hear(self, channel: Any) -> dict[str, Any]:
        try:
            line = channel.readline()
        except OSError as error:
            raise self._failed(f"a process of it does not answer ({error})") from error
        if not line:
            raise self._failed("a process of it ended in its turn")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def _failed(self, what: str) -> ContenderError:
        return ContenderError(
            f"{self.name}: {what}. The end of what it printed:\n{self._log.read_text()[-4000:]}"
        )

    def _tree(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _freeze(self) -> None:
        self._send(signal.SIGSTOP)

    def _thaw(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        self._family = self._tree()
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


@contextlib.contextmanager
def started(names: list[str], task: Task) -> Iterator[dict[str, tuple[Contender, float]]]:
    """Start all contenders, one after another. Return the seconds to the first step of each."""
    with contextlib.ExitStack() as stack:
        found = {}
        for name in names:
            contender = Contender(name, task)
            stack.callback(contender.close)
            found[name] = contender, contender.start()
        yield found
