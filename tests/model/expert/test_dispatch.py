"""Experts on several ranks compute what one process computes, for any routing; or are refused by
name on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from model.expert.models import EXPERTS, WIDTH, Mixture
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.comm.mesh import Mesh, full_tensor
from lockstep.comm.world import World
from lockstep.model.expert.divide import check_experts, divide_experts
from lockstep.model.expert.find import find_experts
from lockstep.model.expert.routing import Routing, local_experts
from lockstep.model.sync_batchnorm import SyncBatchNormExchange
from lockstep.plan import Plan
from lockstep.testing.pool import WorkerPool

TOKENS = 24
FAMILIES = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(-2, 9), min_size=3, max_size=3), max_size=20))
def test_routing(chosen: list[list[int]]) -> None:
    index = torch.tensor(chosen, dtype=torch.int64).reshape(len(chosen), 3)
    found, flat = Routing.of(index, EXPERTS), index.flatten().tolist()
    assert found.order.tolist() == sorted(range(len(flat)), key=flat.__getitem__)
    assert found.counts.tolist() == [flat.count(expert) for expert in range(EXPERTS)]
    assert int(found.outside) == sum(not 0 <= each < EXPERTS for each in flat)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=4))
def test_local_experts(counts: list[list[int]]) -> None:
    rows = sum(map(sum, counts))
    found = local_experts(torch.tensor(counts), rows).tolist()
    assert found == [e for row in counts for e, count in enumerate(row) for _ in range(count)]


def divided(model: nn.Module, *, is_dummy: bool | None = None) -> nn.Module:
    """A copy of the model, with its experts divided over all ranks."""
    model = copy.deepcopy(model)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = World(rank, ranks, rank, ranks, torch.device("cpu"), owns_group=False)
    mesh = Mesh.of(world, Plan(expert=ranks, transport="torch"))
    assert mesh.torch_mesh is not None
    exchange = SyncBatchNormExchange()
    exchange.is_dummy = is_dummy
    experts = find_experts(model, None)
    check_experts(model, experts, ranks)
    axis = mesh.axis("expert")
    divide_experts(experts, mesh.torch_mesh["expert"], axis, exchange, materialize=lambda _: None)
    return model


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a model with divided experts, summed over ranks, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if hasattr(parameter, "placements"):
            found[name] = full_tensor(gradient)
        else:
            found[name] = gradient.clone()
            dist.all_reduce(found[name])
    return found


def off(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-30))
        for name in expected
    )


def gradients_of_families() -> dict[str, float]:
    """Family and dtype -> largest relative difference of a gradient from one process."""
    from model.expert.families import WORDS, family

    differences = {}
    for name in FAMILIES:
        for dtype in (torch.float32, torch.float64):
            model = family(name, dtype)
            cut = divided(model)
            texts = [
                torch.randint(WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(rank))
                for rank in range(dist.get_world_size())
            ]

            def backward(model: nn.Module, text: Tensor) -> None:
                logits = model(input_ids=text).logits[:, :-1].flatten(0, 1)
                F.cross_entropy(logits, text[:, 1:].flatten(), reduction="sum").backward()

            for text in texts:
                backward(model, text)
            backward(cut, texts[dist.get_rank()])
            expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            differences[f"{name} {dtype}"] = off(whole_gradients(cut), expected)
    return differences


@pytest.mark.timeout(120)
def test_families_of_transformers(pool: WorkerPool) -> None:
    for found in pool.run(2, gradients_of_families, timeout_seconds=100):
        print(found)
        assert len(found) == 2 * len(FAMILIES)
        assert all(each < (1e-6 if "32" in name else 1e-14) for name, each in found.items()), found
