"""A loss that depends on how a batch is cut into microbatches is named at the first step, and no
other is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from training.subjects import each_of, recipe

import lockstep as ls
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


def of_one_class(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(output, torch.zeros_like(batch[1]), weight=WEIGHTS)


def of_each_sample(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    pairs = zip(output, batch[1], strict=True)
    return torch.stack([F.cross_entropy(*pair, ignore_index=255) for pair in pairs]).mean()


def of_next_tokens(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    """Each sample as two tokens, of which the last has no next one."""
    labels = torch.stack([batch[1], torch.full_like(batch[1], -100)], 1)
    return F.cross_entropy(output.repeat_interleave(2, 0), labels.flatten())


def rescaled(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return class_weighted(output, batch) * WEIGHTS[batch[1]].mean()


def sum_of_errors(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(output, batch[1], reduction="sum")


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


class Prior:
    """A loss that counts the labels that it has seen. A call with the same ones leaves the share of
    each class as it is."""

    def __init__(self) -> None:
        self.counts = torch.zeros(CLASSES)

    def __call__(self, output: Tensor, batch: Sequence[Tensor]) -> Tensor:
        self.counts += torch.bincount(batch[1], minlength=CLASSES)
        prior = self.counts / self.counts.sum()
        return F.cross_entropy(output + (prior + 0.1).log(), batch[1])


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, CLASSES))


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


class Draws(nn.Module):
    """Draws random numbers in evaluation mode too, as a variational autoencoder does."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


def variational() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), Draws(), nn.Linear(16, CLASSES))


class Counts(nn.Linear):
    """Counts its forwards, for something that sets in later."""

    def __init__(self) -> None:
        super().__init__(6, CLASSES)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x) * (1.0 if self.calls < 1000 else 2.0)


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

    def __init__(self) -> None:
        super().__init__("both")

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
        model=lambda: Carried("both"), data=labelled(), inputs=output_of, loss=centred, microbatch=8
    )
    ls.train(given, run_dir=str(tmp_path / "run"), hooks=[Looks()])
    assert seen == [(None, [0], [0.0] * 8, [0.0] * CLASSES)]


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


def trained(run_dir: str, plan: str, changes: dict[str, Any], checked: bool = True) -> Any:
    """The fingerprint, the loss, and what was reported of the loss; without the check if asked."""
    given = recipe(
        **{
            "model": classifier,
            "data": labelled(),
            "inputs": output_of,
            "loss": plain,
            "microbatch": 8,
            "tensor": {"0": "colwise", "3": "rowwise"} if "tensor" in plan else None,
            **changes,
        }
    )
    with nullcontext() if checked else patch.object(LossCheck, "before_step", LossCheck.after_step):
        result = ls.train(given, run_dir=run_dir, plan=plan)
    said = [
        f"{event.name}: {event.details.get('reason', '')}"
        for event in result.events
        if event.name.startswith("loss-")
    ]
    return result.fingerprint, result.loss, " ".join(said)


DEPENDS = "loss-depends-on-microbatches: loss is "
KEEPS = "loss-keeps-state: loss of the first microbatch is "
REFUSED = "LossError: loss of the first microbatch is "
NOT_CHECKED = "loss-not-checked: "
NOT_TRIED = (
    "whether it keeps state: it fails in the trial: ValueError: no targets in evaluation mode"
)
ALONE, BOTH = "replicate=1", "shard=2,pipeline=2"
UNSPLIT = f"{ALONE} replicate=2 shard=2 pipeline=2"
EVERY = f"{UNSPLIT} tensor=2"
BITWISE = " ".join(f"{plan},numerics=bitwise" for plan in (ALONE, "replicate=2", "shard=2"))
ONLY: dict[str, Any] = {"model": only_for_training, "blocks": ["1"]}
DEPENDS_THERE = (DEPENDS, " for its two halves together")
IS_FINE = ("not", "loss-depends")
CHANGES = ("LossError: ", "keeps a value that it changes")
TABLE: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    (EVERY, {"loss": class_weighted}, DEPENDS_THERE),
    (EVERY, {"loss": contrastive}, DEPENDS_THERE),
    (
        UNSPLIT,
        {"loss": of_one_class},
        ("loss-depends-on-microbatches: it is a mean over class weights",),
    ),
    (UNSPLIT, {"loss": rescaled}, IS_FINE),
    (ALONE, {"loss": of_each_sample}, IS_FINE),
    (ALONE, {"loss": of_next_tokens}, IS_FINE),
    (f"{ALONE} replicate=2 shard=2", {"model": variational, "loss": sum_of_errors}, DEPENDS_THERE),
    (f"{ALONE} replicate=2", {"model": variational}, ("not", "loss-")),
    (UNSPLIT, {"loss": plain}, IS_FINE),
    *((f"{ALONE} replicate=2", {"loss": loss}, IS_FINE) for loss in (noisy, fails_on_halves)),
    *(
        (ALONE, {"loss": loss, "precision": "bf16"}, IS_FINE)
        for loss in (plain, noisy, fails_on_halves)
    ),
    (
        f"{ALONE} replicate=2",
        {"loss": class_weighted_sum, "weight": sum_of_weights},
        IS_FINE,
    ),
    ("replicate=2", {"microbatch": 1}, IS_FINE),
    (
        ALONE,
        {"collate": without_some, "loss": weighted_sum, "weight": lambda batch: len(batch[1])},
        ("loss-depends", "not", NOT_CHECKED),
    ),
    (ALONE, {"loss": plain}, ("not", "loss-")),
    (
        ALONE,
        {"loss": fails_on_halves},
        (f"{NOT_CHECKED}it fails on a half of the first microbatch: ValueError: eight samples",),
    ),
    (ALONE, {"loss": noisy}, (f"{NOT_CHECKED}it draws random numbers, without dropout too",)),
    (
        ALONE,
        {
            "loss": lambda output, batch: F.cross_entropy(output, batch["y"]),
            "collate": with_a_scalar,
            "inputs": lambda batch: batch["x"],
        },
        (f"{NOT_CHECKED}its first microbatch cannot be cut in two",),
    ),
    (UNSPLIT, {"loss": Centred}, (KEEPS,)),
    (UNSPLIT, {"loss": Prior}, (KEEPS,)),
    (
        f"{ALONE} replicate=2 shard=2",
        {"model": Counts},
        ("loss-keeps-state: each forward changes the number calls",),
    ),
    (BITWISE, {"model": Counts}, ("LossError: each forward changes the number calls",)),
    (BITWISE, {"loss": Centred}, (REFUSED, "make it a buffer", "; or drop numerics=bitwise")),
    (BITWISE, {"loss": Prior}, CHANGES),
    (BITWISE, {"model": Remembers}, (REFUSED, "the loss or the model keeps a value")),
    (BITWISE, {"model": partial(Carried, "both")}, CHANGES),
    (BITWISE, {"model": partial(Carried, "training")}, CHANGES),
    (BITWISE, {"model": partial(Carried, "evaluation")}, CHANGES),
    (BITWISE, {"model": Queue}, CHANGES),
    (BITWISE, {"model": Burnt}, ("not", "loss-")),
    (BITWISE, {"model": Buffered}, ("not", "loss-")),
    ("shard=2", {**ONLY, "microbatch": 1}, (NOT_TRIED,)),
    ("shard=2", {**ONLY, "microbatch": 4}, (NOT_TRIED,)),
    (f"{ALONE} pipeline=2 {BOTH}", {**ONLY, "microbatch": 1}, ()),
    (f"{ALONE} pipeline=2 {BOTH}", {**ONLY, "microbatch": 4}, ()),
]
"""Plans, changes of the recipe, and words of what is said; after "not", words that are not."""


