"""Documents in models of transformers: each attends within itself, at positions that restart."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model.context.families import CONFIGS, WORDS, family
from torch import Tensor, nn
from torch.nn import functional as F
from worlds import ALONE, all_ranks

from lockstep.base.errors import PlanError, RecipeError
from lockstep.model.context.active import ActiveSequence, activate, deactivate
from lockstep.model.context.documents import Documents
from lockstep.model.context.exchange import TokenLayout
from lockstep.model.context.transformers import open_transformers
from lockstep.testing.pool import WorkerPool

IDS = torch.tensor([[0] * 6 + [1] * 12 + [2] * 14, [0] * 3 + [1] + [4] * 21 + [-1] * 7])
TOKENS = torch.randint(WORDS, IDS.shape, generator=torch.Generator().manual_seed(1))


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Forwards:
    """A forward whose model attends to a sequence, without what else its mode changes."""

    sequence: ActiveSequence

    def resumed(self, counts: dict[str, int]) -> Any:
        raise AssertionError(counts)


@contextmanager
def attending(layout: TokenLayout, documents: Documents | None, exchange: Any = "auto") -> Any:
    sequence = ActiveSequence(layout, exchange, documents)
    activate(Forwards(sequence))
    try:
        yield sequence
    finally:
        deactivate()


@pytest.mark.parametrize("name", [*CONFIGS])
def test_documents_of_a_row_are_what_they_are_alone(name: str) -> None:
    model = family(name)
    alone = deepcopy(model)
    assert open_transformers(model)
    with attending(TokenLayout(IDS.shape[1], 8, ALONE), Documents.of(IDS, CPU)):
        packed = model(input_ids=TOKENS).logits
        masked = model(input_ids=TOKENS, attention_mask=(IDS >= 0).long()).logits
    for row in range(2):
        for document in IDS[row].unique():
            where = IDS[row] == document
            truth = alone(input_ids=TOKENS[row : row + 1, where]).logits[0]
            torch.testing.assert_close(packed[row, where], truth, rtol=1e-5, atol=1e-5)
            if document >= 0:
                torch.testing.assert_close(masked[row, where], truth, rtol=1e-5, atol=1e-5)
    assert packed.isfinite().all()
    assert masked.isfinite().all()
    plain = {"input_ids": TOKENS, "attention_mask": (IDS >= 0).long()}
    assert torch.equal(model(**plain).logits, alone(**plain).logits)


CASES = {
    "plain": torch.zeros_like(IDS),
    "padded": torch.where(IDS < 0, IDS, 0),
    "documents": IDS,
}
"""The ids of each case's documents; padding is -1."""


def next_labels(ids: Tensor) -> Tensor:
    """The next token of the same document."""
    ends = F.pad(ids.diff(dim=1) != 0, (0, 1), value=True) | (ids < 0)
    return TOKENS.roll(-1, 1).masked_fill(ends, -100)


def backward(logits: Tensor, labels: Tensor) -> None:
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()


