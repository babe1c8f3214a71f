"""Optimizers that need whole tensors are found by a trial, and get them where a plan shards
tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from training.subjects import OUTPUTS, each_of, muon_and_adamw, network, recipe

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.plan import Plan
from lockstep.testing.pool import WorkerPool
from lockstep.training.optim.element_wise import (
    KNOWN,
    is_element_wise,
    mixes_tensors,
    needing_whole_tensors,
)
from lockstep.training.optim.operands import align_operands
from lockstep.training.training import Training


def matrix() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(7, 12))]


class Inertia(torch.optim.SGD):
    """Averages a gradient over more steps if it is small beside those of all tensors, as Adai
    does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        updated = [each for group in self.param_groups for each in group["params"]]
        mean = torch.cat([each.grad.square().flatten() for each in updated]).mean()
        for parameter in updated:
            state = self.state[parameter]
            for name in ("average", "weight"):
                state.setdefault(name, torch.zeros_like(parameter))
            share = (parameter.grad.square() / mean).clamp(0.1, 0.9)
            state["average"].lerp_(parameter.grad, share)
            state["weight"].lerp_(torch.ones_like(share), share)
            parameter.sub_(0.1 * state["average"] / state["weight"])


def test_a_momentum_that_depends_on_other_tensors_is_found() -> None:
    assert mixes_tensors(Inertia(matrix(), lr=0.1))


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_those_that_are_not_tried_would_pass(kind: Any) -> None:
    optimizer = kind([*matrix(), nn.Parameter(torch.ones(5))], lr=0.01)
    before = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    assert is_element_wise(optimizer)
    assert not mixes_tensors(optimizer)
    assert {parameter: dict(state) for parameter, state in optimizer.state.items()} == before


def test_a_known_optimizer_whose_step_has_a_hook_is_tried() -> None:
    optimizer = torch.optim.SGD(matrix(), lr=0.01)

    def divide_by_the_norm(optimizer: Any, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad /= parameter.grad.norm()

    assert not needing_whole_tensors([optimizer], Plan(shard=2))
    optimizer.register_step_pre_hook(divide_by_the_norm)
    assert needing_whole_tensors([optimizer], Plan(shard=2)) == [optimizer]


def test_a_known_class_whose_step_was_replaced_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.optim.SGD.step

    def by_the_norm(optimizer: Any, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad /= parameter.grad.norm()
        original(optimizer)

    monkeypatch.setattr(torch.optim.SGD, "step", by_the_norm)
    optimizer = torch.optim.SGD(matrix(), lr=0.01)
    assert needing_whole_tensors([optimizer], Plan(shard=2)) == [optimizer]


@pytest.mark.parametrize(
    "options",
    [
        {"fused": True},
        {"lr": 0.0},
        {"lr": torch.tensor(0.01)},
        {"weight_decay": 0.1, "amsgrad": True},
    ],
)
def test_the_settings_of_an_element_wise_optimizer_do_not_matter(options: dict[str, Any]) -> None:
    assert is_element_wise(torch.optim.AdamW(matrix(), **options))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.optim.Muon(matrix()),
        lambda: torch.optim.Muon(matrix(), lr=0.0),
        lambda: torch.optim.Adafactor(matrix()),
    ],
)
def test_optimizers_that_see_the_whole_matrix_are_found(
    make: Callable[[], torch.optim.Optimizer],
) -> None:
    assert not is_element_wise(make())


class Normalized(torch.optim.SGD):
    """Divides each gradient by its norm, as LARS and LAMB do in their ways."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


class Slowing(Normalized):
    """Counts its steps in an attribute, as SGD-SaI notes there that it has begun."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        return super().step(closure)


def test_the_norm_of_a_vector_is_found() -> None:
    assert not is_element_wise(Normalized([nn.Parameter(torch.ones(5))], lr=0.1))


