"""What is recorded of a failure, which failure is the first, and what is said about it."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from containers import control_groups
from hypothesis import given, strategies as st
from processes import ran

from lockstep.base.errors import DataError, DivergenceError, RecipeError, exit_status
from lockstep.comm.segment import PeerDied, PeerStopped
from lockstep.launch.failures import (
    Ending,
    FailureRecord,
    WorkerFailure,
    error_details,
    failure_record,
    out_of_memory,
    read_crash,
    read_torch_record,
)
from lockstep.model.pipeline.boundary_discovery import StageFailed

GLOO = (
    "[pair.cc:553] Connection closed by peer [127.0.0.1]:41096. This is typically caused by a"
    " remote worker crashing."
)


def record(error: BaseException, time: float = 0.0) -> FailureRecord:
    try:
        raise error
    except BaseException as caught:
        made = failure_record(caught, caught.__traceback__, exit_status(caught))
    return FailureRecord(
        **{field: getattr(made, field) for field in FailureRecord.__slots__} | {"time": time}
    )


def failure(rank: int, time: float, error: BaseException) -> WorkerFailure:
    return WorkerFailure(
        rank=rank, time=time, returncode=exit_status(error), record=record(error, time)
    )


def killed(rank: int, time: float, number: signal.Signals, crash: str = "") -> WorkerFailure:
    return WorkerFailure(rank=rank, time=time, returncode=-number, crash=crash)


def test_memory_that_a_control_group_limits_is_named_where_a_process_was_killed() -> None:
    code = (
        "from lockstep.launch.failures import WorkerFailure; print(WorkerFailure(rank=1, time=0.0,"
        " returncode=-9).line)"
    )
    with control_groups({"memory.limit_in_bytes": str(3 << 28)}) as (_, join):
        ended = ran([*join, sys.executable, "-c", code])
    assert (
        ended.stdout
        == "rank 1 was killed by SIGKILL (often the kernel or the container, because memory ran"
        " out; the control group's limit is 0.75 GiB)\n"
    )


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.record"
    assert FailureRecord.read(path) is None
    written = record(DataError("the value 'é\ud800'; the rule; the remedy"))
    written.write(path)
    assert FailureRecord.read(path) == written
    assert [entry.name for entry in tmp_path.iterdir()] == ["rank-0.record"]


def test_a_record_says_what_was_raised_and_where() -> None:
    made = record(KeyError("name"))
    assert (made.kind, made.message, made.status, made.user_error, made.peer_lost) == (
        "builtins:KeyError",
        "'name'",
        1,
        False,
        False,
    )
    assert made.traceback.startswith("Traceback (most recent call last):\n")
    assert made.traceback.endswith("    raise error\nKeyError: 'name'\n")


def test_a_user_error_is_marked_and_ends_with_status_2() -> None:
    made = record(DataError("text"))
    assert (made.kind, made.user_error, made.status) == ("lockstep.base.errors:DataError", True, 2)


def test_a_failure_that_lockstep_names_is_shown_without_its_own_frames() -> None:
    error = DivergenceError("replicas differ after step 3: rank 1 differs")
    error.add_note("a note")
    made = record(error)
    assert (made.user_error, made.status) == (False, 1)
    failure = WorkerFailure(rank=1, time=0.0, returncode=1, record=made)
    assert Ending(failures=[failure]).report().splitlines() == [
        "rank 1 failed (exit status 1):",
        "DivergenceError: replicas differ after step 3: rank 1 differs",
        "a note",
    ]
    other = WorkerFailure(rank=0, time=1.0, returncode=1, record=made)
    assert Ending(failures=[failure, other]).report().splitlines()[-1] == (
        "The others: rank 0 failed (exit status 1) too with the same error."
    )
    elsewhere = replace(made, message=f"{made.message}\nin another tensor")
    other = replace(other, record=elsewhere)
    assert Ending(failures=[failure, other]).report().splitlines()[-1] == (
        "The others: rank 0 failed (exit status 1) too with DivergenceError: replicas differ after"
        " step 3: rank 1 differs."
    )


def test_an_error_whose_text_cannot_be_had_is_recorded() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert record(Mute()).message == "<Mute whose text cannot be had>"


class DistBackendError(RuntimeError):
    """torch's has this name; the record does not import torch."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        ConnectionResetError(),
        BrokenPipeError(),
        DistBackendError("NCCL error"),
        PeerDied([1], "rank 1: its process ended"),
        PeerStopped([1], "rank 1 closed the group"),
        StageFailed("rank 1 of the pipeline failed: ValueError: boom"),
    ],
)
def test_the_loss_of_a_peer_is_told_from_other_errors(error: Exception) -> None:
    assert record(error).peer_lost
    wrapped = ValueError("step 3 failed")
    wrapped.__cause__ = error
    assert record(wrapped).peer_lost
    assert not record(ValueError(GLOO)).peer_lost


