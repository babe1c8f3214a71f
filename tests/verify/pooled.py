"""`lockstep verify` whose runs are forked from processes that have imported torch: a third of the time, and the same in all else."""

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
from lockstep.testing.pool import WorkerPool
from lockstep.verify.records import read
from lockstep.verify.run import Ended, Runner, asked
from lockstep.verify.runs_to_take import Job, parse_plans
from lockstep.verify.verdict import Report, Verification, Wanted

MOST_PROCESSES = 8
PRELOADED = ("torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel", "lockstep.verify.probe")


class Pooled(Runner):
    """A `Runner` with a pool of workers for each of its slots, instead of `lockstep run`."""

    def __init__(self, script: Sequence[str], folder: Path, pools: SimpleQueue[WorkerPool]) -> None:
        super().__init__(script, folder, timeout_seconds=600, slots=pools.qsize())
        self._pools = pools

    def _ended(self, job: Job) -> Ended:
        trace = self._folder / job.name / "trace"
        trace.mkdir(parents=True)
        tracing = asked(job, trace).variables()
        given = {"LOCKSTEP_PLAN": str(job.plan), "LOCKSTEP_RUN_DIR": str(self._folder / job.name / "run"), **tracing}
        began, status, said = time.monotonic(), 0, ""
        pool = self._pools.get()
        try:
            pool.run(job.processes, run_script, self._script, given, timeout_seconds=self._timeout_seconds)
        except UserError as error:
            status, said = USER_ERROR_STATUS, str(error)
        except WorkerError as error:
            status, said = 1, str(error)
        finally:
            self._pools.put(pool)
        return Ended(job=job, status=status, traces=[] if status else read(trace), error=said, seconds=time.monotonic() - began)


def run_script(line: Sequence[str], given: dict[str, str]) -> None:
    """What a worker does: the script, up to the step that ends it. What it prints goes beside its run directory."""
    sys.argv = list(line)
    environment = patch.dict(os.environ, given, LOCKSTEP_LAUNCHER="lockstep", OMP_NUM_THREADS="1")
    with environment, open(given["LOCKSTEP_RUN_DIR"] + ".txt", "a") as said, redirect_stdout(said), redirect_stderr(said):
        try:
            runpy.run_path(line[0], run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise


@contextmanager
def pools(*, preload: Sequence[str] = ()) -> Iterator[SimpleQueue[WorkerPool]]:
    """One for each core. `preload`: modules that scripts import and that take long."""
    made: SimpleQueue[WorkerPool] = SimpleQueue()
    with ExitStack() as stack:
        for _ in os.sched_getaffinity(0):
            made.put(stack.enter_context(WorkerPool(MOST_PROCESSES, preload=[*PRELOADED, *preload])))
        yield made


def verified(line: Sequence[str], plans: Sequence[str], pools: SimpleQueue[WorkerPool], **wanted: Any) -> Report:
    """What `lockstep verify` says of the script under `plans`. `wanted`: the rest of `Wanted`."""
    with tempfile.TemporaryDirectory() as folder, Pooled(line, Path(folder), pools) as runner:
        return Verification(line[0], Wanted(plans=parse_plans(plans, bitwise=False), **wanted), runner).run()
