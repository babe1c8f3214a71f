"""Plans that share out sequences: what their attention sends and keeps is in the trace, from shapes
alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from planner import subjects
from planner.subjects import processes, recipe, traced
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.planner.trace import Compute, TracedStep, memory_peak
from lockstep.planner.tracing.tracer import model_size

WIDTH, HEADS, KEY_HEADS, LENGTH, WORDS, BLOCKS = 64, 8, 4, 509, 32, 2
SAMPLES = 2
ACTIVATION_BYTES = 4 * SAMPLES * LENGTH * WIDTH
MICROBATCHES = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pair = nn.Linear(WIDTH, 2 * WIDTH * KEY_HEADS // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        query = self.query(x).view(samples, tokens, HEADS, -1).transpose(1, 2)
        key, value = self.pair(x).view(samples, tokens, 2, KEY_HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        found: Tensor = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return found


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        places = self.places(torch.arange(words.shape[1], device=words.device))
        scores: Tensor = self.head(self.blocks(self.words(words) + places))
        return scores


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 40)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        scores: Tensor = self.head(self.attention(x, x, x)[0])
        return scores


def halves(batch: list[Tensor]) -> Tensor:
    """Two documents in each sample."""
    return (torch.arange(LENGTH) >= LENGTH // 2).long().expand(len(batch[0]), -1)


@cache
def step(plan: str, ranks: int, *, is_gpu: bool = True, packed: bool = False) -> TracedStep:
    words = torch.zeros(8, LENGTH, dtype=torch.int64)
    given = recipe(
        model=GPT,
        data=TensorDataset(words, words),
        global_batch=SAMPLES * MICROBATCHES,
        microbatch=SAMPLES,
        sequence=ls.Sequence(chunks=4 if packed else 8, documents=halves if packed else None),
        stages=None,
        tensor=None,
    )
    return traced(plan, given, world_size=ranks, is_gpu=is_gpu)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("exchange", ["keys", "heads"])
def test_attention_sends_the_bytes_of_its_exchange(ranks: int, exchange: str) -> None:
    trace = step(f"context={ranks},exchange={exchange}", ranks)
    share = KEY_HEADS / HEADS
    each = {
        "keys": 6 * share * (ranks - 1) / ranks,
        "heads": 4 * (1 + share) * (ranks - 1) / ranks**2,
    }[exchange]
    layers = BLOCKS * MICROBATCHES
    expected = layers * each * ACTIVATION_BYTES
    sent = trace.sent_bytes()
    found = sum(sent.get(f"{kind} on context", 0) for kind in ("all_to_all", "broadcast"))
    assert found == pytest.approx(expected, abs=0.02 * expected + 4096)


def test_ranks_keep_their_part_of_the_activations() -> None:
    alone = memory_peak(step("replicate=1", 1)).by_cause
    for ranks in (2, 4):
        keys = memory_peak(step(f"context={ranks},exchange=keys", ranks)).by_cause
        # with all keys and values of one layer, here as large as one activation, and a copy
        most = alone["activations"] / ranks + 2 * ACTIVATION_BYTES
        assert keys["activations"] + keys.get("communication", 0) <= most


def test_gathered_keys_and_values_are_a_cause_of_memory() -> None:
    trace = step("context=2,exchange=keys", 2)
    changes = [each for each in trace.allocations if trace.causes[each.number] == "keys and values"]
    gathered = 2 * ACTIVATION_BYTES * KEY_HEADS // HEADS
    live = most = 0
    for each in changes:
        live += each.bytes
        most = max(most, live)
    assert most == gathered, "of one layer"


def test_a_gpu_needs_no_mask_in_memory_for_a_chunk() -> None:
    masks = []
    for is_gpu in (True, False):
        items = step("context=2,exchange=keys", 2, is_gpu=is_gpu).items
        made = [each.operation for each in items if isinstance(each, Compute)]
        masks.append(sum(each.name == "aten.where" and each.bytes > 64 * LENGTH for each in made))
    assert masks[0] == 0 < masks[1]


def test_chunked_logits_are_traced_without_memory_of_their_own() -> None:
    given = recipe(head="head", stages=None, tensor=None)
    whole, chunked = (
        traced(f"replicate=1,logits={logits}", given) for logits in ("whole", "chunked")
    )
    products = [
        sum(isinstance(each, Compute) and each.operation.kind == "matmul" for each in trace.items)
        for trace in (whole, chunked)
    ]
    assert products[1] > products[0], "a product for each chunk of tokens"
    causes = [
        set(trace.causes.values()) & {"logits", "chunked logits"} for trace in (whole, chunked)
    ]
    assert causes == [{"logits"}, {"chunked logits"}]
    assert model_size(given).has_head
    assert not model_size(recipe()).has_head


def test_what_is_refused_by_name_is_refused_in_a_trace() -> None:
    given = recipe(model=Attending, sequence=ls.Sequence(chunks=4), stages=None, tensor=None)
    with pytest.raises(RecipeError, match="MultiheadAttention"):
        traced("context=2", given)


@pytest.mark.parametrize("is_gpu", [True, False])
@pytest.mark.parametrize("plan", ["replicate=1", "context=2"])
def test_packed_documents_are_traced(plan: str, is_gpu: bool) -> None:
    trace = step(plan, 2 if "context" in plan else 1, is_gpu=is_gpu, packed=True)
    made = [each.operation for each in trace.items if isinstance(each, Compute)]
    assert {each.kind for each in made} >= {"attention", "matmul"}


@pytest.mark.parametrize("packed", [False, True])
def test_stages_pass_on_the_tokens_of_a_rank(packed: bool) -> None:
    given = recipe(
        data=TensorDataset(*torch.zeros(2, 16, LENGTH, dtype=torch.int64)),
        global_batch=4 * SAMPLES,
        microbatch=SAMPLES,
        sequence=ls.Sequence(chunks=4, documents=halves if packed else None),
        tensor=None,
    )
    sent = {}
    for plan in ("pipeline=2", "pipeline=2,context=2")[packed:]:
        for rank in (0, processes(plan) // 2):
            trace = traced(plan, given, rank=rank)
            sent[plan, rank] = sum(
                each for name, each in trace.sent_bytes().items() if "on pipeline" in name
            )
            made = [each.operation.kind for each in trace.items if isinstance(each, Compute)]
            assert "attention" in made
    cut, boundary = sent["pipeline=2,context=2", 0], 4 * SAMPLES * subjects.WIDTH
    assert cut == pytest.approx(4 * boundary * (LENGTH - LENGTH // 2), rel=0.02)
    assert sent["pipeline=2,context=2", 2] == pytest.approx(cut, rel=0.1)
    if not packed:
        whole = sent["pipeline=2", 0]
        assert whole - cut == pytest.approx(4 * boundary * (LENGTH // 2), rel=0.02)
