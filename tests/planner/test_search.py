"""The search among plans: what is laid out, what is struck out, what is tried with less memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, strategies as st

from lockstep.plan import Plan
from lockstep.planner.prediction import Outcome, Prediction, text
from lockstep.planner.search import Space, closest, layouts, search, shorter
from lockstep.planner.trace import Peak

AXES = ("replicate", "shard", "expert", "context", "tensor", "pipeline")
SPACE = Space(
    devices=8, devices_per_node=8, samples=256, microbatch=4, is_splittable=True,
    state_bytes=100, stages=8,
    capacity_bytes=1000,
)  # fmt: skip


def predicted(plan: Plan, seconds: float, needed: int, capacity: int = 1000) -> Outcome:
    memory = Peak(
        rank=0, bytes=needed, by_cause={"activations": needed}, moment="the forward of microbatch 1"
    )
    prediction = Prediction(
        plan=text(plan), microbatch=1, microbatches=1, seconds=seconds,
        by_limit={"matmul": seconds}, seconds_with_twice={},
        samples=1, tokens=None, steps=None, memory=[memory], capacity_bytes=capacity,
    )  # fmt: skip
    return Outcome(
        plan=text(plan), prediction=prediction, reason=None if prediction.fits else "does not fit"
    )


def evaluating(
    rule: Callable[[Plan], tuple[float, int]], tried: list[str]
) -> Callable[[Sequence[Plan]], list[Outcome]]:
    def evaluate(plans: Sequence[Plan]) -> list[Outcome]:
        tried.extend(map(text, plans))
        return [predicted(plan, *rule(plan)) for plan in plans]

    return evaluate


@given(
    st.integers(1, 128),
    st.sampled_from([1, 4, 8]),
    st.integers(1, 512),
    st.sampled_from([None, 4, 16]),
    st.sampled_from([1, 8, 12]),
)
def test_each_layout_uses_all_devices_and_gives_each_data_rank_a_microbatch(
    devices: int, node: int, microbatches: int, chunks: int | None, experts: int
) -> None:
    space = replace(
        SPACE,
        devices=devices,
        devices_per_node=node,
        samples=4 * microbatches,
        chunks=chunks,
        experts=experts,
    )
    for plan in [*layouts(space), *shorter(space)]:
        sizes = {axis: int(getattr(plan, axis)) for axis in AXES}
        assert prod(sizes.values()) == devices
        assert sizes["replicate"] * sizes["shard"] * sizes["expert"] <= microbatches
        assert experts % sizes["expert"] == 0
        assert node % sizes["expert"] == 0, "tokens are sent inside a node"
        assert node % sizes["tensor"] == 0, "tensor parallelism stays inside a node"
        assert 2 * sizes["context"] <= (chunks or 2), "a rank computes two chunks or more"
    for plan in layouts(space):
        context = int(plan.context or 1)
        data = plan.data_ranks
        each = int(plan.pipeline or 1)
        assert context == 1 or data * context * each > microbatches, "data ranks send less"


@given(st.integers(1, 200), st.sampled_from([1, 4, 8]), st.integers(1, 100), st.integers(1, 8))
def test_devices_that_data_ranks_cannot_use_are_told_with_remedies_that_use_them(
    devices: int, node: int, samples: int, size: int
) -> None:
    space = replace(
        SPACE,
        devices=devices,
        devices_per_node=min(node, devices),
        samples=samples,
        microbatch=size,
        stages=0,
    )
    usable = space.usable_devices
    fewer = replace(space, devices=usable, devices_per_node=min(node, usable))
    assert f"replicate={usable}" in map(text, layouts(fewer))
    if usable == devices:
        return
    assert usable < node or usable % node == 0, "whole machines"
    told = dict(
        re.findall(r"(global_batch|microbatch)=(\d+)", space.why_fewer().partition("to use all")[2])
    )
    more = replace(space, samples=int(told["global_batch"]))
    assert f"replicate={devices}" in map(text, layouts(more))
    if "microbatch" in told:
        assert f"replicate={devices}" in map(
            text, layouts(replace(space, microbatch=int(told["microbatch"])))
        )
    assert f"planned for {usable};" in space.why_fewer()


def test_layouts_are_all_different_and_name_the_classic_ones() -> None:
    found = [text(plan) for plan in layouts(SPACE)]
    assert len(found) == len(set(found))
    assert {
        "replicate=8",
        "shard=8",
        "tensor=8",
        "pipeline=8",
        "shard=4,tensor=2",
        "replicate=2,tensor=2,pipeline=2",
    } <= set(found)


def test_a_model_without_stages_is_tried_in_one_pipeline_which_says_why() -> None:
    found = [text(plan) for plan in layouts(replace(SPACE, stages=0))]
    assert {plan for plan in found if "pipeline" in plan} == {
        "replicate=4,pipeline=2",
        "shard=4,pipeline=2",
    }
    assert not [
        text(plan) for plan in layouts(replace(SPACE, stages=4)) if "pipeline=8" in text(plan)
    ]


def test_parameters_are_sharded_over_a_node_or_over_all() -> None:
    found = {text(plan) for plan in layouts(replace(SPACE, devices=16))}
    assert {"replicate=2,shard=8", "shard=16", "replicate=16"} <= found


def test_the_fastest_that_fits_is_first_and_what_does_not_fit_last() -> None:
    tried: list[str] = []
    outcomes = search(
        SPACE, evaluating(lambda plan: (1.0 / plan.shard, 5000 if plan.tensor == 8 else 10), tried)
    )  # type: ignore[operator]
    assert outcomes[0].plan == "shard=8"
    assert "tensor=8" in outcomes[-1].plan
    assert outcomes[-1].reason is not None


def test_a_plan_that_fits_is_not_tried_with_less_memory() -> None:
    tried: list[str] = []
    search(SPACE, evaluating(lambda plan: (1.0, 10), tried))
    assert not [plan for plan in tried if "checkpointing" in plan]


def test_a_plan_that_does_not_fit_is_tried_with_less_memory_until_it_does() -> None:
    tried: list[str] = []
    search(
        SPACE, evaluating(lambda plan: (1.0, 10 if plan.checkpointing == "full" else 5000), tried)
    )
    assert [plan.split("=8")[1] for plan in tried if plan.startswith("replicate=8")][:3] == [
        *("", ",checkpointing=selective", ",checkpointing=full")
    ]


def test_logits_are_computed_in_chunks_before_anything_is_computed_twice() -> None:
    rule = evaluating(lambda plan: (1.0, 10 if plan.checkpointing == "full" else 5000), tried := [])
    search(replace(SPACE, has_head=True), rule)
    assert [plan for plan in tried if plan.startswith("replicate=8")][:3] == [
        "replicate=8",
        "replicate=8,logits=chunked",
        "replicate=8,checkpointing=selective,logits=chunked",
    ]
    of_tensor = [plan for plan in tried if plan.startswith("tensor=8")]
    assert of_tensor[:2] == ["tensor=8", "tensor=8,checkpointing=selective"], "its loss is sharded"
    search(SPACE, evaluating(lambda plan: (1.0, 5000), tried := []))
    assert not refined_of(tried, "logits"), "no head is known"


def test_microbatches_of_one_sample_are_not_split() -> None:
    tried: list[str] = []
    search(
        replace(SPACE, microbatch=1),
        evaluating(lambda plan: (1.0, 10 if plan.offload else 5000), tried),
    )
    assert not [plan for plan in tried if "microbatch_splits" in plan]
    assert [plan for plan in tried if "offload=yes" in plan]


def test_plans_whose_parameters_do_not_fit_are_struck_out_without_a_trace() -> None:
    tried: list[str] = []
    outcomes = search(replace(SPACE, state_bytes=4000), evaluating(lambda plan: (1.0, 10), tried))
    assert "replicate=8" not in tried
    (struck,) = [each for each in outcomes if each.plan == "replicate=8"]
    assert struck.reason is not None
    assert "parameters and gradients alone" in struck.reason


def test_if_nothing_can_fit_what_holds_the_least_is_predicted_and_comes_closest() -> None:
    tried: list[str] = []
    outcomes = search(
        replace(SPACE, state_bytes=10**6), evaluating(lambda plan: (1.0, 9000 - plan.shard), tried)
    )  # type: ignore[operator]
    nearest = closest(outcomes)
    assert nearest is not None
    assert nearest.plan.startswith("shard=8")
    assert all(each.reason for each in outcomes)


def test_the_best_pipelines_are_tried_with_other_schedules_where_they_are_legal() -> None:
    tried: list[str] = []
    search(SPACE, evaluating(lambda plan: (1.0 / plan.pipeline, 10), tried))  # type: ignore[operator]
    assert {"pipeline=8,schedule=interleaved", "pipeline=8,schedule=zero-bubble"} <= set(tried)


@pytest.mark.parametrize(
    "plan",
    ["shard=8", "replicate=2,tensor=4", "pipeline=2,shard=4,checkpointing=full", "replicate=1"],
)
def test_the_text_of_a_plan_is_read_back(plan: str) -> None:
    devices = prod(
        int(part.split("=")[1]) for part in plan.split(",") if part.split("=")[0] in AXES
    )
    assert Plan.parse(text(Plan.parse(plan).resolve(devices))).resolve(devices) == Plan.parse(
        plan
    ).resolve(devices)


# Sequences shared out

LONG = replace(SPACE, samples=2, microbatch=1, chunks=16, stages=0)


def test_sequences_are_shared_out_where_there_are_more_devices_than_microbatches() -> None:
    found = {text(plan) for plan in layouts(LONG)}
    assert {"replicate=2,context=4", "shard=2,context=4", "tensor=8"} <= found
    assert "context=8" not in found, "the second sample would wait"
    assert "shard=2,context=2,tensor=2" in found
    deep = {text(plan) for plan in layouts(replace(LONG, stages=2))}
    assert "context=4,pipeline=2" in deep, "two microbatches fill two stages"
    assert "context" not in "".join(text(plan) for plan in layouts(replace(LONG, samples=8)))
    assert "context" not in "".join(text(plan) for plan in layouts(replace(LONG, chunks=None)))


def test_experts_are_divided_over_the_ranks_of_a_node() -> None:
    space = replace(SPACE, devices=16, experts=12, expert_bytes=80, stages=2)
    found = {text(plan) for plan in layouts(space) if plan.expert != 1}
    assert found == {
        "replicate=4,expert=4",
        "shard=4,expert=4",
        "replicate=2,expert=4,pipeline=2",
        "shard=2,expert=4,pipeline=2",
        "replicate=2,expert=4,tensor=2",
        "shard=2,expert=4,tensor=2",
        "replicate=2,expert=2,tensor=4",
        "shard=2,expert=2,tensor=4",
        "expert=4,tensor=2,pipeline=2",
        "expert=2,tensor=4,pipeline=2",
    }
    assert not [
        plan for plan in layouts(replace(space, stages=1)) if plan.expert != 1 != plan.pipeline
    ]
    assert not [plan for plan in layouts(SPACE) if plan.expert != 1]
    held = replace(space, state_bytes=1500, expert_bytes=1200, capacity_bytes=700)
    search(held, evaluating(lambda plan: (1.0, 10), tried := []))
    assert "replicate=4,expert=4" in tried, "300 bytes of dense layers, and 300 of experts"
    assert "replicate=2,expert=4,tensor=2" in tried, "150 bytes of dense layers, and 300"
    search(replace(held, capacity_bytes=440), evaluating(lambda plan: (1.0, 10), tried := []))
    assert "replicate=2,expert=4,tensor=2" not in tried, "tensor leaves experts whole"
    search(replace(held, expert_bytes=0), evaluating(lambda plan: (1.0, 10), tried := []))
    assert "replicate=4,expert=4" not in tried


def test_sequences_are_shared_out_further_only_if_nothing_fits_without() -> None:
    space = replace(LONG, samples=8)
    search(space, evaluating(lambda plan: (1.0, 10), tried := []))
    assert not [plan for plan in tried if "context" in plan]
    rule = evaluating(lambda plan: (1.0, 10 if plan.context == 4 else 5000), tried := [])
    outcomes = search(space, rule)
    assert outcomes[0].plan == "replicate=2,context=4"
    assert tried.index("replicate=2,context=4") > tried.index("replicate=8,checkpointing=full")
    held = replace(space, state_bytes=1500)
    assert search(held, rule)[0].plan == "shard=2,context=4", "a replica has no room"


@pytest.mark.parametrize(("samples", "usable"), [(1, 8), (2, 16), (3, 24), (5, 40), (64, 64)])
def test_devices_beyond_all_chunks_are_left_out(samples: int, usable: int) -> None:
    space = replace(LONG, devices=64, samples=samples)
    assert space.usable_devices == usable
    assert list(layouts(replace(space, devices=usable)))
    without = replace(space, chunks=None).why_fewer()
    assert "or, for a model of sequences, sequence=ls.Sequence()" in without
    assert "for a model of sequences" not in space.why_fewer()


# Faster variants of the fastest


def refined_of(tried: list[str], setting: str) -> list[str]:
    return [plan for plan in tried if setting in plan]


def test_only_the_fastest_plans_are_tried_compiled_and_with_gathered_blocks_kept() -> None:
    tried: list[str] = []
    search(SPACE, evaluating(lambda plan: (1.0 / plan.shard, 10), tried))  # type: ignore[operator]
    assert refined_of(tried, "sharding=gradients")[:2] == [
        "shard=8,sharding=gradients",
        "shard=4,pipeline=2,sharding=gradients",
    ]
    assert 1 <= len(refined_of(tried, "compile=yes")) <= 2
    assert not [plan for plan in refined_of(tried, "compile=yes") if "tensor" in plan], (
        "a compiled forward cannot be split"
    )


def test_what_makes_a_plan_faster_is_kept_when_the_next_change_is_tried() -> None:
    def seconds(plan: Plan) -> float:
        return (
            (1.0 if plan.shard == 8 else 9.0)
            * (0.5 if plan.sharding == "gradients" else 1)
            * (0.5 if plan.compile else 1)
        )

    outcomes = search(SPACE, evaluating(lambda plan: (seconds(plan), 10), tried := []))
    assert outcomes[0].plan == "shard=8,sharding=gradients,compile=yes"
    assert refined_of(tried, "compile=yes") == [
        "shard=8,sharding=gradients,compile=yes",
        "shard=8,compile=yes",
    ]


def test_plans_of_whole_models_keep_no_gathered_blocks() -> None:
    tried: list[str] = []
    search(SPACE, evaluating(lambda plan: (float(plan.shard), 10), tried))  # type: ignore[arg-type]
    assert refined_of(tried, "sharding=gradients")
    assert all("shard=" in plan for plan in refined_of(tried, "sharding=gradients"))


def test_a_plan_that_does_not_fit_is_not_made_faster() -> None:
    outcomes = search(
        SPACE, evaluating(lambda plan: (1.0, 10 if plan.tensor == 8 else 9000), tried := [])
    )
    assert [each.plan for each in outcomes if each.reason is None] == ["tensor=8"]
    assert not refined_of(tried, "sharding") + refined_of(tried, "compile")


# A microbatch that the recipe leaves to the plan

FREE = replace(SPACE, microbatch=None, samples=64)


def test_a_microbatch_of_the_plans_choice_is_split_before_anything_is_computed_twice() -> None:
    search(
        FREE,
        evaluating(lambda plan: (1.0, 10 if plan.checkpointing == "full" else 5000), tried := []),
    )
    of_replicas = [plan for plan in tried if plan.startswith("replicate=8")]
    assert of_replicas[:3] == [
        "replicate=8",
        "replicate=8,microbatch_splits=1",
        "replicate=8,microbatch_splits=2",
    ]
    assert "replicate=8,microbatch_splits=4" not in tried, "a rank has 8 samples"
    assert of_replicas[3] == "replicate=8,checkpointing=selective,microbatch_splits=2"
    assert of_replicas[4] == "replicate=8,checkpointing=full,microbatch_splits=2"


def test_pipelines_have_enough_microbatches_to_be_filled() -> None:
    found = {text(plan) for plan in layouts(FREE)}
    assert {
        "pipeline=8,microbatch_splits=5",
        "replicate=4,pipeline=2,microbatch_splits=3",
        "replicate=8",
    } <= found


def test_what_cannot_be_split_is_not() -> None:
    for space in (replace(SPACE, is_splittable=False), replace(FREE, is_splittable=False)):
        search(space, evaluating(lambda plan: (1.0, 5000), tried := []))
        assert "replicate=8,checkpointing=full" in tried
        assert not refined_of(tried, "microbatch_splits")


def test_plans_that_cannot_be_split_further_are_tried_with_offload() -> None:
    search(
        replace(SPACE, microbatch=2),
        evaluating(lambda plan: (1.0, 10 if plan.offload else 5000), tried := []),
    )
    assert "shard=8,offload=yes,checkpointing=full,microbatch_splits=1" in tried


@pytest.mark.parametrize(
    "outcome",
    [
        predicted(Plan(shard=8), 1.0, 10),
        predicted(Plan(shard=8), 1.0, 9000),
        Outcome(plan="x", reason="no"),
    ],
)
def test_an_outcome_is_the_same_after_a_way_through_json(outcome: Outcome) -> None:
    assert Outcome.from_json(json.loads(json.dumps(outcome.as_json()))) == outcome
