"""Experts on several ranks compute what one process computes, for any routing; or are refused by
name on every rank."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from model.expert.models import (
    EXPERTS,
    WIDTH,
    Counted,
    CountsAll,
    Dropped,
    DropsRows,
    Heads,
    HidesWeights,
    MixesRows,
    MixesRowsIfTold,
    MixesRowsLater,
    Mixture,
    NumbersExperts,
    OtherBits,
    StackedExperts,
    WeighsBefore,
)
from torch import Tensor, nn
from torch.nn import functional as F
from worlds import all_ranks

from lockstep.base.errors import PlanError, RecipeError
from lockstep.comm.mesh import Mesh, full_tensor
from lockstep.model.block_wrappers import checkpoint_activations
from lockstep.model.expert.divide import check_divisible, divide_experts
from lockstep.model.expert.find import find_experts
from lockstep.model.expert.layer_calls import LayerCalls
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


def divided(model: nn.Module, *, is_dummy: bool | None = None, bitwise: bool = False) -> nn.Module:
    """A copy of the model, with its experts divided over all ranks."""
    model = copy.deepcopy(model)
    world = all_ranks()
    mesh = Mesh.of(world, Plan(expert=world.size, transport="torch"))
    assert mesh.torch_mesh is not None
    exchange = SyncBatchNormExchange()
    exchange.is_dummy = is_dummy
    experts = find_experts(model, None)
    check_divisible(model, experts, world.size)
    divide_experts(
        model,
        experts,
        mesh.torch_mesh["expert"],
        mesh.axis("expert"),
        exchange,
        roots=[""],
        materialize=lambda _: None,
        bitwise=bitwise,
    )
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
    each = [
        (found[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-30)
        for name in expected
    ]
    return float(torch.stack(each).max())  # NaN if any is


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
@pytest.mark.usefixtures("transformers_in_pool")
def test_families_of_transformers(pool: WorkerPool) -> None:
    for found in pool.run(2, gradients_of_families, timeout_seconds=100):
        assert len(found) == 2 * len(FAMILIES)
        assert all(each < (1e-6 if "32" in name else 1e-14) for name, each in found.items()), found


def batches(ranks: int) -> list[Tensor]:
    """A batch for each rank, of different sizes; the last one has no token."""
    generator = torch.Generator().manual_seed(3)
    sizes = [*range(5, 4 + ranks), 0]
    return [torch.randn(size, 3, WIDTH, generator=generator).double() for size in sizes]


class Layers(nn.Sequential):
    """Two mixtures. `to_one`: the router prefers one expert by far."""

    def __init__(
        self,
        kinds: type[nn.Module] | Sequence[nn.Module] = StackedExperts,
        *,
        to_one: bool = False,
    ) -> None:
        torch.manual_seed(1)
        first, second = (kinds(), kinds()) if isinstance(kinds, type) else kinds
        super().__init__(Mixture(first), Mixture(second))
        self.double()
        for each in self:
            if to_one:
                with torch.no_grad():
                    each.router.weight.copy_(torch.linspace(3, -3, EXPERTS)[:, None])


def total(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) ** 3).sum()


def checkpointed(model: nn.Module) -> nn.Module:
    for each in model.children():
        checkpoint_activations(each, "full")
    return model


def selective(model: nn.Module) -> nn.Module:
    for each in model.children():
        checkpoint_activations(each, "selective")
    return model


def copied(model: nn.Module) -> nn.Module:
    """A copy of the model, whose original computes with NaNs."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.nan)
    return made


