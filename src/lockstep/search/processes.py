"""The warm parent of the trials' processes, and their channels, seen from the search."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict

from lockstep.base.errors import LaunchError
from lockstep.base.python_process import own_python
from lockstep.launch.recovery.channel import Channel, open_channel, variables
from lockstep.launch.seeding import HASH_SEED
from lockstep.search.warm_parent import PARENT, LaunchRequest


class WarmParent:
    """The process that forks the launchers of trials. Started at once; it is ready when it has
    imported torch."""

    def __init__(self) -> None:
        """Raises `LaunchError` where a process cannot be forked so."""
        ends = open_channel()
        if ends is None:
            raise LaunchError(
                f"lockstep search on {sys.platform}; its trials are forks of one process, on Linux;"
                " run it there"
            )
        self.channel, theirs = ends
        with theirs:
            environment = {**os.environ, **HASH_SEED, PARENT: str(os.getpid()), **variables(theirs)}
            self._process = subprocess.Popen(
                own_python("-m", "lockstep.search.warm_parent"),
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._gpus: int | None = None

    def gpus(self) -> int:
        """Return the number of GPUs here. Waits until torch is imported. Raises `LaunchError` if
        that fails."""
        if self._gpus is None:
            message = self.channel.receive()
            if message is None:
                raise LaunchError(
                    f"torch cannot be imported by {sys.executable}; what that process said stands"
                    " above; mend its installation"
                )
            self._gpus = int(message["gpus"])
        return self._gpus

    def start(self, request: LaunchRequest) -> Channel:
        """Start a trial's launcher. Returns the channel to its rank 0."""
        ends = open_channel()
        assert ends is not None, "checked at the beginning"
        ours, theirs = ends
        with theirs:
            self.channel.send("start", descriptors=[theirs.fileno()], request=asdict(request))
        return ours

    def signal(self, number: int, trial: int | None = None) -> None:
        """Send a signal to the launcher of a trial; None: to all."""
        self.channel.send("signal", signal=number, number=trial)

    def close(self) -> None:
        """End it, with all that it has started."""
        self.channel.close()
        if self._gpus is None:  # it still imports torch, and has started nothing
            self._process.kill()
        self._process.wait()
