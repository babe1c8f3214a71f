"""`ls.spawn`: a function in several processes, its result and its errors. Only one of these imports
torch in the processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
from processes import ran
from scripts import functions

import lockstep as ls
from lockstep.base import accelerator
from lockstep.base.errors import DataError, LaunchError, PlanError, WorkerError
from lockstep.base.system import PASSED_ON
from lockstep.launch import spawn as module


def test_the_result_is_what_rank_0_returned_and_arguments_may_be_queues() -> None:
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    result = ls.spawn(functions.double, nproc=3, args=(functions.Point(3), queue))
    assert (type(result), result.x) == (functions.Point, 6)
    assert sorted(queue.get() for _ in range(3)) == [0, 1, 2]
    queue.close()


def test_processes_have_their_variables_from_the_start_and_this_one_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    before = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in PASSED_ON}
    found = ls.spawn(
        functions.describe_process, nproc=2, plan="replicate=2,numerics=bitwise", run_dir="runs/a"
    )
    assert found == {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCKSTEP_LAUNCHER": "spawn",
        "LOCKSTEP_PLAN": "replicate=2,numerics=bitwise",
        "LOCKSTEP_RUN_DIR": os.path.abspath("runs/a"),
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
        "rank at import": 0,
        "blocked": set(),
        "leads a session": True,
        "torch": False,
    }
    assert dict(os.environ) == before
    assert {number: signal.getsignal(number) for number in PASSED_ON} == handlers


def test_a_new_process_runs_nothing_that_is_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pickle", "runpy", "socket"):
        (tmp_path / f"{name}.py").write_text("open('was-run', 'w').close(); raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    # Children of the function search as they would without lockstep.
    assert ls.spawn(functions.searches_safely, nproc=1) == (None, "False")
    assert not (tmp_path / "was-run").exists()


def test_the_first_process_runs_nothing_that_is_in_the_working_directory(tmp_path: Path) -> None:
    """multiprocessing starts its resource tracker with it."""
    here, script = tmp_path / "here", tmp_path / "script.py"
    here.mkdir()
    for name in ("signal", "threading", "warnings"):
        (here / f"{name}.py").write_text("open('was-run', 'w').close(); raise SystemExit(1)")
    text = "import lockstep as ls\nfrom scripts import functions\n"
    script.write_text(
        f"{text}if __name__ == '__main__':\n    print(ls.spawn(functions.searches_safely,"
        " nproc=1))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = ran([sys.executable, str(script)], cwd=here, env=environment)
    assert (done.returncode, done.stdout) == (0, "(None, 'False')\n"), done.stderr
    assert not (here / "was-run").exists()


def test_signals_wait_while_a_process_starts_until_it_has_handlers_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starter = module._Starter("fork", functions.double, ())
    blocked: list[set[Any]] = []

    class Process(multiprocessing.Process):
        def start(self) -> None:
            blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    monkeypatch.setattr(
        starter, "_context", SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Process)
    )
    starter.start({"RANK": "0"})
    starter.close()
    assert blocked == [set(PASSED_ON)]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_the_resource_tracker_of_this_process_is_no_part_of_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    starter = module._Starter("spawn", functions.double, ())
    seen: list[bool] = []

    class Process(multiprocessing.Process):
        def start(self) -> None:
            seen.append("RANK" in os.environ)

    monkeypatch.setattr(
        module.resource_tracker, "ensure_running", lambda: seen.append("RANK" in os.environ)
    )
    monkeypatch.setattr(
        starter, "_context", SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Process)
    )
    starter.start({"RANK": "0"})
    starter.close()
    assert seen == [False, True]


def test_the_number_of_processes_comes_from_the_plan_where_it_says_one(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ls.spawn(functions.print_line, plan="replicate=3")
    assert sorted(capfd.readouterr().out.splitlines()) == [
        f'{{"rank": {rank}}}' for rank in range(3)
    ]


def test_a_result_larger_than_a_pipe_arrives() -> None:
    assert len(ls.spawn(functions.large, nproc=1)) == 4 << 20


def test_a_gloo_group_that_nobody_takes_down_does_no_harm() -> None:
    assert ls.spawn(functions.all_reduced, nproc=2) == 3.0


def test_an_error_is_a_worker_error_with_the_first_failing_ranks_traceback() -> None:
    with pytest.raises(WorkerError) as failed:
        ls.spawn(functions.fail, nproc=2, args=("error",))
    lines = str(failed.value).splitlines()
    assert lines[:2] == ["rank 1 failed (exit status 1):", "Traceback (most recent call last):"]
    assert lines[2].startswith(f'  File "{functions.__file__}", line ')
    assert lines[-2:] == ["ValueError: boom", "The others: rank 0 was stopped."]


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("user error", DataError, "value; rule; remedy"),
        ("own user error", functions.Refused, "value; rule"),
    ],
)
def test_a_user_error_is_raised_as_its_own_type_with_its_text(
    how: str, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as failed:
        ls.spawn(functions.fail, nproc=2, args=(how,))
    assert (type(failed.value), str(failed.value)) == (kind, text)


def test_an_exit_status_and_a_death_by_signal_are_worker_errors() -> None:
    with pytest.raises(
        WorkerError, match=r"^rank 1 failed \(exit status 3\)\nThe others: rank 0 was stopped\.$"
    ):
        ls.spawn(functions.fail, nproc=2, args=("exit",))
    with pytest.raises(
        WorkerError,
        match=(
            r"^rank 1 was killed by SIGKILL \(often the kernel or the container, because memory ran"
            r" out\)"
        ),
    ):
        ls.spawn(functions.killed, nproc=2)


def test_an_interrupt_ends_all_processes_and_is_raised_here() -> None:
    with pytest.raises(KeyboardInterrupt):
        ls.spawn(functions.fail, nproc=2, args=("interrupt",))


def test_a_signal_reaches_the_handler_that_was_there_after_the_processes_ended() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with pytest.raises(WorkerError, match=r"^stopped by SIGTERM; no worker is left$"):
            ls.spawn(functions.fail, nproc=2, args=("terminate",))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (
            {"nproc": 0},
            LaunchError,
            (
                "nproc=0; it takes a whole number of processes, at least 1, or auto (from the "
                "plan, else one per GPU, else 1), or gpu (one per GPU); give one of those"
            ),
        ),
        (
            {"nproc": 3, "plan": "replicate=2"},
            PlanError,
            (
                "plan 'replicate=2,numerics=fast' with 3 processes; the axes multiply to 2, and"
                " must multiply to the number of processes; change the plan, or the number of"
                " processes to 2"
            ),
        ),
        (
            {"nproc": 1, "plan": "replicat=2"},
            PlanError,
            "'replicat' in plan 'replicat=2' is unknown; the known keys are ",
        ),
        (
            {"nproc": 1, "args": (lambda: 3,)},
            LaunchError,
            (
                "the function or its arguments cannot be sent to another process (PicklingError:"
                " Can't pickle "
            ),
        ),
    ],
)
def test_what_cannot_be_started_is_refused(
    given: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as refused:
        ls.spawn(functions.double, **given)
    assert str(refused.value).startswith(text)


def test_a_result_that_does_not_pickle_is_refused() -> None:
    with pytest.raises(LaunchError) as refused:
        ls.spawn(functions.unpicklable, nproc=1)
    assert str(refused.value).startswith(
        "the function returned a function that cannot be sent back (AttributeError: Can't "
    )
    assert str(refused.value).endswith(
        "the result of rank 0 is pickled; return something that pickles, or write it to a file"
    )


@pytest.mark.parametrize("variable", ["LOCKSTEP_LAUNCHER", "TORCHELASTIC_RUN_ID"])
def test_a_process_that_a_launcher_started_does_not_start_more(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "x")
    with pytest.raises(LaunchError) as refused:
        ls.spawn(functions.print_line, nproc=1)
    assert (
        str(refused.value)
        == f"ls.spawn in a process that a launcher started ({variable}=x); each of its processes"
        " would start more; call the function itself here, or start the script with python"
    )


def test_a_fork_is_refused_once_a_gpu_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def main() -> None:
        pass

    main.__module__ = "__main__"
    monkeypatch.setattr(module.sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    assert module._start_method(main) == "fork"
    monkeypatch.setattr(accelerator, "is_initialized", lambda: True)
    with pytest.raises(
        LaunchError,
        match=(
            r"a fork cannot use it after that; restart and call ls.spawn before anything touches"
            r" a GPU"
        ),
    ):
        module._start_method(main)
    assert module._start_method(functions.double) == "spawn"


@pytest.mark.command
def test_a_script_that_calls_it_unguarded_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import lockstep as ls\ndef main(): return 1\nls.spawn(main, nproc=2)\n")
    ended = ran([sys.executable, str(path)])
    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        ended.stderr
        == "lockstep: LaunchError: ls.spawn at the top level of a script; each process that it"
        " starts imports the script, and comes to ls.spawn again; put the call under `if"
        ' __name__ == "__main__":`\n'
    )


@pytest.mark.command
def test_a_notebooks_functions_run_in_forks_that_leave_its_own_things_alone(tmp_path: Path) -> None:
    # Torch has used its threads here before, and an output file is open, and an atexit function
    # registered.
    source = """
        import atexit, os, signal, sys, torch
        import lockstep as ls
        from lockstep.base.errors import WorkerError
        torch.set_num_threads(2)
        matrix = torch.ones(700, 700)
        (matrix @ matrix).exp().sum()
        notes = open(sys.argv[1], "w")
        notes.write("once")
        atexit.register(lambda: print("parent atexit"))
        class Result: pass
        def main(fails):
            import torch.distributed as dist
            dist.init_process_group("gloo")
            (matrix @ matrix).exp().sum()
            result = Result()
            result.value = torch.tensor(float(dist.get_rank() + 1))
            dist.all_reduce(result.value)
            if fails and dist.get_rank() == 1:
                atexit.register(lambda: print("child atexit"))
                raise ValueError("boom")
            dist.barrier()
            return result, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], signal.getsignal(signal.SIGTERM)
        result, *others = ls.spawn(main, nproc=2, args=(False,))
        print(type(result) is Result, result.value.item(), *others)
        try:
            ls.spawn(main, nproc=2, args=(True,))
        except WorkerError as error:
            print(str(error).splitlines()[-2])
        """
    line = [sys.executable, "-", str(tmp_path / "notes")]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    ended = ran(line, input=dedent(source), env=environment)
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == [
        "True 3.0 1 1 0",
        "child atexit",
        "ValueError: boom",
        "parent atexit",
    ]
    assert (ended.returncode, (tmp_path / "notes").read_text()) == (0, "once")