def gradients_of_layers() -> dict[str, float]:
    """Case -> largest relative difference of a gradient or output from one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, model, change in (
        ("layers", Layers(), None),
        ("to one expert", Layers(to_one=True), None),
        ("attribute", Layers(Counted, to_one=True), None),
        ("checkpointed", Layers(), checkpointed),
        ("copied", Layers(), copied),
        ("selective", Layers(), selective),
    ):
        cut = divided(model)
        if change is not None:
            cut = change(cut)
        for batch in batches(ranks)[:-1]:  # the last one is empty
            total(model, batch).backward()
        total(cut, batches(ranks)[rank]).backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        gradients = off(whole_gradients(cut), expected)
        with torch.no_grad():
            batch = batches(ranks)[rank]
            outputs = float((cut(batch) - model(batch)).norm())
        found[name] = max(gradients, outputs)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_own_models(pool: WorkerPool, ranks: int) -> None:
    for found in pool.run(ranks, gradients_of_layers):
        assert len(found) == 6
        assert all(each < 1e-14 for each in found.values()), found


def gradients_with_a_dummy() -> float:
    """The last rank computes a dummy, of NaNs: it sends no row, and still computes the rows of
    other ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    is_dummy = rank == ranks - 1
    model, (batch, *_) = Layers(), batches(ranks)
    cut = divided(model, is_dummy=is_dummy)
    total(model, batch).backward()
    part = total(cut, batch * torch.nan if is_dummy else batch)
    if is_dummy:
        names = dict(cut.named_parameters())
        experts = {n: p for n, p in names.items() if "experts" in n}
        gradients = torch.autograd.grad(part, [*experts.values()])
        for parameter in names.values():
            parameter.grad = torch.zeros_like(parameter)
        for parameter, gradient in zip(experts.values(), gradients, strict=True):
            parameter.grad = gradient
    else:
        part.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return off(whole_gradients(cut), expected)


def test_dummies_send_no_rows(pool: WorkerPool) -> None:
    assert all(found < 1e-14 for found in pool.run(2, gradients_with_a_dummy))


WRONG: dict[str, tuple[type[nn.Module], str]] = {
    "mixes rows": (MixesRows, "its output differs by"),
    "mixes rows later": (MixesRowsLater, "its output differs by"),
    "numbers experts": (NumbersExperts, "its output differs by"),
    "drops rows": (DropsRows, "its output differs by"),
    "weighs before": (WeighsBefore, "its output differs by"),
    "hides weights": (HidesWeights, "the gradient of its weights differs by"),
    "dropped": (Dropped, "draws random numbers"),
    "counts all": (CountsAll, "IndexError: index 7 is out of bounds"),
}


def refusals() -> dict[str, str]:
    """The errors of wrong models, and of wrong inputs."""
    rank = dist.get_rank()
    found = {}

    def note(name: str, model: nn.Module, batch: Tensor) -> None:
        try:
            model(batch)
        except RecipeError as error:
            found[name] = str(error)

    batch = batches(dist.get_world_size())[0]
    for name, (kind, _) in WRONG.items():
        note(name, divided(Layers(kind)), batch)
    note("heads", divided(nn.Sequential(Heads3())), batch)
    note("other bits", divided(Layers(OtherBits), bitwise=True), batch)
    outside = divided(Layers())
    outside(batch)
    if rank == 1:
        outside[1].experts.register_forward_pre_hook(
            lambda _, given: (given[0], given[1] + EXPERTS - 1, given[2])
        )
    note("outside", outside, batch)
    for name, called in SKIPPED.items():
        skips = divided(Layers())
        skips(batch)
        skips.forward = partial(in_order, skips, called[rank])  # type: ignore[method-assign]
        note(name, skips, batch)
    note(
        "in an attribute", divided(Layers([MixesRowsIfTold(told) for told in (False, True)])), batch
    )
    return found


SKIPPED = {
    "skips one": ((0, 1), (1,)),
    "skips the last": ((0,), (0, 1)),
    "skip others": ((1,), (0,)),
    "repeats one": ((0, 1), (0, 0, 1)),
    "repeats the last": ((0, 1, 1), (0, 1)),
}
"""Case -> the layers that a forward calls on each rank."""


class Heads3(Heads):
    def forward(self, query: Tensor, key: Any = None, value: Any = None) -> Tensor:
        return query


