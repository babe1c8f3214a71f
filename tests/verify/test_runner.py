"""Jobs as subprocesses: how many at once, how they end, and their environment.

Stand-ins for the script import nothing.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.options import LaunchOptions
from lockstep.plan import Plan
from lockstep.scripts.line import ScriptLine
from lockstep.verify.jobs import Job, TraceRequest
from lockstep.verify.runner import Runner


def job(name: str, processes: int = 1, **given: Any) -> Job:
    return Job(
        name=name, plan=Plan.parse(f"replicate={processes}"), processes=processes, steps=2, **given
    )


@pytest.fixture
def runner(tmp_path: Path) -> Callable[..., Runner]:
    def made(
        program: str,
        *,
        slots: int = 2,
        timeout_seconds: float = 30.0,
        progress: Callable[[str], None] = lambda _: None,
    ) -> Runner:
        found = Runner(
            ScriptLine("train.py"),
            tmp_path / "runs",
            timeout_seconds=timeout_seconds,
            slots=slots,
            progress=progress,
        )
        found._command = lambda job, run_dir: [sys.executable, "-c", program, job.name]  # type: ignore[method-assign]
        return found

    return made


def test_a_job_is_a_lockstep_run_of_the_script(tmp_path: Path) -> None:
    line = ScriptLine("package.train", ["--lr", "1"], is_module=True)
    with Runner(
        line, tmp_path, timeout_seconds=1, slots=1, launch=LaunchOptions(share_devices=True)
    ) as made:
        command = made._command(job("plan", 2), tmp_path / "run")
    options = {
        "--nproc": "2",
        "--plan": "replicate=2,numerics=fast",
        "--run-dir": str(tmp_path / "run"),
    }
    assert command[1:5] == ["-P", "-m", "lockstep", "run"]
    given = [word for word in command[5:12] if word != "--share-devices"]
    assert dict(zip(given[::2], given[1::2], strict=True)) == options
    assert command[12:] == ["-m", "package.train", "--lr", "1"]


def test_each_run_is_named_when_it_begins_and_counted_once_all_are_known(tmp_path: Path) -> None:
    begun: list[str] = []
    with Runner(
        ScriptLine("train.py"),
        tmp_path / "runs",
        timeout_seconds=30.0,
        slots=1,
        begins=begun.append,
    ) as made:
        made._command = lambda job, run_dir: [sys.executable, "-c", ""]  # type: ignore[method-assign]
        made.run([job("reference-fast")])
        with made.queueing_the_rest():
            rest = [
                job("plan-2", 2, uncompressed=True),
                job("plan-2-float64", 2, float64=True),
                job("perturbed-0", noise_seed=0),
            ]
            futures = [made.start(each) for each in rest]
        for future in futures:
            future.result()
    assert begun == [
        "run 1: one process",
        "run 2 of 4: replicate=2",
        "run 3 of 4: replicate=2, in float64",
        "run 4 of 4: one process, with noise",
    ]


def test_a_run_is_requested_to_trace_and_to_use_one_thread(
    runner: Callable[..., Runner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    with runner(program) as made:
        made.run([job("perturbed", noise_seed=2, microbatch=3)])
    seen = json.loads((tmp_path / "runs" / "perturbed" / "output.txt").read_text())
    trace = tmp_path / "runs" / "perturbed" / "trace"
    wanted = TraceRequest(folder=trace, steps=2, noise_seed=2, microbatch=3)
    assert TraceRequest.read(seen) == wanted
    assert seen["OMP_NUM_THREADS"] == "1"


def test_no_more_processes_run_at_once_than_there_are_slots(
    runner: Callable[..., Runner], tmp_path: Path
) -> None:
    program = "import sys, time; print(time.monotonic()); time.sleep(0.3); print(time.monotonic())"
    jobs = [job("a"), job("b"), job("c", 2), job("d", 5), job("e")]
    with runner(program, slots=2) as made:
        assert [ended.job.name for ended in made.run(jobs)] == list("abcde")
    spans = [
        (
            *map(float, (tmp_path / "runs" / each.name / "output.txt").read_text().split()),
            min(2, each.processes),
        )
        for each in jobs
    ]
    for now, *_ in spans:
        assert sum(size for start, stop, size in spans if start <= now < stop) <= 2


def test_a_run_that_times_out_is_ended(runner: Callable[..., Runner]) -> None:
    progress: list[str] = []
    program = (
        "import os, sys, time; print(os.getpid(), flush=True); print('stuck', file=sys.stderr,"
        " flush=True); time.sleep(1000)"
    )
    with runner(program, timeout_seconds=3.0, progress=progress.append) as made:
        (ended,) = made.run([job("slow")])
    pid, said = ended.error.splitlines()
    assert (ended.timed_out, ended.traces, said) == (True, [], "stuck")
    (told,) = progress
    assert re.fullmatch(r"slow: timed out, \d+ s", told)
    assert not psutil.pid_exists(int(pid))


def test_a_failed_run_has_its_last_output(runner: Callable[..., Runner]) -> None:
    program = (
        "import sys; print('on stdout'); [print(i, file=sys.stderr) for i in range(50) if 'loud' in"
        " sys.argv]; sys.exit(3)"
    )
    with runner(program) as made:
        loud, quiet = made.run([job("loud"), job("quiet")])
    assert (loud.status, loud.timed_out, quiet.error) == (3, False, "on stdout")
    assert loud.error.splitlines() == [str(number) for number in range(20, 50)]


def test_leaving_the_runner_ends_running_jobs_and_starts_no_more(
    runner: Callable[..., Runner], tmp_path: Path
) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    output = tmp_path / "runs" / "first" / "output.txt"
    with runner(program, slots=1) as made:
        futures = [made.start(job("first")), made.start(job("second"))]
        while not output.exists() or not output.read_text():
            time.sleep(0.01)
    assert not psutil.pid_exists(int(output.read_text()))
    assert not (tmp_path / "runs" / "second").exists()
    assert futures[0].result().status != 0
