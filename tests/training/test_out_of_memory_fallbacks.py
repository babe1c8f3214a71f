"""The out-of-memory fallbacks: from a plan to the next one."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lockstep.base.errors import PlanError, RunDirectoryError
from lockstep.hooks.out_of_memory import (
    FALLBACKS,
    FILE,
    TakenFallbacks,
    advice,
    changes,
    fallback_since,
    next_plan,
)
from lockstep.plan import Plan
from lockstep.saving import OutOfMemory

FAILURE = {
    "step": 3,
    "rank": 1,
    "error": "OutOfMemoryError: 2.00 GiB",
    "then": "checkpointing=full",
}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any valid, resolved plan."""
    axes = st.integers(1, 3)
    settings: dict[str, Any] = {
        "numerics": draw(st.sampled_from(["fast", "bitwise"])),
        "checkpointing": draw(st.sampled_from(["none", "selective", "full"])),
        "offload": draw(st.booleans()),
        "microbatch_splits": draw(st.integers(0, 3)),
        **{
            name: draw(axes)
            for name in ("replicate", "shard", "tensor", "pipeline", "data_parallel")
        },
    }
    try:
        return Plan(**settings)
    except PlanError:
        return Plan(**{**settings, "numerics": "fast", "data_parallel": 1, "offload": False})


