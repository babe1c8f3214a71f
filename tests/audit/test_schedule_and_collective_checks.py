"""Schedules that run too fast, collectives that do not match, batches that run out, and files that
all ranks write."""

from __future__ import annotations

import pytest
from audit.given_records import (
    backward,
    causes,
    collective,
    given,
    only,
    passes,
    row,
    schedule,
    step,
)

from lockstep.audit.checks.collectives import check_collectives, check_files, is_broken_collective
from lockstep.audit.checks.schedules import check_schedules
from lockstep.audit.finding import Cause
from lockstep.evidence.rows import Row


def scheduled(steps: int, calls: int, **changes: object) -> list[Row]:
    return [
        each for index in range(steps) for each in (step(index), *[schedule(**changes)] * calls)
    ]


# Schedules


def test_a_schedule_that_follows_the_steps_is_right() -> None:
    result = check_schedules(given(scheduled(6, 1), scheduled(6, 1)))
    assert not result.findings
    assert (
        result.right
        == "one learning rate on all ranks in 6 steps; no schedule is stepped more often than its"
        " optimizer"
    )


def test_a_schedule_of_several_steps_each_is_found() -> None:
    finding = only(check_schedules(given(scheduled(6, 4))))
    assert (finding.cause, finding.line) == (Cause.SCHEDULE_SPEED, "train.py:21")
    assert finding.evidence == "StepLR was stepped 4 times for each step of the optimizer"


def test_a_schedule_that_is_stepped_in_each_microbatch_is_found() -> None:
    """Before the step, as in a loop over microbatches."""
    rows = [
        each for index in range(5) for each in (schedule(), schedule(), schedule(), step(index))
    ]
    assert causes(check_schedules(given(rows))) == {Cause.SCHEDULE_SPEED}


def test_a_schedule_of_epochs_and_one_of_another_optimizer_are_right() -> None:
    rows = [*scheduled(5, 0), schedule(), *[step(index) for index in range(5, 10)], schedule()]
    assert not check_schedules(given(rows)).findings
    rows = [
        each
        for index in range(6)
        for each in (
            step(index),
            schedule(),
            step(index, optimizer=1),
            schedule(optimizer=1, schedule=2),
        )
    ]
    assert not check_schedules(given(rows)).findings


def test_two_schedules_of_one_optimizer_are_counted_apart() -> None:
    rows = [
        each
        for index in range(6)
        for each in (step(index), schedule(schedule=1), schedule(schedule=2))
    ]
    assert not check_schedules(given(rows)).findings


def test_few_steps_prove_no_speed() -> None:
    assert not check_schedules(given(scheduled(3, 4))).findings


def test_a_schedule_of_an_unknown_optimizer_is_said() -> None:
    assert check_schedules(given(scheduled(6, 4, optimizer=-1))).unseen == [
        "a schedule's optimizer was not seen"
    ]


@pytest.mark.parametrize(("horizon", "found"), [(12, False), (5, True), (None, False)])
def test_accelerates_steps_are_right_if_the_schedules_length_was_counted_so(
    horizon: int | None, found: bool
) -> None:
    rows = scheduled(6, 2, by="accelerate.scheduler", horizon=horizon)
    result = check_schedules(given(rows, rows))
    assert causes(result) == ({Cause.SCHEDULE_SPEED} if found else set())
    assert bool(result.unseen) == (horizon is None)
    if found:
        assert only(result).evidence.endswith("came to its end (after 5) in step 2 of 6")


def test_a_schedule_on_a_skipped_step_is_found() -> None:
    rows = [step(), schedule(), row("skipped_step", optimizer=0), schedule(line="train.py:22")]
    finding = only(check_schedules(given(rows)))
    assert (finding.cause, finding.line) == (Cause.SCHEDULE_ON_SKIPPED_STEP, "train.py:22")
    assert not check_schedules(
        given([step(), schedule(), row("skipped_step", optimizer=0), step(1), schedule()])
    ).findings
    assert not check_schedules(
        given([step(), row("skipped_step", optimizer=1), schedule()])
    ).findings


def test_learning_rates_that_differ_are_found_at_the_first_step() -> None:
    finding = only(
        check_schedules(given([step(), step(1, lr=[0.1])], [step(), step(1, lr=[0.025])]))
    )
    assert (finding.cause, finding.line, finding.step) == (
        Cause.LEARNING_RATES_DIFFER,
        "train.py:20",
        1,
    )
    assert finding.evidence == "step 1: 0.1, 0.025 on the ranks"
    assert (
        only(check_schedules(given([step(lr=[None])], [step()]))).evidence
        == "step 0: none, 0.1 on the ranks"
    )


