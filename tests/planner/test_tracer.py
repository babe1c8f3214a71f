"""A traced step under each engine: what is in memory, what is exchanged, and what is computed."""

from __future__ import annotations

import time
from collections import Counter
from functools import cache

import pytest
import torch
import torch.distributed as dist
from planner.subjects import (
    BLOCKS,
    HIDDEN,
    LENGTH,
    MICROBATCH,
    WIDTH,
    WORDS,
    Transformer,
    adamw,
    processes,
    recipe,
    split,
    traced,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.base.errors import PlanError
from lockstep.plan import Plan
from lockstep.planner.trace import (
    DISPATCH,
    REDUCED,
    Cause,
    Communicate,
    Compute,
    Mark,
    Operation,
    TracedStep,
    memory_peak,
)
from lockstep.planner.tracing.tracer import StageSplit, TraceOptions

PARAMETERS = 4 * sum(parameter.numel() for parameter in Transformer().parameters())
TENSORS = sum(1 for _ in Transformer().parameters())
SPLIT = 4 * BLOCKS * (2 * WIDTH * HIDDEN + HIDDEN)
"""Bytes of what the tensor axis shards: `up`, its bias, and the weight of `down`."""
OF_STAGE = 4 * (
    WORDS * WIDTH + BLOCKS // 2 * sum(each.numel() for each in Transformer().blocks[0].parameters())
)
"""Bytes of the first of two stages: the embedding and half of the blocks."""
BLOCK = 4 * sum(each.numel() for each in Transformer().blocks[0].parameters())
MESSAGE = 4 * MICROBATCH * LENGTH * WIDTH
"""Bytes that a stage of a pipeline passes on."""
MICROBATCHES = 4
"""Microbatches of a step of one data rank, of two it is half."""

OF_STATE = {
    "replicate=1": (PARAMETERS, TENSORS),
    "replicate=2": (PARAMETERS, TENSORS),
    "replicate=2,numerics=bitwise": (PARAMETERS, TENSORS),
    "shard=2": (PARAMETERS // 2, TENSORS),
    "shard=2,sharding=gradients": (PARAMETERS // 2, TENSORS),
    "replicate=2,shard=4": (PARAMETERS // 4, TENSORS),
    "tensor=2": (PARAMETERS - SPLIT // 2, TENSORS),
    "pipeline=2": (OF_STAGE, 1 + 8 * BLOCKS // 2),
    "pipeline=2,shard=2,tensor=2": ((OF_STAGE - SPLIT // 4) // 2, 1 + 8 * BLOCKS // 2),
}
"""Bytes and number of the parameters that a plan leaves to a rank."""
MANY = recipe(global_batch=8 * MICROBATCH)


def plain(plan: str, rank: int = 0) -> TracedStep:
    """The trace of a step of `recipe()`, made once. With the state of AdamW under the plans of
    which a test looks at it."""
    return made(plan, rank)


@cache
def made(plan: str, rank: int) -> TracedStep:
    changes = {"optimizer": adamw} if plan in OF_STATE else {}
    return traced(plan, recipe(**changes), rank=rank)


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


def held(trace: TracedStep, cause: Cause) -> int:
    """The most memory of one kind at a time."""
    return memory_peak(
        TracedStep(
            0,
            [],
            [each for each in trace.allocations if trace.causes[each.number] == cause],
            trace.causes,
        )
    ).bytes


def counts(trace: TracedStep, kind: str, axis: str | None = None) -> int:
    return sum(each.kind == kind and axis in (None, each.axis) for each in trace.collectives())


def operations(trace: TracedStep) -> list[Operation]:
    return [item.operation for item in trace.items if isinstance(item, Compute)]


# Memory


@pytest.mark.parametrize("plan", OF_STATE)
def test_the_state_has_exactly_the_bytes_that_the_plan_leaves_to_a_rank(plan: str) -> None:
    trace, (parameters, tensors) = plain(plan), OF_STATE[plan]
    assert held(trace, "parameters") == parameters
    assert held(trace, "optimizer") == 2 * parameters + 4 * tensors, (
        "AdamW: two moments, and a count for each parameter"
    )
    if "bitwise" not in plan:
        assert held(trace, "gradients") == parameters


def test_ddps_buckets_are_communication_and_stay_from_step_to_step() -> None:
    """Beside them, microbatches before the last one sum their gradients in memory of their own."""
    trace, sums = plain("replicate=2"), 4 * LENGTH * MICROBATCHES * 4
    assert PARAMETERS <= held(trace, "communication") <= PARAMETERS + sums, (
        "and the sums of the loss"
    )
    before = [
        each
        for each in trace.allocations
        if each.at == 0 and trace.causes[each.number] == "communication"
    ]
    assert sum(each.bytes for each in before) >= PARAMETERS
    assert memory_peak(trace).by_cause["communication"] >= PARAMETERS


def test_a_bitwise_sum_has_buffers_beside_the_buckets() -> None:
    assert held(plain("replicate=2,numerics=bitwise"), "communication") >= 2 * PARAMETERS


@pytest.mark.parametrize(
    ("plan", "parameters"),
    [
        ("pipeline=2,numerics=bitwise", OF_STAGE),
        ("tensor=2,numerics=bitwise,slices=2", PARAMETERS - SPLIT // 2),
    ],
)
def test_an_ordered_sum_after_the_backwards_holds_a_gradient_for_each_level_of_its_tree(
    plan: str, parameters: int
) -> None:
    assert MICROBATCHES == 4
    assert held(plain(plan), "gradients") == 3 * parameters


@pytest.mark.parametrize("plan", ["shard=2", "shard=2,checkpointing=full"])
def test_what_a_block_is_gathered_in_and_scattered_from_is_communication(plan: str) -> None:
    """A reduce-scatter has the whole gradient and its shard; the next block is gathered
    meanwhile."""
    assert 1.5 * BLOCK <= held(plain(plan), "communication") <= 3.5 * BLOCK


def test_each_gather_of_a_block_and_each_scatter_has_a_buffer_in_the_forward_too() -> None:
    trace = plain("shard=2")
    buffers = [
        each
        for each in trace.allocations
        if each.bytes == BLOCK and trace.causes[each.number] == "communication" and each.at > 0
    ]
    assert len(buffers) == MICROBATCHES // 2 * BLOCKS * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_stage_receives_is_communication(rank: int) -> None:
    found = held(plain("pipeline=2", rank), "communication")
    assert found % MESSAGE == 0
    assert MESSAGE <= found <= MICROBATCHES * MESSAGE


@pytest.mark.parametrize("rank", [0, 1])
def test_under_1f1b_a_stage_needs_no_more_memory_for_more_microbatches(rank: int) -> None:
    few = plain("pipeline=2", rank)
    many = traced("pipeline=2", MANY, rank=rank)
    for cause in ("communication", "activations"):
        assert held(many, cause) == pytest.approx(held(few, cause), abs=MESSAGE // 2), (
            "no more than the sums of the loss"
        )


def test_split_layers_are_nowhere_whole() -> None:
    """Torch computes with fake whole weights to know the shape of a result; that is no part of the
    step."""
    sums = Counter(each.bytes for each in operations(plain("tensor=2")) if each.name == "aten.add_")
    whole, later = 3 * 4 * WIDTH * HIDDEN, BLOCKS * (MICROBATCHES - 1)
    assert sums[whole] == later, "the projection's, which is as large and not split"
    assert sums[whole // 2] == 2 * later


def test_the_sums_of_split_layers_are_activations() -> None:
    assert held(plain("tensor=2"), "communication") < MESSAGE


def test_checkpointing_keeps_fewer_activations_and_computes_them_again() -> None:
    by_mode = {mode: plain(f"replicate=1,checkpointing={mode}") for mode in ("selective", "full")}
    by_mode["none"] = plain("replicate=1")
    kept = {mode: held(trace, "activations") for mode, trace in by_mode.items()}
    again = {
        mode: sum(each.flops for each in operations(trace) if each.phase == "recompute")
        for mode, trace in by_mode.items()
    }
    assert kept["full"] < kept["selective"] < kept["none"]
    assert again["none"] == again["selective"] == 0 < again["full"], (
        "selective keeps what took arithmetic"
    )
    forward = {
        mode: sum(each.flops for each in operations(trace) if each.phase == "forward")
        for mode, trace in by_mode.items()
    }
    assert len(set(forward.values())) == 1


def test_activations_are_in_proportion_to_the_microbatch_and_state_is_not() -> None:
    assert MICROBATCH == 2
    small = plain("replicate=1")
    large = traced("replicate=1", recipe(microbatch=8, global_batch=4 * 8))
    assert held(large, "parameters") == held(small, "parameters")
    assert held(large, "activations") == pytest.approx(4 * held(small, "activations"), rel=0.02)


def test_a_pipeline_keeps_fewer_activations_under_1f1b_than_under_gpipe() -> None:
    assert Plan().schedule == "1f1b"
    first, gpipe = (
        held(plain(plan), "activations") for plan in ("pipeline=2", "pipeline=2,schedule=gpipe")
    )
    assert first < 0.6 * gpipe


def test_in_bf16_activations_take_about_half() -> None:
    full, short = (
        held(
            traced("replicate=1", recipe(precision=name, microbatch=48, global_batch=48)),
            "activations",
        )
        for name in ("fp32", "bf16")
    )
    assert 0.45 * full < short < 0.8 * full, (
        "and copies of the parameters; what is normalised stays as it is"
    )


def test_in_bf16_a_shard_gathers_half_the_bytes_and_keeps_no_cast_weights() -> None:
    full, short = plain("shard=2"), traced("shard=2", recipe(precision="bf16"))
    gathered = [
        sum(each.bytes for each in trace.collectives() if each.kind == "all_gather")
        for trace in (full, short)
    ]
    assert gathered[1] < 0.7 * gathered[0]
    alone = traced("replicate=1", recipe(precision="bf16"))
    assert held(short, "activations") < 0.6 * held(alone, "activations"), "which has cast weights"


@pytest.mark.parametrize(("layer", "numerics"), [(nn.Linear, "bitwise"), (OwnLinear, "fast")])
def test_in_bf16_a_shard_keeps_casts_of_one_block(
    monkeypatch: pytest.MonkeyPatch, layer: type[nn.Module], numerics: str
) -> None:
    """Those of weights that are gathered in float32 live until the end of the block's forward."""
    casts = sum(2 * each.numel() for each in Transformer().blocks[0].parameters() if each.dim() > 1)
    monkeypatch.setattr(nn, "Linear", layer)
    alone, shard = (
        held(traced(f"{plan},numerics={numerics}", recipe(precision="bf16")), "activations")
        for plan in ("replicate=1", "shard=2")
    )
    assert alone - shard >= (BLOCKS - 1) * casts


class Routed(Transformer):
    """Has a layer that is left out of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WORDS, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        scores = super().forward(words)
        with torch.autocast(scores.device.type, enabled=False):
            routed: Tensor = self.gate(scores.float())
        return routed


def test_what_a_run_would_refuse_for_a_dtype_the_plan_refuses() -> None:
    assert held(
        traced("replicate=2", recipe(model=Routed, precision="bf16", stages=None)), "activations"
    )
    with pytest.raises(
        PlanError,
        match=(
            r"shard=2.*: expected both factors to have the same dtype, but got: .*BFloat16; under"
            r" shard"
        ),
    ):
        traced("shard=2", recipe(model=Routed, precision="bf16", stages=None))


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "tensor=2", "pipeline=2"])
def test_no_memory_is_freed_twice(plan: str) -> None:
    live: Counter[int] = Counter()
    for each in (trace := plain(plan)).allocations:
        live[each.number] += each.bytes
        assert live[each.number] >= 0
    assert live.keys() <= trace.causes.keys()


# Exchanges


def test_replicas_send_their_gradients_once_a_step() -> None:
    for trace in (plain("replicate=2"), traced("replicate=2", recipe(global_batch=4))):
        (summed,) = [each for each in trace.collectives() if each.kind == "all_reduce"]
        assert PARAMETERS <= summed.bytes <= PARAMETERS + 500, "and the sums of the loss"
        assert (summed.ranks, summed.axis) == (2, "replicate")


@pytest.mark.parametrize(
    ("plan", "passes"),
    [
        ("shard=2", 2),
        ("shard=2,sharding=gradients", 1),
        ("shard=2,checkpointing=full", 2),
        ("shard=2,checkpointing=selective", 2),
    ],
)
def test_a_sharded_block_is_gathered_for_each_pass(plan: str, passes: int) -> None:
    """And what is in no block once: it is kept from the forward to the backward. The weights of the
    microbatches are gathered once."""
    trace, microbatches = plain(plan), MICROBATCHES // 2
    assert counts(trace, "all_gather", "shard") == microbatches * (BLOCKS * passes + 1) + 1
    assert counts(trace, "reduce_scatter", "shard") == microbatches * (BLOCKS + 1)
    given = sum(each.bytes for each in trace.collectives() if each.kind == "reduce_scatter")
    assert given == microbatches * PARAMETERS


def test_replicas_of_shards_sum_their_shards_once_a_step() -> None:
    trace = traced("replicate=2,shard=2", recipe(global_batch=16))
    summed = [
        each.bytes
        for each in trace.collectives()
        if (each.kind, each.axis) == ("all_reduce", "replicate")
    ]
    assert sum(summed) == pytest.approx(PARAMETERS / 2, rel=0.01)


def test_a_split_layer_is_summed_in_the_forward_and_in_the_backward() -> None:
    trace = plain("tensor=2")
    activations = [each for each in trace.collectives() if each.bytes == MESSAGE]
    assert Counter(each.phase for each in activations) == {
        "forward": MICROBATCHES * BLOCKS,
        "backward": MICROBATCHES * BLOCKS,
    }


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero-bubble"])
def test_what_a_stage_sends_the_next_one_receives(schedule: str) -> None:
    traces = [plain(f"pipeline=2,schedule={schedule}", rank) for rank in range(2)]
    boundaries = 3 if schedule == "interleaved" else 1
    for sender, receiver in ((0, 1), (1, 0)):
        sent, received = (
            messages(traces[sender], receiver, receives=False),
            messages(traces[receiver], sender, receives=True),
        )
        assert sent == received == [MESSAGE] * MICROBATCHES * boundaries


def messages(trace: TracedStep, peer: int, *, receives: bool) -> list[int]:
    """Bytes of the messages to another rank of the pipeline, or from it, in order."""
    found = [
        item
        for item in trace.items
        if isinstance(item, Communicate) and (item.peer, item.receives) == (peer, receives)
    ]
    return [item.collective.bytes for item in found]


@pytest.mark.parametrize(
    "plan",
    [
        "replicate=2",
        "shard=2",
        "pipeline=2,schedule=interleaved",
        "tensor=2",
    ],
)
def test_all_ranks_compute_as_much_together_as_one_alone(plan: str) -> None:
    alone = sum(each.flops for each in operations(plain("replicate=1")))
    ranks = [plain(plan, rank) for rank in range(processes(plan) if "pipeline" in plan else 1)]
    flops = [sum(each.flops for each in operations(trace)) for trace in ranks]
    together = sum(flops) * (1 if "pipeline" in plan else processes(plan))
    if plan == "tensor=2":
        assert alone < together < 2 * alone, "what is not split is computed by both"
    else:
        assert together == alone


def marks(plan: str, name: str) -> int:
    return sum(item == Mark(name) for item in plain(plan).items)


def test_the_host_s_work_beside_kernels_is_marked() -> None:
    """DTensor's for each operation on a split layer; DDP's for each gradient; of FSDP the optimizer
    alone has any."""
    assert marks("tensor=2", DISPATCH) > BLOCKS * 10
    assert (marks("replicate=2", DISPATCH), marks("replicate=2", REDUCED)) == (0, 2 * TENSORS)
    assert marks("shard=2", DISPATCH) < 10
    assert (marks("shard=2", REDUCED), marks("replicate=1", REDUCED)) == (0, 0)


class Words(nn.Module):
    """A vocabulary whose rows are no multiple of 16 bytes."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, WIDTH), nn.Linear(WIDTH, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embedding(words))
        return scores


@pytest.mark.parametrize(("words", "aligned"), [(257, 4), (256, 64)])
def test_the_rows_of_all_three_products_with_an_odd_vocabulary_are_not_aligned(
    words: int, aligned: int
) -> None:
    """Whether it is the inner dimension or not. An odd number of tokens is no row of any."""
    given = recipe(
        model=lambda: Words(words), stages=None, tensor=None, microbatch=1, global_batch=1
    )
    products = [each for each in operations(traced("replicate=1", given)) if each.kind == "matmul"]
    assert sorted(each.shape for each in products) == [
        (1, 6, 16, words),
        (1, 6, words, 16),
        (1, words, 16, 6),
    ]
    assert {each.aligned_bytes for each in products} == {aligned}


def test_marks_say_where_a_step_begins_and_ends() -> None:
    names = [
        item.name
        for item in plain("shard=2").items
        if isinstance(item, Mark) and item != Mark(DISPATCH)
    ]
    assert names == ["microbatch", "microbatch", "update", "end"]


def test_the_stages_of_a_pipeline_are_found_in_the_whole_model() -> None:
    plan = Plan.parse("pipeline=2,schedule=interleaved").resolve(2)
    found = split(None, plan, TraceOptions(world_size=2))
    assert isinstance(found, StageSplit)
    assert sum(map(sum, found.kinds)) == BLOCKS + 2
    for route in found.boundaries:
        assert [each.shapes for each in route] == [((MICROBATCH, LENGTH, WIDTH),)] * 3


# Size of the world


@pytest.mark.parametrize("plan", ["replicate={}", "replicate={},shard=8", "shard={}"])
def test_a_rank_of_16384_is_as_cheap_as_one_of_16(plan: str) -> None:
    traces, seconds, groups = [], [], list[int]()
    for size in (16, 16384):
        samples = torch.zeros(4 * size * MICROBATCH, LENGTH, dtype=torch.long)
        given = recipe(data=TensorDataset(samples, samples), global_batch=2 * size * MICROBATCH)
        sized = plan.format(size // 8 if "shard=8" in plan else size)
        began = time.process_time()
        traces.append(
            traced(
                sized,
                given,
                world_size=size,
                watch=lambda _: groups.append(len(dist.distributed_c10d._world.pg_map)),
            )
        )
        seconds.append(time.process_time() - began)
    small, large = traces
    assert abs(len(large.items) - len(small.items)) < 4
    assert abs(len(large.allocations) - len(small.allocations)) < 10
    assert [each.kind for each in large.collectives()] == [
        each.kind for each in small.collectives()
    ]
    assert groups[0] == groups[1] < 10
    assert seconds[1] < 4 * seconds[0] + 3


def test_the_output_of_the_model_and_the_loss_are_logits() -> None:
    by_cause = memory_peak(plain("replicate=1")).by_cause
    assert by_cause["logits"] > 0
