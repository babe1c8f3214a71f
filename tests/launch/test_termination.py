"""Signals that ask a training process to save and end: the first is noted, the second ends it at
once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockstep.launch import termination as module
from lockstep.launch.failures import Ending
from lockstep.launch.termination import (
    INTERRUPTED,
    Interrupted,
    Preempted,
    Terminated,
    Termination,
    preempted,
)

Starter = Callable[..., Ending]

SAVES = """
from lockstep.launch.termination import Termination, preempted
from lockstep.launch.worker_files import note_options_read
note_options_read()
def train():
    with Termination() as termination:
        os.kill(os.getppid(), signal.{name})
        while termination.asked is None: time.sleep(0.001)
        termination.answer()
        raise preempted(termination.asked)
"""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before: dict[int, Any] = {number: signal.getsignal(number) for number in module.PREEMPTING}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    yield
    module._unanswered = None
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [("SIGTERM", 75, ""), ("SIGUSR1", 75, ""), ("SIGINT", 130, f"lockstep: {INTERRUPTED}\n")],
)
def test_workers_that_save_and_end_when_the_launcher_is_asked(
    run: Starter, name: str, status: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ending = run(SAVES.format(name=name) + "train()", count=1)
    assert (ending.status, ending.was_preempted) == (status, True)
    assert ending.report() == f"saved and ended ({name}); the same command resumes from there"
    assert capfd.readouterr().err == words


@pytest.mark.parametrize(("is_saved", "status"), [(True, 75), (False, 143)])
def test_a_signal_while_the_others_of_a_failed_one_save_lets_them_save(
    run: Starter, is_saved: bool, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    ending = run(
        f"""
        from lockstep.launch.worker_files import defer_kill, note_saved
        if rank == 1:
            while not os.path.exists("ready"): time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        def save(*_):
            with defer_kill():
                os.kill(os.getppid(), signal.SIGTERM)
                time.sleep(0.5)
                if {is_saved}: note_saved()
            sys.exit(143)
        signal.signal(signal.SIGTERM, save)
        open("ready", "w").close()
        while True: signal.pause()
        """,
        max_restarts=1,
    )
    assert (ending.status, ending.has_saved) == (status, is_saved)
    assert "restart 1 of 1" not in capfd.readouterr().err


def test_a_users_error_before_the_signal_is_not_called_a_request() -> None:
    from lockstep.launch.failures import WorkerFailure, failure_record

    failure = WorkerFailure(
        rank=0, time=0.0, returncode=1, record=failure_record(ValueError("boom"), None, 1)
    )
    ending = Ending(failures=[failure], signal=signal.SIGTERM, has_saved=True)
    assert (ending.was_preempted, ending.status) == (False, 143)


def test_the_first_interrupt_is_noted_and_says_what_a_second_one_does(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Termination() as termination:
        signal.raise_signal(signal.SIGINT)
        assert termination.asked == "SIGINT"
        assert capfd.readouterr().err.strip() == f"lockstep: {INTERRUPTED}"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        termination.answer()


def test_a_run_that_has_saved_is_ended_by_an_exception_that_scripts_may_catch() -> None:
    error = preempted("SIGINT")
    assert isinstance(error, KeyboardInterrupt)
    assert isinstance(error, Preempted)
    assert (error.code, error.reason) == (130, "SIGINT")
    other = preempted("SIGTERM")
    assert not isinstance(other, Interrupted)
    assert other.code == 75


def test_a_request_after_the_last_step_is_answered_by_the_next_training() -> None:
    with Termination():
        signal.raise_signal(signal.SIGTERM)
    with Termination() as second:
        assert second.asked == "SIGTERM"
        second.answer()
    with Termination() as third:
        assert third.asked is None


def test_a_request_amid_a_recovery_is_answered_after_it() -> None:
    with Termination() as first:
        signal.raise_signal(signal.SIGINT)
        first.hold(failed=True)
    with Termination() as second:
        assert second.asked == "SIGINT"
        second.answer()


def test_an_interrupt_after_the_last_step_is_raised_then() -> None:
    with pytest.raises(KeyboardInterrupt), Termination():
        signal.raise_signal(signal.SIGINT)


def test_a_run_with_nothing_to_save_ends_at_once() -> None:
    with pytest.raises(Terminated), Termination(saves=False):
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), Termination(saves=False):
        signal.raise_signal(signal.SIGINT)


def test_what_the_users_code_handles_is_left_alone() -> None:
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    with Termination() as termination:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert (termination.asked, seen) == (None, [1, 1])


def test_a_fork_that_a_step_may_need_leaves_the_first_interrupt_to_the_training_process() -> None:
    with Termination() as termination:
        if (child := os.fork()) == 0:
            try:
                signal.raise_signal(signal.SIGINT)
                try:
                    signal.raise_signal(signal.SIGINT)
                except KeyboardInterrupt:
                    os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert termination.asked is None
