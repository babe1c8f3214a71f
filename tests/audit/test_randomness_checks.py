"""Random numbers that come twice are found, and modes that dropout and BatchNorm should not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from audit.given_records import backward, calls, causes, given, only, row, step

from lockstep.audit.checks.area_result import AreaResult
from lockstep.audit.checks.randomness import check_modes, check_randomness
from lockstep.audit.finding import Cause
from lockstep.audit.records import Row


def draws(*states: str) -> list[Row]:
    """Forwards of one batch each."""
    rows = []
    for number, state in enumerate(states):
        rows += [row("batch"), backward(number, state=f"{state}'", state_at_batch=state)]
    return rows


def seed(value: int = 7, *, at: int = 0, line: str = "train.py:4") -> Row:
    return row("seed", line, seed=value, step=at)


def test_random_numbers_of_its_own_for_each_forward_are_right() -> None:
    result = check_randomness(given(draws("a", "b", "c"), draws("d", "e", "f")))
    assert not result.findings
    assert result.right == "6 forwards and 0 reads of data drew random numbers, each its own"


def test_ranks_that_draw_the_same_are_found_at_the_seed() -> None:
    finding = only(check_randomness(given([seed(), *draws("a", "b")], [seed(), *draws("a", "b")])))
    assert (finding.cause, finding.line) == (Cause.SAME_RANDOM_NUMBERS, "train.py:4")
    assert finding.evidence.startswith("in 2 of 2 forwards ranks 0 and 1 drew the same random numbers")
    assert finding.evidence.endswith("since torch.manual_seed(7) on both")
    assert only(check_randomness(given(draws("a", "b"), draws("a", "b")))).line == "train.py:19"


def test_the_ranks_that_draw_the_same_are_named() -> None:
    finding = only(check_randomness(given(draws("a", "b"), draws("c", "d"), draws("c", "d"))))
    assert "ranks 1 and 2" in finding.evidence


def test_one_equal_state_may_be_an_accident() -> None:
    assert not check_randomness(given(draws("a", "b"), draws("a", "c"))).findings


def test_forwards_that_draw_nothing_may_have_equal_states() -> None:
    same = [backward(number) for number in range(4)]
    result = check_randomness(given([step(), *same], [step(), *same]))
    assert not result.findings
    assert result.right == "no forward drew random numbers of torch, and no read of data any"


def test_a_seed_that_is_set_again_is_found_instead_of_its_consequences() -> None:
    rows = [seed(), *draws("a", "a", "a"), seed(3, at=1, line="train.py:14"), seed(3, at=2, line="train.py:14")]
    finding = only(check_randomness(given(rows, rows)))
    assert (finding.cause, finding.line) == (Cause.SEED_RESET, "train.py:14")
    assert finding.evidence == (
        "rank 0: 2 of 3 forwards drew the same random numbers as one before; torch.manual_seed(3) is called again and again"
    )
    assert only(check_randomness(given(draws("a", "a", "a")))).line == "train.py:19"
    assert not check_randomness(given(draws("a", "a", "b"))).findings


def test_two_backwards_of_one_forward_drew_its_numbers_once() -> None:
    """A GAN draws noise once, and takes a step of each of its models."""
    rows = []
    for number, state in enumerate(["a", "b", "c"]):
        both = {"state": f"{state}'", "state_at_batch": state}
        rows += [row("batch"), backward(2 * number, **both), backward(2 * number + 1, **both)]
    assert not check_randomness(given(rows)).findings


# Reads of data


def fetch(worker: int | None = None, *, rank: int = 0, pid: int = 1, number: int = 1, **drawn: str) -> Row:
    return {"kind": "fetch", "rank": rank, "worker": worker, "pid": pid, "number": number, "drawn": drawn}


def begun(workers: int) -> Row:
    return row("pass", "train.py:10", workers=workers)


def fetched(*rows: Row, workers: int = 2) -> AreaResult:
    return check_randomness(given([begun(0), begun(workers)], [begun(0), begun(workers)], fetches=rows))


def test_workers_that_draw_the_same_numbers_are_found() -> None:
    finding = only(fetched(fetch(0, pid=1, numpy="x", torch="a"), fetch(1, pid=2, numpy="x", torch="b")))
    assert (finding.cause, finding.line) == (Cause.SAME_AUGMENTATION, "train.py:10")
    assert finding.evidence == "rank 0's loader worker 0 and rank 0's loader worker 1 drew the same numbers of numpy"


def test_workers_of_two_ranks_that_draw_the_same_numbers_are_found() -> None:
    finding = only(fetched(fetch(0, rank=0, pid=1, torch="x"), fetch(0, rank=1, pid=2, torch="x")))
    assert finding.evidence == "rank 0's loader worker 0 and rank 1's loader worker 0 drew the same numbers of torch"


def test_workers_that_draw_the_same_numbers_in_each_epoch_are_found() -> None:
    finding = only(fetched(fetch(0, pid=1, python="x"), fetch(0, pid=2, python="x")))
    assert finding.evidence == "rank 0's loader worker 0 and rank 0's loader worker 0 (epoch 1) drew the same numbers of python"


def test_ranks_that_read_in_their_own_process_are_compared() -> None:
    rows = [fetch(rank=0, torch="x"), fetch(rank=1, torch="x")]
    finding = only(fetched(*rows, workers=0))
    assert finding.evidence == "rank 0 and rank 1 drew the same numbers of torch"


def test_reads_that_draw_numbers_of_their_own_are_right() -> None:
    rows = [
        fetch(worker, rank=rank, pid=2 * rank + worker, number=number, numpy=f"{rank}{worker}{number}")
        for rank in (0, 1)
        for worker in (0, 1)
        for number in (1, 2)
    ]
    result = fetched(*rows)
    assert not result.findings
    assert result.right == "0 forwards and 8 reads of data drew random numbers, each its own"


# Modes


def mode(*, training: bool, loader: int | None, what: str = "dropout", grad: bool = False, line: str = "train.py:25") -> Row:
    return row("mode", line, what=what, training=training, grad=grad, loader=loader, number=0)


def check(rows: Sequence[Row]) -> AreaResult:
    return check_modes(given(rows))


def trains(number: int = 0, **counts: Any) -> Row:
    return backward(number, calls=calls(**counts))


def test_an_evaluation_in_train_mode_is_found() -> None:
    finding = only(check([trains(train=1), mode(training=True, loader=1)]))
    assert (finding.cause, finding.line) == (Cause.EVALUATION_IN_TRAIN_MODE, "train.py:25")
    assert finding.evidence == "rank 0: dropout ran in train mode on batches that no backward followed"


def test_modes_as_they_should_be_are_right() -> None:
    result = check([mode(training=True, loader=0, grad=True), trains(train=1), mode(training=False, loader=1), trains(1, train=1)])
    assert not result.findings
    assert result.right
    assert not check([mode(training=True, loader=None), trains(train=1)]).findings, "no batch of a loader: what it is for is not known"
    assert not check([mode(training=True, loader=1)]).findings, "nothing has been trained yet"


def test_without_dropout_and_batch_norm_modes_change_nothing() -> None:
    assert check([trains(), trains(1)]).right == ""


def test_training_that_goes_on_in_eval_mode_is_found() -> None:
    evaluation = mode(training=False, loader=0, grad=True, line="train.py:16")
    finding = only(check([trains(train=2), step(), mode(training=False, loader=1), evaluation, trains(1, evaluation=2), step(1)]))
    assert (finding.cause, finding.line, finding.step) == (Cause.TRAINING_IN_EVAL_MODE, "train.py:16", 1)
    assert finding.evidence == "rank 0: step 1 ran 2 calls of dropout and BatchNorm in eval mode, which the first step ran in train mode"


def test_dropout_that_is_off_from_the_beginning_is_found() -> None:
    finding = only(check([trains(evaluation=2, off=2)]))
    assert (finding.cause, finding.step) == (Cause.TRAINING_IN_EVAL_MODE, 0)


def test_layers_that_are_frozen_from_the_beginning_may_be_in_eval_mode() -> None:
    assert not check([trains(number, train=1, evaluation=3) for number in range(3)]).findings
    assert causes(check([trains(train=4), trains(1, train=1, evaluation=3)])) == {Cause.TRAINING_IN_EVAL_MODE}