def one_by_one(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The gradients, with each document, or row without its padding, in a forward of its own."""
    for row, labels in enumerate(next_labels(ids)):
        for document in ids[row][ids[row] >= 0].unique():
            where = ids[row] == document
            logits = model(input_ids=TOKENS[row : row + 1, where]).logits
            backward(logits, labels[where][None])
    return taken(model)


def taken(model: nn.Module) -> list[Tensor]:
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def distances_on_ranks(name: str, exchanges: tuple[str, ...]) -> dict[str, float]:
    """The largest relative difference of a gradient from one process, by case and exchange."""
    world = all_ranks()
    model = family(name)
    truth = {case: one_by_one(model, ids) for case, ids in CASES.items()}
    open_transformers(model)
    layout = TokenLayout(IDS.shape[1], 8, world)
    found = {}
    for case, ids in CASES.items():
        given: dict[str, Any] = {"input_ids": layout.take(TOKENS, 1)}
        if case == "padded":
            given["attention_mask"] = layout.take((ids >= 0).long(), 1)
        documents = Documents.of(ids, CPU) if case == "documents" else None
        for exchange in exchanges:
            with attending(layout, documents, exchange):
                logits = model(**given).logits
            backward(logits, layout.take(next_labels(ids), 1))
            worst = 0.0
            for mine, true in zip(taken(model), truth[case], strict=True):
                dist.all_reduce(mine)
                worst = max(worst, float((mine - true).norm() / (true.norm() + 1e-12)))
            found[f"{case} {exchange}"] = worst
    return found


def distances_of_all(
    families: tuple[str, ...], exchanges: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    return {name: distances_on_ranks(name, exchanges) for name in families}


@pytest.mark.usefixtures("transformers_in_pool")
@pytest.mark.parametrize(
    ("ranks", "families", "exchanges"),
    [(2, (*CONFIGS,), ("keys", "heads")), (3, ("mistral", "gpt2"), ("keys",))],
    ids=["2", "3, a window and positions that are learned"],
)
def test_gradients_on_several_ranks_are_those_of_each_document_alone(
    pool: WorkerPool, ranks: int, families: tuple[str, ...], exchanges: tuple[str, ...]
) -> None:
    for found in pool.run(ranks, distances_of_all, families, exchanges):
        assert max(max(each.values()) for each in found.values()) < 1e-5, found


def changed(name: str = "llama", **config: Any) -> nn.Module:
    model = family(name)
    for key, value in config.items():
        setattr(model.config, key, value)
    return model


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            "a rotary embedding of the type 'dynamic'",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "a rotary embedding of the type 'longrope'",
        ),
        ({"layer_types": ["full_attention", "conv"]}, "layers of the kind 'conv'"),
        ({"_attn_implementation_internal": "flex_attention"}, "attends by flex_attention"),
    ],
)
def test_models_whose_documents_a_mask_does_not_keep_apart_are_refused(
    config: dict[str, Any], text: str
) -> None:
    with pytest.raises(RecipeError) as found:
        open_transformers(changed(**config))
    assert text in str(found.value)
    assert open_transformers(changed(rope_parameters={"rope_type": "yarn"}))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"labels": TOKENS}, "is called with labels"),
        ({"use_cache": True}, "is called with a cache of keys"),
        ({"attention_mask": torch.ones(2, 1, 32, 32)}, "an attention_mask of shape (2, 1, 32, 32)"),
    ],
)
def test_calls_that_pair_documents_are_refused(given: dict[str, Any], text: str) -> None:
    model = family("llama")
    open_transformers(model)
    layout = TokenLayout(IDS.shape[1], 8, ALONE)
    with attending(layout, Documents.of(IDS, CPU)), pytest.raises(RecipeError) as found:
        model(input_ids=TOKENS, **given)
    assert text in str(found.value)


def test_a_mask_of_the_models_own_and_other_lengths_are_refused() -> None:
    model = family("llama")
    open_transformers(model)
    layout = TokenLayout(IDS.shape[1], 8, ALONE)
    with attending(layout, None), pytest.raises(RecipeError) as found:
        model(input_ids=TOKENS[:, :7], attention_mask=torch.ones(2, 7))
    assert "attends with 7 tokens to 7, and a row has 32 tokens" in str(found.value)


def attention_dropout_on_ranks(exchange: str, key_heads: int) -> str:
    layout = TokenLayout(IDS.shape[1], 8, all_ranks())
    dropout = 0.0 if exchange == "heads" else 0.1
    model = family("llama", attention_dropout=dropout, num_key_value_heads=key_heads).train()
    open_transformers(model)
    with attending(layout, None, exchange), pytest.raises(PlanError) as found:
        model(input_ids=layout.take(TOKENS, 1))
    return str(found.value)


def refused_on_ranks() -> list[str]:
    return [
        attention_dropout_on_ranks(exchange, heads)
        for exchange, heads in (("keys", 2), ("heads", 1))
    ]


@pytest.mark.usefixtures("transformers_in_pool")
def test_what_ranks_cannot_compute_together_is_refused(pool: WorkerPool) -> None:
    for dropout, heads in pool.run(2, refused_on_ranks):
        assert "context=2 and LlamaAttention with attention dropout 0.1" in dropout
        assert "exchange=heads and LlamaAttention with 1 key heads" in heads
