"""A recipe with a sampler of its own: the same samples at any number of processes, and after a
resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate
from training.subjects import each_of, network, recipe, rows, sgd, squared_error

import lockstep as ls
from lockstep.testing.pool import WorkerPool
from lockstep.training.loop import total_steps_of

SAMPLES = 30
PLANS = {"replicate=3": 3, "shard=2,workers=1": 2}
LENGTHS = [3 + 7 * index % 11 for index in range(SAMPLES)]


OWN: dict[str, Any] = {"global_batch": None, "microbatch": None}
"""Of a recipe whose sampler makes the batches."""


def curriculum(epoch: int, seed: int) -> list[int]:
    """Ten samples an epoch, of which more and more are late ones."""
    return (torch.randperm(10) + 10 * min(epoch, 2)).tolist()


def nested(epoch: int, seed: int) -> list[list[list[int]]]:
    return [[[0, 1, 2], [3 + epoch % 2]], [[5, 6], [7, 8, 9], [10]], [[11, 12]]]


SAMPLERS: dict[str, dict[str, Any]] = {
    "a curriculum": {"sampler": curriculum, "global_batch": 4, "microbatch": 2},
    "weighted": {
        "sampler": ls.samplers.weighted(range(SAMPLES), samples=14),
        "global_batch": 4,
        "microbatch": 1,
    },
    "a short last batch": {
        "sampler": curriculum,
        "global_batch": 4,
        "microbatch": 2,
        "steps": None,
        "epochs": 3,
    },
    "batches of its own": {**OWN, "batch_sampler": nested},
    "by length": {
        **OWN,
        "batch_sampler": ls.samplers.by_length(LENGTHS, tokens=40, microbatches=2),
        "steps": None,
        "epochs": 2,
    },
}


class Seen(ls.Hook):
    """The samples of each microbatch of this rank, by step, and whether to fail."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.steps: list[list[list[int]]] = []
        self._fail_at = fail_at

    def before_step(self, run: Any) -> None:
        layout = run.training.source.layout
        self.steps.append([layout.samples_of(place) for place in range(len(layout.spans))])
        if run.step == self._fail_at:
            raise RuntimeError("lost")


def sampled(name: str, **changes: Any) -> ls.Recipe:
    return recipe(**{"data": rows(SAMPLES), "steps": 5, **SAMPLERS[name], **changes})


def train(
    run_dir: str, name: str, plan: str, saving: ls.Saving | None = None
) -> tuple[str, list[list[list[int]]]]:
    seen = Seen()
    result = ls.train(
        sampled(name), hooks=[seen], run_dir=run_dir, plan=f"{plan},numerics=bitwise", saving=saving
    )
    return result.fingerprint, seen.steps


