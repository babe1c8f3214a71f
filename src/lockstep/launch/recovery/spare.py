"""A spare process: it has imported torch and lockstep, and waits to replace a lost worker."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING

from lockstep.base.garbage import freeze_for_good
from lockstep.base.processes import die_with_parent
from lockstep.launch.recovery.channel import Channel, open_channel, worker_channel
from lockstep.launch.worker_files import WorkerStart

if TYPE_CHECKING:
    from lockstep.launch.worker_processes import Start, WorkerProcess


class Spare:
    """A spare process, seen from the launcher."""

    def __init__(self, start: Start, environment: Mapping[str, str]) -> None:
        """`environment`: the variables of all workers, without those of a rank."""
        ends = open_channel()
        assert ends is not None, "recovery in place is for Linux"
        self.channel, theirs = ends
        self._import_seconds: float | None = None
        with theirs:
            told = WorkerStart(launcher=os.getpid(), channel=theirs.fileno())
            self.process: WorkerProcess = start({**environment, **told.variables()})

    def import_seconds(self) -> float | None:
        """Seconds of the imports, which a worker's script needs and a spare's does not. None before
        they are done."""
        if self._import_seconds is None and (message := self.channel.receive(0.0)) is not None:
            self._import_seconds = message["import_seconds"]
        return self._import_seconds

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def become(self, environment: Mapping[str, str]) -> None:
        """Have it run the script as the worker with these variables."""
        self.channel.send("start", environment=dict(environment))

    def end(self) -> None:
        """End it: it reads that the launcher has closed the connection."""
        self.channel.close()


def wait_to_start(environ: MutableMapping[str, str]) -> Channel | None:
    """In a spare, import a worker's modules, wait until it becomes a worker, take over its
    variables, and return the connection. Returns None in other processes. Ends the process if the
    launcher does not need it."""
    told = WorkerStart.read(environ)
    if told is None or told.files is not None or told.channel is None:
        return None
    die_with_parent(told.launcher)
    began = time.monotonic()
    channel = worker_channel(told.channel)
    import_module("lockstep.run")
    prepare_process()
    channel.send("warm", import_seconds=time.monotonic() - began)
    message = channel.receive()
    if message is None:
        os._exit(0)
    environ.update(message["environment"])
    return channel


def prepare_process() -> None:
    """Import the modules for training, and exempt all present objects from garbage collection:
    collecting the old model after a recovery then takes milliseconds instead of 0.2 s."""
    for name in import_module("lockstep.base.torch_private").IMPORTED_IN_TRAINING:
        import_module(name)
    gc.collect()
    freeze_for_good()
