"""A loss that depends on how a batch is cut into microbatches is named at the first step, and no other is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from training.subjects import recipe, rows, squared_error

import lockstep as ls
from lockstep.base.errors import LossError
from lockstep.hooks.loss_check import LossCheck
from lockstep.testing.pool import WorkerPool

CLASSES = 3
WEIGHTS = torch.tensor([0.1, 1.0, 5.0])


def labelled() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(48, 6, generator=generator)
    return TensorDataset(features, torch.randint(0, CLASSES, (48,), generator=generator))


def output_of(batch: Any) -> Tensor:
    return batch[0]


def class_weighted(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(output, batch[1], weight=WEIGHTS)


def class_weighted_sum(output: Tensor, batch: Sequence[Tensor]) -> ls.Sum:
    return ls.Sum(F.cross_entropy(output, batch[1], weight=WEIGHTS, reduction="sum"))


def sum_of_weights(batch: Sequence[Tensor]) -> Tensor:
    return WEIGHTS[batch[1]].sum()


def contrastive(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    features = F.normalize(output, dim=1)
    return F.cross_entropy(features @ features.T / 0.1, torch.arange(len(features)))


def plain(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(output, batch[1])


def noisy(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(output + torch.randn_like(output), batch[1])


def changes_its_batch(output: Tensor, batch: list[Tensor]) -> Tensor:
    batch[1].add_(1).remainder_(CLASSES)
    return F.cross_entropy(output, batch[1])


def fails_on_halves(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    if len(output) != 8:
        raise ValueError("eight samples at a time")
    return F.cross_entropy(output, batch[1])


class Centred:
    """A loss that keeps the mean of all outputs that it has seen, as DINO's does."""

    def __init__(self) -> None:
        self.centre = torch.zeros(CLASSES)

    def __call__(self, output: Tensor, batch: Sequence[Tensor]) -> Tensor:
        value = F.cross_entropy(output - self.centre, batch[1])
        self.centre += 0.5 * (output.detach().mean(0) - self.centre)
        return value


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, CLASSES))


def train(run_dir: str, loss: Callable[..., Any], plan: str, **changes: Any) -> tuple[str, list[str]]:
    given = recipe(model=classifier, data=labelled(), inputs=output_of, loss=loss, microbatch=8, **changes)
    result = ls.train(given, run_dir=run_dir, plan=plan)
    return result.fingerprint, [event.details["reason"] for event in result.events if event.name == "loss-depends-on-microbatches"]


@pytest.mark.parametrize("loss", [class_weighted, contrastive])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_is_no_mean_over_samples_is_named(pool: WorkerPool, tmp_path: Path, loss: Any, world_size: int) -> None:
    (_, reasons), *_ = pool.run(world_size, train, str(tmp_path / "run"), loss, "replicate=auto")
    (reason,) = reasons
    assert reason.startswith("loss is ")
    assert reason.endswith(" for its two halves together")


def train_in(run_dir: str, loss: Callable[..., Any], precision: Any) -> list[str]:
    return train(run_dir, loss, "replicate=1", precision=precision)[1]


@pytest.mark.parametrize("loss", [plain, noisy, fails_on_halves])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_losses_are_not(pool: WorkerPool, tmp_path: Path, loss: Any, precision: str) -> None:
    assert pool.run(1, train_in, str(tmp_path / "run"), loss, precision) == [[]]


def train_centred(run_dir: str, plan: str) -> list[str]:
    given = recipe(model=classifier, data=labelled(), inputs=output_of, loss=Centred(), microbatch=8)
    events = ls.train(given, run_dir=run_dir, plan=plan).events
    return [event.details["reason"] for event in events if event.name == "loss-keeps-state"]


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "pipeline=2"])
def test_a_loss_that_keeps_a_value_is_an_event(pool: WorkerPool, tmp_path: Path, plan: str) -> None:
    (reason,) = pool.run(2, train_centred, str(tmp_path / "run"), plan)[0]
    assert reason.startswith("loss of the first microbatch is ")


@pytest.mark.parametrize(("plan", "ranks"), [("replicate=1", 1), ("replicate=2", 2), ("shard=2", 2)])
def test_a_loss_that_keeps_a_value_is_refused_where_bits_count(pool: WorkerPool, tmp_path: Path, plan: str, ranks: int) -> None:
    with pytest.raises(LossError, match=r"^loss of the first microbatch is .*make it a buffer .*; or drop numerics=bitwise$"):
        pool.run(ranks, train_centred, str(tmp_path / "run"), f"{plan},numerics=bitwise")


