"""Law 1: under every plan a step applies the gradient of Σ total / Σ weight over all microbatches
of all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import MOST, tiered
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training.subjects import DATA_PLANS, network, recipe, rows, samples_at

import lockstep as ls
from lockstep.assignment import batch_span, microbatch_spans, total_steps
from lockstep.comm.mesh import full_tensor
from lockstep.recipe.checks import Precision
from lockstep.testing.pool import WorkerPool
from lockstep.training.precision import autocast

Batch = Sequence[Tensor]


def errors(model: nn.Module, batch: Batch) -> Tensor:
    return ((model(batch[1]) - batch[2]) ** 2).mean(1)


def scalar(model: nn.Module, batch: Batch) -> Tensor:
    return errors(model, batch).mean()


def weighted_sum(model: nn.Module, batch: Batch) -> ls.Sum:
    return ls.Sum((batch[3] * errors(model, batch)).sum())


def weighted_loss(model: nn.Module, batch: Batch) -> ls.Loss:
    return ls.Loss((batch[3] * errors(model, batch)).sum(), batch[3].sum())


def two_terms(model: nn.Module, batch: Batch) -> dict[str, ls.Sum]:
    sizes = (model(batch[1]) ** 2).sum(1)
    return {"error": weighted_sum(model, batch), "size": ls.Sum((sizes / batch[3]).sum())}


def weight(batch: Batch) -> Tensor:
    return batch[3].sum()


def two_weights(batch: Batch) -> dict[str, Tensor]:
    return {"error": batch[3].sum(), "size": (1 / batch[3]).sum()}


@dataclass(frozen=True, kw_only=True)
class Case:
    samples: int = 32
    global_batch: int = 16
    microbatch: int | None = 4
    epochs: bool = False
    precision: Precision = "fp32"
    loss: Callable[..., Any] = scalar
    weight: Callable[..., Any] | None = None

    def steps(self) -> int:
        length = {"steps": None, "epochs": 1} if self.epochs else {"steps": 2, "epochs": None}
        return total_steps(length=self.samples, global_batch=self.global_batch, **length)

    def batches(self, dtype: torch.dtype) -> list[list[list[Tensor]]]:
        """Of each step, its microbatches on one process."""
        cut = []
        for step in range(self.steps()):
            start, stop = batch_span(
                step, length=self.samples, global_batch=self.global_batch, epochs=self.epochs
            )
            samples = samples_at(start, stop, of=self.samples)
            spans = microbatch_spans(stop - start, self.microbatch, 1)
            cut.append(
                [
                    [tensor[samples[a:b]].to(dtype) for tensor in self.data().tensors]
                    for a, b in spans
                ]
            )
        return cut

    def data(self) -> TensorDataset:
        """Samples whose weights are 1 in every other microbatch of four, and 100 between."""
        weights = torch.ones(self.samples)
        for position, sample in enumerate(samples_at(0, self.samples, of=self.samples)):
            weights[sample] = 100.0 if position // 4 % 2 else 1.0
        return TensorDataset(*rows(self.samples).tensors, weights)

    def recipe(self) -> ls.Recipe:
        return recipe(
            data=self.data(),
            loss=self.loss,
            weight=self.weight,
            optimizer=frozen,
            precision=self.precision,
            global_batch=self.global_batch,
            microbatch=self.microbatch,
            steps=None if self.epochs else self.steps(),
            epochs=1 if self.epochs else None,
        )


CASES = {
    "even": Case(),
    "uneven microbatches": Case(global_batch=14),
    "a short last batch": Case(samples=21, epochs=True),
    "fewer microbatches than ranks": Case(global_batch=8),
    "one microbatch a rank": Case(global_batch=14, microbatch=None),
    "weights 1 and 100, known before": Case(loss=weighted_sum, weight=weight),
    "weights 1 and 100, from the forward": Case(loss=weighted_loss),
    "weights 1 and 100, short last batch": Case(samples=21, epochs=True, loss=weighted_loss),
    "two terms, each with its denominator": Case(loss=two_terms, weight=two_weights),
    "bf16": Case(precision="bf16", global_batch=14),
}


for number in range(6):
    drawn = random.Random(number)
    CASES[f"drawn at random, {number}"] = Case(
        samples=drawn.randint(1, 40),
        global_batch=(batch := drawn.randint(1, 24)),
        microbatch=drawn.choice([None, drawn.randint(1, batch)]),
        epochs=drawn.random() < 0.5,
        **drawn.choice([{}, {"loss": weighted_loss}, {"loss": weighted_sum, "weight": weight}]),
    )


def frozen(model: nn.Module) -> torch.optim.Optimizer:
    """So that every step's gradient is that of the first weights."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


