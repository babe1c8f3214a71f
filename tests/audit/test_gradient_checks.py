"""How ranks' gradients enter the one that is applied is read from sketches, whatever the gradients
are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from audit.given_records import (
    Gradients,
    backward,
    causes,
    given,
    mean_over_ranks,
    only,
    random_gradients,
    row,
    scaled,
    sketched,
    step,
    total,
    trained,
)
from hypothesis import given as drawn, settings, strategies as st

from lockstep.audit.checks.gradients import (
    LEAST_ALIKE,
    check_applied_gradients,
    factors,
    last_factors,
    names_on_all_ranks,
)
from lockstep.audit.finding import Cause
from lockstep.evidence.rows import Row
from lockstep.evidence.sketch import sketch

runs = {
    "seed": st.integers(0, 2**32 - 1),
    "ranks": st.integers(2, 4),
    "backwards": st.integers(1, 4),
}
some = settings(max_examples=40)


def found(rows: Sequence[Row]) -> set[Cause]:
    return causes(check_applied_gradients(given(*[[each] for each in rows])))


# Reduction


@some
@drawn(**runs)
def test_the_mean_over_ranks_has_even_factors(seed: int, ranks: int, backwards: int) -> None:
    added = random_gradients(seed, ranks=ranks, backwards=backwards)
    rows = trained(added, mean_over_ranks(added))
    for rank in range(ranks):
        fitted = factors(rows, rank, names_on_all_ranks(rows))
        assert fitted is not None
        assert fitted.fits
        assert fitted.even == pytest.approx(1 / ranks)
        assert not fitted.is_own_only(rank)
    assert found(rows) == set()


@some
@drawn(**runs)
def test_the_sum_over_ranks_is_reduced_too(seed: int, ranks: int, backwards: int) -> None:
    added = random_gradients(seed, ranks=ranks, backwards=backwards)
    rows = trained(added, [scaled(each, ranks) for each in mean_over_ranks(added)])
    fitted = factors(rows, 0, names_on_all_ranks(rows))
    assert fitted is not None
    assert fitted.even == pytest.approx(1.0)
    assert found(rows) == set()


@some
@drawn(**runs, only_one=st.booleans())
def test_a_ranks_own_gradient_alone_is_not_reduced(
    seed: int, ranks: int, backwards: int, only_one: bool
) -> None:
    """On all parameters, or on one of them."""
    added = random_gradients(seed, ranks=ranks, backwards=backwards)
    applied = [total(each) for each in added]
    if only_one:
        means = mean_over_ranks(added)
        applied = [
            {**mean, "layer1.weight": own["layer1.weight"]}
            for mean, own in zip(means, applied, strict=True)
        ]
    finding = only(check_applied_gradients(given(*[[each] for each in trained(added, applied)])))
    assert (finding.cause, finding.step, finding.line) == (Cause.NOT_REDUCED, 0, "train.py:19")
    assert list(finding.names) == (
        ["layer1.weight"] if only_one else ["layer0.weight", "layer1.weight", "layer2.weight"]
    )
    assert "1 × rank 0's + 0 × rank 1's" in finding.evidence


@some
@drawn(seed=runs["seed"], ranks=runs["ranks"], backwards=st.integers(2, 4))
def test_a_last_microbatch_that_is_not_reduced_is_found(
    seed: int, ranks: int, backwards: int
) -> None:
    """`no_sync` around the wrong microbatch: those before the last are reduced."""
    added = random_gradients(seed, ranks=ranks, backwards=backwards)
    before = mean_over_ranks([each[:-1] for each in added])
    applied = [total([mean, each[-1]]) for mean, each in zip(before, added, strict=True)]
    rows = trained(added, applied)
    last = last_factors(rows, 0, names_on_all_ranks(rows))
    assert last is not None
    assert last.fits
    assert last.is_own_only(0)
    assert found(rows) == {Cause.NOT_REDUCED}


@some
@drawn(**runs)
def test_shards_add_up_to_the_reduced_gradient(seed: int, ranks: int, backwards: int) -> None:
    added = random_gradients(seed, ranks=ranks, backwards=backwards)
    rows = trained(added, mean_over_ranks(added))
    names = names_on_all_ranks(rows)
    for rank, each in enumerate(rows):
        each["sharded"] = names
        for name in names:
            mean = torch.from_numpy(mean_over_ranks(added)[0][name])
            first = sum(len(part) for part in mean.chunk(ranks)[:rank])
            each["applied"][name] = each["reduced"][name] = (
                sketch(mean.chunk(ranks)[rank], first)
                if rank < len(mean.chunk(ranks))
                else sketched([])
            )
    fitted = factors(rows, 0, names)
    assert fitted is not None
    assert fitted.even == pytest.approx(1 / ranks)
    assert found(rows) == set()


def test_an_uneven_reduction_is_told_by_its_factors() -> None:
    added = random_gradients(1, ranks=3, backwards=1)
    applied = total(
        [scaled(each[0], factor) for each, factor in zip(added, (0.5, 0.25, 0.25), strict=True)]
    )
    fitted = factors(trained(added, [applied] * 3), 0, ["layer0.weight", "layer1.weight"])
    assert fitted is not None
    assert fitted.even is None
    assert fitted.values == pytest.approx([0.5, 0.25, 0.25])


def test_equal_gradients_cannot_be_told_apart() -> None:
    """All ranks were given the same samples: that is said elsewhere, and nothing is claimed
    here."""
    one = random_gradients(1, ranks=1, backwards=1)[0]
    result = check_applied_gradients(
        given(*[[each] for each in trained([one, one], [one[0], one[0]])])
    )
    assert not result.findings
    assert result.unseen == [
        "gradients before their reduction were not seen, or were the same on all ranks"
    ]
    assert not result.right


def test_equal_gradients_in_several_steps_are_of_the_same_samples() -> None:
    ranks: list[list[Row]] = [[], []]
    for index in range(LEAST_ALIKE):
        one = random_gradients(index, ranks=1, backwards=1)[0]
        assert not check_applied_gradients(given(*ranks)).findings
        for rank, each in zip(
            ranks, trained([one, one], [one[0], one[0]], index=index), strict=True
        ):
            rank.append(each)
    finding = only(check_applied_gradients(given(*ranks)))
    assert (finding.cause, finding.line, finding.step) == (
        Cause.SAME_SAMPLES,
        "train.py:19",
        LEAST_ALIKE - 1,
    )


def test_gradients_that_are_all_zero_are_said() -> None:
    zero = [[{"w": np.zeros(4)}]]
    assert check_applied_gradients(given(trained(zero, zero[0]))).unseen == [
        "every gradient is zero: the script learns nothing"
    ]


def test_a_parameter_of_one_element_is_judged_with_the_others() -> None:
    added = [
        [{"w": np.array([1.0, 2.0, 3.0]), "b": np.array([1.0])}],
        [{"w": np.array([-2.0, 0.5, 1.0]), "b": np.array([3.0])}],
    ]
    assert found(trained(added, mean_over_ranks(added))) == set()
    assert found(trained(added, [each[0] for each in added])) == {Cause.NOT_REDUCED}


def test_a_parameter_that_only_one_rank_adds_to_is_no_finding() -> None:
    added = random_gradients(1, ranks=2, backwards=1)
    added[1] = [{**added[1][0], "layer1.weight": np.zeros(24)}]
    applied = [dict(each) for each in mean_over_ranks(added)]
    applied[0]["layer1.weight"] = applied[1]["layer1.weight"] = added[0][0]["layer1.weight"] / 2
    assert found(trained(added, applied)) == set()


def test_a_step_of_several_closures_is_not_seen() -> None:
    result = check_applied_gradients(
        given([step(several_closures=True, type="LBFGS", stale=["w"])], [step()])
    )
    assert not result.findings
    assert result.unseen[0] == "LBFGS computes several gradients in a step"


# Stale gradients, clipping, unused and untrained parameters


def test_stale_gradients_are_found_on_one_process_too() -> None:
    result = check_applied_gradients(given([step(), step(1, stale=["w", "b"])]))
    assert (only(result).cause, only(result).step, only(result).line) == (
        Cause.STALE_GRADIENTS,
        1,
        "train.py:20",
    )
    assert list(only(result).names) == ["w", "b"]
    assert not check_applied_gradients(given([step(), step(1)])).findings


def clip(**changes: object) -> Row:
    return {
        "line": "train.py:18",
        "scaled": False,
        "backward": 0,
        "reduced": {},
        "norm": 1.0,
        **changes,
    }


def test_a_norm_of_scaled_gradients_is_found() -> None:
    result = check_applied_gradients(
        given([step(clip=clip(scaled=True, norm=70000.0), scale=65536.0)])
    )
    assert (only(result).cause, only(result).line) == (Cause.CLIPPED_SCALED, "train.py:18")
    assert "loss scale 65536: 7e+04" in only(result).evidence
    assert not check_applied_gradients(given([step(clip=clip(), scale=65536.0)])).findings


def clipped(
    added: Sequence[Sequence[Gradients]], before: Sequence[Gradients], after: Sequence[Gradients]
) -> list[Row]:
    rows = trained(added, after)
    for each, own in zip(rows, before, strict=True):
        norm = float(np.sqrt(sum(np.sum(part**2) for part in own.values())))
        each["clip"] = clip(norm=norm, reduced={name: sketched(part) for name, part in own.items()})
    return rows


def test_clipping_before_the_reduction_is_found() -> None:
    added = random_gradients(1, ranks=2, backwards=1)
    own = [total(each) for each in added]
    after = mean_over_ranks([[scaled(each, 0.1 + 0.1 * rank)] for rank, each in enumerate(own)])
    result = check_applied_gradients(given(*[[each] for each in clipped(added, own, after)]))
    assert Cause.LOCAL_CLIPPING in causes(result)
    assert {finding.line for finding in result.findings} == {"train.py:18"}


def test_clipping_after_the_reduction_is_right() -> None:
    added = random_gradients(1, ranks=2, backwards=2)
    means = mean_over_ranks(added)
    assert found(clipped(added, means, [scaled(each, 0.1) for each in means])) == set()


def test_clipping_in_each_microbatch_is_found_on_one_process_too() -> None:
    (rows,) = [
        trained(added, [total(added[0])]) for added in [random_gradients(1, ranks=1, backwards=3)]
    ]
    rows[0]["clipped"] = [clip(backward=number) for number in range(3)]
    finding = only(check_applied_gradients(given(rows)))
    assert (finding.cause, finding.line, finding.step) == (Cause.LOCAL_CLIPPING, "train.py:18", 0)
    assert (
        finding.evidence
        == "step 0: gradients were clipped after 1 of 3 microbatches, before they were reduced"
    )
    rows[0]["clipped"] = [clip(backward=2)]
    assert not check_applied_gradients(given(rows)).findings
    rows[0]["clipped"] = [clip(backward=7)]  # another model's
    assert not check_applied_gradients(given(rows)).findings


def test_norms_of_shards_are_found() -> None:
    """A norm that each rank takes of its own shards."""
    rows = [
        step(
            sharded=["w"],
            clip=clip(norm=norm),
            reduced={"w": sketched([3.0])},
            applied={"w": sketched([3.0])},
        )
        for norm in (1.0, 2.0)
    ]
    assert (
        only(check_applied_gradients(given(*[[each] for each in rows]))).evidence
        == "step 0: the norms by which the ranks clipped differ: 1, 2"
    )
    rows[1]["clip"]["norm"] = 1.0
    assert found(rows) == set()


def test_shards_that_are_clipped_by_different_factors_are_found() -> None:
    """A loop of the script's own, which calls no function of torch that returns a norm."""
    rows = [
        step(sharded=["w"], reduced={"w": sketched([3.0])}, applied={"w": sketched([3.0 * factor])})
        for factor in (0.5, 0.25)
    ]
    assert (
        only(check_applied_gradients(given(*[[each] for each in rows]))).cause
        is Cause.LOCAL_CLIPPING
    )
    rows[1]["applied"] = rows[0]["applied"]
    assert found(rows) == set()


