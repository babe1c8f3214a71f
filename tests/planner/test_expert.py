"""Plans that divide experts over ranks: what they send and hold is in the trace, from shapes
alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from planner.subjects import adamw, recipe, traced
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.plan import Plan
from lockstep.planner.machines.costs import Machine
from lockstep.planner.machines.hardware import parse_target
from lockstep.planner.predict import predict
from lockstep.planner.prediction import SKEW, Prediction
from lockstep.planner.trace import TracedStep, memory_peak
from lockstep.planner.tracing.tracer import model_size
from lockstep.recipe.balance import Balance

WIDTH, HIDDEN, LENGTH, WORDS, EXPERTS, CHOSEN, SAMPLES, MICROBATCHES = 64, 96, 33, 32, 8, 2, 2, 4


class Experts(nn.Module):
    """Takes the weights of each row's expert, which needs no value."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        up, down = self.up[index], self.down[index]
        hidden = torch.einsum("sd,skdh->skh", tokens, up).relu()
        return torch.einsum("skh,skhd,sk->sd", hidden, down, weights)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(CHOSEN)
        found: Tensor = x + self.experts(tokens, index, weights).view_as(x)
        return found


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.Sequential(Block())

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.words(words)))
        return scores


words = torch.zeros(SAMPLES * MICROBATCHES, LENGTH, dtype=torch.int64)
GIVEN = recipe(
    model=Mixture,
    data=TensorDataset(words, words),
    global_batch=SAMPLES * MICROBATCHES,
    microbatch=SAMPLES,
    optimizer=adamw,
    stages=None,
    tensor=None,
)


@cache
def step(plan: str) -> TracedStep:
    return traced(plan, GIVEN)


def test_rows_go_to_their_experts_and_back() -> None:
    """With balanced routing, in the forward and in the backward, in each round."""
    for ranks in (2, 4):
        sent = step(f"expert={ranks}").sent_bytes()["all_to_all on expert"]
        rows = SAMPLES * LENGTH * CHOSEN
        once = 4 * rows * WIDTH + 8 * EXPERTS / 4
        expected = 4 * once * MICROBATCHES / ranks * (ranks - 1) / ranks
        assert abs(sent / expected - 1) < 0.02


def test_a_stage_sends_rows_to_the_experts_of_its_own_ranks() -> None:
    """The second stage of two is the head, without experts."""
    staged = replace(GIVEN, stages=["words", "blocks.*", "head"])
    plan = "expert=2,pipeline=2"
    first, second = (traced(plan, staged, rank=rank).sent_bytes() for rank in (0, 2))
    assert first["all_to_all on expert"] == step("expert=2").sent_bytes()["all_to_all on expert"]
    assert "all_to_all on expert" not in second
    head = 4 * (WIDTH + 1) * WORDS
    summed = second["all_reduce on expert"]
    assert head <= summed <= head + 1024, "2 (N - 1) / N of the other parameters"


def test_the_stages_of_a_bitwise_pipeline_send_what_one_stage_sends() -> None:
    staged = replace(GIVEN, stages=["words", "blocks.*", "head"])
    plan = "expert=2,pipeline=2,numerics=bitwise"
    several = [traced(plan, staged, rank=rank).sent_bytes() for rank in (0, 2)]
    one = traced("expert=2,numerics=bitwise", staged).sent_bytes()
    weights = 8 * MICROBATCHES // 2  # each stage gathers them
    for kind, twice in (("all_to_all on expert", 0), ("all_gather on expert", weights)):
        assert sum(sent[kind] for sent in several) == one[kind] + twice, kind


def test_a_rank_whose_experts_are_chosen_more_often_receives_more_rows() -> None:
    """Here twice as many as the mean. With 2 ranks that is every row."""
    for ranks in (2, 4):
        balanced, skewed = (
            trace.sent_bytes()["all_to_all on expert"]
            for trace in (
                step(f"expert={ranks}"),
                traced(f"expert={ranks}", GIVEN, skew=SKEW),
            )
        )
        assert abs(skewed / balanced - SKEW) < 0.05


def test_a_prediction_has_both_figures() -> None:
    machine = Machine.of(parse_target("2 x H100"), None)
    experts, dense = (
        predict(GIVEN, Plan.parse(plan), machine) for plan in ("expert=2", "replicate=2")
    )
    assert dense.skewed is None
    assert experts.skewed is not None
    assert experts.skewed.seconds >= experts.seconds
    assert experts.skewed.peak_bytes > experts.peak.bytes


def predicted(plan: str, microbatches: int, over: Any) -> Prediction:
    rows = words[:SAMPLES].repeat(microbatches, 1)
    given = replace(
        GIVEN,
        model=Mixture,
        data=TensorDataset(rows, rows),
        global_batch=SAMPLES * microbatches,
        balance=over and Balance(coefficient=0.1, over=over),
        stages=["words", "blocks", "head"],
    )
    count = 2 if "pipeline" in plan else 1
    return predict(given, Plan.parse(plan), Machine.of(parse_target(f"{count} x H100"), None))


def test_a_balance_over_the_step_costs_a_forward_more() -> None:
    """A third of the products, in the forward and the backward, of all microbatches."""
    for count in (3, 7):
        plain, step, previous = (
            predicted("replicate=1", count, over).by_limit["matmul"]
            for over in (None, "step", "previous")
        )
        assert previous == plain
        assert 1.05 < step / plain < 1.4


def test_a_balance_over_the_step_costs_no_forward_where_backwards_are_held() -> None:
    """And holds the inputs of the blocks of all microbatches until then."""
    plan, inputs = "replicate=1,checkpointing=full", 4 * SAMPLES * LENGTH * WIDTH
    plain, short, long = (
        predicted(plan, count, over) for count, over in ((7, None), (4, "step"), (7, "step"))
    )
    assert long.by_limit["matmul"] == pytest.approx(plain.by_limit["matmul"])
    assert long.peak.bytes - short.peak.bytes >= 3 * inputs


def test_a_balance_in_a_pipeline_is_predicted() -> None:
    step, previous = (predicted("pipeline=2", 6, over) for over in ("step", "previous"))
    assert step.seconds > previous.seconds


def test_a_rank_holds_its_experts() -> None:
    whole, half = (memory_peak(step(plan)).by_cause for plan in ("replicate=2", "expert=2"))
    experts = 4 * EXPERTS * 2 * WIDTH * HIDDEN
    assert whole["parameters"] - half["parameters"] == experts // 2
    assert whole["optimizer"] - half["optimizer"] == experts
    sharded = memory_peak(step("shard=2,expert=2")).by_cause
    assert sharded["parameters"] <= 1.05 * half["parameters"] / 2


def test_tensor_leaves_experts_whole() -> None:
    given = replace(GIVEN, tensor={"head": "vocabulary"})
    alone, both = (traced(plan, given) for plan in ("expert=2", "expert=2,tensor=2"))
    bytes_alone, bytes_both = (memory_peak(each).by_cause["parameters"] for each in (alone, both))
    assert bytes_alone - bytes_both == 4 * (WORDS * WIDTH + WORDS) // 2
    assert both.sent_bytes()["all_to_all on expert"] == alone.sent_bytes()["all_to_all on expert"]
    assert both.sent_bytes()["all_gather on tensor"] > 0


def test_experts_are_found() -> None:
    size = model_size(GIVEN)
    assert (size.experts, size.expert_bytes) == (EXPERTS, 4 * EXPERTS * 2 * WIDTH * HIDDEN)
    assert (model_size(recipe()).experts, model_size(recipe()).expert_bytes) == (1, 0)
