"""What is said of a step that was made again."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.cli.replay import _differences, _show, replay_plan, rows_of
from lockstep.replay.step import (
    Replay,
    ReplayedMicrobatch,
    StepComparison,
    block_of,
    compared,
    joined_parts,
)

SAME = StepComparison(step=4, checksum=True, loss=(1.0, 1.0), norm=(2.0, 2.0))
OTHER = replace(SAME, step=5, checksum=False, norm=(2.0, 2.02))
UNKNOWN = replace(SAME, checksum=None)
REPLAY = Replay(
    step=5,
    begin=3,
    plan="replicate=1,numerics=bitwise",
    run_plan="shard=2,numerics=bitwise",
    loss=1.0,
    squares={"a": 9.0, "b": 16.0},
    microbatches=[ReplayedMicrobatch(microbatch=0, samples=[1, 2], squares={"a": 4.0, "b": 0.0})],
)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("transformer.h.3.attn.weight", "transformer.h.3"),
        ("0.weight", "0"),
        ("layers.1.experts.2.up.weight", "layers.1"),
        ("transformer.wte.weight", "transformer.wte"),
        ("head.bias", "head"),
        ("scale", "scale"),
    ],
)
def test_a_parameter_belongs_to_a_block(name: str, block: str) -> None:
    assert block_of(name) == block


def test_norms_are_of_all_blocks_together() -> None:
    assert REPLAY.norm == 5.0
    assert REPLAY.microbatches[0].norm == 2.0
    assert ReplayedMicrobatch(microbatch=0, samples=[]).norm is None


@pytest.mark.parametrize(
    ("on_the_way", "plan", "same", "said"),
    [
        ([SAME], None, True, "the gradients of 1 logged step up to here have the bits of the run"),
        ([SAME, OTHER], None, False, "from step 5 on, the gradients have other bits than in the"),
        ([UNKNOWN], None, False, "the run has no checksums of 1 logged step; loss and norm differ"),
        ([], None, False, "the run has logged no step on the way, so nothing is compared"),
        ([OTHER], "replicate=1", False, "numerics=fast: only up to rounding is it the step of the"),
        ([SAME], "replicate=1", True, "the gradients of 1 logged step up to here have the bits"),
    ],
)
def test_it_says_whether_it_is_the_step_of_the_run(
    on_the_way: list[StepComparison], plan: str | None, same: bool, said: str
) -> None:
    found = replace(REPLAY, on_the_way=on_the_way, plan=plan or REPLAY.plan)
    assert found.same_bits == same
    assert found.verdict().startswith(said)
    assert found.as_json()["verdict"] == found.verdict()


def test_the_first_other_step_is_named_with_the_largest_difference() -> None:
    found = replace(REPLAY, on_the_way=[SAME, OTHER, replace(OTHER, step=6, loss=(1.0, 1.5))])
    assert found.first_difference == OTHER
    assert "differ by at most 3.3e-01" in found.verdict()


def test_numbers_that_are_not_finite_are_compared_too() -> None:
    assert replace(SAME, loss=(math.nan, math.nan)).difference == 0.0
    assert replace(SAME, loss=(math.nan, 1.0)).difference == math.inf


def test_rows_of_the_steps_on_the_way_are_compared() -> None:
    run = [
        {
            "step": step,
            "loss": 1.0 * step,
            "gradient_norm": 2.0,
            "gradient_checksum": f"{step:016x}",
        }
        for step in range(1, 7)
    ]
    now = [{**row, "loss": None, "not_finite": {"loss": "inf"}} for row in run]
    del run[3]["gradient_checksum"]
    found = compared([*run, {"step": 5, "evaluation/loss": 1.0}], now, after=3, to=5)
    assert [(each.step, each.checksum) for each in found] == [(4, None), (5, True)]
    assert found[1].loss == (5.0, math.inf)


@pytest.mark.parametrize(
    ("run", "plan"),
    [
        ("replicate=2,shard=2,numerics=bitwise", "replicate=1,numerics=bitwise"),
        ("pipeline=2", "replicate=1"),
        ("tensor=2,slices=4,numerics=bitwise", "slices=4,numerics=bitwise"),
        (
            "tensor=2,microbatch_splits=1,checkpointing=full",
            "checkpointing=full,microbatch_splits=1",
        ),
    ],
)
def test_the_default_plan_has_the_numbers_of_the_run_on_one_process(run: str, plan: str) -> None:
    from lockstep.plan import Plan

    found = replay_plan(run)
    assert found.resolve(1) == Plan.parse(plan).resolve(1)


def test_shares_of_ranks_in_a_microbatch_are_added() -> None:
    one, two = (
        ReplayedMicrobatch(microbatch=1, samples=[4], total=total, part=total / 2)
        for total in (1.0, 3.0)
    )
    other = ReplayedMicrobatch(microbatch=1, samples=[4], model=1, squares={"a": 1.0})
    first = ReplayedMicrobatch(microbatch=0, samples=[3])
    assert joined_parts([one, other, first, two, first]) == [
        first,
        replace(one, total=4.0, part=2.0),
        other,
    ]


def test_the_table_names_the_model_if_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    _show(REPLAY)
    assert "model" not in capsys.readouterr().out
    (only,) = REPLAY.microbatches
    _show(replace(REPLAY, microbatches=[only, replace(only, model=1)]))
    _, _, heads, _, *lines = capsys.readouterr().out.splitlines()
    assert heads.split()[1] == "model"
    assert [line.split()[1] for line in lines[:2]] == ["0", "1"]


def test_rows_are_of_steps_that_the_run_has_kept(tmp_path: Path) -> None:
    steps = [1, 2, 3, 4, 2, 3]
    rows = [{"step": step, "loss": float(place)} for place, step in enumerate(steps)]
    not_finite = {"step": 4, "loss": None, "not_finite": {"loss": "inf"}}
    lines = [*rows, {"step": 9, "evaluation": 1.0}, not_finite]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert rows_of(tmp_path) == [rows[0], rows[4], rows[5], not_finite]


@pytest.mark.parametrize(
    "damaged",
    [
        {"loss": "1.0"},
        {"loss": [1.0]},
        {"loss": 10**400},
        {"gradient_norm": {}},
        {"lr": "0.1"},
        {"gradient_checksum": 17},
        {"not_finite": "loss"},
        {"loss": None, "not_finite": {"loss": "x"}},
        {"loss": None, "not_finite": {"loss": []}},
    ],
)
def test_a_row_that_no_run_writes_is_passed_over(
    tmp_path: Path, damaged: dict[str, object]
) -> None:
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0} | damaged]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert rows_of(tmp_path) == rows[:1]


def test_a_changed_script_is_told_from_a_wrong_machine() -> None:
    run = {
        "recipe": {"clip_norm": 1.0, "steps": 8},
        "code": {"loss": "a", "model": "b"},
        "environment": {"versions": {"torch": "2.13.0"}},
    }
    changed = {
        "recipe": {"clip_norm": 2.0, "steps": 8},
        "code": {"loss": "c", "model": "b"},
        "environment": {"versions": {"torch": "2.14.0"}},
    }
    assert list(_differences(run, run)) == []
    assert list(_differences(run, changed)) == [
        "recipe's clip_norm: 1.0, now 2.0",
        "code of loss",
        "torch: 2.13.0, now 2.14.0",
    ]
    assert list(_differences({"recipe": None}, {"recipe": None, "code": {}})) == []
