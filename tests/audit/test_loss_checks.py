"""Means of means and wrong scales are told from the counts and the weights of the calls of loss
functions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
from audit.given_records import (
    Gradients,
    backward,
    causes,
    collective,
    given,
    loss,
    mean_over_ranks,
    only,
    random_gradients,
    scaled,
    step,
    total,
    trained,
)
from hypothesis import assume, given as drawn, settings, strategies as st

from lockstep.audit.checks.losses import LEAST_ERROR, check_losses
from lockstep.audit.finding import AreaResult, Cause
from lockstep.evidence.rows import Row

counts = st.lists(st.lists(st.integers(1, 50), min_size=4, max_size=4), min_size=4, max_size=4)


def weighed(
    added: Sequence[Sequence[Gradients]],
    of: Sequence[Sequence[float]],
    *,
    weight: float,
    factor: float | None = None,
) -> list[list[Row]]:
    """A step in which each backward had a loss over so many targets, and weighs it so. `factor`: of
    the reduction."""
    means = (
        mean_over_ranks(added)
        if factor is None
        else [scaled(each, factor * len(added)) for each in mean_over_ranks(added)]
    )
    rows = trained(added, means)
    ranks: list[list[Row]] = []
    for each, numbers in zip(rows, of, strict=True):
        each["losses"] = [loss(number, count, weight) for number, count in enumerate(numbers)]
        ranks.append(
            [
                *(
                    backward(number, line=f"train.py:{40 + number}")
                    for number in range(len(numbers))
                ),
                each,
            ]
        )
    return ranks


def check(*ranks: Sequence[Row]) -> AreaResult:
    return check_losses(given(*ranks))


@settings(max_examples=60)
@drawn(st.integers(0, 2**32 - 1), st.integers(2, 4), st.integers(1, 4), counts)
def test_the_error_of_a_mean_of_means_is_the_true_one(
    seed: int, ranks: int, backwards: int, numbers: list[list[int]]
) -> None:
    """Within the accuracy of sketches of 8 parameters."""
    of = [each[:backwards] for each in numbers[:ranks]]
    means = random_gradients(seed, ranks=ranks, backwards=backwards, names=8, size=48)
    added = [[scaled(each, 1 / backwards) for each in rank] for rank in means]
    targets = sum(sum(each) for each in of)
    right = total(
        [
            scaled(mean, count / targets)
            for rank, each in zip(means, of, strict=True)
            for mean, count in zip(rank, each, strict=True)
        ]
    )
    applied = mean_over_ranks(added)[0]
    error = np.sqrt(
        sum(np.sum((applied[name] - right[name]) ** 2) for name in right)
        / sum(np.sum(each**2) for each in right.values())
    )
    assume(not LEAST_ERROR / 2 < error < LEAST_ERROR * 2)
    result = check(*weighed(added, of, weight=1 / backwards))
    if error < LEAST_ERROR:
        assert not result.findings
        return
    finding = only(result)
    assert (finding.cause, finding.line, finding.step) == (Cause.MEAN_OF_MEANS, "train.py:17", 0)
    said = re.search(r"off by ([\d.e-]+) of its size", finding.evidence)
    assert said is not None
    assert 0.55 * error < float(said[1]) < 1.7 * error
    least, most = min(map(min, of)), max(map(max, of))
    assert f"between {least} and {most} targets a microbatch" in finding.evidence


@settings(max_examples=40)
@drawn(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), counts)
def test_one_weight_for_all_targets_is_right(
    seed: int, ranks: int, backwards: int, numbers: list[list[int]]
) -> None:
    """Sums over all targets, divided by their number in the step: whatever the microbatches
    hold."""
    of = [each[:backwards] for each in numbers[:ranks]]
    rows = weighed(
        random_gradients(seed, ranks=ranks, backwards=backwards),
        of,
        weight=1 / sum(map(sum, of)),
        factor=1.0,
    )
    for rank in rows:
        for each in rank[-1]["losses"]:
            each["reduction"] = "sum"
    result = check(*rows)
    assert not result.findings
    assert (
        result.right
        == "in 1 steps all targets have one weight; in 1 the weights of a step add up to 1"
    )


def test_even_microbatches_need_no_weights() -> None:
    added = random_gradients(1, ranks=2, backwards=2)
    assert not check(*weighed(added, [[8, 8], [8, 8]], weight=0.5)).findings


def test_a_mean_of_means_is_found_on_one_process() -> None:
    added = random_gradients(1, ranks=1, backwards=2)
    finding = only(check(*weighed(added, [[2, 40]], weight=0.5)))
    assert finding.cause is Cause.MEAN_OF_MEANS
    assert "a target counts up to 20 times as much as another" in finding.evidence


def test_a_loss_that_is_not_a_number_has_no_weights() -> None:
    added = random_gradients(1, ranks=1, backwards=2)
    assert not check(*weighed(added, [[2, 40]], weight=math.nan)).findings


def test_a_mask_of_the_scripts_own_is_weighed() -> None:
    """`reduction="none"`, a product with a mask, a mean over the kept: the weights are in the
    gradient."""
    added = random_gradients(1, ranks=1, backwards=2)
    (rank,) = weighed(added, [[2, 40]], weight=0.5)
    for each in rank[-1]["losses"]:
        low = 0.5 / each["count"]
        each |= {"reduction": "none", "weights": [low, low]}
        del each["weight"]
    assert causes(check(rank)) == {Cause.MEAN_OF_MEANS}
    for each in rank[-1]["losses"]:
        each["weights"] = [0.1, 0.1]
    assert not check(rank).findings
    for each in rank[-1]["losses"]:
        each["weights"] = [0.1, 0.4]  # of each sample its own: nothing can be said
    assert check(rank).unseen


def test_two_loss_functions_are_weighed_each_for_itself() -> None:
    added = random_gradients(1, ranks=1, backwards=2)
    (rank,) = weighed(added, [[8, 8]], weight=0.5)
    rank[-1]["losses"] += [
        loss(number, count, 0.5, line="train.py:18") for number, count in enumerate((3, 30))
    ]
    finding = only(check(rank))
    assert (finding.cause, finding.line) == (Cause.MEAN_OF_MEANS, "train.py:18")
    assert "off by" not in finding.evidence


# Scale


@pytest.mark.parametrize(
    ("ranks", "backwards", "weight", "factor", "text"),
    [
        (
            1,
            4,
            1.0,
            None,
            (
                "adds up the means of 4 microbatches and does not divide: the gradient is 4 times"
                " too large"
            ),
        ),
        (
            2,
            4,
            1.0,
            None,
            (
                "adds up the means of 4 microbatches and does not divide: the gradient is 4 times"
                " too large"
            ),
        ),
        (
            2,
            1,
            1.0,
            1.0,
            (
                "the 2 ranks' gradients are added up, and not divided: the gradient is 2 times too"
                " large"
            ),
        ),
        (
            3,
            2,
            0.5,
            1.0,
            (
                "the 3 ranks' gradients are added up, and not divided: the gradient is 3 times too"
                " large"
            ),
        ),
        (
            2,
            4,
            1.0,
            1.0,
            "the gradient is 8 times too large: 2 ranks and 4 microbatches are added up",
        ),
    ],
)
def test_a_scale_that_is_too_large_is_found(
    ranks: int, backwards: int, weight: float, factor: float | None, text: str
) -> None:
    added = random_gradients(1, ranks=ranks, backwards=backwards)
    finding = only(check(*weighed(added, [[8] * backwards] * ranks, weight=weight, factor=factor)))
    assert (finding.cause, finding.line, finding.step) == (Cause.WRONG_SCALE, "train.py:40", 0)
    assert text in finding.evidence


def test_the_scale_of_a_loss_over_gathered_values_is_not_judged() -> None:
    ranks = weighed(random_gradients(1, ranks=2, backwards=1), [[8], [8]], weight=1.0, factor=1.0)
    for rank in ranks:
        rank.insert(0, collective("all_gather", "train.py:33", floats=1))
    assert causes(check(*ranks)) == {Cause.WRONG_SCALE}, (
        "one number: the count of a rank's tokens, say"
    )
    for rank in ranks:
        rank[0]["floats"] = 64
    result = check(*ranks)
    assert not result.findings
    assert "its scale is not judged" in result.unseen[0]


def test_two_losses_with_a_backward_each_are_not_microbatches() -> None:
    ranks = weighed(random_gradients(1, ranks=2, backwards=2), [[8, 8], [8, 8]], weight=1.0)
    assert causes(check(*ranks)) == {Cause.WRONG_SCALE}
    for rank in ranks:
        rank[-1]["losses"][1]["function"] = "l1_loss"
    assert not check(*ranks).findings


def test_gradients_of_several_microbatches_that_are_seen_together_have_the_weights_of_all() -> None:
    """FSDP2 with `set_requires_gradient_sync(False)` shows the sum of all microbatches in the last
    backward."""
    ranks = weighed(random_gradients(1, ranks=2, backwards=1), [[8, 8], [8, 8]], weight=0.5)
    for rank in ranks:
        rank[-1]["added"] = {"1": rank[-1]["added"].pop("0")}
        rank[-1]["sharded"] = list(rank[-1]["applied"])
        rank[-1]["applied"] = {
            name: [each / 2 for each in whole] for name, whole in rank[-1]["applied"].items()
        }
    assert not check(*ranks).findings


def test_class_weights_are_named() -> None:
    ranks = weighed(random_gradients(1, ranks=2, backwards=1), [[4], [12]], weight=1.0)
    for rank in ranks:
        rank[-1]["losses"][0]["has_class_weights"] = True
    assert "between 4 and 12 sums of class weights a microbatch" in only(check(*ranks)).evidence


def test_gradients_that_the_script_adds_up_itself_have_the_line_of_its_all_reduce() -> None:
    ranks = weighed(random_gradients(1, ranks=2, backwards=1), [[8], [8]], weight=1.0, factor=1.0)
    for rank in ranks:
        rank.insert(1, collective("all_reduce", "train.py:33"))
    assert only(check(*ranks)).line == "train.py:33"


def test_a_loss_that_is_divided_once_more_than_needed_is_found() -> None:
    added = random_gradients(1, ranks=2, backwards=1)
    ranks = weighed(added, [[8], [8]], weight=0.5)
    assert not check(*ranks).findings, "a factor of the script's own"
    for rank in ranks:
        rank[0]["divisors"] = [2.0]
    finding = only(check(*ranks))
    assert finding.cause is Cause.WRONG_SCALE
    assert (
        "divided by 2 once more than the reduction needs: the gradient is 2 times too small"
        in finding.evidence
    )


@pytest.mark.parametrize(
    ("backwards", "weight", "factor"), [(4, 0.25, None), (1, 1.0, None), (2, 0.5, 0.5)]
)
def test_a_right_scale_is_right(backwards: int, weight: float, factor: float | None) -> None:
    added = random_gradients(1, ranks=2, backwards=backwards)
    assert not check(*weighed(added, [[8] * backwards] * 2, weight=weight, factor=factor)).findings


@pytest.mark.parametrize(
    ("weight", "factor", "found"),
    [(1 / 16, None, True), (1 / 16, 1.0, False), (1 / 8, None, False), (1 / 8, 1.0, True)],
)
def test_a_sum_that_is_divided_by_the_count_has_a_right_scale(
    weight: float, factor: float | None, found: bool
) -> None:
    """Over the targets of all ranks, or of each rank; the reduction is a mean, or a sum."""
    ranks = weighed(
        random_gradients(1, ranks=2, backwards=1), [[8], [8]], weight=weight, factor=factor
    )
    for rank in ranks:
        rank[-1]["losses"][0]["reduction"] = "sum"
        rank[0]["divisors"] = [1 / weight]
    result = check(*ranks)
    assert causes(result) == ({Cause.WRONG_SCALE} if found else set())
    if found and factor is None:
        assert (
            only(result).evidence
            == "step 0: each rank divides its sum by the 16 targets of all ranks, and the reduction"
            " divides by 2 again: the gradient is 2 times too small"
        )
    assert ("add up to 1" in result.right) != found


def test_half_of_a_mean_is_not_a_mean_over_two_ranks() -> None:
    """0.5 * mse_loss(..., reduction="sum") / batch has the weight of a sum over two ranks'
    batches."""
    ranks = weighed(random_gradients(1, ranks=2, backwards=1), [[8], [8]], weight=1 / 16)
    for rank in ranks:
        rank[-1]["losses"][0]["reduction"] = "sum"
        rank[0]["divisors"] = [8.0]
    result = check(*ranks)
    assert not result.findings
    assert "add up to 0.5, by a factor of the script's own" in result.unseen[0]


def gathered(*, sums: bool, values: Sequence[float]) -> AreaResult:
    """A loss of each rank over the features of both. `sums`: the backward of the gather adds up
    gradients."""
    ranks = weighed(random_gradients(1, ranks=2, backwards=1), [[16], [16]], weight=1.0)
    for rank, value in zip(ranks, values, strict=True):
        rank[0]["value"] = value
        rank.insert(0, collective("all_gather", "train.py:33", floats=64))
        if sums:
            rank.insert(2, collective("reduce_scatter", "train.py:34", in_backward=True))
    return check(*ranks)


def test_a_loss_over_gathered_values_without_their_gradients_is_found() -> None:
    finding = only(gathered(sums=False, values=[1.5, 1.5]))
    assert (finding.cause, finding.line) == (Cause.WRONG_SCALE, "train.py:33")
    assert finding.evidence.endswith(
        "and the reduction divides by 2: the gradient is 2 times too small"
    )


@pytest.mark.parametrize(("sums", "values"), [(True, [1.5, 1.5]), (False, [1.5, 2.5])])
def test_a_loss_over_gathered_values_may_be_right(sums: bool, values: Sequence[float]) -> None:
    """With a backward that adds up their gradients, or of which each rank computes a part."""
    result = gathered(sums=sums, values=values)
    assert not result.findings
    assert "its scale is not judged" in result.unseen[0]


def test_sums_have_no_right_scale() -> None:
    added = random_gradients(1, ranks=2, backwards=4)
    ranks = weighed(added, [[8] * 4] * 2, weight=1.0)
    for rank in ranks:
        for each in rank[-1]["losses"]:
            each["reduction"] = "sum"
    assert not check(*ranks).findings


def test_a_loss_scale_is_not_a_wrong_scale() -> None:
    """Gradients that are unscaled before the step have the factor 1 / scale."""
    added = [
        [scaled(each, 65536.0) for each in rank]
        for rank in random_gradients(1, ranks=2, backwards=1)
    ]
    assert not check(*weighed(added, [[8], [8]], weight=65536.0, factor=0.5 / 65536)).findings


# What cannot be seen


def test_losses_that_are_not_seen_are_said() -> None:
    assert "no loss function of torch was seen" in check([step()], [step()]).unseen[0]
    assert check([], []).unseen == []


def test_gradients_that_are_not_reduced_have_no_weights() -> None:
    added = random_gradients(1, ranks=2, backwards=1)
    ranks = weighed(added, [[2], [40]], weight=1.0)
    for rank, own in zip(ranks, trained(added, [total(each) for each in added]), strict=True):
        rank[-1]["applied"] = own["applied"]
    assert not check(*ranks).findings


def test_losses_of_other_steps_and_closures_are_left_out() -> None:
    added = random_gradients(1, ranks=1, backwards=2)
    (rank,) = weighed(added, [[8, 8]], weight=0.5)
    rank[-1]["losses"].append(loss(7, 400, 0.5))
    assert not check(rank).findings
    (rank,) = weighed(added, [[2, 40]], weight=0.5)
    rank[-1]["several_closures"] = True
    assert not check(rank).findings
