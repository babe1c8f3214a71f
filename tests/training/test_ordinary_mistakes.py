"""Ordinary scripts whose ranks would learn something else, or nothing, without an error: set right,
or refused."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate, random_split
from training.subjects import OUTPUTS, each_of, learned, momentum, recipe, rows, squared_error

import lockstep as ls
from lockstep.base.errors import DataError, RecipeError
from lockstep.recipe.code import texts
from lockstep.testing.pool import WorkerPool

BITWISE = "numerics=bitwise"


def rank() -> int:
    return int(os.environ["RANK"])


def unseeded(samples: int = 48) -> TensorDataset:
    """Rows as a process makes them whose generators nobody has seeded alike."""
    torch.manual_seed(rank())
    return TensorDataset(
        torch.arange(samples), torch.randn(samples, 6), torch.randn(samples, OUTPUTS)
    )


def split_at_random() -> Any:
    torch.manual_seed(rank())
    return random_split(rows(60), [48, 12])[0]


class AnotherEachTime(Dataset[tuple[int, Tensor, Tensor]]):
    """Augments with a generator of its own, which nobody seeds."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        generator = torch.Generator()
        generator.seed()
        return index, torch.rand(6, generator=generator), torch.ones(OUTPUTS)


def train(run_dir: str, data: Callable[[], Any], plan: str, **changes: Any) -> list[str]:
    result = ls.train(recipe(data=data(), **changes), run_dir=run_dir, plan=plan)
    return [event.name for event in result.events]


def evaluate(run_dir: str, data: Callable[[], Any]) -> None:
    ls.train(recipe(evaluation=ls.Evaluation(data=data())), run_dir=run_dir)