class ByIdentity(torch.optim.SGD):
    """Knows its parameters by their identities, and so cannot step others."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.rates = {
            id(parameter): lr for group in self.param_groups for parameter in group["params"]
        }

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = max(self.rates[id(parameter)] for parameter in group["params"])
        return super().step(closure)


class ByGroup(ByIdentity):
    """The remedy: what it needs is in the groups."""

    def step(self, closure: Any = None) -> Any:
        return torch.optim.SGD.step(self, closure)


class Wraps(torch.optim.Optimizer):
    """Steps another optimizer, whatever is in its own groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: ByIdentity(matrix(), lr=0.1), r"its step raises KeyError: \d+"),
        (lambda: Wraps(torch.optim.SGD(matrix(), lr=0.1)), "10 steps leave a parameter unchanged"),
    ],
)
def test_one_that_cannot_be_tried_is_refused_where_tensors_are_split(
    make: Callable[[], torch.optim.Optimizer], why: str
) -> None:
    for plan in (Plan(shard=2), Plan(tensor=2), Plan(pipeline=2)):
        with pytest.raises(
            RecipeError,
            match=(
                rf"^{type(make()).__name__} cannot be tried on a small tensor \({why}\), and the"
                r" plan"
            ),
        ):
            needing_whole_tensors([make()], plan)
    assert needing_whole_tensors([make()], Plan(replicate=2)) == []


def by_identity(model: nn.Module) -> torch.optim.Optimizer:
    return ByIdentity(model.parameters(), lr=0.1)


def by_group(model: nn.Module) -> torch.optim.Optimizer:
    return ByGroup(model.parameters(), lr=0.1)


def no_bias() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16, bias=False), nn.Tanh(), nn.Linear(16, OUTPUTS, bias=False)
    )


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(model.parameters(), lr=0.02)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.02)


def slowing(model: nn.Module) -> torch.optim.Optimizer:
    return Slowing(model.parameters(), lr=0.1)


class Eigenbasis(torch.optim.Optimizer):
    """Takes the sign of the gradient in the eigenvectors of its products, as SOAP: where these are
    not unique, the last bit of a product decides."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.dim() != 2:
                p.sub_(p.grad, alpha=0.01)
                continue
            state = self.state[p]
            products = state.setdefault("products", [torch.zeros(len(p), len(p))])
            products[0].lerp_(p.grad @ p.grad.mT, 0.5)
            rotated = state.setdefault("basis", [torch.linalg.eigh(products[0])[1]])[0].mT @ p.grad
            p.sub_(self.param_groups[0]["lr"] * state["basis"][0] @ rotated.sign())
            state["basis"][0] = torch.linalg.qr(products[0] @ state["basis"][0])[0]


def odd_sizes() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 15), nn.Tanh(), nn.Linear(15, OUTPUTS))


def eigenbasis(model: nn.Module) -> torch.optim.Optimizer:
    return Eigenbasis(model.parameters())


FAIL_AFTER = 3
"""Steps, of which a checkpoint has two."""
OPTIMIZERS = {
    "muon": (no_bias, muon),
    "adafactor": (network, adafactor),
    "both": (network, muon_and_adamw),
    "slowing": (network, slowing),
    "eigenbasis": (odd_sizes, eigenbasis),
}
OPTIMIZERS |= {"by identity": (network, by_identity), "by group": (network, by_group)}


def train(name: str, run_dir: str, plan: str, **options: Any) -> str:
    model, optimizer = OPTIMIZERS[name]
    given = recipe(
        model=model,
        optimizer=optimizer,
        clip_norm=1.0,
        steps=5,
        tensor={"0": "colwise", "2": "rowwise"},
    )
    return ls.train(given, run_dir=run_dir, plan=plan, **options).fingerprint


MATRICES = ["muon", "adafactor", "both", "eigenbasis"]
TRAININGS = {
    1: [(name, "numerics=bitwise") for name in (*MATRICES, "by identity", "slowing")]
    + [("muon", "numerics=fast")],
    2: [
        *((name, "shard=2,numerics=bitwise") for name in MATRICES),
        ("both", "replicate=2,numerics=bitwise"),
        ("by identity", "replicate=2,numerics=bitwise"),
        ("by group", "shard=2,numerics=bitwise"),
        ("slowing", "shard=2,numerics=bitwise"),
        ("muon", "shard=2,numerics=fast"),
    ],
    3: [(name, "shard=3,numerics=bitwise") for name in ("muon", "eigenbasis")],
    4: [(name, "replicate=2,shard=2,numerics=bitwise") for name in MATRICES],
}
"""By the number of processes: optimizers and plans."""


def train_each(run_dir: str, processes: int) -> list[Any]:
    return each_of(train_noting, run_dir, TRAININGS[processes])


def train_noting(run_dir: str, name: str, plan: str) -> tuple[str, int]:
    """The fingerprint, and how many events tell of whole tensors."""
    fingerprint = train(name, run_dir, plan)
    return fingerprint, Path(run_dir, "events.jsonl").read_text().count("optimizer-on-whole-tens")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Any, Any]]:
    """The folder of the runs of one process, and what they gave."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, dict(zip(TRAININGS[1], train_each(str(folder), 1), strict=True))


