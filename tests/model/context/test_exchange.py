"""Attention over a sequence on several ranks: outputs and gradients of one process, the bytes that
are sent, and what is saved for the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from worlds import ALONE, all_ranks

from lockstep.model.context.exchange import (
    TokenLayout,
    attend_by_heads,
    attend_by_keys,
    chosen_exchange,
    gather_tokens,
)
from lockstep.model.context.recomputed_tensors import RecomputedTensors
from lockstep.testing.pool import WorkerPool

SAMPLES, HEADS, KEY_HEADS, TOKENS, FEATURES = 2, 6, 6, 36, 4


def heads(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SAMPLES, count, TOKENS, FEATURES, generator=generator, dtype=torch.float64)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def gradients(layout: TokenLayout, how: str, key_heads: int) -> list[Tensor]:
    """The output and the gradients of all tokens."""
    whole = [heads(HEADS, 0), heads(key_heads, 1), heads(key_heads, 2)]
    mine = [layout.take(each, 2).requires_grad_() for each in whole]

    def forward(*mine: Tensor) -> Tensor:
        if how == "heads":
            return attend_by_heads(layout, *mine, attend, RecomputedTensors())
        return attend_by_keys(layout, *mine, attend, RecomputedTensors())

    output = (
        checkpoint(forward, *mine, use_reentrant=False) if "checkpoint" in how else forward(*mine)
    )
    output.backward(layout.take(heads(HEADS, 3), 2))
    found = [output.detach(), *(each.grad for each in mine)]
    return [gather_tokens(layout, each, 2) for each in found if each is not None]


def compared(how: str, key_heads: int, chunks: int) -> float:
    world = all_ranks()
    found = gradients(TokenLayout(TOKENS, chunks, world), how, key_heads)
    truth = gradients(TokenLayout(TOKENS, chunks, ALONE), how, key_heads)
    return max(
        ((one - other).norm() / other.norm()).item()
        for one, other in zip(found, truth, strict=True)
    )


def all_compared() -> dict[str, float]:
    cases = [("keys", 2, 7), ("keys", 6, 16), ("keys, checkpoint", 6, 5), ("heads", 6, 7)]
    return {
        f"{how} {key_heads}": compared(how, key_heads, chunks) for how, key_heads, chunks in cases
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_is_that_of_one_process(pool: WorkerPool, ranks: int) -> None:
    for found in pool.run(ranks, all_compared):
        assert {case: off for case, off in found.items() if off > 1e-14} == {}


def costs(how: str, key_heads: int, chunks: int) -> dict[str, int]:
    """Bytes that this rank sends in forward and backward, those that it saves for the backward, and
    the rounds of collectives."""
    sent, calls, saved = 0, 0, {}
    exchange, gather, broadcast = dist.all_to_all_single, dist.all_gather_single, dist.broadcast

    def exchanged(
        output: Tensor, given: Tensor, to_take: Any, to_give: list[int], **how: Any
    ) -> Any:
        nonlocal sent, calls
        calls += 1
        sent += given.element_size() * (sum(to_give) - to_give[dist.get_rank()]) * given[:1].numel()
        return exchange(output, given, to_take, to_give, **how)

    def gathered(output: Tensor, given: Tensor, **how: Any) -> Any:
        nonlocal sent, calls
        calls += 1
        sent += output.nbytes - given.nbytes
        return gather(output, given, **how)

    def broadcasted(tensor: Tensor, group_src: int, **how: Any) -> Any:
        nonlocal sent, calls
        if group_src == dist.get_rank():
            calls += 1
            sent += tensor.nbytes * (dist.get_world_size() - 1)
        return broadcast(tensor, group_src=group_src, **how)

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    dist.all_to_all_single, dist.all_gather_single, dist.broadcast = (
        exchanged,
        gathered,
        broadcasted,
    )
    try:
        layout = TokenLayout(TOKENS, chunks, all_ranks())
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            gradients(layout, how, key_heads)
    finally:
        dist.all_to_all_single, dist.all_gather_single, dist.broadcast = exchange, gather, broadcast
    return {"sent": sent, "calls": calls, "saved": sum(saved.values())}


@pytest.mark.parametrize(
    ("how", "key_heads", "chunks"),
    [("heads", 6, 8), ("keys", 6, 8), ("keys", 2, 8), ("keys", 2, 6)],
)
def test_what_is_sent_and_saved(pool: WorkerPool, how: str, key_heads: int, chunks: int) -> None:
    ranks = 3
    g, a = key_heads / HEADS, 8 * SAMPLES * HEADS * TOKENS * FEATURES
    formula = {
        "heads": 4 * (1 + g) * a * (ranks - 1) / ranks**2,
        "keys": 6 * g * a * (ranks - 1) / ranks,
    }[how]
    extra = (2 + 2 * g) * a * (ranks - 1) / ranks  # the test's own `gather_tokens`
    found = pool.run(ranks, costs, how, key_heads, chunks)
    # tokens are not divided evenly: some ranks send more, and others less
    assert sum(each["sent"] for each in found) == pytest.approx(ranks * (formula + extra), rel=0.02)
    assert {each["calls"] for each in found} == {4 + (4 if how == "heads" else 3)}
    (alone,) = pool.run(1, costs, how, key_heads, chunks)
    assert sum(each["saved"] for each in found) <= 1.05 * alone["saved"]


def test_the_exchange_that_sends_fewer_bytes_is_chosen() -> None:
    def chosen(heads: int, key_heads: int, ranks: int) -> str:
        return chosen_exchange("auto", heads=heads, key_heads=key_heads, ranks=ranks)

    assert [chosen(8, 8, ranks) for ranks in (2, 3, 4, 8)] == ["heads", "keys", "heads", "heads"]
    assert [chosen(8, 4, ranks) for ranks in (2, 4, 8)] == ["keys", "heads", "keys"]
    assert [chosen(32, 8, ranks) for ranks in (2, 4, 8)] == ["keys", "heads", "heads"]
    assert chosen_exchange("keys", heads=8, key_heads=8, ranks=8) == "keys"