class Held:
    """An object such as a dataset returns for a collate of its own."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Holds(Dataset[Any]):
    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return Held([float(index), self.make()])


def only_numbers(samples: Sequence[Any]) -> Any:
    x = torch.tensor([each.value[0] for each in samples])
    return torch.arange(len(x)), x[:, None].expand(-1, 6), torch.ones(len(x), OUTPUTS)


def train_held(run_dir: str, make: Callable[[], Any]) -> list[str]:
    return train(run_dir, partial(Holds, make), BITWISE, collate=only_numbers)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_change_from_fetch_to_fetch_are_refused_where_bits_count(
    pool: WorkerPool, tmp_path: Path, workers: int
) -> None:
    with pytest.raises(DataError) as caught:
        pool.run(1, train, str(tmp_path / "run"), AnotherEachTime, f"{BITWISE},workers={workers}")
    assert str(caught.value).startswith("data: sample 0[1] on rank 0 has other bits each time ")
    assert str(caught.value).endswith(", or drop numerics=bitwise")


def test_objects_that_cannot_be_read_are_an_event_on_one_process_too(tmp_path: Path) -> None:
    assert "data-not-compared" in train_held(str(tmp_path / "run"), Lock)


def loss_times(factor: float) -> Callable[..., Any]:
    return lambda model, batch: factor * squared_error(model, batch)


class Trainer:
    """What a script keeps its settings in."""

    def __init__(self) -> None:
        self.weights, self.rank = torch.ones(OUTPUTS), 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return (self.weights * (model(batch[1]) - batch[2]) ** 2).mean()


def heavier() -> Any:
    made = Trainer()
    made.weights[1] += rank()
    return made.loss


def printing(is_main: bool) -> Callable[..., Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if is_main:
            print(len(batch[0]))
        return squared_error(model, batch)

    return loss


def writing(writer: Any) -> Callable[..., Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if writer is not None:
            writer.info("%d", len(batch[0]))
        return squared_error(model, batch)

    return loss


def asking(model: nn.Module, batch: Any) -> Tensor:
    if ls.rank() == 0:
        print(len(batch[0]))
    return squared_error(model, batch)


def of_level(level: int) -> logging.Logger:
    logger = logging.getLogger("of one rank")
    logger.setLevel(level)
    return logger


def on(device: torch.device) -> Callable[..., Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return squared_error(model, batch).to("cpu" if device.index else batch[1].device)

    return loss


class OnOneRank(ls.Hook):
    """Keeps which rank it is, and a writer on one of them, as public scripts do."""

    def __init__(self, main: bool) -> None:
        self.is_main, self.writer = main, logging.getLogger("of a hook") if main else None

    def after_step(self, run: Any) -> None:
        if self.is_main:
            assert self.writer is not None
            self.writer.info("step %d", run.step)


DIFFERENT: dict[str, Callable[[], Any]] = {
    "factor": lambda: loss_times(1.0 + rank()),
    "its code": lambda: (
        (lambda *given: 2 * squared_error(*given))
        if rank()
        else (lambda *given: squared_error(*given))
    ),
    ".__self__.weights": heavier,
    "is_main": lambda: printing(rank() == 0),
    "writer": lambda: writing(None if rank() else of_level(logging.ERROR)),
}
"""Losses that each rank makes for itself, by what differs."""
ALIKE: dict[str, Callable[[], Any]] = {
    "the rank, asked for in the loss": lambda: asking,
    "a writer on every rank, whose level depends on it": lambda: writing(
        of_level(logging.INFO + rank())
    ),
    "a device": lambda: on(torch.device("cuda", rank())),
}


def trained_loss(run_dir: str, make: Callable[[], Any]) -> str:
    hooks = [OnOneRank(rank() == 0)]
    return ls.train(recipe(loss=make()), run_dir=run_dir, plan=BITWISE, hooks=hooks).fingerprint


def train_losses(run_dir: str) -> list[str]:
    return each_of(trained_loss, run_dir, [(make,) for make in (DIFFERENT | ALIKE).values()])


def test_what_a_loss_asks_for_itself_and_what_hooks_keep_may_depend_on_the_rank(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """And another function on each rank is refused."""
    (alone,) = pool.run(1, train_losses, str(tmp_path / "alone"))
    (fingerprint,) = set(alone[len(DIFFERENT) :])
    assert len(fingerprint) == 64
    for found in pool.run(2, train_losses, str(tmp_path / "run")):
        assert found[len(DIFFERENT) :] == [fingerprint] * len(ALIKE)
        for name, said in zip(DIFFERENT, found, strict=False):
            assert said.startswith(
                "RecipeError: loss is another function on rank 1 than on rank 0:"
                f" {name} differs; all processes of a run have one recipe; give the same on every"
                " rank; for a line that one rank prints or logs, ask for the rank within"
            ), name


def another_copy(run_dir: str) -> None:
    found = {**texts(), "numbers": f"x = {rank()}", "fractions": f"x = 1  # on rank {rank()}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.recipe.code.texts", lambda: found)
        ls.train(recipe(), run_dir=run_dir)


def shard_of_its_own(shard: int, epoch: int, start: int) -> Any:
    """A stream whose shards lie on the machine of the rank that reads them."""
    if shard % 2 != rank():
        raise FileNotFoundError(shard)
    yield from ((index, torch.rand(6), torch.ones(OUTPUTS)) for index in range(start, 8))


def other_stream(shard: int, epoch: int, start: int) -> Any:
    yield from (
        (index, torch.full((6,), rank() + 0.5), torch.ones(OUTPUTS)) for index in range(start, 8)
    )


def train_stream(run_dir: str, open_shard: Callable[[int, int, int], Any]) -> list[str]:
    given = recipe(data=ls.Stream(open_shard, shards=2), microbatch=8)
    return [event.name for event in ls.train(given, run_dir=run_dir).events]


def droops() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, OUTPUTS))


class After(ls.Hook):
    """Calls a function after step 2, on the ranks that are named."""

    def __init__(self, change: Callable[[Any], object], ranks: Sequence[int]) -> None:
        self.change = change
        self.ranks = ranks

    def after_step(self, run: Any) -> None:
        if run.step == 2 and run.context.world.rank in self.ranks:
            self.change(run)


class AtTheStart(ls.Hook):
    def on_start(self, run: Any) -> None:
        run.model[1].train(rank() == 0)


def train_with(
    run_dir: str, hooks: Sequence[ls.Hook], plan: str = BITWISE
) -> tuple[str, list[str]]:
    result = ls.train(recipe(model=droops, steps=4), run_dir=run_dir, hooks=hooks, plan=plan)
    return result.fingerprint, [event.name for event in result.events]


DIFFERS = " differs between rank 0 and rank 1"
DATA: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[str, ...]]] = {
    "drawn unseeded": (
        train,
        (unseeded, "replicate=2"),
        (f"DataError: data: sample 0[1]{DIFFERS}", "seed what is drawn"),
    ),
    "split unseeded": (
        train,
        (split_at_random, "replicate=2"),
        (f"DataError: data: sample 0[0]{DIFFERS}", "seed what is drawn"),
    ),
    "another object": (train_held, (rank,), (f"DataError: data: sample 0.value{DIFFERS}",)),
    "evaluation data": (
        evaluate,
        (unseeded,),
        (f"DataError: evaluation.data: sample 0[1]{DIFFERS}",),
    ),
    "another version of the script": (
        another_copy,
        (),
        ("RecipeError: numbers", " is another version on rank 1 than on rank 0: edited since"),
    ),
    "a stream": (
        train_stream,
        (other_stream,),
        (f"DataError: data: the first sample of shard 0[1]{DIFFERS}",),
    ),
    "modes": (
        train_with,
        ([AtTheStart()],),
        (
            "RecipeError",
            "module '1' is in training mode on rank 0 and in evaluation mode on rank 1",
        ),
    ),
    "an object that cannot be read": (train_held, (Lock,), ("data-not-compared",)),
    "another each time": (
        train,
        (AnotherEachTime, "replicate=2"),
        ("data-not-reproducible",),
    ),
    "a stream of the rank's machine": (train_stream, (shard_of_its_own,), ("data-not-compared",)),
}
"""What trains on other data on each rank, and words of the error or of the events."""


def with_data(run_dir: str) -> list[Any]:
    found = []
    for place, (function, arguments, _) in enumerate(DATA.values()):
        found += each_of(function, f"{run_dir}/{place}", [arguments])
    return found


def test_other_data_on_each_rank_is_refused_or_an_event(pool: WorkerPool, tmp_path: Path) -> None:
    for found in pool.run(2, with_data, str(tmp_path)):
        for (name, (_, _, words)), said in zip(DATA.items(), found, strict=True):
            assert str(said).startswith(words[0]) or words[0] in said, (name, said)
            assert all(each in said for each in words), (name, said)
    runs = {name: tmp_path / str(place) / "0" for place, name in enumerate(DATA)}
    assert not (runs["evaluation data"] / "metrics.jsonl").read_text(), "before the first step"
    for name, words in {
        "an object that cannot be read": "data: sample 0.value[1]",
        "a stream of the rank's machine": (
            "data: the first sample of shard 0 (FileNotFoundError: 0) on rank 1"
        ),
    }.items():
        lines = (runs[name] / "events.jsonl").read_text().splitlines()
        (told,) = [line for line in lines if "data-not-compared" in line]
        assert words in told


def forgets_train(run: Any) -> None:
    run.model.eval()


def computes_itself(run: Any) -> None:
    run.model(torch.ones(1, 6))


def adds_a_group(run: Any) -> None:
    run.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def swaps_a_module(run: Any) -> None:
    run.model[2] = nn.Linear(8, OUTPUTS)


def swaps_a_parameter(run: Any) -> None:
    run.model[2].weight = nn.Parameter(torch.ones(OUTPUTS, 8))


def freezes(run: Any) -> None:
    run.model[2].weight.requires_grad_(False)


def raises_a_rate(run: Any) -> None:
    run.optimizers[0].param_groups[1]["lr"] = 0.1


def copies_values(run: Any) -> None:
    with torch.no_grad():
        for parameter in run.model[2].parameters():
            parameter.copy_(torch.ones_like(parameter))


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    later = list(model[2].parameters())  # type: ignore[index]
    return torch.optim.SGD(
        [{"params": list(model[0].parameters())}, {"params": later, "lr": 0.0}], lr=0.1
    )  # type: ignore[index]


def follow_remedies(run_dir: str, plan: str) -> str:
    hooks = [After(raises_a_rate, [0, 1]), After(copies_values, [0, 1])]
    return ls.train(
        recipe(model=droops, optimizer=two_groups, steps=4), run_dir=run_dir, hooks=hooks, plan=plan
    ).fingerprint


CHANGES = {
    adds_a_group: "the optimizer has 5 parameters in 2 groups, and had 4 in 1 when it was built",
    swaps_a_module: "module '2' was replaced after the model was prepared",
    swaps_a_parameter: "parameter '2.weight' was replaced after the model was prepared",
    freezes: "parameter '2.weight' has requires_grad=False and had True when the model was",
}
"""What is refused in the next step, and its words."""


def with_hooks(run_dir: str, axes: str) -> dict[str, Any]:
    plan = f"{BITWISE},{axes}"
    given: dict[str, list[ls.Hook]] = {"plain": []}
    if axes != "replicate=1":
        given |= {"eval": [After(forgets_train, [0])], "forward": [After(computes_itself, [0, 1])]}
        given |= {change.__name__: [After(change, [0, 1])] for change in CHANGES}
    found = each_of(train_with, run_dir, [(hooks, plan) for hooks in given.values()])
    return {
        **dict(zip(given, found, strict=True)),
        "remedies": follow_remedies(f"{run_dir}/remedies", plan),
    }


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_what_a_hook_does_to_the_model_is_set_right_or_refused_in_the_next_step(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    """A model left in evaluation mode trains with dropout; a forward of its own changes nothing;
    and what the errors recommend trains the same model anywhere."""
    alone = with_hooks(str(tmp_path / "alone"), "replicate=1")
    expected = alone["plain"][0]
    everyone = pool.run(2, with_hooks, str(tmp_path / "run"), plan)
    assert "modes-restored" in everyone[0]["eval"][1]
    for found in everyone:
        assert [found[name][0] for name in ("plain", "eval", "forward")] == [expected] * 3
        for change, words in CHANGES.items():
            said = found[change.__name__]
            assert said.startswith("RecipeError: "), change
            assert words in said, change
        assert found["remedies"] == alone["remedies"]


def test_a_change_on_one_rank_alone_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        pool.run(2, train_with, str(tmp_path / "run"), [After(freezes, [0])], "shard=2")
    assert CHANGES[freezes] in str(caught.value)


def count_collated(run_dir: str, own: bool) -> dict[str, int]:
    counts = {"training": 0, "evaluation": 0}

    def collate(kind: str, samples: list[Any]) -> Any:
        counts[kind] += len(samples)
        return default_collate(samples)

    evaluation = ls.Evaluation(
        data=rows(8), collate=partial(collate, "evaluation") if own else None
    )
    ls.train(recipe(collate=partial(collate, "training"), evaluation=evaluation), run_dir=run_dir)
    return counts


@pytest.mark.parametrize("own", [True, False])
def test_an_evaluation_does_not_collate_as_the_training_does(tmp_path: Path, own: bool) -> None:
    tried = 6 * 4  # six batches of four samples before the first step
    assert count_collated(str(tmp_path / "run"), own) == {
        "training": tried + 32,
        "evaluation": tried + 8 if own else 0,
    }


def batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, OUTPUTS))


def positions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(6, OUTPUTS)
    )


def train_epochs(run_dir: str, model: Any, samples: int, drop_last: bool = False) -> int:
    given = recipe(
        model=model, data=rows(samples), loss=squared_error, epochs=2, drop_last=drop_last
    )
    return ls.train(given, run_dir=run_dir).steps


def train_epochs_each(run_dir: str) -> list[Any]:
    rows = [(batchnorm, 37), (batchnorm, 37, True), (positions, 37)]
    return each_of(train_epochs, run_dir, rows)


def test_batchnorm_over_a_last_microbatch_of_one_sample_is_refused_before_the_first_step(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """Without the last batch, or over several positions of the sample, it trains."""
    for said, without, several in pool.run(2, train_epochs_each, str(tmp_path)):
        assert (
            said == "RecipeError: the last global batch of an epoch has microbatches of 4, 1"
            " samples; BatchNorm '1' has no variance over one sample; use drop_last=True, or"
            " another global_batch or microbatch"
        )
        assert (without, several) == (4, 6)
    assert not Path(tmp_path, "0", "metrics.jsonl").read_text()


def test_drop_last_that_cannot_be_is_refused() -> None:
    for changes, text in (
        ({"drop_last": 1, "epochs": 1}, "drop_last=1; it must be True to leave out"),
        ({"drop_last": True, "steps": 2}, "drop_last=True without epochs"),
        (
            {"drop_last": True, "epochs": 1, "data": rows(15)},
            "drop_last=True with 15 samples and global_batch=16",
        ),
    ):
        with pytest.raises(RecipeError) as caught:
            recipe(**changes)
        assert text in str(caught.value)


def idle(run_dir: str, microbatch: int) -> list[dict[str, Any]]:
    result = ls.train(recipe(microbatch=microbatch), run_dir=run_dir)
    return [event.details for event in result.events if event.name == "idle-ranks"]


def idle_each(run_dir: str) -> list[Any]:
    return each_of(idle, run_dir, [(8,), (4,)])


def test_ranks_that_compute_nothing_are_an_event(pool: WorkerPool, tmp_path: Path) -> None:
    few, enough = pool.run(3, idle_each, str(tmp_path))[0]
    assert (few, enough) == ([{"ranks": [2], "microbatches": 2}], [])


class LowersTheRate(ls.Hook):
    """After the second evaluation, as ReduceLROnPlateau would."""

    def after_evaluation(self, run: Any, metrics: Any) -> None:
        if run.step == 4:
            for group in run.optimizers[0].param_groups:
                group["lr"] *= 0.1


def scheduled(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def decaying(step: int) -> float:
    return 0.9**step


def train_with_rates(run_dir: str, schedule: Any, plan: str = BITWISE) -> str:
    given = recipe(
        optimizer=momentum,
        steps=6,
        evaluation=ls.Evaluation(data=rows(8), every=2),
        schedule=schedule,
    )
    return ls.train(
        given, run_dir=run_dir, hooks=[LowersTheRate()], plan=plan, log_every=1
    ).fingerprint


def test_a_rate_that_a_hook_sets_beside_a_schedule_is_refused_and_without_one_stays(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for schedule in (decaying, scheduled):
        with pytest.raises(RecipeError) as caught:
            train_with_rates(str(tmp_path / schedule.__name__), schedule)
        assert str(caught.value).startswith("after step 4: the learning rate of group 0 is ")
        assert ", and the schedule had set it to" in str(caught.value)
    alone = train_with_rates(str(tmp_path / "alone"), None)
    assert [row["lr"] for row in learned(tmp_path / "alone") if "lr" in row] == pytest.approx(
        [0.1] * 4 + [0.01] * 2
    )
    found = pool.run(2, train_with_rates, str(tmp_path / "run"), None, f"{BITWISE},shard=2")
    assert found == [alone, alone]