# Collectives

GLOO = (
    "[rank1]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection"
    " closed by peer [127.0.0.1]:1234"
)


def collectives(*ranks: list[Row], hung: bool = False, error: str = "") -> set[Cause]:
    return causes(check_collectives(given(*ranks), hung=hung, error=error))


def test_the_same_collectives_on_all_ranks_are_right() -> None:
    rows = [collective(), collective("broadcast"), row("end")]
    result = check_collectives(given(rows, rows), hung=False, error="")
    assert not result.findings
    assert (
        result.right
        == "4 collectives, of Python code and of DistributedDataParallel, in the same order on all"
        " ranks"
    )


def forward(line: str = "train.py:17", *, broadcasts: bool = True) -> list[Row]:
    """A forward of DistributedDataParallel, whose next backward reduces."""
    name = "DistributedDataParallel's broadcast of buffers"
    return [
        *([collective(name, line, shape=[], operation="")] if broadcasts else []),
        row("ddp_forward", line, wrapper=1, ranks=[0, 1], reduces=True),
    ]


def test_a_forward_of_one_rank_that_broadcasts_buffers_is_found() -> None:
    """All later broadcasts and reductions of this rank are others than those of the other one."""
    end = row("end")
    trains = [*forward(), backward()]
    one = [*trains, *forward("train.py:30"), *trains, end]
    result = check_collectives(given(one, [*trains, *trains, end]), hung=False, error="")
    finding = only(result)
    assert (finding.cause, finding.line) == (Cause.COLLECTIVE_MISMATCH, "train.py:30")
    assert (
        finding.evidence
        == "collective 4: rank 0 DistributedDataParallel's broadcast of buffers at line 17, rank 1"
        " DistributedDataParallel's reduction of gradients at line 19; before it: rank 0"
        " DistributedDataParallel's broadcast of buffers at line 30, rank 1"
        " DistributedDataParallel's broadcast of buffers at line 17"
    )


def test_a_forward_of_one_rank_without_buffers_is_right() -> None:
    trains = [*forward(broadcasts=False), backward()]
    result = check_collectives(
        given([*forward("train.py:30", broadcasts=False), *trains], trains), hung=False, error=""
    )
    assert not result.findings
    assert result.right.startswith("2 collectives")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"name": "broadcast"},
            "collective 2: rank 0 all_reduce of 4 at line 30, rank 1 broadcast of 4 at line 30",
        ),
        (
            {"shape": [[2, 3], "float32"]},
            "collective 2: rank 0 all_reduce of 4 at line 30, rank 1 all_reduce of 2x3 at line 30",
        ),
        ({"shape": [[], "float32"]}, "rank 1 all_reduce of a number at line 30"),
        ({"shape": [[4], "float16"]}, "rank 1 all_reduce of 4 at line 30"),
        ({"operation": "MAX"}, "rank 1 all_reduce of 4 at line 30"),
    ],
)
def test_different_collectives_are_found(change: Row, text: str) -> None:
    finding = only(
        check_collectives(
            given([collective(), collective()], [collective(), collective(**change)]),
            hung=False,
            error="",
        )
    )
    assert (finding.cause, finding.line) == (Cause.COLLECTIVE_MISMATCH, "train.py:30")
    assert text in finding.evidence


@pytest.mark.parametrize(
    ("hung", "error", "ended"), [(True, "", False), (False, GLOO, False), (False, "", True)]
)
def test_a_collective_that_one_rank_alone_calls_is_found(
    hung: bool, error: str, ended: bool
) -> None:
    end = [row("end")] if ended else []
    records = given(
        [collective(), collective("barrier", "train.py:31", shape=[]), *end], [collective(), *end]
    )
    finding = only(check_collectives(records, hung=hung, error=error))
    assert (finding.cause, finding.line) == (Cause.COLLECTIVE_MISMATCH, "train.py:31")
    assert finding.evidence.endswith(
        "(2 on rank 0, 1 on rank 1); the first that not all called: barrier at line 31"
    )


def test_a_rank_that_is_only_behind_calls_the_same_collectives() -> None:
    assert collectives([collective(), collective()], [collective()]) == set()
    assert (
        collectives([collective(), collective()], [collective()], error="ValueError: boom") == set()
    )


