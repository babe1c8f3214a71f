"""Optimizers that compute the gradient more than once per step: LBFGS and SAM, on any number of
processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from training.subjects import OUTPUTS, network, recipe, rows, state_of

import lockstep as ls
from lockstep.base.errors import LossError, RecipeError
from lockstep.plan import Plan
from lockstep.testing.pool import WorkerPool
from lockstep.training.optim.optimizers import check_closures, needs_closure
from lockstep.training.training import Training


class Sam(torch.optim.SGD):
    """Sharpness-aware minimization (Foret et al., 2021): the gradient at the worst point nearby."""

    needs_closure = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameters = [
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [0.05 * p.grad / norm for p in parameters]
        for parameter, move in zip(parameters, moves, strict=True):
            parameter += move
        closure()
        for parameter, move in zip(parameters, moves, strict=True):
            parameter -= move
        super().step()
        return loss


class SamOfItsPaper(Sam):
    """As it is often written: it moves with the gradient that is there, then calls the closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "it needs a closure"
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        before = [p.clone() for p in parameters]
        for parameter in parameters:
            parameter += 0.05 * parameter.grad / norm
        self.zero_grad()
        loss = closure()
        for parameter, value in zip(parameters, before, strict=True):
            parameter.data = value
        torch.optim.SGD.step(self)
        return loss


class SamThatZeroes(Sam):
    """Zeroes the gradient before each of its calls."""

    def zeroed(self, closure: Any) -> Any:
        self.zero_grad(set_to_none=False)
        return closure()

    def step(self, closure: Any = None) -> Any:
        return super().step(lambda: self.zeroed(closure))