def plans_until_the_last(
    plan: Plan, device: str, setting: OutOfMemory, microbatch: int, unsplittable: str | None
) -> tuple[list[Plan], str]:
    """All plans from this one to the last, and why there is none after it. `microbatch`: samples in
    the first."""
    found: Plan | str = plan
    tried = []
    while isinstance(found, Plan):
        tried.append(found)
        assert len(tried) < 20
        largest = -(-microbatch // 2 ** (found.microbatch_splits - plan.microbatch_splits))
        found = next_plan(found, device, setting, largest=largest, unsplittable=unsplittable)
    return tried, found


given_any = given(
    plan=plans(),
    device=st.sampled_from(["cpu", "cuda"]),
    setting=st.sampled_from(["retry", "halve", "same-bits"]),
    microbatch=st.integers(1, 100),
    unsplittable=st.none() | st.just("it must stay whole"),
)


@given_any
def test_each_plan_has_one_more_fallback_than_the_one_before_and_there_is_a_last(
    plan: Plan, device: str, setting: OutOfMemory, microbatch: int, unsplittable: str | None
) -> None:
    tried, why_not = plans_until_the_last(plan, device, setting, microbatch, unsplittable)
    assert why_not
    for before, after in pairwise(tried):
        changed = changes(before, after).partition("=")[0]
        assert [
            name for name in Plan.__slots__ if getattr(before, name) != getattr(after, name)
        ] == [changed]
        assert after.checkpointing == "full" or after.data_parallel > 1
        assert not after.offload or (device == "cuda" and after.shard != 1) or plan.offload
        assert after.microbatch_splits - before.microbatch_splits in (0, 1)
    orders = [FALLBACKS.index(changes(*two).partition("=")[0]) for two in pairwise(tried)]
    assert orders == sorted(orders)


@given_any
def test_microbatches_are_split_last_down_to_one_sample_and_only_if_bits_may_change(
    plan: Plan, device: str, setting: OutOfMemory, microbatch: int, unsplittable: str | None
) -> None:
    tried, why_not = plans_until_the_last(plan, device, setting, microbatch, unsplittable)
    microbatch_splits = tried[-1].microbatch_splits - plan.microbatch_splits
    may = unsplittable is None and (
        setting == "halve" or (setting == "retry" and plan.numerics == "fast")
    )
    assert 2**microbatch_splits >= microbatch if may else microbatch_splits == 0
    assert 2 ** (microbatch_splits - 1) < microbatch
    assert ("one sample" in why_not) == (may or microbatch == 1)
    assert ("split each microbatch, and it must stay whole" in why_not) == (
        unsplittable is not None and microbatch > 1
    )


@given(plan=plans(), device=st.sampled_from(["cpu", "cuda"]))
def test_before_the_first_step_only_offload_helps(plan: Plan, device: str) -> None:
    found = next_plan(plan, device, "halve", largest=None, unsplittable=None)
    if device == "cuda" and plan.shard != 1 and not plan.offload:
        assert isinstance(found, Plan)
        assert changes(plan, found) == "offload=yes"
    else:
        assert isinstance(found, str)
        assert found.startswith("no step had begun")


@given(plan=plans())
def test_with_the_setting_stop_nothing_is_changed(plan: Plan) -> None:
    assert (
        next_plan(plan, "cuda", "stop", largest=8, unsplittable=None)
        == "--out-of-memory stop allows no change of the plan"
    )


def test_offload_is_skipped_where_it_would_be_refused() -> None:
    """With two threads, an optimizer on the CPU has other bits; one of whole tensors has no whole
    tensor there."""
    threads = Plan(shard=2, numerics="bitwise", checkpointing="full", threads=2)
    whole = Plan(shard=2, checkpointing="full")
    for plan, offloadable in ((threads, True), (whole, False)):
        found = next_plan(
            plan, "cuda", "halve", largest=8, unsplittable=None, offloadable=offloadable
        )
        assert isinstance(found, Plan)
        assert changes(plan, found) == "microbatch_splits=1"


def test_in_bitwise_numerics_the_advice_says_how_to_allow_other_bits() -> None:
    plan = Plan(replicate=2, numerics="bitwise", checkpointing="full")
    found = next_plan(plan, "cpu", "retry", largest=8, unsplittable=None)
    assert (
        advice(plan, found, folder=Path("runs/a"), step=3)
        == "lockstep: memory ran out with checkpointing=full; the only fallback left is to split"
        " each microbatch, which changes the bits from there on, and numerics=bitwise does not"
        " allow that; allow it with --out-of-memory halve (LOCKSTEP_OUT_OF_MEMORY=halve), or"
        " shard the model over more processes"
    )


@pytest.mark.parametrize(
    ("step", "start"),
    [
        (3, "resumes after step 3"),
        (0, "starts again"),
        (None, "resumes from its last checkpoint, or starts again,"),
    ],
)
def test_the_advice_says_from_where_the_run_resumes(step: int | None, start: str) -> None:
    text = advice(Plan(), Plan(checkpointing="full"), folder=Path("runs/a"), step=step)
    assert (
        text
        == f"lockstep: the run in runs/a {start} with checkpointing=full if the same command is"
        " given again with that run directory"
    )


@given_any
def test_the_taken_fallbacks_turn_the_first_plan_into_the_last(
    plan: Plan, device: str, setting: OutOfMemory, microbatch: int, unsplittable: str | None
) -> None:
    tried, _ = plans_until_the_last(plan, device, setting, microbatch, unsplittable)
    taken = TakenFallbacks()
    for after in tried:
        assert taken.apply_to(after, device) == after
        taken = taken.with_plan(after, FAILURE)
        assert taken.apply_to(plan, device) == after
    for weaker in tried:
        assert taken.with_plan(weaker, FAILURE).apply_to(plan, device) == tried[-1]
    assert len(taken.failures) == len(tried)


def test_fallbacks_that_another_plan_cannot_have_are_left_out() -> None:
    taken = TakenFallbacks().with_plan(
        Plan(shard=2, offload=True, checkpointing="full", microbatch_splits=1), FAILURE
    )
    assert taken.apply_to(Plan(replicate=1), "cuda") == Plan(
        replicate=1, checkpointing="full", microbatch_splits=1
    )
    assert taken.apply_to(Plan(shard=2), "cpu") == Plan(
        shard=2, checkpointing="full", microbatch_splits=1
    )
    assert taken.apply_to(Plan(data_parallel=2), "cuda") == Plan(
        data_parallel=2, microbatch_splits=1
    )


def test_taken_fallbacks_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / FILE
    for written in (
        TakenFallbacks(checkpointing="full", failures=[FAILURE]),
        TakenFallbacks(
            checkpointing="full", offload=True, microbatch_splits=2, failures=[FAILURE, FAILURE]
        ),
    ):
        written.write(path)
        assert TakenFallbacks.parse(path.read_text(), path) == written
    assert [entry.name for entry in tmp_path.iterdir()] == [FILE]


def test_every_rank_sees_the_fallback_that_one_has_written_since_the_start(tmp_path: Path) -> None:
    known = TakenFallbacks()
    assert fallback_since(known, tmp_path) is None
    then = known.with_plan(Plan(checkpointing="full"), FAILURE)
    then.write(tmp_path / FILE)
    assert (
        fallback_since(known, tmp_path)
        == "memory ran out after step 3 on rank 1, checkpointing=full from there"
    )
    assert fallback_since(then, tmp_path) is None
    (tmp_path / FILE).write_text("{")
    assert fallback_since(known, tmp_path) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        *(
            json.dumps(
                {
                    "checkpointing": "full",
                    "offload": False,
                    "microbatch_splits": 0,
                    "failures": [FAILURE],
                    **wrong,
                }
            )
            for wrong in (
                {"checkpointing": "some"},
                {"offload": 1},
                {"microbatch_splits": -1},
                {"microbatch_splits": "1"},
                {"failures": []},
                {"failures": [{}]},
                {"failures": 3},
                {"more": 1},
            )
        ),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(RunDirectoryError, match=f"{FILE} is damaged; .* remove it"):
        TakenFallbacks.parse(text, tmp_path / FILE)
