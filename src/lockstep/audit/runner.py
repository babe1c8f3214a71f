"""Runs the audited script, unchanged, on several processes, as torchrun would; sees a hang, and
ends all it started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from lockstep.audit.processes import dump_stacks, end_all, recorded, running_records
from lockstep.audit.request import AuditRequest
from lockstep.audit.source import ScriptSource
from lockstep.base.python_process import own_python

POLL_SECONDS = 0.2
STACKS_SECONDS = 2.0
"""Seconds that processes have to write their stacks."""
TAIL_LINES = 30
"""Lines of a failed script's output that are kept."""
SITE = Path(__file__).parent / "site"
"""Directory whose `sitecustomize` installs the probes in each process."""
LauncherChoice = Literal["auto", "torchrun", "python"]
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_FAILED = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic/multiprocessing/", re.MULTILINE)
"""Head of the first line that torchrun itself prints about a failed worker."""
_AGENT_TRACEBACK = re.compile(
    r"^Traceback \(most recent call last\):\n(?:  .*\n)*?.*torch/distributed/(?:run|launcher)",
    re.MULTILINE,
)
_THREADS_BANNER = re.compile(r"^\*+\nSetting OMP_NUM_THREADS.*\n\*+\n", re.MULTILINE)
_RANK_LINE = re.compile(r'"kind":\s*"rank"')


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditOptions:
    """The options of an audit."""

    script: str
    """Path of the script, or name of the module."""
    arguments: Sequence[str] = ()
    is_module: bool = False
    processes: int = 2
    steps: int = 20
    hang_after_seconds: float = 60.0
    """Seconds without a new record after which the script is held to hang."""
    timeout_seconds: float = 600.0
    """Longest time of the run."""
    launcher: LauncherChoice = "auto"
    """`python`: the script starts its own processes. `auto`: as its source says."""
    perturb: int = 0
    """Seed of noise of one unit in the last place on the initial parameters. 0: none."""
    resume_arguments: Sequence[str] | None = None
    """Arguments of the script with which it goes on from what it saved. None: it is not resumed."""

    @property
    def line(self) -> list[str]:
        return [*(["-m"] if self.is_module else []), self.script, *self.arguments]

    @property
    def root(self) -> str:
        """The directory of the user's own code."""
        return os.getcwd() if self.is_module else os.path.dirname(os.path.abspath(self.script))


@dataclass(frozen=True, kw_only=True, slots=True)
class HangStacks:
    """The stacks of a script that hangs."""

    seconds: float
    """Seconds without progress."""
    stacks: Mapping[int, str]
    """The stacks of all threads, by process id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptRun:
    """A run of the script that has ended, or was ended."""

    status: int
    """Exit status as a shell shows it: 128 + N after signal N."""
    seconds: float
    error: str = ""
    """Last lines of a failed script's output. Empty if it did not fail."""
    hang: HangStacks | None = None
    timed_out: bool = False


