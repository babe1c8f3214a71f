"""Runs the user's script in subprocesses that write traces."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lockstep.base.processes import own_python
from lockstep.evidence.trace import Trace, read_traces
from lockstep.options import LaunchOptions
from lockstep.scripts.line import ScriptLine
from lockstep.scripts.process import ScriptEnd, run_script
from lockstep.verify.jobs import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult(ScriptEnd):
    job: Job
    traces: list[Trace]


class Runner:
    """Runs jobs while slots are free. On exit from the `with` block, all runs are ended."""

    def __init__(
        self,
        line: ScriptLine,
        folder: Path,
        timeout_seconds: float,
        slots: int,
        *,
        launch: LaunchOptions | None = None,
        begins: Callable[[str], None] = lambda _: None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.line = line
        self._folder = folder
        self._timeout_seconds = timeout_seconds
        self._slots = self._free = max(1, slots)
        self._launch = launch or LaunchOptions()
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(max_workers=self._slots)
        self._is_ending = self._is_count_known = False
        self._begins, self._progress = begins, progress
        self._begun = self._queued = 0

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        self._pool.shutdown(cancel_futures=True)

    def start(self, job: Job) -> Future[JobResult]:
        """Run `job` when enough slots are free. A failed run is a result, not an exception of the
        future."""
        self._queued += 1
        return self._pool.submit(self._run, job)

    @contextmanager
    def queueing_the_rest(self) -> Iterator[None]:
        """Delay runs until the `with` block ends, so that all remaining jobs are counted first."""
        with self._changed:
            yield
            self._is_count_known = True

    def run(self, jobs: Sequence[Job]) -> list[JobResult]:
        return [future.result() for future in [self.start(job) for job in jobs]]

    def _run(self, job: Job) -> JobResult:
        needed = min(job.processes, self._slots)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= needed or self._is_ending)
            if self._is_ending:
                return JobResult(job=job, status=1, traces=[], seconds=0.0)
            self._free -= needed
            self._begun += 1
            of = f" of {self._queued}" if self._is_count_known else ""
            self._begins(f"run {self._begun}{of}: {job.text}")
        try:
            result = self._result(job)
        finally:
            with self._changed:
                self._free += needed
                self._changed.notify_all()
        failed = f"failed (exit status {result.status})" if result.status else "done"
        outcome = "timed out" if result.timed_out else failed
        self._progress(f"{job.name}: {outcome}, {result.seconds:.0f} s")
        return result

    def _result(self, job: Job) -> JobResult:
        folder = self._folder / job.name
        trace = folder / "trace"
        trace.mkdir(parents=True)
        end = run_script(
            self._command(job, folder / "run"),
            job.request(trace),
            folder,
            # one thread per process: on CPUs, the number of threads changes bits
            environ={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout_seconds=self._timeout_seconds,
            look=lambda: self._is_ending,
        )
        return JobResult(
            job=job, traces=[] if end.status or end.timed_out else read_traces(trace), **asdict(end)
        )

    def _command(self, job: Job, run_dir: Path) -> list[str]:
        options = replace(
            self._launch, nproc=str(job.processes), plan=str(job.plan), run_dir=str(run_dir)
        )
        return own_python("-m", "lockstep", "run", *options.arguments(), *self.line.words)