def train_each(run_dir: str, plan: str) -> list[Any]:
    return each_of(train, run_dir, [(name, plan) for name in SAMPLERS])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Fingerprint and samples of one process, by the sampler."""
    found = train_each(str(tmp_path_factory.mktemp("alone")), "replicate=1")
    return dict(zip(SAMPLERS, found, strict=True))


@pytest.mark.parametrize("plan", PLANS)
def test_the_samples_and_the_bits_are_those_of_one_process(
    pool: WorkerPool, tmp_path: Path, alone: dict[str, Any], plan: str
) -> None:
    for found in pool.run(PLANS[plan], train_each, str(tmp_path), plan):
        assert dict(zip(SAMPLERS, found, strict=True)) == alone


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_resumed_run_goes_on_with_the_samples_that_come_next(
    tmp_path: Path, alone: dict[str, Any], name: str
) -> None:
    saving = ls.Saving(every=1)
    with pytest.raises(RuntimeError, match="lost"):
        ls.train(
            sampled(name),
            hooks=[Seen(fail_at=3)],
            run_dir=str(tmp_path),
            plan="numerics=bitwise",
            saving=saving,
        )
    fingerprint, steps = alone[name]
    assert train(str(tmp_path), name, "replicate=1", saving) == (fingerprint, steps[3:])


def test_the_samples_are_those_that_the_sampler_gave(alone: dict[str, Any]) -> None:
    _, steps = alone["batches of its own"]
    assert steps == [batch for epoch in range(3) for batch in nested(epoch, 0)][:5]
    _, steps = alone["a curriculum"]
    order = [sample for step in steps for microbatch in step for sample in microbatch]
    assert [sorted(order[:10]), sorted(order[10:20])] == [list(range(10)), list(range(10, 20))]
    assert order[:10] != sorted(order[:10]), (
        "the default generators are seeded, and so the same in each call"
    )


class KnowsItsEpoch(Dataset[Any]):
    def __init__(self) -> None:
        self.epoch = -1

    def __len__(self) -> int:
        return 6

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.epoch), torch.zeros(1), torch.zeros(1)


def epochs_seen(run_dir: str, plan: str) -> list[int]:
    seen: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.extend(batch[0].tolist())
        return model(torch.ones(len(batch[0]), 6)).sum(1).mean()

    ls.train(
        recipe(
            model=network, data=KnowsItsEpoch(), loss=loss, global_batch=4, microbatch=2, steps=3
        ),
        run_dir=run_dir,
        plan=plan,
    )
    return sorted(seen)


@pytest.mark.parametrize("plan", ["replicate=1,workers=0", "replicate=1,workers=2"])
def test_a_dataset_with_set_epoch_is_told_the_epoch_of_each_sample(
    tmp_path: Path, plan: str
) -> None:
    found = epochs_seen(str(tmp_path / "run"), plan)
    assert found.count(1) == 6
    assert set(found[:-6]) == {0}, "of which the loss check computes some again"


def differs(epoch: int, seed: int) -> Any:
    return np.random.RandomState().permutation(SAMPLES)


class Stateful:
    def __init__(self) -> None:
        self._generator = np.random.RandomState(0)

    def __call__(self, epoch: int, seed: int) -> Any:
        return self._generator.permutation(SAMPLES)


BATCHES = "a list of global batches, each a list of microbatches, each a list of indices"
WRONG: list[tuple[dict[str, Any], str, str]] = [
    (
        {"sampler": Stateful()},
        "DataError: sampler(0, 0) returned other indices the second time",
        "a function of epoch and seed",
    ),
    (
        {"sampler": lambda epoch, seed: range(epoch + 3)},
        "DataError: sampler(1, 0) returned 4 indices, and 3 in epoch 0",
        "",
    ),
    (
        {"sampler": lambda epoch, seed: [SAMPLES]},
        "DataError",
        "returned the index 30; the dataset has 30 samples, 0 to 29",
    ),
    ({"sampler": lambda epoch, seed: [0.5]}, "DataError", "returned [0.5]; it returns the indices"),
    ({"sampler": lambda epoch, seed: []}, "DataError", "returned []"),
    ({"sampler": [1, 2]}, "RecipeError", "sampler is [1, 2]"),
    (
        {"sampler": curriculum, "batch_sampler": nested},
        "RecipeError",
        "batch_sampler with global_batch=16, microbatch=4 or a sampler",
    ),
    ({"global_batch": None}, "RecipeError: global_batch is None", "give one, or a batch_sampler"),
    (
        {"sampler": curriculum, "data": ls.Stream(lambda *_: [], shards=4)},
        "RecipeError",
        "a sampler without a map-style dataset",
    ),
    ({"data": DataLoader(rows(8))}, "DataError", "data=loader.dataset"),
    ({**OWN, "batch_sampler": lambda epoch, seed: [[0, 1], [2]]}, "DataError", BATCHES),
    (
        {**OWN, "batch_sampler": lambda epoch, seed: [[[0]]] * (epoch + 1)},
        "DataError: batch_sampler(1, 0) returned 2 batches of up to 1 microbatches",
        "1 of up to 1 in epoch 0",
    ),
    (
        {
            "sampler": curriculum,
            "epochs": 2,
            "drop_last": True,
            "global_batch": 20,
        },
        "RecipeError: drop_last=True with 10 samples and global_batch=20",
        "the only batch of each epoch is short",
    ),
]


def trained(run_dir: str, changes: dict[str, Any]) -> int:
    return ls.train(recipe(**{"data": rows(SAMPLES), **changes}), run_dir=run_dir).steps


def test_a_wrong_sampler_is_refused(tmp_path: Path) -> None:
    found = each_of(trained, str(tmp_path), [(changes,) for changes, _, _ in WRONG])
    for (changes, start, words), said in zip(WRONG, found, strict=True):
        assert said.startswith(start), changes
        assert words in said, changes


def by_rank(run_dir: str) -> list[Any]:
    def sampler(epoch: int, seed: int) -> list[int]:
        return [torch.distributed.get_rank()] * 4

    return each_of(trained, run_dir, [({"sampler": sampler},)])


def test_a_sampler_that_differs_between_ranks_is_refused_on_all(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for (said,) in pool.run(2, by_rank, str(tmp_path / "run")):
        assert said.startswith(
            "DataError: the sampler returned other indices for epoch 0 on rank 1 than on rank 0"
        )


def doubled(samples: list[Any]) -> Any:
    number, x, y = default_collate(samples)
    return number, 2 * x, y


def in_a_loop(run_dir: str, data: Any, **options: Any) -> str:
    with ls.Session(run_dir=run_dir, plan="numerics=bitwise") as session:
        model, optimizer = session.prepare(network, sgd)
        for step in session.steps(
            data, sampler=curriculum, global_batch=8, microbatch=2, steps=4, **options
        ):
            for batch in step.microbatches():
                step.backward(squared_error(model, batch))
            step.commit(optimizer)
        return ls.fingerprint(model)


def test_a_loop_of_ones_own_takes_dataset_and_collate_of_a_dataloader_in_the_order_that_is_given(
    tmp_path: Path,
) -> None:
    loader = DataLoader(rows(SAMPLES), batch_size=3, shuffle=True, collate_fn=doubled)
    taken = in_a_loop(str(tmp_path / "loader"), loader)
    assert taken == in_a_loop(str(tmp_path / "dataset"), rows(SAMPLES), collate=doubled)
    assert taken != in_a_loop(str(tmp_path / "plain"), DataLoader(rows(SAMPLES)))


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 2},
        *({"epochs": 2, "drop_last": drop_last, "global_batch": 20} for drop_last in (False, True)),
        {**SAMPLERS["a short last batch"]},
        {**SAMPLERS["by length"]},
        {
            "epochs": 2,
            "drop_last": True,
            "global_batch": 20,
            "data": rows(4),
            "sampler": ls.samplers.weighted([1] * 4, samples=50),
        },
    ],
)
def test_the_steps_of_a_recipe_are_those_that_training_takes(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    given = recipe(**{"data": rows(SAMPLES), **changes})
    assert total_steps_of(given) == trained(str(tmp_path / "run"), changes)
