"""Random numbers that come twice are found, and modes that dropout and BatchNorm should not
have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from audit.given_records import backward, causes, given, modes, only, row, step

from lockstep.audit.checks.randomness import check_modes, check_randomness
from lockstep.audit.finding import AreaResult, Cause
from lockstep.evidence.rows import Row


def draws(*states: str) -> list[Row]:
    """Forwards of one batch each."""
    rows = []
    for number, state in enumerate(states):
        rows += [row("batch", grad=True), backward(number, state=f"{state}'", state_at_batch=state)]
    return [*rows, step()]


def foresees(*states: str) -> list[Row]:
    """Forwards with dropout in a script that fetches the next batch before the backward."""
    rows = [row("batch", grad=True)]
    for number, state in enumerate(states):
        rows += [
            row("batch", grad=True),
            backward(number, state=f"{state}'", state_at_batch=f"{state}'", drawn=state),
        ]
    return [*rows, step()]


def only_text(result: AreaResult) -> str:
    (text,) = result.unseen
    return text


def seed(value: int = 7, *, at: int = 0, line: str = "train.py:4") -> Row:
    return row("seed", line, seed=value, step=at)


def test_random_numbers_of_its_own_for_each_forward_are_right() -> None:
    result = check_randomness(given(draws("a", "b", "c"), draws("d", "e", "f")))
    assert not result.findings
    assert (
        result.right == "6 forwards drew random numbers, each its own, and no read of data drew any"
    )


def test_forwards_are_compared_where_the_next_batch_comes_before_the_backward() -> None:
    """And without a DataLoader."""
    assert (
        only(check_randomness(given(foresees("a", "b"), foresees("a", "b")))).cause
        is Cause.SAME_RANDOM_NUMBERS
    )
    assert check_randomness(given(foresees("a", "b"), foresees("c", "d"))).right.startswith(
        "4 forwards drew random numbers, each its own"
    )
    arrays = [row for row in foresees("a", "b") if row["kind"] != "batch"]
    assert only(check_randomness(given(arrays, arrays))).cause is Cause.SAME_RANDOM_NUMBERS


def test_draws_that_may_be_the_forwards_are_not_right() -> None:
    """Random numbers were drawn between two backwards, and no dropout was seen."""
    rows = [backward(), backward(1, state="b", other_draws=True), step()]
    result = check_randomness(given(rows, rows))
    assert (result.findings, result.right) == ([], "")
    assert "by the forward or for the data: which was not seen" in result.unseen[0]
    rows[1] |= {"state_at_batch": "b"}
    batches = [row("batch", grad=True), rows[0], row("batch", grad=True), *rows[1:]]
    assert check_randomness(given(batches)).right.startswith("none of 2 forwards drew"), (
        "the batch came after them"
    )


def test_ranks_that_draw_the_same_are_found_at_the_seed() -> None:
    finding = only(check_randomness(given([seed(), *draws("a", "b")], [seed(), *draws("a", "b")])))
    assert (finding.cause, finding.line) == (Cause.SAME_RANDOM_NUMBERS, "train.py:4")
    assert finding.evidence.startswith(
        "in 2 of 2 forwards ranks 0 and 1 drew the same random numbers"
    )
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
    assert result.right == "none of 8 forwards drew random numbers of torch"
    assert "random numbers of what makes the data are not seen" in only_text(result)


def test_a_seed_that_is_set_again_is_found_instead_of_its_consequences() -> None:
    rows = [
        seed(),
        *draws("a", "a", "a"),
        seed(3, at=1, line="train.py:14"),
        seed(3, at=2, line="train.py:14"),
    ]
    finding = only(check_randomness(given(rows, rows)))
    assert (finding.cause, finding.line) == (Cause.SEED_RESET, "train.py:14")
    assert (
        finding.evidence == "rank 0: 2 of 3 forwards drew the same random numbers as one before;"
        " torch.manual_seed(3) is called again and again"
    )
    assert only(check_randomness(given(draws("a", "a", "a")))).line == "train.py:19"
    assert not check_randomness(given(draws("a", "a", "b"))).findings


def test_two_backwards_of_one_forward_drew_its_numbers_once() -> None:
    """A GAN draws noise once, and takes a step of each of its models."""
    rows = []
    for number, state in enumerate(["a", "b", "c"]):
        both = {"state": f"{state}'", "state_at_batch": state}
        rows += [
            row("batch", grad=True),
            backward(2 * number, **both),
            backward(2 * number + 1, **both),
        ]
    assert not check_randomness(given(rows)).findings


# Reads of data


def fetch(
    worker: int | None = None, *, rank: int = 0, pid: int = 1, number: int = 1, **drawn: str
) -> Row:
    return {
        "kind": "fetch",
        "rank": rank,
        "worker": worker,
        "pid": pid,
        "number": number,
        "drawn": drawn,
    }


def begun(workers: int) -> Row:
    return row("pass", "train.py:10", workers=workers)


def fetched(*rows: Row, workers: int = 2) -> AreaResult:
    ranks = [
        [begun(0), begun(workers), *draws(f"rank {rank}", f"rank {rank} again")]
        for rank in range(2)
    ]
    return check_randomness(given(*ranks, fetches=rows))


def test_workers_that_draw_the_same_numbers_are_found() -> None:
    finding = only(
        fetched(fetch(0, pid=1, numpy="x", torch="a"), fetch(1, pid=2, numpy="x", torch="b"))
    )
    assert (finding.cause, finding.line) == (Cause.SAME_AUGMENTATION, "train.py:10")
    assert (
        finding.evidence
        == "rank 0's loader worker 0 and rank 0's loader worker 1 drew the same numbers of numpy"
    )


def test_workers_of_two_ranks_that_draw_the_same_numbers_are_found() -> None:
    finding = only(fetched(fetch(0, rank=0, pid=1, torch="x"), fetch(0, rank=1, pid=2, torch="x")))
    assert (
        finding.evidence
        == "rank 0's loader worker 0 and rank 1's loader worker 0 drew the same numbers of torch"
    )


def test_workers_that_draw_the_same_numbers_in_each_epoch_are_found() -> None:
    finding = only(fetched(fetch(0, pid=1, python="x"), fetch(0, pid=2, python="x")))
    assert (
        finding.evidence
        == "rank 0's loader worker 0 and rank 0's loader worker 0 (epoch 1) drew the same numbers"
        " of python"
    )


def test_ranks_that_read_in_their_own_process_are_compared() -> None:
    rows = [fetch(rank=0, torch="x"), fetch(rank=1, torch="x")]
    finding = only(fetched(*rows, workers=0))
    assert finding.evidence == "rank 0 and rank 1 drew the same numbers of torch"


def test_reads_that_draw_numbers_of_their_own_are_right() -> None:
    rows = [
        fetch(
            worker, rank=rank, pid=2 * rank + worker, number=number, numpy=f"{rank}{worker}{number}"
        )
        for rank in (0, 1)
        for worker in (0, 1)
        for number in (1, 2)
    ]
    result = fetched(*rows)
    assert not result.findings
    assert result.right.endswith("and 8 reads of data drew random numbers, each its own")


# Modes


def mode(
    *,
    training: bool,
    loader: int | None,
    what: str = "dropout",
    grad: bool = False,
    line: str = "train.py:25",
    number: int = 1,
) -> Row:
    return row(
        "mode", line, what=what, training=training, grad=grad, loader=loader, number=0, mode=number
    )


def check(rows: Sequence[Row]) -> AreaResult:
    return check_modes(given(rows))


def trains(number: int = 0, **counts: Any) -> list[Row]:
    return [backward(number), modes(number, **counts)]


def test_an_evaluation_in_train_mode_is_found() -> None:
    finding = only(check([*trains(train=1), mode(training=True, loader=1)]))
    assert (finding.cause, finding.line) == (Cause.EVALUATION_IN_TRAIN_MODE, "train.py:25")
    assert (
        finding.evidence == "rank 0: dropout ran in train mode on batches that no backward followed"
    )
    assert not check([mode(training=True, loader=1, grad=True), step()]).findings, (
        "nothing has been trained yet"
    )


def test_a_forward_with_gradients_is_an_evaluation_if_no_backward_comes_to_it() -> None:
    """If the next batch is fetched before the backward, the forward after an evaluation has an
    earlier batch."""
    forward = mode(training=True, loader=1, grad=True)
    assert causes(check([*trains(train=1), forward, step()])) == {Cause.EVALUATION_IN_TRAIN_MODE}
    reached = [*trains(train=1), forward, row("mode_reached", mode=1), step()]
    assert not check(reached).findings
    assert not check([*trains(train=1), step(), forward]).findings, (
        "its backward may have been about to come"
    )


def test_modes_as_they_should_be_are_right() -> None:
    training = mode(training=True, loader=0, grad=True)
    rows = [
        training,
        row("mode_reached", mode=1),
        *trains(train=1),
        mode(training=False, loader=1),
        *trains(1, train=1),
        step(),
    ]
    result = check(rows)
    assert (result.findings, result.unseen) == ([], [])
    assert (
        result.right
        == "dropout and BatchNorm: in 2 backwards they are in the mode of the first one, in 1"
        " passes without gradients in eval mode"
    )


def test_a_forward_in_train_mode_without_a_loader_and_a_backward_is_not_judged() -> None:
    result = check([mode(training=True, loader=None), *trains(train=1), step()])
    assert not result.findings
    assert "it may be an evaluation" in result.unseen[0]


def test_without_dropout_and_batch_norm_modes_are_not_seen() -> None:
    result = check([backward(), backward(1), step()])
    assert (result.right, len(result.unseen)) == ("", 2)


def test_training_that_goes_on_in_eval_mode_is_found() -> None:
    evaluation = mode(training=False, loader=0, grad=True, line="train.py:16")
    rows = [
        *trains(train=2),
        step(),
        mode(training=False, loader=1),
        evaluation,
        *trains(1, evaluation=2),
        step(1),
    ]
    finding = only(check(rows))
    assert (finding.cause, finding.line, finding.step) == (
        Cause.TRAINING_IN_EVAL_MODE,
        "train.py:16",
        1,
    )
    assert (
        finding.evidence
        == "rank 0: step 1 ran 2 calls of dropout and BatchNorm in eval mode, which the first step"
        " ran in train mode"
    )


def test_dropout_that_is_off_from_the_beginning_is_found() -> None:
    finding = only(check(trains(evaluation=2, off=2)))
    assert (finding.cause, finding.step) == (Cause.TRAINING_IN_EVAL_MODE, 0)


def test_layers_that_are_frozen_from_the_beginning_may_be_in_eval_mode() -> None:
    assert not check(
        [each for number in range(3) for each in trains(number, train=1, evaluation=3)]
    ).findings
    assert causes(check([*trains(train=4), *trains(1, train=1, evaluation=3)])) == {
        Cause.TRAINING_IN_EVAL_MODE
    }
