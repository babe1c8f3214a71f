"""A loss that depends on how a batch is cut into microbatches is named at the first step, and no
other is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

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


def train(
    run_dir: str, loss: Callable[..., Any], plan: str, **changes: Any
) -> tuple[str, list[str]]:
    given = recipe(
        model=classifier, data=labelled(), inputs=output_of, loss=loss, microbatch=8, **changes
    )
    result = ls.train(given, run_dir=run_dir, plan=plan)
    return result.fingerprint, [
        event.details["reason"]
        for event in result.events
        if event.name == "loss-depends-on-microbatches"
    ]


@pytest.mark.parametrize("loss", [class_weighted, contrastive])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_is_no_mean_over_samples_is_named(
    pool: WorkerPool, tmp_path: Path, loss: Any, world_size: int
) -> None:
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
    given = recipe(
        model=classifier, data=labelled(), inputs=output_of, loss=Centred(), microbatch=8
    )
    events = ls.train(given, run_dir=run_dir, plan=plan).events
    return [event.details["reason"] for event in events if event.name == "loss-keeps-state"]


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "pipeline=2"])
def test_a_loss_that_keeps_a_value_is_an_event(pool: WorkerPool, tmp_path: Path, plan: str) -> None:
    (reason,) = pool.run(2, train_centred, str(tmp_path / "run"), plan)[0]
    assert reason.startswith("loss of the first microbatch is ")


@pytest.mark.parametrize(
    ("plan", "ranks"), [("replicate=1", 1), ("replicate=2", 2), ("shard=2", 2)]
)
def test_a_loss_that_keeps_a_value_is_refused_where_bits_count(
    pool: WorkerPool, tmp_path: Path, plan: str, ranks: int
) -> None:
    with pytest.raises(
        LossError,
        match=r"^loss of the first microbatch is .*make it a buffer .*; or drop numerics=bitwise$",
    ):
        pool.run(ranks, train_centred, str(tmp_path / "run"), f"{plan},numerics=bitwise")


class Remembers(nn.Module):
    """Carries a hidden state from one forward to the next, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.hidden = (
            nn.Linear(6, 16),
            nn.Linear(16, CLASSES),
            torch.zeros(16),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x) + 0.01 * self.hidden)
        self.hidden = hidden.detach().mean(0)
        output: Tensor = self.last(hidden)
        return output


def train_remembering(run_dir: str, plan: str) -> int:
    given = recipe(
        model=Remembers,
        data=labelled(),
        inputs=output_of,
        loss=plain,
        microbatch=8,
        tensor={"first": "colwise", "last": "rowwise"},
    )
    return ls.train(given, run_dir=run_dir, plan=plan).steps


@pytest.mark.parametrize(
    ("plan", "ranks"), [("replicate=1", 1), ("replicate=2", 2), ("shard=2", 2)]
)
def test_a_model_that_keeps_a_value_is_refused_where_bits_count(
    pool: WorkerPool, tmp_path: Path, plan: str, ranks: int
) -> None:
    with pytest.raises(
        LossError, match=r"^loss of the first microbatch is .*the loss or the model keeps a value"
    ):
        pool.run(ranks, train_remembering, str(tmp_path / "run"), f"{plan},numerics=bitwise")


class Carried(nn.Module):
    """Carries a hidden state of each sample to the next batch. `only`: the mode in which it
    does."""

    def __init__(self, only: str) -> None:
        super().__init__()
        self.layer, self.cell, self.last = nn.Linear(6, 8), nn.GRUCell(8, 8), nn.Linear(8, CLASSES)
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(8)
        self.only, self.hidden, self.calls = only, None, [0]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.cell(self.drop(self.norm(self.layer(x))), self.hidden)
        if self.only != ("evaluation" if self.training else "training"):
            self.hidden, self.calls[0] = hidden.detach(), self.calls[0] + 1
        output: Tensor = self.last(hidden)
        return output


class Burnt(Carried):
    """The remedy: the hidden state is computed in the forward, from what came before."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.cell(self.norm(self.layer(x.flip(1)))).detach()
        self.calls[0] += 1
        return self.last(self.cell(self.drop(self.norm(self.layer(x))), self.hidden))


class Queue(nn.Module):
    """A memory bank in an attribute, written in place, in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last, self.bank = nn.Linear(6, 8), nn.Linear(8, CLASSES), torch.zeros(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        output: Tensor = self.last(hidden + self.bank.mean(0))
        if self.training:
            self.bank[:] = hidden.detach()[:8]
        return output


class Buffered(Remembers):
    """The remedy for a value of the model: a buffer that is updated once a step."""

    self_updating_buffers = ("hidden",)

    def __init__(self) -> None:
        super().__init__()
        del self.hidden
        self.register_buffer("hidden", torch.zeros(16))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "each": lambda: Carried("both"),
    "training": lambda: Carried("training"),
    "evaluation": lambda: Carried("evaluation"),
    "queue": Queue,
    "burnt": lambda: Burnt("both"),
    "buffered": Buffered,
}


