"""What a run that ran out of memory changes: plans in, plans out."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lockstep.base.errors import PlanError, RunDirectoryError
from lockstep.hooks.fallbacks import FALLBACKS, FILE, TakenFallbacks, changes, fallback_since, next_plan, said
from lockstep.plan import Plan
from lockstep.saving import OutOfMemory

FAILURE = {"step": 3, "rank": 1, "error": "OutOfMemoryError: 2.00 GiB", "then": "checkpointing=full"}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any that can be made, resolved."""
    axes = st.integers(1, 3)
    settings: dict[str, Any] = {
        "numerics": draw(st.sampled_from(["fast", "bitwise"])),
        "checkpointing": draw(st.sampled_from(["none", "selective", "full"])),
        "offload": draw(st.booleans()),
        "microbatch_splits": draw(st.integers(0, 3)),
        **{name: draw(axes) for name in ("replicate", "shard", "tensor", "pipeline", "data_parallel")},
    }
    try:
        return Plan(**settings)
    except PlanError:
        return Plan(**{**settings, "numerics": "fast", "data_parallel": 1, "offload": False})


def climbed(plan: Plan, device: str, setting: OutOfMemory, microbatch: int, whole: str | None) -> tuple[list[Plan], str]:
    """All plans from this one to the last, and why there is none after it. `microbatch`: its samples in the first."""
    found: Plan | str = plan
    tried = []
    while isinstance(found, Plan):
        tried.append(found)
        assert len(tried) < 20
        largest = -(-microbatch // 2 ** (found.microbatch_splits - plan.microbatch_splits))
        found = next_plan(found, device, setting, largest=largest, whole=whole)
    return tried, found


given_any = given(
    plan=plans(),
    device=st.sampled_from(["cpu", "cuda"]),
    setting=st.sampled_from(["retry", "halve", "same-bits"]),
    microbatch=st.integers(1, 100),
    whole=st.none() | st.just("it must stay whole"),
)


@given_any
def test_each_plan_has_one_rung_more_than_the_one_before_and_there_is_a_last(
    plan: Plan, device: str, setting: OutOfMemory, microbatch: int, whole: str | None
) -> None:
    tried, why_not = climbed(plan, device, setting, microbatch, whole)
    assert why_not
    for before, after in pairwise(tried):
        changed = changes(before, after).partition("=")[0]
        assert [name for name in Plan.__slots__ if getattr(before, name) != getattr(after, name)] == [changed]
        assert after.checkpointing == "full" or after.data_parallel > 1
        assert not after.offload or (device == "cuda" and after.shard != 1) or plan.offload
        assert after.microbatch_splits - before.microbatch_splits in (0, 1)
    orders = [FALLBACKS.index(changes(*two).partition("=")[0]) for two in pairwise(tried)]
    assert orders == sorted(orders)


@given_any
def test_halves_come_last_go_down_to_one_sample_and_only_where_bits_may_change(
    plan: Plan, device: str, setting: OutOfMemory, microbatch: int, whole: str | None
) -> None:
    tried, why_not = climbed(plan, device, setting, microbatch, whole)
    microbatch_splits = tried[-1].microbatch_splits - plan.microbatch_splits
    may = whole is None and (setting == "halve" or (setting == "retry" and plan.numerics == "fast"))
    assert 2**microbatch_splits >= microbatch if may else microbatch_splits == 0
    assert 2 ** (microbatch_splits - 1) < microbatch
    assert ("one sample" in why_not) == (may or microbatch == 1)
    assert ("halves, and it must stay whole" in why_not) == (whole is not None and microbatch > 1)


@given(plan=plans(), device=st.sampled_from(["cpu", "cuda"]))
def test_what_there_is_no_room_for_before_the_first_step_is_the_model_so_that_only_offload_helps(plan: Plan, device: str) -> None:
    found = next_plan(plan, device, "halve", largest=None, whole=None)
    if device == "cuda" and plan.shard != 1 and not plan.offload:
        assert isinstance(found, Plan)
        assert changes(plan, found) == "offload=yes"
    else:
        assert isinstance(found, str)
        assert found.startswith("no step had begun")


@given(plan=plans())
def test_told_to_stop_it_changes_nothing(plan: Plan) -> None:
    assert next_plan(plan, "cuda", "stop", largest=8, whole=None) == "it was told to change nothing (--out-of-memory stop)"


def test_in_bitwise_numerics_it_says_how_to_allow_what_changes_bits() -> None:
    plan = Plan(replicate=2, numerics="bitwise", checkpointing="full")
    found = next_plan(plan, "cpu", "retry", largest=8, whole=None)
    assert said(plan, found, folder=Path("runs/a"), step=3) == (
        "lockstep: memory ran out with checkpointing=full; what is left is to compute each microbatch in halves, which changes the bits "
        "from there on, and in numerics=bitwise it does not; allow it with --out-of-memory halve (LOCKSTEP_OUT_OF_MEMORY=halve), or cut "
        "the model over more processes"
    )


@pytest.mark.parametrize(
    ("step", "where"), [(3, "goes on from step 3"), (0, "begins anew"), (None, "goes on from its last checkpoint, or begins anew,")]
)
def test_it_says_where_the_run_goes_on(step: int | None, where: str) -> None:
    text = said(Plan(), Plan(checkpointing="full"), folder=Path("runs/a"), step=step)
    assert (
        text == f"lockstep: the run in runs/a {where} with checkpointing=full when the same command is given again, with that run directory"
    )


@given_any
def test_what_is_remembered_gives_the_first_plan_all_that_the_last_one_had(
    plan: Plan, device: str, setting: OutOfMemory, microbatch: int, whole: str | None
) -> None:
    tried, _ = climbed(plan, device, setting, microbatch, whole)
    remembered = TakenFallbacks()
    for after in tried:
        assert remembered.over(after, device) == after
        remembered = remembered.with_plan(after, FAILURE)
        assert remembered.over(plan, device) == after
    for weaker in tried:
        assert remembered.with_plan(weaker, FAILURE).over(plan, device) == tried[-1]
    assert len(remembered.failures) == len(tried)


def test_what_cannot_be_under_another_plan_is_left_out() -> None:
    remembered = TakenFallbacks().with_plan(Plan(shard=2, offload=True, checkpointing="full", microbatch_splits=1), FAILURE)
    assert remembered.over(Plan(replicate=1), "cuda") == Plan(replicate=1, checkpointing="full", microbatch_splits=1)
    assert remembered.over(Plan(shard=2), "cpu") == Plan(shard=2, checkpointing="full", microbatch_splits=1)
    assert remembered.over(Plan(data_parallel=2), "cuda") == Plan(data_parallel=2, microbatch_splits=1)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / FILE
    for written in (
        TakenFallbacks(checkpointing="full", failures=[FAILURE]),
        TakenFallbacks(checkpointing="full", offload=True, microbatch_splits=2, failures=[FAILURE, FAILURE]),
    ):
        written.write(path)
        assert TakenFallbacks.parse(path.read_text(), path) == written
    assert [entry.name for entry in tmp_path.iterdir()] == [FILE]


def test_every_rank_sees_what_one_has_written_down_since_they_began(tmp_path: Path) -> None:
    known = TakenFallbacks()
    assert fallback_since(known, tmp_path) is None
    then = known.with_plan(Plan(checkpointing="full"), FAILURE)
    then.write(tmp_path / FILE)
    assert fallback_since(known, tmp_path) == "memory ran out in step 3 on rank 1, checkpointing=full from there"
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
            json.dumps({"checkpointing": "full", "offload": False, "microbatch_splits": 0, "failures": [FAILURE], **wrong})
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
def test_what_no_run_wrote_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(RunDirectoryError, match=f"{FILE} is not as a run writes it; .* remove it"):
        TakenFallbacks.parse(text, tmp_path / FILE)
