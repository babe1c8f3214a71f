"""The shard axis under `ls.train` and `Session`: what comes out is what one process gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.subjects import each_of, network, recipe, rows, squared_error

import lockstep as ls
from lockstep.testing.pool import WorkerPool

PLANS = {"shard=2": 2, "shard=3": 3, "replicate=2,shard=2": 4}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def train(
    plan: str, run_dir: str, changes: dict[str, Any], hooks: Sequence[ls.Hook] = ()
) -> ls.Result:
    return ls.train(
        recipe(**{"optimizer": adamw, **changes}),
        plan=f"{plan},numerics=bitwise",
        run_dir=run_dir,
        hooks=hooks,
    )


def needs_values() -> nn.Module:
    model = network()
    with torch.no_grad():
        model[0].weight.copy_(torch.from_numpy(model[0].weight.numpy() * 2))
    return model


def train_what_needs_values(plan: str, run_dir: str) -> tuple[str, list[str]]:
    result = train(plan, run_dir, {"model": needs_values})
    return result.fingerprint, [
        event.details["reason"] for event in result.events if event.name == "model-built-whole"
    ]


def distances(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return (output - batch[2]).abs().mean(1)


def collected(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0], output[:, 0]


def in_order(index: Tensor, output: Tensor) -> float:
    return float(output.sum()) if index.tolist() == list(range(len(index))) else -1.0


def evaluate(plan: str, run_dir: str) -> dict[str, float]:
    metrics = {"distance": ls.Mean(distances), "sum": ls.Gathered(collected, in_order)}
    evaluation = ls.Evaluation(data=rows(37, seed=9), every=1, metrics=metrics)
    error = {
        "inputs": lambda batch: batch[1],
        "loss": lambda output, batch: ((output - batch[2]) ** 2).mean(),
    }
    return train(plan, run_dir, {**error, "evaluation": evaluation}).metrics


def train_a_pair_of_models(plan: str, run_dir: str) -> list[str]:
    """Each learns from the other, as in a GAN."""
    with ls.Session(run_dir=run_dir, plan=f"{plan},numerics=bitwise") as session:
        one, first = session.prepare(network, adamw)
        two, second = session.prepare(network, adamw)
        for step in session.steps(rows(48), global_batch=20, microbatch=4, steps=3):
            for batch in step.microbatches(dummies=True):
                step.backward(
                    ((one(batch[1]) - two(batch[1]).detach()) ** 2).mean()
                    + squared_error(one, batch),
                    first,
                )
            step.commit(first)
            for batch in step.microbatches(dummies=True):
                step.backward(
                    ((two(batch[1]) - one(batch[1])) ** 2).mean() + two(batch[1]).mean(), second
                )
            step.commit(second, clip_norm=0.1)
        return [ls.fingerprint(one), ls.fingerprint(two)]


def train_with_an_average(plan: str, run_dir: str) -> bytes:
    train(plan, run_dir, {}, hooks=[ls.ExponentialMovingAverage(0.5)])
    return (Path(run_dir) / "model_average.safetensors").read_bytes()


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Mixed(nn.Module):
    """Adds its second input, unless it is the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, *, others: Sequence[Tensor]) -> Tensor:
        y: Tensor = self.linear(x)
        return y if others[0] is x else y + others[0]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.skipped, self.mixed = nn.Linear(16, 16), Mixed()

    def forward(self, x: Tensor) -> Tensor:
        words = self.first(x)[:, None] * torch.linspace(-1, 1, 5)[:, None]
        words = words + self.attention(words, words, words, need_weights=False)[0]
        words = self.mixed(words, others=[words])  # after a block that is left out
        y: Tensor = self.last(self.mixed(words, others=[words.tanh()]).mean(1))
        return y


def train_what_attends(plan: str, run_dir: str) -> str:
    return train(
        plan, run_dir, {"model": Attending, "blocks": ["attention", "skipped", "mixed"]}
    ).fingerprint