def train_carrying(run_dir: str, plan: str, name: str) -> Any:
    """The refusal; or the fingerprint, and what was reported beside."""
    given = recipe(
        model=MODELS[name],
        data=labelled(),
        inputs=output_of,
        loss=plain,
        microbatch=8,
        global_batch=16,
    )
    try:
        result = ls.train(given, run_dir=run_dir, plan=plan)
    except LossError as error:
        return str(error)
    return result.fingerprint, [
        event.details["reason"] for event in result.events if event.name.startswith("loss-")
    ]


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_a_state_that_has_the_size_of_the_batch_or_is_kept_in_one_mode_alone_is_refused(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    for name in ("each", "training", "evaluation", "queue"):
        one, other = pool.run(
            2, train_carrying, str(tmp_path / name), f"{plan},numerics=bitwise", name
        )
        assert one == other
        assert "keeps a value that it changes" in one


@pytest.mark.parametrize("name", ["burnt", "buffered"])
def test_the_remedies_for_a_kept_state_are_the_same_on_any_number_of_processes(
    pool: WorkerPool, tmp_path: Path, name: str
) -> None:
    (alone,) = pool.run(
        1, train_carrying, str(tmp_path / "alone"), "replicate=1,numerics=bitwise", name
    )
    assert alone[1] == []
    for plan in ("replicate=2", "shard=2"):
        found = pool.run(2, train_carrying, str(tmp_path / plan), f"{plan},numerics=bitwise", name)
        assert {fingerprint for fingerprint, _ in found} == {alone[0]}


def test_the_trial_leaves_the_model_and_the_loss_as_they_were(tmp_path: Path) -> None:
    seen = []

    class Looks(ls.Hook):
        def before_step(self, run: Any) -> None:
            if run.step == 0:
                model = run.model
                seen.append(
                    (
                        model.hidden,
                        list(model.calls),
                        model.norm.running_mean.tolist(),
                        centred.centre.tolist(),
                    )
                )

    centred = Centred()
    given = recipe(
        model=MODELS["each"], data=labelled(), inputs=output_of, loss=centred, microbatch=8
    )
    ls.train(given, run_dir=str(tmp_path / "run"), hooks=[Looks()])
    assert seen == [(None, [0], [0.0] * 8, [0.0] * CLASSES)]


def unchecked(run_dir: str, loss: Callable[..., Any], changes: dict[str, Any]) -> list[str]:
    given = recipe(
        **{
            "model": classifier,
            "data": labelled(),
            "inputs": output_of,
            "loss": loss,
            "microbatch": 8,
            **changes,
        }
    )
    return [
        event.details["reason"]
        for event in ls.train(given, run_dir=run_dir).events
        if event.name == "loss-not-checked"
    ]


def test_what_is_not_compared_is_an_event(tmp_path: Path) -> None:
    def reasons(loss: Callable[..., Any], **changes: Any) -> list[str]:
        return unchecked(str(tmp_path / str(len(list(tmp_path.iterdir())))), loss, changes)

    assert reasons(plain) == []
    assert reasons(fails_on_halves) == [
        "it fails on a half of the first microbatch: ValueError: eight samples at a time"
    ]
    assert reasons(noisy) == ["it draws random numbers, without dropout too"]
    (reason,) = reasons(
        lambda output, batch: F.cross_entropy(output, batch["y"]),
        collate=with_a_scalar,
        inputs=lambda batch: batch["x"],
    )
    assert reason.startswith("its first microbatch cannot be cut in two")


def with_a_scalar(samples: list[Any]) -> dict[str, Tensor]:
    return {
        "x": torch.stack([x for x, _ in samples]),
        "y": torch.stack([y for _, y in samples]),
        "temperature": torch.ones(()),
    }


def without_some(samples: list[Any]) -> list[Tensor]:
    """Leaves out every sample of class 0."""
    kept = [sample for sample in samples if sample[1] != 0]
    return [torch.stack([x for x, _ in kept]), torch.stack([y for _, y in kept])]


def weighted_sum(output: Tensor, batch: Sequence[Tensor]) -> ls.Sum:
    """A sum divided by other weights than it has."""
    return ls.Sum(class_weighted(output, batch) * len(batch[1]))


def test_a_batch_with_other_rows_than_samples_is_cut_too(tmp_path: Path) -> None:
    given = recipe(
        model=classifier, data=labelled(), collate=without_some, inputs=output_of,
        loss=weighted_sum, weight=lambda batch: len(batch[1]),
        microbatch=8,
    )  # fmt: skip
    names = [event.name for event in ls.train(given, run_dir=str(tmp_path / "run")).events]
    assert "loss-depends-on-microbatches" in names
    assert "loss-not-checked" not in names


def train_with_weights(run_dir: str) -> list[str]:
    return train(run_dir, class_weighted_sum, "replicate=2", weight=sum_of_weights)[1]


def test_the_remedy_is_not(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, train_with_weights, str(tmp_path / "run")) == [[], []]


def train_under(run_dir: str, loss: Callable[..., Any], plan: str) -> list[str]:
    return train(run_dir, loss, plan, tensor={"0": "colwise", "3": "rowwise"})[1]


@pytest.mark.parametrize("loss", [class_weighted, contrastive])
@pytest.mark.parametrize("plan", ["shard=2", "tensor=2", "pipeline=2"])
def test_where_a_forward_has_collectives_it_is_tried_on_the_output(
    pool: WorkerPool, tmp_path: Path, loss: Any, plan: str
) -> None:
    (reason,) = pool.run(2, train_under, str(tmp_path / "run"), loss, plan)[0]
    assert reason.startswith("loss is ")


@pytest.mark.parametrize("loss", [plain, noisy, fails_on_halves])
@pytest.mark.parametrize("plan", ["shard=2", "pipeline=2"])
def test_other_losses_are_not_named_there(
    pool: WorkerPool, tmp_path: Path, loss: Any, plan: str
) -> None:
    assert pool.run(2, train_under, str(tmp_path / "run"), loss, plan) == [[], []]


@pytest.mark.parametrize("loss", [noisy, changes_its_batch])
def test_there_it_changes_nothing_that_is_learned(
    pool: WorkerPool, tmp_path: Path, loss: Any
) -> None:
    plan = "shard=2,numerics=bitwise"
    found = pool.run(2, train, str(tmp_path / "with"), loss, plan)
    assert pool.run(2, train_without_the_check, str(tmp_path / "without"), loss, plan) == [
        fingerprint for fingerprint, _ in found
    ]


def test_the_check_changes_nothing_that_is_learned(pool: WorkerPool, tmp_path: Path) -> None:
    found = pool.run(2, train, str(tmp_path / "with"), changes_its_batch, "numerics=bitwise")
    without = pool.run(
        2, train_without_the_check, str(tmp_path / "without"), changes_its_batch, "numerics=bitwise"
    )
    assert without == [fingerprint for fingerprint, _ in found]


def train_without_the_check(run_dir: str, loss: Callable[..., Any], plan: str) -> str:
    with patch.object(LossCheck, "before_step", LossCheck.after_step):
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
    return nn.Sequential(
        nn.Linear(6, 16), nn.Linear(16, 16), OnlyForTraining(), nn.Linear(16, CLASSES)
    )


def train_only(run_dir: str, plan: str, microbatch: int) -> float:
    given = recipe(
        model=only_for_training,
        blocks=["1"],
        data=labelled(),
        inputs=output_of,
        loss=plain,
        microbatch=microbatch,
    )
    return ls.train(given, plan=plan, run_dir=run_dir).loss


@pytest.mark.parametrize("microbatch", [1, 4])
@pytest.mark.parametrize("plan", ["shard=2", "pipeline=2", "shard=2,pipeline=2"])
def test_a_model_that_fails_in_evaluation_mode_is_trained(
    pool: WorkerPool, tmp_path: Path, plan: str, microbatch: int
) -> None:
    (expected,) = pool.run(1, train_only, str(tmp_path / "one"), "replicate=1", microbatch)
    ranks = 4 if "," in plan else 2
    assert pool.run(ranks, train_only, str(tmp_path / "run"), plan, microbatch) == pytest.approx(
        [expected] * ranks
    )
    if plan == "shard=2":
        told = next(
            line
            for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
            if "loss-not-checked" in line
        )
        assert (
            "whether it keeps state: it fails in the trial: ValueError: no targets in evaluation"
            " mode" in told
        )