def test_a_run_says_in_our_words_that_a_peer_was_lost_and_keeps_torchs_as_the_detail() -> None:
    assert error_details(RuntimeError(GLOO)) == {
        "error": (
            "a peer was lost: another process of this run ended, or the connection to it broke"
        ),
        "detail": f"RuntimeError: {GLOO}",
    }
    assert error_details(PeerDied([1], "rank 1: its process ended")) == {
        "error": "PeerDied: rank 1: its process ended"
    }
    assert error_details(KeyError("name")) == {"error": "KeyError: 'name'"}


def test_the_first_failure_is_the_earliest_that_is_not_the_loss_of_a_peer() -> None:
    lost = failure(0, 1.0, RuntimeError(GLOO))
    cause = failure(2, 2.0, ValueError("boom"))
    later = failure(1, 3.0, ValueError("boom"))
    assert Ending(failures=[lost, later, cause]).first is cause
    assert Ending(failures=[lost, killed(3, 2.5, signal.SIGKILL), later]).first == killed(
        3, 2.5, signal.SIGKILL
    )
    assert Ending(failures=[lost]).first is lost


@given(st.lists(st.tuples(st.floats(0, 9), st.booleans()), min_size=1, max_size=6))
def test_the_first_failure_is_the_same_in_whatever_order_they_are_seen(
    times: list[tuple[float, bool]],
) -> None:
    failures = [
        failure(rank, time, RuntimeError(GLOO) if lost else ValueError())
        for rank, (time, lost) in enumerate(times)
    ]
    first = Ending(failures=failures).first
    assert first is not None
    assert Ending(failures=failures[::-1]).first == first
    assert all(
        first.time <= other.time
        for other in failures
        if other.record is not None and not other.record.peer_lost
    ) or all(lost for _, lost in times)


def test_the_report_has_the_first_failure_on_top_and_one_line_about_the_others() -> None:
    ending = Ending(
        failures=[
            failure(0, 1.0, RuntimeError(GLOO)),
            failure(3, 2.0, ValueError("boom")),
            failure(5, 3.0, KeyError("name")),
        ],
        stopped=[1, 2, 4],
        finished=[6],
    )
    lines = ending.report().splitlines()
    assert lines[:2] == [
        "rank 3 failed (exit status 1), first of 3:",
        "Traceback (most recent call last):",
    ]
    assert lines[-2:] == [
        "ValueError: boom",
        (
            "The others: rank 0 lost a peer; rank 5 failed (exit status 1) too with KeyError:"
            " 'name'; ranks 1-2, 4 were stopped; rank 6 had finished."
        ),
    ]
    assert ending.report().count("Traceback") == 1
    assert ending.status == 1
    saved = replace(ending, has_saved=True, new_run_dir="runs/a").report().splitlines()
    assert saved == [
        *lines,
        "The last step is saved; the same command with --run-dir runs/a before the script resumes"
        " from it.",
    ]


def test_who_left_in_the_midst_of_the_run_without_an_error_is_named_first() -> None:
    left = Ending(
        failures=[
            failure(0, 1.0, PeerDied((1,), "rank 1 has ended")),
            failure(2, 1.1, RuntimeError(GLOO)),
        ],
        finished=[1],
    )
    assert (
        left.report().splitlines()[0]
        == "rank 1 ended with status 0 while others waited; did the script leave its loop, or exit,"
        " there alone? rank 0 failed (exit status 1), first of 2:"
    )
    assert left.status == 1
    other = Ending(failures=[failure(0, 1.0, ValueError("x"))], finished=[1])
    assert other.report().startswith("rank 0 failed (exit status 1):")


def test_the_report_of_a_user_error_is_its_message_alone() -> None:
    ending = Ending(
        failures=[failure(rank, float(rank), DataError("value; rule; remedy")) for rank in (1, 0)]
    )
    assert (ending.report(), ending.status) == ("DataError: value; rule; remedy", 2)