class Remembers(nn.Module):
    """Carries a hidden state from one forward to the next, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.hidden = nn.Linear(6, 16), nn.Linear(16, CLASSES), torch.zeros(16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x) + 0.01 * self.hidden)
        self.hidden = hidden.detach().mean(0)
        output: Tensor = self.last(hidden)
        return output


def train_remembering(run_dir: str, plan: str) -> int:
    given = recipe(
        model=Remembers, data=labelled(), inputs=output_of, loss=plain, microbatch=8, tensor={"first": "colwise", "last": "rowwise"}
    )
    return ls.train(given, run_dir=run_dir, plan=plan).steps


@pytest.mark.parametrize(("plan", "ranks"), [("replicate=1", 1), ("replicate=2", 2), ("shard=2", 2)])
def test_a_model_that_keeps_a_value_is_refused_where_bits_count(pool: WorkerPool, tmp_path: Path, plan: str, ranks: int) -> None:
    with pytest.raises(LossError, match=r"^loss of the first microbatch is .*the loss or the model keeps a value"):
        pool.run(ranks, train_remembering, str(tmp_path / "run"), f"{plan},numerics=bitwise")


def train_with_weights(run_dir: str) -> list[str]:
    return train(run_dir, class_weighted_sum, "replicate=2", weight=sum_of_weights)[1]


def test_the_remedy_is_not(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, train_with_weights, str(tmp_path / "run")) == [[], []]


def train_under(run_dir: str, loss: Callable[..., Any], plan: str) -> list[str]:
    return train(run_dir, loss, plan, tensor={"0": "colwise", "3": "rowwise"})[1]


@pytest.mark.parametrize("loss", [class_weighted, contrastive])
@pytest.mark.parametrize("plan", ["shard=2", "tensor=2", "pipeline=2"])
def test_where_a_forward_has_collectives_it_is_tried_on_the_output(pool: WorkerPool, tmp_path: Path, loss: Any, plan: str) -> None:
    (reason,) = pool.run(2, train_under, str(tmp_path / "run"), loss, plan)[0]
    assert reason.startswith("loss is ")


@pytest.mark.parametrize("loss", [plain, noisy, fails_on_halves])
@pytest.mark.parametrize("plan", ["shard=2", "pipeline=2"])
def test_other_losses_are_not_named_there(pool: WorkerPool, tmp_path: Path, loss: Any, plan: str) -> None:
    assert pool.run(2, train_under, str(tmp_path / "run"), loss, plan) == [[], []]


@pytest.mark.parametrize("loss", [noisy, changes_its_batch])
def test_there_it_changes_nothing_that_is_learned(pool: WorkerPool, tmp_path: Path, loss: Any) -> None:
    plan = "shard=2,numerics=bitwise"
    found = pool.run(2, train, str(tmp_path / "with"), loss, plan)
    assert pool.run(2, train_without_the_check, str(tmp_path / "without"), loss, plan) == [fingerprint for fingerprint, _ in found]


def test_the_check_changes_nothing_that_is_learned(pool: WorkerPool, tmp_path: Path) -> None:
    found = pool.run(2, train, str(tmp_path / "with"), changes_its_batch, "numerics=bitwise")
    without = pool.run(2, train_without_the_check, str(tmp_path / "without"), changes_its_batch, "numerics=bitwise")
    assert without == [fingerprint for fingerprint, _ in found]


def train_without_the_check(run_dir: str, loss: Callable[..., Any], plan: str) -> str:
    LossCheck.before_step = LossCheck.after_step  # type: ignore[method-assign]  # this process ends with the run
    return train(run_dir, loss, plan)[0]


def train_one_each(run_dir: str) -> int:
    return ls.train(recipe(loss=squared_error, data=rows(48), microbatch=1), run_dir=run_dir).steps


def test_a_microbatch_of_one_sample_cannot_be_cut(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, train_one_each, str(tmp_path / "run")) == [2, 2]


class OnlyForTraining(nn.Module):
    """A layer that fails in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise ValueError("no targets in evaluation mode")
        return x


def only_for_training() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16), OnlyForTraining(), nn.Linear(16, CLASSES))


def train_only(run_dir: str, plan: str, microbatch: int) -> float:
    given = recipe(model=only_for_training, blocks=["1"], data=labelled(), inputs=output_of, loss=plain, microbatch=microbatch)
    return ls.train(given, plan=plan, run_dir=run_dir).loss


@pytest.mark.parametrize("microbatch", [1, 4])
@pytest.mark.parametrize("plan", ["shard=2", "pipeline=2", "shard=2,pipeline=2"])
def test_a_model_that_fails_in_evaluation_mode_is_trained(pool: WorkerPool, tmp_path: Path, plan: str, microbatch: int) -> None:
    (expected,) = pool.run(1, train_only, str(tmp_path / "one"), "replicate=1", microbatch)
    ranks = 4 if "," in plan else 2
    assert pool.run(ranks, train_only, str(tmp_path / "run"), plan, microbatch) == pytest.approx([expected] * ranks)