def test_a_parameter_without_a_gradient_on_one_rank_is_found() -> None:
    some_gradient = sketched([1.0, 2.0])
    rows = [
        step(applied={"used": some_gradient, "w": some_gradient}),
        step(applied={"used": some_gradient, "w": None}),
    ]
    finding = only(check_applied_gradients(given(*[[each] for each in rows])))
    assert (finding.cause, list(finding.names), finding.step) == (Cause.UNUSED_PARAMETER, ["w"], 0)
    assert "none on rank 1" in finding.evidence
    rows[0]["applied"]["w"] = None
    assert found(rows) == set()


def test_parameters_in_no_optimizer_are_found() -> None:
    finding = only(check_applied_gradients(given([step(untrained=["head.weight"]), step(1)])))
    assert (finding.cause, list(finding.names), finding.step) == (
        Cause.NOT_TRAINED,
        ["head.weight"],
        0,
    )
    assert not check_applied_gradients(given([step(untrained=[]), step(1)])).findings


# Values that are not finite


NAN, FINITE = {"w": sketched([float("nan")])}, {"w": sketched([1.0])}


@pytest.mark.parametrize(
    ("rows", "when", "line", "at"),
    [
        (
            [step(applied=NAN, before=NAN, parameters=NAN)],
            "before the first step 1 of 1",
            "train.py:5",
            0,
        ),
        (
            [step(before=FINITE, parameters=FINITE), step(1, applied=NAN, parameters=NAN)],
            "after step 1",
            "train.py:20",
            1,
        ),
    ],
)
def test_parameters_that_are_not_finite_are_found(
    rows: list[Row], when: str, line: str, at: int
) -> None:
    finding = only(check_applied_gradients(given(rows, rows)))
    assert (finding.cause, finding.line, finding.step, list(finding.names)) == (
        Cause.NOT_FINITE,
        line,
        at,
        ["w"],
    )
    assert finding.evidence.startswith(when)