def test_wrong_models_are_refused_on_all_ranks(pool: WorkerPool) -> None:
    first, second = pool.run(2, refusals)
    assert first == second
    for name, (_, said) in WRONG.items():
        assert first[name].startswith("0.experts "), name
        assert said in first[name], (name, first[name])
    assert "0.experts computes other bits for a row when it has only some" in first["other bits"]
    assert "was called with (5, 3, 6) float64; experts are called with" in first["heads"]
    assert "1.experts was called with experts from 7 to 1" in first["outside"]
    assert "on rank 1 of the axis expert; it has the experts 0 to 7" in first["outside"]
    for name, said in (
        ("skips one", "rank 0 calls 0.experts and rank 1 leaves out 0.experts"),
        ("skips the last", "rank 0 leaves out 1.experts and rank 1 calls 1.experts"),
        ("skip others", "rank 0 leaves out 0.experts and rank 1 calls 0.experts"),
        ("repeats one", "rank 0 calls 1.experts and rank 1 calls 0.experts"),
        ("repeats the last", "rank 0 calls 1.experts and rank 1 ends after 1.experts"),
    ):
        assert f"in a forward, {said}, as with stochastic depth" in first[name]
    assert first["in an attribute"].startswith("1.experts ")
    assert len(first) == len(WRONG) + 4 + len(SKIPPED)


def gradients_without_a_layer() -> float:
    """Of layers of which all ranks leave the same ones out, and whose modules are called in another
    order than that of the model."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(*Layers(), *Layers())
    cut = divided(model)
    for each in (model, cut):
        each.forward = partial(in_order, each, [3, 0, 2])  # type: ignore[method-assign]
    for batch in batches(ranks)[:-1]:
        total(model, batch).backward()
    total(cut, batches(ranks)[rank]).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(expected) == 3 * 4
    return off(whole_gradients(cut), expected)


def in_order(layers: nn.Sequential, order: Sequence[int], x: Tensor) -> Tensor:
    for place in order:
        x = layers[place](x)
    return x


def test_layers_that_all_ranks_leave_out(pool: WorkerPool) -> None:
    assert all(found < 1e-14 for found in pool.run(2, gradients_without_a_layer))


def test_the_number_of_experts_of_a_token_is_no_number_of_experts() -> None:
    layers = Layers()
    layers[0].experts.num_experts_per_tok = 2
    check_divisible(layers, find_experts(layers, None), 2)


def test_experts_that_cannot_be_divided() -> None:
    other = Layers()
    other[1].experts.up = other[0].experts.up
    inner = Layers(Counted)
    for parameter in inner[1].experts.parameters():
        parameter.data = parameter.data.new_zeros(WIDTH, *parameter.shape)
    for wrong, ranks, said in (
        (nn.Sequential(nn.Linear(2, 2)), 2, "the model has no modules of experts"),
        (inner, 2, "1.experts has num_experts=8 and parameters whose dim 0 is 6; .* must be that"),
        (Layers(), 3, "0.experts has 8 experts; .* choose expert=2 or 4 or 8"),
        (other, 2, "0.experts shares a parameter with another module"),
    ):
        with pytest.raises(PlanError, match=said):
            check_divisible(wrong, find_experts(wrong, None), ranks)
    shared = Layers()
    shared[1].experts = shared[0].experts
    check_divisible(shared, find_experts(shared, None), 2)


class TwoLayers(nn.Module):
    """Waits between its layers."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.second, self.wait = nn.Identity(), nn.Identity(), wait

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.wait()
        return self.second(x)  # type: ignore[no-any-return]


def test_a_forward_in_another_thread_leaves_no_layer_out() -> None:
    """As chunks of a sequence do, which take turns."""
    left_out: list[int] = []
    ended: list[threading.Thread] = []
    arrived, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        if threading.current_thread() is not threading.main_thread():
            arrived.set()
            assert goes_on.wait(10)

    model = TwoLayers(wait)
    layers: Any = [
        SimpleNamespace(
            experts=SimpleNamespace(module=module),
            leave_out=partial(left_out.append, place),
            end_forward=lambda: ended.append(threading.current_thread()),
        )
        for place, module in enumerate([model.first, model.second])
    ]
    LayerCalls(model, layers)
    other = threading.Thread(target=model, args=(torch.zeros(1),))
    other.start()
    assert arrived.wait(10)
    model(torch.zeros(1))
    goes_on.set()
    other.join()
    assert left_out == []
    assert ended == [threading.main_thread(), other]
