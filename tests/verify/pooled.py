"""`lockstep verify` with runs that are forked from processes that have imported torch. It takes a
third of the time."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

from lockstep.base.errors import USER_ERROR_STATUS, UserError, WorkerError
from lockstep.evidence.trace import read_traces
from lockstep.scripts.line import ScriptLine
from lockstep.testing.pool import WorkerPool
from lockstep.verify.jobs import Job, parse_plans
from lockstep.verify.runner import JobResult, Runner
from lockstep.verify.verdict import Report
from lockstep.verify.verification import Verification, VerifyOptions

MOST_PROCESSES = 8
PRELOADED = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "lockstep.verify.probe",
)


class Pooled(Runner):
    """A `Runner` that uses a pool of workers for each slot instead of `lockstep run`."""

    def __init__(self, line: ScriptLine, folder: Path, pools: SimpleQueue[WorkerPool]) -> None:
        super().__init__(line, folder, timeout_seconds=600, slots=pools.qsize())
        self._pools = pools

    def _result(self, job: Job) -> JobResult:
        trace = self._folder / job.name / "trace"
        trace.mkdir(parents=True)
        variables = job.request(trace).write(trace.parent)
        given = {
            "LOCKSTEP_PLAN": str(job.plan),
            "LOCKSTEP_RUN_DIR": str(self._folder / job.name / "run"),
            **variables,
        }
        began, status, said = time.monotonic(), 0, ""
        pool = self._pools.get()
        try:
            pool.run(
                job.processes,
                run_script,
                self.line.words,
                given,
                timeout_seconds=self._timeout_seconds,
            )
        except UserError as error:
            status, said = USER_ERROR_STATUS, str(error)
        except WorkerError as error:
            status, said = 1, str(error)
        finally:
            self._pools.put(pool)
        return JobResult(
            job=job,
            status=status,
            traces=[] if status else read_traces(trace),
            error=said,
            seconds=time.monotonic() - began,
        )


def run_script(line: Sequence[str], given: dict[str, str]) -> None:
    """Run the script in a worker, up to the step that ends it. Its output goes to a file beside its
    run directory."""
    sys.argv = list(line)
    environment = patch.dict(os.environ, given, LOCKSTEP_LAUNCHER="lockstep", OMP_NUM_THREADS="1")
    with (
        environment,
        open(given["LOCKSTEP_RUN_DIR"] + ".txt", "a") as said,
        redirect_stdout(said),
        redirect_stderr(said),
    ):
        try:
            runpy.run_path(line[0], run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise


@contextmanager
def pools(*, preload: Sequence[str] = ()) -> Iterator[SimpleQueue[WorkerPool]]:
    """Yield a pool for each core. `preload`: modules that scripts import and that take long to
    import."""
    made: SimpleQueue[WorkerPool] = SimpleQueue()
    with ExitStack() as stack:
        for _ in os.sched_getaffinity(0):
            made.put(
                stack.enter_context(WorkerPool(MOST_PROCESSES, preload=[*PRELOADED, *preload]))
            )
        yield made


def verified(
    line: Sequence[str], plans: Sequence[str], pools: SimpleQueue[WorkerPool], **options: Any
) -> Report:
    """Return the report on the script under `plans`. `options`: the other fields of
    `VerifyOptions`."""
    script = ScriptLine(line[0], line[1:])
    with tempfile.TemporaryDirectory() as folder, Pooled(script, Path(folder), pools) as runner:
        wanted = VerifyOptions(plans=parse_plans(plans, bitwise=False), **options)
        return Verification(script, wanted, runner).run()
