"""Runs of the user's script as subprocesses, each leaving a trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from lockstep.options import LaunchOptions
from lockstep.verify.records import Trace, read
from lockstep.verify.runs_to_take import Job
from lockstep.verify.trace_request import Tracing

STOP_SECONDS = 10.0
"""From asking a run to stop to killing it."""
TAIL_LINES = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run ended."""

    job: Job
    status: int
    """As a shell shows it."""
    traces: list[Trace]
    """One for each pair; empty where the run failed or never trained."""
    error: str
    """The end of what it wrote to stderr, or to stdout where it wrote nothing there. Empty where it went well."""
    seconds: float
    timed_out: bool = False


class Runner:
    """Runs jobs, several at once where there are processors for it. Use it in a `with`: leaving it ends every run."""

    def __init__(
        self,
        script: Sequence[str],
        folder: Path,
        *,
        timeout_seconds: float,
        slots: int,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`script`: `[-m] SCRIPT ARGS...`. `folder`: where runs leave their files. `slots`: processes at once; a job that needs more
        of them runs alone. `tell` is given a line when a run ends."""
        self._script = list(script)
        self._folder = folder
        self._timeout_seconds = timeout_seconds
        self._slots = max(1, slots)
        self._free = self._slots
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(max_workers=self._slots)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ending = False
        self._tell = tell

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._ending = True
            running = list(self._running)
            self._changed.notify_all()
        for process in running:
            _stop(process)
        self._pool.shutdown(cancel_futures=True)

    def start(self, job: Job) -> Future[Ended]:
        """Run it when there is room. The future's result raises nothing of the run's own."""
        return self._pool.submit(self._run, job)

    def run(self, jobs: Sequence[Job]) -> list[Ended]:
        """Run them all; in the order of `jobs`."""
        return [future.result() for future in [self.start(job) for job in jobs]]

    def _run(self, job: Job) -> Ended:
        needed = min(job.processes, self._slots)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= needed or self._ending)
            self._free -= needed
        try:
            ended = self._ended(job)
        finally:
            with self._changed:
                self._free += needed
                self._changed.notify_all()
        outcome = "did not end in time" if ended.timed_out else "done" if ended.status == 0 else f"failed (exit status {ended.status})"
        self._tell(f"{job.name}: {outcome}, {ended.seconds:.0f} s")
        return ended

    def _ended(self, job: Job) -> Ended:
        folder = self._folder / job.name
        trace = folder / "trace"
        trace.mkdir(parents=True)
        began = time.monotonic()
        with (folder / "stdout").open("wb") as output, (folder / "stderr").open("wb") as errors, self._changed:
            if self._ending:
                return Ended(job=job, status=1, traces=[], error="", seconds=0.0)
            process = subprocess.Popen(
                self._command(job, folder / "run"), env=_environment(job, trace), stdin=subprocess.DEVNULL, stdout=output, stderr=errors
            )
            self._running.add(process)
        timed_out = False
        try:
            status = process.wait(self._timeout_seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
            status = _stop(process)
        finally:
            with self._changed:
                self._running.discard(process)
        failed = status != 0 or timed_out
        return Ended(
            job=job,
            status=status if status >= 0 else 128 - status,
            traces=[] if failed else read(trace),
            error=_tail(folder) if failed else "",
            seconds=time.monotonic() - began,
            timed_out=timed_out,
        )

    def _command(self, job: Job, run_dir: Path) -> list[str]:
        options = LaunchOptions(nproc=str(job.processes), plan=str(job.plan), run_dir=str(run_dir))
        return [sys.executable, "-m", "lockstep", "run", *options.arguments(), *self._script]


def asked(job: Job, trace: Path) -> Tracing:
    """What a run is told to trace. `trace`: its folder."""
    return Tracing(
        folder=trace,
        steps=job.steps,
        noise=job.noise,
        float64=job.float64,
        microbatch=job.microbatch,
        eval_mode=job.eval_mode,
        exact=job.exact,
    )


def _environment(job: Job, trace: Path) -> dict[str, str]:
    """One thread a process: on CPUs their number changes bits."""
    return {**os.environ, **asked(job, trace).variables(), "OMP_NUM_THREADS": "1"}


def _stop(process: subprocess.Popen[bytes]) -> int:
    """End a `lockstep run`: it ends its workers, and where it is killed the kernel does."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _tail(folder: Path) -> str:
    for name in ("stderr", "stdout"):
        lines = (folder / name).read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        if lines:
            return "\n".join(lines[-TAIL_LINES:])
    return ""