def test_collectives_are_compared_within_their_group() -> None:
    pair = {"ranks": [0, 1]}
    rows = [
        [collective(ranks=[0, 2]), collective(**pair)],
        [collective(**pair)],
        [collective(ranks=[0, 2])],
    ]
    assert collectives(*rows, hung=False) == set()
    rows[2] = [collective("broadcast", ranks=[0, 2])]
    assert collectives(*rows) == {Cause.COLLECTIVE_MISMATCH}


def test_a_hang_without_another_cause_is_said_with_each_ranks_place() -> None:
    rows = [
        [step(), collective(line="train.py:33"), row("end", "")],
        [step(), collective(line="train.py:33")],
    ]
    finding = only(check_collectives(given(*rows), hung=True, error=""))
    assert (finding.cause, finding.line) == (Cause.HANG, "train.py:33")
    assert finding.evidence == "the ranks wait: rank 0 after 1 steps, ended; rank 1 after 1 steps"
    assert collectives(*rows) == set()


@pytest.mark.parametrize(("hung", "error"), [(True, ""), (False, GLOO)])
def test_a_rank_that_runs_out_of_batches_is_found(hung: bool, error: str) -> None:
    rows = [passes(range(12), complete=False), passes(range(8), line="train.py:10")]
    finding = only(check_collectives(given(*rows), hung=hung, error=error))
    assert (finding.cause, finding.line) == (Cause.UNEVEN_INPUTS, "train.py:10")
    assert finding.evidence == "pass 0 over the training data has batches: 3 on rank 0, 2 on rank 1"
    assert collectives(*rows) == set(), "it may go on"


def test_a_rank_that_ends_while_the_others_go_on_is_found() -> None:
    stays = [backward(0), step(), backward(1, line="train.py:20")]
    leaves = [backward(0), step(line="train.py:21")]
    finding = only(check_collectives(given(stays, leaves), hung=False, error=GLOO))
    assert (finding.cause, finding.line) == (Cause.RANK_LEFT, "train.py:21")
    assert finding.evidence.startswith(
        "rank 1 ended after 1 steps and 1 backwards; the others began backward 2"
    )
    assert (
        collectives(stays, leaves) == collectives(stays, leaves, error="ValueError: boom") == set()
    )
    assert collectives(stays, stays, error=GLOO) == set()


def test_under_join_ranks_take_different_numbers_of_steps() -> None:
    rows = [row("join"), *passes(range(12), complete=False)], passes(range(8), line="train.py:10")
    result = check_collectives(given(*rows), hung=False, error=GLOO)
    assert not result.findings
    assert "under Join ranks take different numbers of steps" in result.unseen[0]
    assert (
        list(given([step(), row("join"), step(1)], [step(), row("join"), step(1)]).together())[1:]
        == []
    )


def test_a_rank_that_is_only_behind_does_not_run_out_of_batches() -> None:
    assert collectives(
        passes(range(12), complete=False), passes(range(8), complete=False), hung=True
    ) == {Cause.HANG}


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (GLOO, True),
        ("torch.distributed.DistBackendError: NCCL error in: ...", True),
        ("RuntimeError: Timed out waiting 1800000ms for recv operation to complete", True),
        ("Traceback (most recent call last):\n  File 'train.py'\nValueError: boom", False),
        (GLOO + "\n[rank0]: ValueError: boom", False),
        ("", False),
        ("Killed", False),
    ],
)
def test_a_failure_of_its_own_is_told_from_one_that_a_peer_has_caused(
    error: str, broken: bool
) -> None:
    assert is_broken_collective(error) is broken


def test_on_one_process_there_is_nothing_to_compare() -> None:
    result = check_collectives(given([collective()]), hung=True, error="")
    assert (result.findings, result.right) == ([], "")


# Files


def save(path: str) -> Row:
    return row("save", "train.py:28", path=path, keys=[], step=1)


def test_a_file_that_several_ranks_write_is_found() -> None:
    finding = only(
        check_files(
            given([save("/tmp/a.pt")], [save("/tmp/b.pt")], [save("/tmp/a.pt"), save("/tmp/a.pt")])
        )
    )
    assert (finding.cause, finding.line, list(finding.names)) == (
        Cause.SAVED_BY_EVERY_RANK,
        "train.py:28",
        ["/tmp/a.pt"],
    )
    assert finding.evidence == "ranks 0, 2 wrote /tmp/a.pt"


def test_files_of_one_rank_each_are_right() -> None:
    result = check_files(given([save("/tmp/a.pt"), save("/tmp/a.pt")], [save("/tmp/b.pt")]))
    assert not result.findings
    assert result.right == "files that were saved, each by one rank: 2"
    assert check_files(given([], [])).right == ""