class Gradients(ls.Hook):
    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def after_step(self, run: Any) -> None:
        self.steps.append(
            torch.cat([full_tensor(p.grad).reshape(-1) for p in run.model.parameters()])
        )


class FirstWeights(ls.Hook):
    def on_start(self, run: Any) -> None:
        self.weights = {
            name: full_tensor(value.detach()).clone()
            for name, value in run.model.state_dict().items()
        }


def cases(plan: str) -> list[str]:
    """All; under shard, which takes longest, two of those that are drawn."""
    return list(CASES)[: -4 if "shard" in plan else None]


def gradients_of_all_cases(
    plan: str, run_dir: str
) -> dict[str, tuple[dict[str, Tensor], list[Tensor]]]:
    found = {}
    for name in cases(plan):
        first, gradients = FirstWeights(), Gradients()
        given = CASES[name].recipe()
        ls.train(given, plan=plan, run_dir=f"{run_dir}/{name}", hooks=[first, gradients])
        found[name] = (first.weights, [gradient.clone() for gradient in gradients.steps])
    return found


def by_hand(case: Case, weights: dict[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The gradient of each step on one process, one microbatch after another, without lockstep. In
    float32: in the case's precision."""
    model = network()
    model.load_state_dict(weights)
    model.to(dtype)
    gradients = []
    for step in case.batches(dtype):
        model.zero_grad()
        samples = sum(len(batch[1]) for batch in step)
        for batch in step:
            with autocast(
                case.precision if dtype is torch.float32 else "fp32", torch.device("cpu")
            ):
                loss = case.loss(model, batch)
            if isinstance(loss, dict):
                totals = {name: sum(two_weights(other)[name] for other in step) for name in loss}
                sum(term.total / totals[name] for name, term in loss.items()).backward()
            elif isinstance(loss, Tensor):
                (loss * len(batch[1]) / samples).backward()
            else:
                (loss.total / sum(weight(other) for other in step)).backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    return gradients


@pytest.fixture(scope="module")
def measured(
    pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[Any]]:
    @cache
    def run(plan: str) -> list[Any]:
        path: Path = tmp_path_factory.mktemp("plan")
        return pool.run(DATA_PLANS[plan], gradients_of_all_cases, plan, str(path))

    return run


@pytest.mark.parametrize(
    "plan", tiered(DATA_PLANS, always=["replicate=1", "replicate=3", "shard=2"], most=1)
)
def test_the_gradient_is_one_process_in_float64_within_4_times_float32s_own_error(
    measured: Callable[[str], list[Any]], plan: str
) -> None:
    for name in cases(plan):
        case = CASES[name]
        weights, _ = measured(plan)[0][name]
        exact = by_hand(case, weights, torch.float64)
        own = by_hand(case, weights, torch.float32)
        for rank, found in enumerate(measured(plan)):
            _, gradients = found[name]
            assert len(gradients) == len(exact) == case.steps(), name
            for step, truth in enumerate(exact):
                error, own_error = (
                    (gradient - truth).norm() / truth.norm()
                    for gradient in (gradients[step], own[step])
                )
                assert error <= 4 * own_error, (
                    f"{name}, rank {rank}, step {step}: {error:.2e} and {own_error:.2e}"
                )


def test_bf16_has_an_error_of_its_own(measured: Callable[[str], list[Any]]) -> None:
    weights, _ = measured("replicate=1")[0]["bf16"]
    exact, own = (
        by_hand(CASES["bf16"], weights, dtype)[0] for dtype in (torch.float64, torch.float32)
    )
    assert 1e-4 < (own - exact).norm() / exact.norm() < 3e-2


def test_the_cases_are_what_they_are_called() -> None:
    weights = CASES["weights 1 and 100, from the forward"].batches(torch.float32)[0]
    assert [float(batch[3].sum()) for batch in weights] == [4.0, 400.0, 4.0, 400.0]
    assert [len(batch[1]) for batch in CASES["uneven microbatches"].batches(torch.float32)[0]] == [
        4,
        4,
        4,
        2,
    ]
    assert [len(batch[1]) for batch in CASES["a short last batch"].batches(torch.float32)[1]] == [
        4,
        1,
    ]
    assert len(CASES["fewer microbatches than ranks"].batches(torch.float32)[0]) < MOST