class RecordGrowth:
    """The growth of the records, by which a script that hangs is told from one that works."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._bytes = 0
        self._at = clock()
        self._has_rank = False

    def stalled_seconds(self) -> float:
        """Look, and return the seconds since a process last added to its record; 0 before the first
        line of a rank."""
        paths = list(recorded(self._folder).values())
        size = sum(path.stat().st_size for path in paths)
        if size != self._bytes:
            self._bytes, self._at = size, self._clock()
            self._has_rank = self._has_rank or any(
                _RANK_LINE.search(path.read_text(errors="replace")) for path in paths
            )
        return self._clock() - self._at if self._has_rank else 0.0


def launcher_of(options: AuditOptions) -> tuple[bool, str]:
    """Return True if torchrun is to start the script, and a note if the script's source decided
    against it."""
    if options.launcher != "auto":
        return options.launcher == "torchrun", ""
    call = ScriptSource.find(options.script, is_module=options.is_module).start_call()
    if call is None:
        return True, ""
    return (
        False,
        (
            f"{options.script}:{call.line} starts the processes itself ({call.name}), so it was run"
            f" as python {options.script}, and --nproc does not count; --launcher torchrun runs it"
            " otherwise"
        ),
    )


def command_line(options: AuditOptions, folder: Path, *, torchrun: bool) -> list[str]:
    """Return the command that runs the script."""
    if not torchrun:
        return [sys.executable, *options.line]
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(options.processes),
    ]
    # else it leaves a folder in /tmp
    return own_python(*launcher, "--log-dir", str(folder / "torchrun"), *options.line)


def environment(request: AuditRequest, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the script: that of the audit with the probes, without what a
    launcher has set."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    path = os.pathsep.join([str(SITE), *filter(None, [environ.get("PYTHONPATH")])])
    # Unbuffered, as torchrun runs its workers: nothing is lost when a process ends itself.
    return {**kept, **request.variables(), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def run_script(
    options: AuditOptions, folder: Path, *, torchrun: bool, echo: BinaryIO | None = None
) -> ScriptRun:
    """Run the script until it ends, hangs or takes too long; then end all it started. `folder`: of
    the records, exists. `echo` is given the script's output as it comes."""
    request = AuditRequest(
        folder=folder,
        steps=options.steps,
        roots=[options.root],
        runner=os.getpid(),
        perturb=options.perturb,
    )
    output = folder / "output"
    started = time.monotonic()
    with output.open("wb") as written, output.open("rb") as read:
        process = subprocess.Popen(
            command_line(options, folder, torchrun=torchrun),
            env=environment(request, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            hang, timed_out = _watch(process, options, folder, lambda: _pass_on(read, echo))
            status = process.poll()
            _pass_on(read, echo)  # not what torchrun says about being ended
        finally:
            end_all(process, folder, request.marker)
    if status is None:
        status = process.returncode if process.returncode is not None else -signal.SIGKILL
    status = status if status >= 0 else 128 - status
    error = (
        ""
        if hang is not None or timed_out or status == 0
        else failure_in(output.read_text(encoding="utf-8", errors="replace"))
    )
    if aborted_at_exit(error):
        status, error = 0, ""
    return ScriptRun(
        status=status,
        seconds=time.monotonic() - started,
        error=error,
        hang=hang,
        timed_out=timed_out,
    )


def aborted_at_exit(error: str) -> bool:
    """True if a process aborted after its script had ended, as Python destroyed a process group
    that was still alive: torch does so now and then, and it says nothing about the training."""
    return (
        "terminate called without an active exception" in error
        and "Traceback (most recent call last)" not in error
    )


def failure_in(output: str) -> str:
    """Return the last lines that a failed script has printed, without those that torchrun adds."""
    output = _THREADS_BANNER.sub("", output)
    heads = [
        found.start()
        for pattern in (_FAILED, _AGENT_TRACEBACK)
        if (found := pattern.search(output)) is not None
    ]
    text = output[: min(heads)].rstrip() if heads else ""
    return "\n".join((text or output.rstrip()).splitlines()[-TAIL_LINES:])


def _watch(
    process: subprocess.Popen[bytes],
    options: AuditOptions,
    folder: Path,
    pass_on: Callable[[], None],
) -> tuple[HangStacks | None, bool]:
    """Wait for the end of the script. Returns the stacks if it hangs, and True if it takes too
    long."""
    started = time.monotonic()
    growth = RecordGrowth(folder)
    while process.poll() is None:
        pass_on()
        stalled = growth.stalled_seconds()
        # not while the launcher alone comes to its end
        if stalled > options.hang_after_seconds and running_records(folder):
            return HangStacks(seconds=stalled, stacks=dump_stacks(folder, STACKS_SECONDS)), False
        if time.monotonic() - started > options.timeout_seconds:
            return None, True
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
    return None, False


def _pass_on(read: BinaryIO, echo: BinaryIO | None) -> None:
    if (more := read.read()) and echo is not None:
        with suppress(OSError):  # nobody reads it any more
            echo.write(more)
            echo.flush()
