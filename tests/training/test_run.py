"""`train`: what it leaves in the run directory, what it puts back, and what it refuses on all ranks
alike."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_files
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from training.subjects import each_of, network, recipe, rows, same, squared_error, state_of

import lockstep as ls
from lockstep.base.errors import (
    LockstepError,
    LossError,
    RecipeError,
    RunDirectoryError,
)
from lockstep.testing.pool import WorkerPool
from lockstep.training.set_up import check_same


class Final(ls.Hook):
    def on_save(self, run: Any) -> None:
        self.state = state_of(run.model)


def mean_index(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return batch[0]


def train_in_own_directory(folder: str) -> tuple[ls.Result, dict[str, Tensor], list[str]]:
    """Every rank names another directory: the one of rank 0 counts."""
    final = Final()
    evaluation = ls.Evaluation(data=rows(5), every=3, metrics={"mean": ls.Mean(mean_index)})
    given = recipe(steps=7, evaluation=evaluation, seed=11, clip_norm=1.0)
    rank = distributed.get_rank()
    result = ls.train(
        given, run_dir=f"{folder}/{rank}", plan="workers=0", hooks=[final], log_every=3
    )
    return result, final.state, sorted(os.listdir(folder))


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_run_directory_says_what_ran_and_what_came_of_it(
    pool: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    everyone = pool.run(world_size, train_in_own_directory, str(tmp_path))
    result, state, _ = everyone[0]
    folder = tmp_path / "0"
    assert os.listdir(tmp_path) == ["0"]
    files = sorted(path.name for path in folder.iterdir())
    assert [name for name in files if not name.startswith("events.out.tfevents.")] == [
        "checkpoints",
        "events.jsonl",
        "metrics.jsonl",
        "model.safetensors",
        "ranks.jsonl",
        "result.json",
        "run.json",
    ]
    assert len(files) == 8

    run = json.loads((folder / "run.json").read_text())
    assert list(run) == [
        "recipe",
        "code",
        "seed",
        "plan",
        "world_size",
        "launcher",
        "checkpoints",
        "place_in_script",
        "started",
        "environment",
    ]
    assert (run["seed"], run["world_size"], run["launcher"]) == (11, world_size, "spawn")
    assert run["plan"]["text"] == f"replicate={world_size},numerics=fast" == result.plan
    assert (run["plan"]["replicate"], run["plan"]["numerics"], run["plan"]["workers"]) == (
        world_size,
        "fast",
        0,
    )
    assert (run["recipe"]["global_batch"], run["recipe"]["steps"], run["recipe"]["clip_norm"]) == (
        16,
        7,
        1.0,
    )
    assert run["environment"]["versions"]["torch"] == torch.__version__

    lines = run_files.metrics(folder)
    logged, evaluated = (
        [line for line in lines if name in line] for name in ("loss", "evaluation/loss")
    )
    assert [line["step"] for line in logged] == [3, 6, 7]
    assert [line["step"] for line in evaluated] == [3, 6, 7]
    assert all(
        line.keys()
        == {
            *("step", "time", "loss", "lr", "gradient_norm", "gradient_checksum"),
            *("samples_per_second", "memory_bytes"),
        }
        for line in logged
    )
    assert all(line["evaluation/mean"] == 2.0 for line in evaluated)
    assert logged[-1]["loss"] == result.loss
    assert evaluated[-1]["evaluation/loss"] == result.metrics["loss"]

    events = run_files.events(folder)
    assert [(event["event"], event["step"]) for event in events] == [
        ("run-started", 0),
        ("generators-seeded", 0),
        ("gradient-reducer", 0),
        ("run-ended", 7),
    ]
    assert (events[0]["plan"], events[0]["world_size"]) == (result.plan, world_size)

    written = run_files.result(folder)
    names = [
        "steps",
        "loss",
        "metrics",
        "best",
        "fingerprint",
        "run_dir",
        "plan",
        "world_size",
        "seconds",
        "samples_per_second",
    ]
    assert list(written) == names
    assert written == {name: getattr(result, name) for name in names}
    assert (result.steps, result.world_size, result.run_dir) == (7, world_size, str(folder))
    assert result.samples_per_second == pytest.approx(7 * 16 / result.seconds)
    assert math.isfinite(result.loss)

    saved = load_file(folder / "model.safetensors")
    assert same(saved, state)
    assert ls.fingerprint(saved) == result.fingerprint

    assert [result.rank for result, *_ in everyone] == list(range(world_size))
    for other, other_state, listed in everyone[1:]:
        assert listed == ["0"]
        assert same(other_state, state)
        for name in ("steps", "loss", "metrics", "fingerprint", "run_dir", "plan", "world_size"):
            assert getattr(other, name) == getattr(result, name)


def train_twice(run_dir: str) -> tuple[str, str]:
    first = ls.train(recipe(), run_dir=run_dir).fingerprint
    try:
        ls.train(recipe(), run_dir=run_dir)
    except RunDirectoryError as error:
        return first, str(error)
    raise AssertionError("the directory was used again")


def test_a_used_directory_is_refused_on_all_ranks_alike_and_kept(
    pool: WorkerPool, tmp_path: Path
) -> None:
    everyone = pool.run(3, train_twice, str(tmp_path / "run"))
    assert everyone == [everyone[0]] * 3
    assert everyone[0][1].startswith(
        f"run directory {tmp_path / 'run'} already holds a run that has ended (result.json);"
        " nothing of"
    )
    assert ls.fingerprint(load_file(tmp_path / "run" / "model.safetensors")) == everyone[0][0]


def train_without_a_name(folder: str) -> tuple[str, str]:
    with contextlib.chdir(folder):
        return ls.train(recipe()).run_dir, ls.train(recipe()).run_dir


def test_without_a_name_each_run_gets_a_new_directory_below_runs(
    pool: WorkerPool, tmp_path: Path
) -> None:
    everyone = pool.run(2, train_without_a_name, str(tmp_path))
    assert everyone[0] == everyone[1]
    assert sorted(everyone[0]) == sorted(str(path) for path in (tmp_path / "runs").iterdir())
    assert len(set(everyone[0])) == 2


def launched(run_dir: str, plan: str) -> tuple[str, str, list[Any]]:
    result = ls.train(recipe(), run_dir=run_dir, plan=plan)
    return (
        result.run_dir,
        result.plan,
        [event.details for event in result.events if event.name == "launcher-overrides-script"],
    )


@pytest.mark.parametrize("plan", ["replicate=2", "replicate=3"])
def test_what_the_launcher_says_goes_before_what_the_script_says_and_is_an_event(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    monkeypatch.setenv("LOCKSTEP_PLAN", "numerics=bitwise")
    monkeypatch.setenv("LOCKSTEP_RUN_DIR", str(tmp_path / "launcher's"))
    for run_dir, used, details in pool.run(2, launched, str(tmp_path / "script's"), plan):
        assert run_dir == str(tmp_path / "launcher's")
        assert used == "replicate=2,numerics=bitwise"
        assert [detail["what"] for detail in details] == ["plan", "run_dir"]
        assert details[0]["script"].startswith(plan)
        assert details[0]["launcher"] == used
        assert (details[1]["script"], details[1]["launcher"]) == (
            str(tmp_path / "script's"),
            str(tmp_path / "launcher's"),
        )
    assert not (tmp_path / "script's").exists()


def surroundings() -> list[Any]:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    states = [
        random.getstate(),
        torch.get_num_threads(),
        torch.default_generator.get_state(),
        np.random.get_state()[1].tolist(),
    ]
    return [*states, torch.is_grad_enabled(), sorted(os.environ)]


def put_back(run_dir: str) -> tuple[bool, bool, str]:
    before = surroundings()
    torch.set_num_threads(3)
    try:
        ls.train(recipe(loss=failing_loss), run_dir=f"{run_dir}/failed")
    except LossError as error:
        text = str(error)
    failed = after(before)
    torch.set_num_threads(3)
    ls.train(recipe(), run_dir=f"{run_dir}/done", plan="numerics=bitwise")
    return failed, after(before), text


def after(before: list[Any]) -> bool:
    threads = torch.get_num_threads()
    now = [
        random.getstate(),
        before[1],
        torch.default_generator.get_state(),
        np.random.get_state()[1].tolist(),
    ]
    return (
        same([*now, torch.is_grad_enabled(), sorted(os.environ)], before)
        and threads == 3
        and distributed.is_initialized()
    )


def failing_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return squared_error(model, batch) * math.inf


def test_a_run_puts_back_threads_and_generators_and_says_how_it_failed(
    pool: WorkerPool, tmp_path: Path
) -> None:
    everyone = pool.run(2, put_back, str(tmp_path))
    text = everyone[0][2]
    assert everyone == [(True, True, text)] * 2
    left = sorted(
        path.name for path in (tmp_path / "failed").iterdir() if "tfevents" not in path.name
    )
    assert left == ["checkpoints", "events.jsonl", "metrics.jsonl", "run.json"]
    last = run_files.events(tmp_path / "failed")[-1]
    assert (last["event"], last["error"]) == ("run-failed", f"LossError: {text}")


def of_its_own() -> nn.Module:
    model = network()
    with torch.no_grad():
        model[0].weight += distributed.get_rank()
    return model


def in_an_order_of_its_own() -> nn.Module:
    """The same numbers on each rank, elsewhere: a row is turned by the rank."""
    model = network()
    with torch.no_grad():
        model[0].weight[2] = model[0].weight[2].roll(int(os.environ["RANK"]))
    return model


def with_a_table_of_its_own() -> nn.Module:
    model = network()
    model.register_buffer(
        "table", torch.tensor([float(os.environ["RANK"]), torch.nan]), persistent=False
    )
    return model


def list_of_inputs(batch: Sequence[Tensor]) -> list[Tensor]:
    return list(batch[1:2])


def no_inputs(batch: Sequence[Tensor]) -> None:
    return None


def mean_of_output(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return output.mean()


class Growing(list[int]):
    """One sample longer whenever somebody looks, after the first few looks."""

    looks = 0

    def __len__(self) -> int:
        self.looks += 1
        return super().__len__() + max(0, self.looks - 12)


def attempt(run_dir: str, plan: str | None, changes: dict[str, Any]) -> None:
    ls.train(recipe(**changes), plan=plan, run_dir=run_dir)


OTHER_MODEL = "the factory must build the same model in"
OTHER_VALUES = "RecipeError: the model is not the same on ranks 0 and 1: '{}' has other values; "
REFUSED: dict[str, tuple[str | None, dict[str, Any], str]] = {
    "a plan for other processes": (
        "replicate=2",
        {},
        "PlanError: plan 'replicate=2,numerics=fast' with 3 processes; the axes multiply to 2, and"
        " must multiply to the number of",
    ),
    "an unknown axis": ("replicas=3", {}, "PlanError: 'replicas' in plan 'replicas=3' is unknown"),
    "sequences that a loss cuts with its model": (
        "context=3",
        {},
        "RecipeError: context=3 on a recipe in shorthand form (no inputs; the loss calls the"
        " model); it must call the model itself, with parts of the sequences; give",
    ),
    "a pipeline on a recipe in shorthand form": (
        "pipeline=3",
        {},
        "RecipeError: pipeline=3 on a recipe in shorthand form (no inputs; the loss calls the"
        " model); it must call the model's parts",
    ),
    "bitwise without a microbatch": (
        "numerics=bitwise",
        {"microbatch": None},
        "RecipeError: numerics=bitwise with microbatch=None; without a fixed microbatch, the"
        " microbatches depend on the number of processes; give a microbatch, for example"
        " microbatch=2",
    ),
    "a model of its own on each rank": (
        None,
        {"model": of_its_own},
        OTHER_VALUES.format("0.weight") + OTHER_MODEL,
    ),
    "a model in an order of its own on each rank": (
        None,
        {"model": in_an_order_of_its_own},
        OTHER_VALUES.format("0.weight") + OTHER_MODEL,
    ),
    "a buffer of its own on each rank": (
        None,
        {"model": with_a_table_of_its_own},
        OTHER_VALUES.format("table") + OTHER_MODEL,
    ),
    "a model that is none": (
        None,
        {"model": dict},
        "RecipeError: the model factory returned {} (a dict); it must return a torch.nn.Module",
    ),
    "a model without parameters": (
        None,
        {"model": nn.Tanh},
        "RecipeError: the model (Tanh) has no trainable parameter; training needs",
    ),
    "a list of inputs": (
        None,
        {"inputs": list_of_inputs, "loss": mean_of_output},
        "RecipeError: Recipe.inputs returned a list of 1; the model is called with what it returns:"
        " a tuple of arguments, a dict of",
    ),
    "no inputs": (
        None,
        {"inputs": no_inputs, "loss": mean_of_output},
        "RecipeError: Recipe.inputs returned None; the model is called with what it returns: a"
        " tuple of arguments, a dict of keywords, or",
    ),
    "an optimizer that is none": (
        None,
        {"optimizer": str},
        "RecipeError: the optimizer factory returned 'Sequential(",
    ),
}


OWN = {
    "plan": (
        {},
        {"plan": "replicate=2,transport=torch"},
        "PlanError: plan is replicate=2,numerics=fast on rank 0 and ",
    ),
    "precision": (
        {},
        {"precision": "bf16"},
        "RecipeError: precision is fp32 on rank 0 and bf16 on rank 1; all processes of a run",
    ),
    "gradient_compression": (
        {"gradient_compression": "bf16"},
        {"gradient_compression": "int8"},
        "RecipeError: gradient_compression is bf16 on rank 0 and int8 on rank 1; all processes"
        " of a run",
    ),
    "batch": (
        {},
        {"global_batch": 8},
        "RecipeError: global_batch is 12 on rank 0 and 8 on rank 1; all processes of a run"
        " have one",
    ),
    "saving": ({"saving": ls.Saving(every=1)}, {}, "RecipeError: saving is Saving(every=1, last=2"),
}
"""What ranks 0 and 1 are given otherwise than usual."""


def test_what_only_one_rank_gives_is_another_recipe() -> None:
    check_same([{"plan": "replicate=2"}] * 2)
    with pytest.raises(RecipeError) as caught:
        check_same([{"plan": "replicate=2"}, {"plan": "replicate=2", "data": "Rows[48]"}])
    assert str(caught.value).startswith(
        "data is not there on rank 0 and Rows[48] on rank 1; all processes"
    )


def with_ones_own(run_dir: str, name: str) -> None:
    mine = dict(OWN[name][distributed.get_rank()])
    more = {name: mine.pop(name) for name in ("plan", "saving") if name in mine}
    ls.train(
        recipe(global_batch=mine.pop("global_batch", 12), **mine),
        run_dir=run_dir,
        **{"plan": "replicate=2", **more},
    )


def with_ones_own_each(run_dir: str) -> list[Any]:
    return each_of(with_ones_own, run_dir, [(name,) for name in OWN])


def test_another_plan_or_recipe_on_a_rank_is_refused_on_all_alike(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for (name, (_, _, message)), said, other in zip(
        OWN.items(), *pool.run(2, with_ones_own_each, str(tmp_path)), strict=True
    ):
        assert said == other, name
        assert said.startswith(message), name


def attempt_each(run_dir: str) -> list[Any]:
    return each_of(attempt, run_dir, [row[:2] for row in REFUSED.values()])


def test_what_cannot_be_trained_is_refused_on_all_ranks_alike(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for (name, (_, _, message)), *said in zip(
        REFUSED.items(), *pool.run(3, attempt_each, str(tmp_path)), strict=True
    ):
        assert len(set(said)) == 1, name
        assert said[0].startswith(message), name
    assert not list(tmp_path.glob("*/result.json"))


def grows(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch[:, None].float().expand(-1, 6)).mean()


def test_what_a_batch_or_a_loss_shows_is_refused_in_the_first_step(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        (
            {"data": Growing(range(8)), "loss": grows},
            ("DataError: the dataset has ", " samples after step ", ", microbatch ", ", and had "),
        ),
        (
            {"loss": lambda model, batch: 3.0},
            ("LossError: term 'loss' of the loss is 3.0 (a float); it must be a scalar tensor",),
        ),
        (
            {"loss": lambda model, batch: model(batch[1])},
            ("LossError: term 'loss' of the loss has shape (4, 3); it must be a scalar",),
        ),
        (
            {"loss": lambda model, batch: batch[2].mean()},
            ("LossError: term 'loss' of the loss has no gradient; it must depend on",),
        ),
    ]
    found = each_of(attempt, str(tmp_path), [(None, changes) for changes, _ in cases])
    for (_, words), said in zip(cases, found, strict=True):
        assert said.startswith(words[0]), said
        assert all(each in said for each in words), said


def test_bad_arguments_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for given, arguments, message in (
        ({"model": network}, {}, "RecipeError: train({'model'"),
        (recipe(), {"log_every": 0}, "RecipeError: log_every=0; it counts steps and must be"),
        (recipe(), {"plan": "replicate"}, "PlanError: 'replicate' in plan 'replicate'; a plan is"),
        (
            recipe(),
            {"plan": 2},
            "PlanError: plan=2 (a int); it must be an ls.Plan, or text such as",
        ),
    ):
        with pytest.raises(LockstepError) as caught:
            ls.train(given, run_dir=str(tmp_path / "run"), **arguments)  # type: ignore[arg-type]
        assert f"{type(caught.value).__name__}: {caught.value}".startswith(message)
        assert not (tmp_path / "run").exists()


def test_one_process_needs_no_launcher_and_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    result = ls.train(recipe(), run_dir=str(tmp_path / "run"))
    assert (result.steps, result.world_size, result.plan) == (2, 1, "replicate=1,numerics=fast")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["launcher"] == "python"
    assert not distributed.is_initialized()


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.wave).real


def train_waves(run_dir: str) -> float:
    return ls.train(recipe(model=Waves, steps=3, optimizer=adam), run_dir=run_dir).loss


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def test_complex_parameters_train_in_fast_numerics(pool: WorkerPool, tmp_path: Path) -> None:
    alone = train_waves(str(tmp_path / "1"))
    assert pool.run(2, train_waves, str(tmp_path / "2")) == pytest.approx([alone] * 2, rel=1e-5)