def table(processes: int) -> Iterator[tuple[str, dict[str, Any], tuple[str, ...]]]:
    for plans, changes, words in TABLE:
        for plan in plans.split():
            if processes == (4 if plan == BOTH else int(plan.partition("=")[2][0])):
                keeps = changes.get("loss") in (Centred, Prior)
                made = {"loss": changes["loss"]()} if keeps else {}
                yield plan, {**changes, **made}, words


def trained_each(run_dir: str, processes: int) -> list[Any]:
    return each_of(trained, run_dir, [row[:2] for row in table(processes)])


@pytest.fixture(scope="module")
def found(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """Returns what each rank says of each row, given the number of processes."""

    @cache
    def run(processes: int) -> Any:
        folder = str(tmp_path_factory.mktemp("runs"))
        if processes == 1:
            return [trained_each(folder, 1)]
        return pool.run(processes, trained_each, folder, processes, timeout_seconds=50)

    return run


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loss_is_named_or_refused_if_it_depends_on_the_cut_or_keeps_a_value(
    found: Callable[[int], Any], processes: int
) -> None:
    for (plan, changes, words), *ranks in zip(table(processes), *found(processes), strict=True):
        at = words.index("not") if "not" in words else len(words)
        for result in ranks:
            said = result if isinstance(result, str) else result[2]
            is_refused = any(word.startswith("LossError") for word in words[:at])
            assert isinstance(result, str) is is_refused, (plan, changes, said)
            assert all(word in said for word in words[:at]), (plan, changes, said)
            assert not any(word in said for word in words[at + 1 :]), (plan, changes, said)


def test_the_remedies_for_a_kept_state_are_the_same_on_any_number_of_processes(
    found: Callable[[int], Any],
) -> None:
    for model in (Burnt, Buffered):
        made = {
            fingerprint
            for processes in (1, 2)
            for (_, changes, _), *results in zip(table(processes), *found(processes), strict=True)
            if changes.get("model") is model
            for fingerprint, _, _ in results
        }
        assert len(made) == 1, model


def with_and_without(run_dir: str) -> list[Any]:
    """The fingerprints of trainings with the check and without."""
    return each_of(
        trained,
        run_dir,
        [
            (f"{plan},numerics=bitwise", {"loss": loss}, checked)
            for plan, loss in (
                ("replicate=2", changes_its_batch),
                ("shard=2", changes_its_batch),
                ("shard=2", noisy),
            )
            for checked in (True, False)
        ],
    )


def test_the_check_changes_nothing_that_is_learned(pool: WorkerPool, tmp_path: Path) -> None:
    for results in pool.run(2, with_and_without, str(tmp_path)):
        made = [fingerprint for fingerprint, _, _ in results]
        assert made[::2] == made[1::2]
        assert len(set(made)) > 1


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_model_that_fails_in_evaluation_mode_is_trained(
    found: Callable[[int], Any], processes: int
) -> None:
    def losses(processes: int) -> dict[int, set[float]]:
        """By the samples of a microbatch, of all plans and ranks."""
        made: dict[int, set[float]] = {}
        for (_, changes, _), *results in zip(table(processes), *found(processes), strict=True):
            if changes.get("model") is only_for_training:
                made.setdefault(changes["microbatch"], set()).update(loss for _, loss, _ in results)
        return made

    for microbatch, (loss,) in losses(1).items():
        found_there = sorted(losses(processes)[microbatch])
        assert found_there == pytest.approx([loss] * len(found_there)), microbatch