class SamWithNoise(Sam):
    """Draws noise after its closure was called again."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter += 0.01 * torch.randn_like(parameter)
        return loss


class SamUnnamed(SamOfItsPaper):
    needs_closure = False


def lbfgs(model: nn.Module) -> Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def sam(model: nn.Module) -> Optimizer:
    return Sam(model.parameters(), lr=0.1, momentum=0.9)


def sam_of_its_paper(model: nn.Module) -> Optimizer:
    return SamOfItsPaper(model.parameters(), lr=0.1, momentum=0.9)


def sam_that_zeroes(model: nn.Module) -> Optimizer:
    return SamThatZeroes(model.parameters(), lr=0.1, momentum=0.9)


def sam_with_noise(model: nn.Module) -> Optimizer:
    return SamWithNoise(model.parameters(), lr=0.1)


def noisy() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, OUTPUTS)
    )


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Optimizer]]] = {
    "lbfgs": (network, lbfgs),
    "sam": (network, sam),
    "sam of its paper": (network, sam_of_its_paper),
    "sam that zeroes": (network, sam_that_zeroes),
    "sam, dropout, BatchNorm": (noisy, sam),
    "sam with noise, dropout": (noisy, sam_with_noise),
}


def inputs(batch: list[Tensor]) -> Tensor:
    return batch[1]


def loss(output: Tensor, batch: list[Tensor]) -> Tensor:
    return ((output - batch[2]) ** 2).mean()


def given(name: str, **changes: Any) -> ls.Recipe:
    model, optimizer = CASES[name]
    options = {
        "optimizer": optimizer,
        "data": rows(24),
        "global_batch": 24,
        "microbatch": 4,
        "steps": 4,
        "inputs": inputs,
        "loss": loss,
        **changes,
    }
    return recipe(model=model, **options)


def train(name: str, run_dir: str, plan: str = "replicate=1", **options: Any) -> str:
    changes = {"clip_norm": 1.0} if name == "sam" else {}
    return ls.train(
        given(name, **changes), run_dir=run_dir, plan=f"{plan},numerics=bitwise", **options
    ).fingerprint


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("alone")
    return {name: train(name, str(folder / name)) for name in CASES}


def of_several(run_dir: str, plan: str) -> dict[str, dict[str, str]]:
    """Fingerprints of whole runs; on two processes also of resumed ones, and of a loop."""
    found = {"whole": {name: train(name, f"{run_dir}/{name}", plan) for name in CASES}}
    if plan == "replicate=2":
        found["resumed"] = {
            name: lost_and_resumed(name, f"{run_dir}/resumed-{name}") for name in ("lbfgs", "sam")
        }
        found["loop"] = {"sam": by_session(f"{run_dir}/loop", plan)}
    return found


@pytest.fixture(scope="module")
def two(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return pool.run(2, of_several, str(tmp_path_factory.mktemp("two")), "replicate=2")


def test_the_bits_are_those_of_one_process(
    pool: WorkerPool, tmp_path: Path, alone: dict[str, str], two: list[Any]
) -> None:
    for found in (*two, *pool.run(3, of_several, str(tmp_path), "replicate=3")):
        assert found["whole"] == alone


def test_a_run_goes_on_with_the_optimizers_history(alone: dict[str, str], two: list[Any]) -> None:
    for found in two:
        assert found["resumed"] == {name: alone[name] for name in ("lbfgs", "sam")}


class Initial(ls.Hook):
    def on_start(self, run: Any) -> None:
        self.state = state_of(run.model)
        self.model = run.model


@pytest.mark.parametrize("name", ["lbfgs", "sam", "sam of its paper", "sam that zeroes"])
def test_it_is_the_update_of_a_loop_by_hand_on_the_whole_batch(tmp_path: Path, name: str) -> None:
    initial = Initial()
    ls.train(given(name), run_dir=str(tmp_path / "run"), hooks=[initial])
    model = network()
    model.load_state_dict(initial.state)
    optimizer = CASES[name][1](model)
    data = list(rows(24).tensors)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            found = loss(model(data[1]), data)
            found.backward()
        return found

    for _ in range(4):
        if name == "sam of its paper":
            closure()
        optimizer.step(closure)  # type: ignore[arg-type]
    final = state_of(initial.model)
    for key, value in model.state_dict().items():
        assert torch.allclose(final[key], value, atol=1e-5), key
        assert not torch.allclose(value, initial.state[key], atol=1e-3), key


def by_session(run_dir: str, plan: str) -> str:
    with ls.Session(run_dir=run_dir, plan=f"{plan},numerics=bitwise") as session:
        model, optimizer = session.prepare(network, sam)
        for step in session.steps(rows(24), global_batch=24, microbatch=4, steps=4):

            def accumulate(step: Any = step) -> None:
                for batch in step.microbatches():
                    step.backward(loss(model(inputs(batch)), batch))

            accumulate()
            step.commit(optimizer, closure=accumulate, clip_norm=1.0)
        return ls.fingerprint(model)


def test_a_loop_of_ones_own_gives_the_closure(alone: dict[str, str], two: list[Any]) -> None:
    assert [found["loop"]["sam"] for found in two] == [alone["sam"]] * 2


def without_a_closure(run_dir: str) -> None:
    with ls.Session(run_dir=run_dir) as session:
        model, optimizer = session.prepare(network, lbfgs)
        for step in session.steps(rows(8), global_batch=8, microbatch=8, steps=1):
            for batch in step.microbatches():
                step.backward(loss(model(inputs(batch)), batch))
            step.commit(optimizer)


def test_a_commit_without_a_closure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        LossError, match="a commit without a closure; LBFGS computes the gradient more than once"
    ):
        without_a_closure(str(tmp_path / "run"))


def test_an_optimizer_that_asks_for_a_closure_in_its_step_is_told_the_remedy(
    tmp_path: Path,
) -> None:
    unnamed = given("sam", optimizer=lambda model: SamUnnamed(model.parameters(), lr=0.1))
    with pytest.raises(RecipeError, match=r"it needs a closure; if it .*needs_closure = True"):
        ls.train(unnamed, run_dir=str(tmp_path / "run"))


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise AttributeError("'NoneType' object has no attribute 'mul'")


def test_another_error_of_an_optimizer_is_its_own(tmp_path: Path) -> None:
    failing = given("sam", optimizer=lambda model: Fails(model.parameters(), lr=0.1))
    with pytest.raises(AttributeError, match="has no attribute 'mul'"):
        ls.train(failing, run_dir=str(tmp_path / "run"))


def lost_and_resumed(name: str, run_dir: str) -> str:
    begin = Training.begin_step

    def begin_or_fail(training: Training, source: Any) -> None:
        if training.run.step == 3:
            raise RuntimeError("lost")
        begin(training, source)

    with (
        patch.object(Training, "begin_step", begin_or_fail),
        pytest.raises(RuntimeError, match="lost"),
    ):
        train(name, run_dir, "replicate=2", saving=ls.Saving(every=2))
    return train(name, run_dir, "replicate=2", saving=ls.Saving(every=2))


@pytest.mark.parametrize(
    ("plan", "options", "said"),
    [
        (Plan(shard=2), {}, "shard=2"),
        (Plan(tensor=2, pipeline=2), {}, "tensor=2, pipeline=2"),
        (Plan(), {"precision": "fp16"}, "fp16"),
        (Plan(replicate=2), {"gradient_compression": "bf16"}, "gradient_compression='bf16'"),
    ],
)
def test_it_is_refused_where_it_cannot_be(plan: Plan, options: dict[str, str], said: str) -> None:
    with pytest.raises(RecipeError) as raised:
        check_closures(
            [lbfgs(network())],
            plan,
            **{"precision": "fp32", "gradient_compression": "none", **options},
        )
    assert str(raised.value).startswith(
        f"LBFGS with {said}; its closure computes the gradient more than once per step"
    )


def test_two_optimizers_of_one_model_are_refused(tmp_path: Path) -> None:
    def two(model: nn.Module) -> list[Optimizer]:
        first, *others = model.parameters()
        return [torch.optim.LBFGS([first]), torch.optim.SGD(others, lr=0.1)]

    with pytest.raises(RecipeError, match="LBFGS with 2 optimizers for one model"):
        ls.train(recipe(optimizer=two), run_dir=str(tmp_path / "run"))


def test_torchs_other_optimizers_need_none() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    assert not any(
        needs_closure(getattr(torch.optim, name)(parameters, lr=0.1))
        for name in ("SGD", "AdamW", "Rprop", "ASGD")
    )