@pytest.mark.parametrize(
    ("number", "status", "text"),
    [
        (
            signal.SIGKILL,
            137,
            (
                "rank 1 was killed by SIGKILL (often the kernel or the container, because memory"
                " ran out)"
            ),
        ),
        (
            signal.SIGBUS,
            128 + signal.SIGBUS,
            "rank 1 was killed by SIGBUS (memory that could not be had; often /dev/shm is full)",
        ),
        (signal.SIGUSR1, 128 + signal.SIGUSR1, "rank 1 was killed by SIGUSR1"),
    ],
)
def test_a_death_by_signal_is_named_with_what_it_usually_means(
    number: signal.Signals, status: int, text: str
) -> None:
    ending = Ending(failures=[killed(1, 0.0, number)])
    assert (ending.report(), ending.status) == (text, status)


def test_the_python_stack_at_a_crash_is_shown_without_our_own_frames(tmp_path: Path) -> None:
    path = tmp_path / "crash"
    path.write_text(
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n "
        ' File "/home/me/train.py", line 3 in main\n  File "/lib/lockstep/launch/worker.py", line'
        ' 140 in _execute\n  File "<frozen runpy>", line 88 in _run_code\n\nExtension modules:'
        " numpy (total: 1)\n"
    )
    ending = Ending(failures=[killed(0, 0.0, signal.SIGSEGV, read_crash(path))])
    assert (
        ending.report()
        == "rank 0 was killed by SIGSEGV (a crash in native code):\nFatal Python error:"
        " Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File"
        ' "/home/me/train.py", line 3 in main'
    )
    assert read_crash(tmp_path / "none") == ""


def test_what_torch_recorded_is_read_and_anything_else_is_not(tmp_path: Path) -> None:
    path = tmp_path / "torch"
    assert read_torch_record(path, 1) is None
    path.write_text('{"message": "not the form we know"}')
    assert read_torch_record(path, 1) is None
    path.write_text(
        '{"message": {"message": "ValueError: boom", "extraInfo": {"py_callstack": "Traceback:'
        ' boom", "timestamp": "1"}}}'
    )
    read = read_torch_record(path, 3)
    assert read is not None
    assert (read.kind, read.message, read.traceback, read.status) == (
        ":ValueError",
        "boom",
        "Traceback: boom",
        3,
    )


def test_after_a_signal_to_the_launcher_failures_are_its_consequence() -> None:
    ending = Ending(
        failures=[failure(0, 1.0, RuntimeError(GLOO))], stopped=[1], signal=signal.SIGTERM
    )
    assert (ending.report(), ending.status) == ("stopped by SIGTERM; no worker is left", 143)


def test_a_process_that_the_kernel_holds_is_named() -> None:
    held = "rank 1 did not end, not even by SIGKILL: the kernel holds it"
    assert (
        Ending(stopped=[0, 1], unkillable=[1], signal=signal.SIGTERM).report()
        == f"stopped by SIGTERM; {held}"
    )
    ending = Ending(failures=[killed(0, 1.0, signal.SIGUSR1)], stopped=[1], unkillable=[1])
    assert (
        ending.report() == f"rank 0 was killed by SIGUSR1\nThe others: rank 1 was stopped; {held}."
    )


def test_a_run_in_the_launchers_own_directory_is_told_how_to_resume_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = Ending(preempted=[0, 1], signal=signal.SIGTERM)
    assert named.report() == "saved and ended (SIGTERM); the same command resumes from there"
    new = Ending(
        preempted=[0, 1], signal=signal.SIGTERM, new_run_dir=str(tmp_path / "runs" / "my run")
    )
    assert (
        new.report()
        == "saved and ended (SIGTERM); the same command with --run-dir 'runs/my run' before the"
        " script resumes from there"
    )
    assert new.status == 75
    elsewhere = Ending(preempted=[0], new_run_dir="/runs/a")
    assert elsewhere.report().endswith(
        "; the same command with --run-dir /runs/a before the script resumes from there"
    )


def test_nothing_is_said_where_nothing_failed() -> None:
    ending = Ending(finished=[0, 1])
    assert (ending.report(), ending.status, ending.first) == ("", 0, None)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (
            dist.DistBackendError(
                "NCCL error: unhandled cuda error. Last error: Failed to CUDA calloc async 608"
                " bytes"
            ),
            True,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("CUDA error: out of memory"), False),
        (StageFailed("rank 1 failed with OutOfMemoryError"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_errors_say_that_there_is_no_memory_left(error: Exception, is_one: bool) -> None:
    assert out_of_memory(error) == is_one
    wrapped = RecipeError("while it computed")
    wrapped.__cause__ = error
    assert out_of_memory(wrapped) == is_one


def test_what_torch_raises_on_a_cpu_is_one() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert out_of_memory(caught.value)
