"""Replicas that differ are found at their first difference, with the cause nearest to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from audit.given_records import (
    causes,
    collective,
    given,
    only,
    random_gradients,
    row,
    sketched,
    statistics,
    step,
    trained,
)
from hypothesis import given as drawn, settings, strategies as st

from lockstep.audit.checks.experts import divided
from lockstep.audit.checks.replicas import DRIFT_TOLERANCE, check_replicas
from lockstep.audit.finding import AreaResult, Cause
from lockstep.evidence.rows import Row

W = np.array([0.0, 0.0, 3.0, 0.0])  # sketches of one element are exact


def stepped(
    index: int = 0, *, before: Sequence[float] = W, after: Sequence[float] = W, **changes: object
) -> Row:
    values = {
        "before": {"w": sketched(before)},
        "parameters": {"w": sketched(after)},
        "applied": {"w": sketched([1.0, 1.0, 0.0, 0.0])},
    }
    return step(index, **values, **changes)


def test_equal_replicas_are_right() -> None:
    result = check_replicas(given([stepped(), stepped(1)], [stepped(), stepped(1)]))
    assert not result.findings
    assert result.right == "1 parameters are the same on all ranks after each of 2 steps"


@settings(max_examples=40)
@drawn(st.integers(2, 4), st.integers(0, 3), st.floats(1e-4, 1.0), st.integers(0, 2**32 - 1))
def test_the_rank_that_differs_does_not_matter(
    ranks: int, which: int, share: float, seed: int
) -> None:
    noise = np.random.default_rng(seed).standard_normal(4)
    rows = [[stepped(after=W + (rank == which % ranks) * share * noise)] for rank in range(ranks)]
    assert causes(check_replicas(given(*rows))) == {Cause.REPLICAS_DRIFT}


def test_rounding_is_no_drift() -> None:
    assert not check_replicas(
        given([stepped(after=W)], [stepped(after=W * (1 + DRIFT_TOLERANCE / 10))])
    ).findings


def test_initial_values_that_differ_are_found() -> None:
    finding = only(
        check_replicas(given([stepped(before=W, after=W)], [stepped(before=2 * W, after=2 * W)]))
    )
    assert (finding.cause, finding.line, finding.step, list(finding.names)) == (
        Cause.INITIAL_VALUES_DIFFER,
        "train.py:5",
        0,
        ["w"],
    )
    assert "before the first step w differs by 0.5 of its size" in finding.evidence


def test_initial_values_that_differ_are_blamed_on_the_seed() -> None:
    rows = [
        [
            row("seed", "train.py:3", seed=7, step=0),
            row("seed", "train.py:4", seed=rank, step=0),
            stepped(before=W * rank),
        ]
        for rank in (1, 2)
    ]
    assert only(check_replicas(given(*rows))).line == "train.py:4"
    rows = [
        [row("seed", "train.py:3", seed=7, step=0), stepped(before=W * rank)] for rank in (1, 2)
    ]
    assert only(check_replicas(given(*rows))).line == "train.py:5"


def test_a_drift_is_found_at_its_first_step() -> None:
    rows = [
        [stepped(), stepped(1, after=W * (1 + 0.1 * rank)), stepped(2, after=W * (1 + 0.2 * rank))]
        for rank in range(2)
    ]
    finding = only(check_replicas(given(*rows)))
    assert (finding.cause, finding.line, finding.step, list(finding.names)) == (
        Cause.REPLICAS_DRIFT,
        "train.py:20",
        1,
        ["w"],
    )
    assert finding.evidence.startswith("after step 1 w differs by 0.09")


def test_learning_rates_that_differ_are_said_elsewhere() -> None:
    assert not check_replicas(given([stepped(lr=[0.1])], [stepped(after=2 * W, lr=[0.2])])).findings


def test_optimizer_states_that_differ_are_found() -> None:
    rows = [
        [stepped(2, after=W * (1 + rank), states={"w/exp_avg": sketched(W * (1 + rank))})]
        for rank in range(2)
    ]
    finding = only(check_replicas(given(*rows)))
    assert (finding.cause, finding.step, list(finding.names)) == (
        Cause.OPTIMIZER_STATE_DIFFERS,
        2,
        ["w/exp_avg"],
    )
    assert (
        finding.evidence
        == "step 2: the gradients agree, and the optimizer's w/exp_avg differs by 0.5 of its size"
    )
    for each in rows:
        each[0]["states"] = {"w/exp_avg": sketched(W)}
    assert causes(check_replicas(given(*rows))) == {Cause.REPLICAS_DRIFT}


def test_shards_are_not_replicas() -> None:
    rows = [[stepped(before=W * rank, after=W * rank, sharded=["w"])] for rank in (1, 2)]
    assert not check_replicas(given(*rows)).findings


def test_an_optimizer_that_needs_whole_tensors_is_found() -> None:
    rows = [[stepped(sharded=["w"], shards_right=right, type="Muon")] for right in (True, False)]
    finding = only(check_replicas(given(*rows)))
    assert (finding.cause, finding.line, list(finding.names)) == (
        Cause.OPTIMIZER_NEEDS_WHOLE_TENSORS,
        "train.py:20",
        ["w"],
    )
    assert finding.evidence.startswith(
        "Muon updates an element by the other elements of its tensor, and 1 of them are sharded: w"
    )
    for right in (True, None):
        assert not check_replicas(
            given(*[[stepped(sharded=["w"], shards_right=right)]] * 2)
        ).findings


def experts(*, exchanged: bool, own: bool) -> list[list[Row]]:
    """Each rank has an expert of its own, which no reduction sees, or one that should be the
    same."""
    added = random_gradients(1, ranks=2, backwards=1, names=2)
    mean = (added[0][0]["layer0.weight"] + added[1][0]["layer0.weight"]) / 2
    expert = (
        [each[0]["layer1.weight"] for each in added]
        if own
        else [(added[0][0]["layer1.weight"] + added[1][0]["layer1.weight"]) / 2] * 2
    )
    rows = trained(added, [{"layer0.weight": mean, "layer1.weight": each} for each in expert])
    for rank, each in enumerate(rows):
        each["before"] = each["parameters"] = {
            "layer0.weight": sketched(W),
            "layer1.weight": sketched(W * (1 + rank)),
        }
    return [[*([collective("all_to_all_single")] if exchanged else []), each] for each in rows]


def replicas(records: list[list[Row]]) -> AreaResult:
    return check_replicas(divided(given(*records)).others)


def test_experts_of_one_rank_each_are_meant_to_differ() -> None:
    result = replicas(experts(exchanged=True, own=True))
    assert not result.findings
    assert result.right.startswith("1 parameters are the same")


@pytest.mark.parametrize(("exchanged", "own"), [(False, True), (True, False)])
def test_what_is_no_expert_is_a_replica(exchanged: bool, own: bool) -> None:
    result = replicas(experts(exchanged=exchanged, own=own))
    assert causes(result) == {Cause.INITIAL_VALUES_DIFFER}


# Buffers


def test_running_statistics_that_differ_are_found_where_they_are_used() -> None:
    rows = [
        [
            row("ddp", "train.py:8", broadcast_buffers=False),
            statistics(W * (1 + rank), training=False, grad=False),
            stepped(),
        ]
        for rank in range(2)
    ]
    finding = only(check_replicas(given(*rows)))
    assert (finding.cause, finding.line) == (Cause.BUFFERS_DIFFER, "train.py:8")
    assert (
        finding.evidence
        == "in an evaluation BatchNorm's running statistics differ by 0.5 of their size from rank"
        " to rank"
    )
    rows = [[statistics(W * (1 + rank)), stepped()] for rank in range(2)]
    assert only(check_replicas(given(*rows))).line == "train.py:16"


def test_running_statistics_that_are_the_same_when_they_are_used_are_right() -> None:
    """DistributedDataParallel sends rank 0's before each forward: after it they differ until the
    next."""
    rows = [
        [statistics(W), stepped(buffers={"bn.running_mean": sketched(W * (1 + rank))})]
        for rank in range(2)
    ]
    assert not check_replicas(given(*rows)).findings


def test_statistics_of_other_calls_are_not_compared() -> None:
    rows = [
        [statistics(W, call=1), statistics(2 * W, call=2), stepped()],
        [statistics(2 * W, call=2), statistics(W, call=1), stepped()],
    ]
    assert not check_replicas(given(*rows)).findings


def test_a_buffer_that_differs_is_found_unless_it_is_broadcast() -> None:
    rows = [
        [
            row("ddp", "train.py:8", broadcast_buffers=False),
            stepped(buffers={"codebook": sketched(W * (1 + rank))}),
        ]
        for rank in range(2)
    ]
    finding = only(check_replicas(given(*rows)))
    assert (finding.cause, finding.step, list(finding.names)) == (
        Cause.BUFFERS_DIFFER,
        0,
        ["codebook"],
    )
    for each in rows:
        each[0]["broadcast_buffers"] = True
    assert not check_replicas(given(*rows)).findings


def test_on_one_process_there_are_no_replicas() -> None:
    result = check_replicas(given([stepped()]))
    assert (result.findings, result.right, result.unseen) == (
        [],
        "",
        ["one process has no replica"],
    )