@pytest.mark.parametrize("processes", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_each_tensor_is_updated_as_a_whole(
    pool: WorkerPool, tmp_path: Path, alone: tuple[Path, dict[Any, Any]], processes: int
) -> None:
    """And what the refusal of one that cannot be tried recommends works: replicate, or groups."""
    for found in pool.run(processes, train_each, str(tmp_path), processes):
        for (name, plan), (fingerprint, events) in zip(TRAININGS[processes], found, strict=True):
            by = "by identity" if name == "by group" else name
            if "fast" not in plan:
                assert fingerprint == alone[1][by, "numerics=bitwise"][0], (name, plan)
            assert events == ("shard" in plan and name != "by group"), (name, plan)
    if processes == 2:
        fast = TRAININGS[1].index(("muon", "numerics=fast"))
        expected = load_file(alone[0] / str(fast) / "model.safetensors")
        sharded = load_file(tmp_path / str(len(TRAININGS[2]) - 1) / "model.safetensors")
        for name, value in expected.items():
            assert torch.allclose(value, sharded[name], atol=1e-3), f"fast: {name}"


def lose_a_worker(run_dir: str, plan: str) -> None:
    begin = Training.begin_step

    def begin_or_fail(training: Training, source: Any) -> None:
        if training.run.step == FAIL_AFTER:
            raise RuntimeError("lost")
        begin(training, source)

    with (
        patch.object(Training, "begin_step", begin_or_fail),
        pytest.raises(RuntimeError, match="lost"),
    ):
        train("both", run_dir, plan, saving=ls.Saving(every=2))


def resumed(run_dir: str, plan: str) -> str:
    return train("both", run_dir, plan, saving=ls.Saving(every=2))


def test_its_state_is_saved_and_read_by_any_plan(
    pool: WorkerPool, tmp_path: Path, alone: tuple[Path, dict[Any, Any]]
) -> None:
    expected = alone[1]["both", "numerics=bitwise"][0]
    pool.run(2, lose_a_worker, str(tmp_path / "run"), "shard=2,numerics=bitwise")
    assert set(pool.run(3, resumed, str(tmp_path / "run"), "replicate=3,numerics=bitwise")) == {
        expected
    }
    lose_a_worker(str(tmp_path / "other"), "numerics=bitwise")
    assert set(pool.run(2, resumed, str(tmp_path / "other"), "shard=2,numerics=bitwise")) == {
        expected
    }


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(tensor=2, pipeline=2), "tensor=2,pipeline=2"),
        (Plan(shard=2, pipeline=2), "shard=2,pipeline=2"),
        (Plan(shard=2, offload=True), "shard=2,offload=yes"),
    ],
)
def test_it_is_refused_where_no_rank_can_have_whole_tensors(plan: Plan, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        needing_whole_tensors([torch.optim.Muon(matrix())], plan)
    assert (
        str(caught.value)
        == f"Muon with {said}; its update of an element depends on the other elements of the"
        " tensor, which are on other ranks; use replicate, shard and tensor, or an optimizer that"
        " updates each element by itself, such as AdamW"
    )


def test_each_number_of_dims_is_tried() -> None:
    """An optimizer may treat stacks of matrices in another way than matrices."""

    class NormalizesStacks(Normalized):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.dim() == 3:
                        parameter.grad /= parameter.grad.norm()
            return torch.optim.SGD.step(self, closure)

    stack = nn.Parameter(torch.ones(4, 3, 2))
    assert is_element_wise(NormalizesStacks(matrix(), lr=0.1))
    assert not is_element_wise(NormalizesStacks([*matrix(), stack], lr=0.1))
    assert is_element_wise(
        NormalizesStacks([*matrix(), stack], lr=0.1), lambda each: each.dim() < 3
    )


def test_state_without_strides_is_left_as_it_lies() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter])
    sparse = torch.eye(2).to_sparse()
    state = optimizer.state[parameter] = {"sparse": sparse, "basis": torch.ones(2, 3).T}
    align_operands([parameter], [optimizer])
    assert state["sparse"] is sparse
    assert state["basis"].is_contiguous()


def test_states_in_one_storage_stay_in_it() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter])
    history = torch.zeros(2, 3)
    state = optimizer.state[parameter] = {"history": history, "last": [history[1]]}
    align_operands([parameter], [optimizer])
    history[1] = 5.0
    assert state["last"][0].tolist() == [5.0, 5.0, 5.0]