def test_a_gradient_that_is_not_finite_and_not_applied_is_no_fault() -> None:
    assert not check_applied_gradients(
        given([step(applied=NAN, before=FINITE, parameters=FINITE)])
    ).findings


# Wasted reductions


def accumulated(*reduces: bool) -> list[Row]:
    """A rank that accumulates over microbatches, with what DistributedDataParallel does in each."""
    rows = []
    for number, each in enumerate(reduces):
        rows += [row("ddp_forward", "train.py:16", wrapper=1, reduces=each), backward(number)]
    return [
        *rows,
        step(added={str(number): {"w": sketched([1.0])} for number in range(len(reduces))}),
    ]


def test_reductions_in_every_microbatch_are_found() -> None:
    finding = only(check_applied_gradients(given(accumulated(True, True, True))))
    assert (finding.cause, finding.line, finding.step) == (
        Cause.REDUCED_EVERY_MICROBATCH,
        "train.py:16",
        0,
    )
    assert "3 times in a step of 3 backwards" in finding.evidence


def test_two_wrappers_reduce_once_each() -> None:
    rows = []
    for number in range(2):
        rows += [row("ddp_forward", "train.py:16", wrapper=number, reduces=True), backward(number)]
    added = {str(number): {"w": sketched([1.0])} for number in range(2)}
    assert not check_applied_gradients(given([*rows, step(added=added)])).findings


@pytest.mark.parametrize("reduces", [(False, False, True), (True,), (False, False)])
def test_one_reduction_in_a_step_is_right(reduces: tuple[bool, ...]) -> None:
    assert not check_applied_gradients(given(accumulated(*reduces))).findings
