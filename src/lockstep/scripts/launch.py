"""Runs a script in workers, as `lockstep run` does."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import TextIO

from lockstep.base.errors import USER_ERROR_STATUS, say
from lockstep.base.processes import own_python
from lockstep.base.system import refuse_on_windows, signals_blocked
from lockstep.base.torch_import import importing_torch
from lockstep.launch.machines import Machines
from lockstep.launch.recovery.channel import inherited
from lockstep.logging.run_files import default_run_path
from lockstep.options import LaunchOptions
from lockstep.scripts.line import ScriptLine


def launch_script(
    line: ScriptLine,
    options: LaunchOptions,
    *,
    count: int,
    began: float,
    machines: Machines | None = None,
    request: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    spare_imports: Sequence[str] = (),
) -> int:
    """Run `count` workers to their end, and return the exit status. `began` is in seconds since
    1970. `request` is the environment variable with a request to the workers. A spare process
    imports the modules `spare_imports`."""
    refuse_on_windows("lockstep run")
    with (
        importing_torch(),
        _without_warnings_of_stores() if machines is not None else nullcontext(),
    ):
        # after all checks, because it imports torch
        from lockstep.launch.run_workers import run_workers

    def start(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        added = [f"--local_rank={environment['LOCAL_RANK']}"] if options.local_rank_argument else []
        words = line.words[: len(line.words) - len(line.arguments)]
        with signals_blocked(signal.SIGINT):  # until the worker has been imported: see its `run`
            return subprocess.Popen(
                own_python("-m", "lockstep.launch.worker", *words, *added, *line.arguments),
                env={**os.environ, **(request or {}), **environment},
                start_new_session=True,
                stdout=stdout,
                pass_fds=inherited(environment),
            )

    default_run_dir = str(default_run_path(line.script, datetime.now()).absolute())
    on_all_machines = [f"nnodes={machines.count}"] if machines is not None else []
    ending = run_workers(
        start,
        count=count,
        launcher="lockstep",
        options=options.for_workers(default_run_dir=default_run_dir, now_seconds=began),
        max_restarts=options.max_restarts,
        machines=machines,
        recovery=options.recovery,
        spare_imports=spare_imports,
        command=shlex.join([*on_all_machines, *options.same_on_all_machines(), *line.words]),
    )
    if report := ending.report():
        say(f"lockstep: {report}")
    unread = options.flags_for_script() if ending.status == 0 and not ending.options_read else []
    if unread:
        say(
            f"lockstep: {'error' if options.strict else 'warning'}: {', '.join(unread)} had no"
            " effect, because the script has not trained with lockstep; call ls.train or enter an"
            " ls.Session in it, or leave the options out"
        )
    return USER_ERROR_STATUS if unread and options.strict else ending.status


@contextmanager
def _without_warnings_of_stores() -> Iterator[None]:
    """Suppress the 20 lines that torch's store prints when its host is gone. Import torch in this
    context manager."""
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "ERROR"
    try:
        yield
    finally:
        del os.environ[name]


def count_gpus() -> int:
    with importing_torch():
        from lockstep.base import accelerator

    return accelerator.count()
