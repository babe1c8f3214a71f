"""Runs jobs: the user's script as subprocesses, each of which writes a trace."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from lockstep.base.python_process import own_python
from lockstep.options import LaunchOptions
from lockstep.verify.jobs import Job
from lockstep.verify.trace_reader import Trace, read_traces

STOP_SECONDS = 10.0
"""Seconds from asking a run to stop to killing its workers."""
KILL_SECONDS = 5.0
"""Seconds from killing its workers to killing it."""
TAIL_LINES = 30
"""Lines of a failed run's output that are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """A run that has ended."""

    job: Job
    status: int
    """Exit status as a shell shows it: 128 + N after signal N."""
    traces: list[Trace]
    """One for each train module; empty if the run failed or never trained."""
    error: str
    """Last lines of its stderr, or of its stdout if stderr is empty. Empty if the run succeeded."""
    seconds: float
    timed_out: bool = False


class Runner:
    """Runs jobs, several at once if slots are free. Use it in a `with`: leaving the block ends
    every run."""

    def __init__(
        self,
        script: Sequence[str],
        folder: Path,
        *,
        timeout_seconds: float,
        slots: int,
        launch: LaunchOptions | None = None,
        begins: Callable[[str], None] = lambda _: None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`script`: `[-m] SCRIPT ARGS...`. `folder`: of all files. `slots`: processes at once, or
        one job. `launch`: options of every run. `begins` is called with the words for each run that
        begins, `progress` with those for each that has ended."""
        self._script = list(script)
        self._folder = folder
        self._timeout_seconds = timeout_seconds
        self._slots = max(1, slots)
        self._launch = launch or LaunchOptions()
        self._free = self._slots
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(max_workers=self._slots)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ending = False
        self._begins, self._progress = begins, progress
        self._begun = self._queued = 0
        self._is_count_known = False

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._ending = True
            running = list(self._running)
            self._changed.notify_all()
        for process in running:
            _stop(process)
        self._pool.shutdown(cancel_futures=True)

    def start(self, job: Job) -> Future[JobResult]:
        """Run `job` when enough slots are free. A run that fails is a result, not an exception of
        the future."""
        self._queued += 1
        return self._pool.submit(self._run, job)

    @contextmanager
    def queueing_the_rest(self) -> Iterator[None]:
        """A context in which all jobs are started that are left: no run begins before all are
        counted."""
        with self._changed:
            yield
            self._is_count_known = True

    def run(self, jobs: Sequence[Job]) -> list[JobResult]:
        """Run all jobs and return their results in the order of `jobs`."""
        return [future.result() for future in [self.start(job) for job in jobs]]

    def _run(self, job: Job) -> JobResult:
        needed = min(job.processes, self._slots)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= needed or self._ending)
            self._free -= needed
            if not self._ending:
                self._begun += 1
                self._begins(
                    f"run {self._begun}{f' of {self._queued}' if self._is_count_known else ''}:"
                    f" {job.text}"
                )
        try:
            result = self._result(job)
        finally:
            with self._changed:
                self._free += needed
                self._changed.notify_all()
        outcome = (
            "timed out"
            if result.timed_out
            else "done"
            if result.status == 0
            else f"failed (exit status {result.status})"
        )
        self._progress(f"{job.name}: {outcome}, {result.seconds:.0f} s")
        return result

    def _result(self, job: Job) -> JobResult:
        folder = self._folder / job.name
        trace = folder / "trace"
        trace.mkdir(parents=True)
        # One thread a process: on CPUs the number of threads changes bits.
        environment = {
            **os.environ,
            **replace(job, folder=trace).variables(),
            "OMP_NUM_THREADS": "1",
        }
        started = time.monotonic()
        with (
            (folder / "stdout").open("wb") as output,
            (folder / "stderr").open("wb") as errors,
            self._changed,
        ):
            if self._ending:
                return JobResult(job=job, status=1, traces=[], error="", seconds=0.0)
            process = subprocess.Popen(
                self._command(job, folder / "run"),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
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
        return JobResult(
            job=job,
            status=status if status >= 0 else 128 - status,
            traces=[] if failed else read_traces(trace),
            error=_tail(folder) if failed else "",
            seconds=time.monotonic() - started,
            timed_out=timed_out,
        )

    def _command(self, job: Job, run_dir: Path) -> list[str]:
        options = replace(
            self._launch, nproc=str(job.processes), plan=str(job.plan), run_dir=str(run_dir)
        )
        return own_python("-m", "lockstep", "run", *options.arguments(), *self._script)


def _stop(process: subprocess.Popen[bytes]) -> int:
    """End a `lockstep run`, with its workers: the first signal asks them to save and end, the
    second kills them."""
    for seconds in (STOP_SECONDS, KILL_SECONDS):
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
    process.kill()
    return process.wait()


def _tail(folder: Path) -> str:
    for name in ("stderr", "stdout"):
        lines = (folder / name).read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        if lines:
            return "\n".join(lines[-TAIL_LINES:])
    return ""