def penalised(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    x = batch[1].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return squared_error(model, batch) + slope.square().mean()


def adversarial(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    x = batch[1].clone().requires_grad_()
    (slope,) = torch.autograd.grad(squared_error(model, [batch[0], x, batch[2]]), x)
    return squared_error(model, [batch[0], batch[1] + 0.1 * slope.sign(), batch[2]])


def train_with(loss: Any, plan: str, run_dir: str) -> str:
    return train(
        plan, run_dir, {"loss": loss, "data": rows(44), "global_batch": 12, "blocks": ["0", "2"]}
    ).fingerprint


def refused(run_dir: str, changes: dict[str, Any]) -> None:
    train("shard=2", run_dir, changes)


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (
        {"blocks": ["layers.*"]},
        (
            "RecipeError: the recipe's blocks have 'layers.*', which matches no module of the"
            " model; modules are 0, 1, 2",
        ),
    ),
    (
        {"model": Scalar},
        (
            "RecipeError: the parameter 'scale' is a scalar, which FSDP2 cannot shard; give it one"
            " dim, torch.zeros(1), or choose replicate",
        ),
    ),
    (
        {"model": Turned},
        (
            "RecipeError: the parameter 'weight' is not contiguous (strides (1, 6)), and FSDP2"
            " shards contiguous rows; ",
        ),
    ),
    (
        {"loss": penalised},
        (
            "PlanError: the shard axis with a gradient that is itself differentiated ",
            "; use replicate, under which parameters are plain tensors",
        ),
    ),
]


def all_under(plan: str, run_dir: str) -> dict[str, Any]:
    """What is trained under a plan: little where it takes four processes."""
    found: dict[str, Any] = {"evaluated": evaluate(plan, f"{run_dir}/evaluated")}
    if plan != "shard=3":
        found["pair"] = train_a_pair_of_models(plan, f"{run_dir}/pair")
    if plan in ("replicate=1", "shard=3"):
        found["average"] = train_with_an_average(plan, f"{run_dir}/average")
    if plan in ("replicate=1", "shard=2"):
        found["attending"] = train_what_attends(plan, f"{run_dir}/attending")
        # three microbatches a step on two ranks: one computes a dummy
        found["adversarial"] = train_with(adversarial, plan, f"{run_dir}/adversarial")
        found["values"], found["reasons"] = train_what_needs_values(plan, f"{run_dir}/values")
    if plan != "replicate=2,shard=2" and "3" not in plan:
        penalty = "replicate=2" if plan == "shard=2" else plan
        found["penalised"] = train_with(penalised, penalty, f"{run_dir}/penalised")
    if plan == "shard=2":
        found["refused"] = each_of(refused, run_dir, [(changes,) for changes, _ in REFUSED])
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return all_under("replicate=1", str(tmp_path_factory.mktemp("alone")))


@pytest.fixture(scope="module")
def sharded(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks finds."""
    return pool.run(2, all_under, "shard=2", str(tmp_path_factory.mktemp("sharded")))


@pytest.mark.parametrize(
    "plan", ["shard=3", pytest.param("replicate=2,shard=2", marks=pytest.mark.slow)]
)
def test_what_comes_out_on_more_processes_is_what_one_process_gives(
    pool: WorkerPool, tmp_path: Path, alone: dict[str, Any], plan: str
) -> None:
    for found in pool.run(PLANS[plan], all_under, plan, str(tmp_path)):
        assert found == {name: alone[name] for name in found}


def test_what_comes_out_is_what_one_process_gives(
    alone: dict[str, Any], sharded: list[dict[str, Any]]
) -> None:
    """An evaluation counts every sample once and in order; two models learn from each other; a
    tensor that a block is given several times is one; a gradient of the inputs is not refused; a
    moving average is saved whole."""
    assert alone["evaluated"]["sum"] != -1.0
    assert alone["pair"][0] != alone["pair"][1]
    for found in sharded:
        for name in alone.keys() & found.keys() - {"reasons"}:
            assert found[name] == alone[name], name


def test_a_factory_that_needs_values_is_run_whole_and_an_event_says_why(
    alone: dict[str, Any], sharded: list[dict[str, Any]]
) -> None:
    assert alone["reasons"] == []
    for found in sharded:
        (reason,) = found["reasons"]
        assert "test_sharded.py" in reason


def test_what_cannot_be_sharded_is_refused_on_all_ranks(sharded: list[dict[str, Any]]) -> None:
    one, other = (found["refused"] for found in sharded)
    assert one == other
    for (changes, words), said in zip(REFUSED, one, strict=True):
        assert said.startswith(words[0]), changes
        assert all(each in said for each in words), changes
