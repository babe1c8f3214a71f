"""Whole scripts with the mistakes of ordinary trainings: each is told, or trains the same model as
on one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import run_files
from processes import ran

pytestmark = [pytest.mark.forks, pytest.mark.command, pytest.mark.timeout(120)]
BIN = Path(sys.executable).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PREAMBLE = """
import os, sys, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate, random_split
import lockstep as ls

def fixed(samples=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, x[:, :3].sum(1, keepdim=True))

def recipe(**changes):
    given = dict(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), data=fixed(),
        inputs=lambda batch: batch[0], loss=lambda output, batch: F.mse_loss(output, batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), global_batch=8, microbatch=2, steps=4,
    )
    return ls.Recipe(**{**given, **changes})
"""


def launch(
    folder: Path, body: str, *arguments: str, nproc: int = 2, by: str = "lockstep", env: Any = None
) -> Any:
    script = folder / "train.py"
    script.write_text(PREAMBLE + body)
    launchers = {
        "lockstep": [BIN / "lockstep", "run", "--nproc", nproc, *arguments, script],
        "torchrun": [*TORCHRUN, "--standalone", "--nproc-per-node", nproc, script],
        "verify": [BIN / "lockstep", "verify", script, *arguments],
    }
    # torchrun leaves its log folder behind where a rank fails.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **(env or {})}
    return ran([*map(str, launchers[by])], cwd=folder, env=environ)


def result(folder: Path, name: str = "run") -> dict[str, Any]:
    found: dict[str, Any] = run_files.result(folder / name)
    return found


def fingerprints(folder: Path, body: str, *plans: str) -> set[str]:
    """Those of one process and of two under each plan."""
    found = set()
    for number, (plan, nproc) in enumerate([("replicate=1", 1), *((plan, 2) for plan in plans)]):
        ended = launch(
            folder,
            body,
            "--plan",
            f"{plan},numerics=bitwise",
            "--run-dir",
            f"run-{number}",
            nproc=nproc,
        )
        assert ended.returncode == 0, ended.stderr
        found.add(result(folder, f"run-{number}")["fingerprint"])
    return found


UNSEEDED = """
x = torch.randn(40, 6)
train, held_out = random_split(TensorDataset(x, x[:, :3].sum(1, keepdim=True)), [32, 8])
ls.train(recipe(data=train, evaluation=ls.Evaluation(data=held_out)))
"""


def test_data_that_is_drawn_without_a_seed_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    assert len(fingerprints(tmp_path, UNSEEDED, "replicate=2")) == 1


def test_under_torchrun_it_is_refused(tmp_path: Path) -> None:
    ended = launch(tmp_path, UNSEEDED, by="torchrun")
    assert ended.returncode != 0
    assert (
        "DataError: evaluation.data: sample 0[0] differs between rank 0 and rank 1" in ended.stderr
    )


@pytest.mark.slow
def test_verify_refuses_a_script_with_other_data_in_each_run(tmp_path: Path) -> None:
    body = (
        "x = torch.randn(32, 6,"
        " generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(4), 'big')))\n"
    )
    body += "ls.train(recipe(data=TensorDataset(x, x[:, :1])))\n"
    ended = launch(tmp_path, body, "--plans", "replicate=2", "--steps", "2", by="verify")
    assert ended.returncode == 2
    assert "on one process have other data" in ended.stderr


FORGOTTEN_EVAL = """
class Sampler(ls.Hook):
    def after_step(self, run):
        if run.rank == 0:
            run.model.eval()

model = lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
ls.train(recipe(model=model), hooks=[Sampler()] if "SAMPLE" in os.environ else [])
"""


def test_a_forgotten_eval_is_set_back_and_told(tmp_path: Path) -> None:
    plan = ("--plan", "replicate=2,numerics=bitwise")
    ended = launch(tmp_path, FORGOTTEN_EVAL, *plan, "--run-dir", "run", env={"SAMPLE": "1"})
    assert ended.returncode == 0, ended.stderr
    assert "set back the mode" in ended.stderr
    assert launch(tmp_path, FORGOTTEN_EVAL, *plan, "--run-dir", "without").returncode == 0
    assert result(tmp_path)["fingerprint"] == result(tmp_path, "without")["fingerprint"]


ADDED = """
class Grows(ls.Hook):
    def on_start(self, run):
        self.optimizer = run.optimizers[0]
    def after_step(self, run):
        if run.step == 2:
            self.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})

ls.train(recipe(), hooks=[Grows()])
"""
SWAPPED = """
class Swaps(ls.Hook):
    def after_step(self, run):
        if run.step == 2:
            run.model[2] = nn.Linear(8, 1)

ls.train(recipe(), hooks=[Swaps()])
"""
RATE = """
class Halves(ls.Hook):
    def after_step(self, run):
        for group in run.optimizers[0].param_groups:
            group["lr"] *= 0.5

ls.train(recipe(schedule=lambda step: 1.0), hooks=[Halves()])
"""
ONE_SAMPLE = """
model = lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
ls.train(recipe(model=model, data=fixed(17), epochs=2, steps=None))
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            ADDED,
            [
                "RecipeError: the optimizer has 5 parameters in 2 groups, and had 4 in 1",
                "run.freeze",
            ],
        ),
        (SWAPPED, ["RecipeError: module '2' was replaced after the model was prepared"]),
        (
            RATE,
            [
                "RecipeError: after step 1: the learning rate of group 0 is 0.05, and the schedule"
                " had set it to 0.1"
            ],
        ),
        (ONE_SAMPLE, ["BatchNorm", "one sample", "drop_last"]),
    ],
    ids=[
        "a group added",
        "a module swapped",
        "a rate beside a schedule",
        "BatchNorm over one sample",
    ],
)
def test_a_mistake_ends_the_run_in_words(tmp_path: Path, body: str, words: list[str]) -> None:
    ended = launch(tmp_path, body)
    assert ended.returncode == 2, ended.stderr
    assert all(word in ended.stderr for word in words), ended.stderr


@pytest.mark.slow
def test_muon_trains_the_same_model_on_shards(tmp_path: Path) -> None:
    body = """
model = lambda: nn.Sequential(nn.Linear(6, 12, bias=False), nn.Tanh(), nn.Linear(12, 1, bias=False))
ls.train(recipe(model=model, optimizer=lambda model: torch.optim.Muon(model.parameters(), lr=0.02)))
"""
    assert len(fingerprints(tmp_path, body, "replicate=2", "shard=2")) == 1


def test_a_collate_that_augments_is_not_used_in_evaluations(tmp_path: Path) -> None:
    body = """
def mix(samples):
    x, y = default_collate(samples)
    return x, y + 1000.0

evaluation = ls.Evaluation(data=fixed(), metrics={"largest": ls.Gathered(lambda output, batch: batch[1], lambda y: float(y.max()))})
ls.train(recipe(collate=mix, evaluation=evaluation, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0)))
"""
    ended = launch(tmp_path, body, "--run-dir", "run")
    assert ended.returncode == 0, ended.stderr
    assert result(tmp_path)["metrics"]["largest"] < 100


def test_the_best_model_is_saved_named_and_exported(tmp_path: Path) -> None:
    body = """
evaluation = ls.Evaluation(data=fixed(8, 1), every=1, loss=lambda output, batch: -F.mse_loss(output, batch[1]))
ls.train(recipe(evaluation=evaluation, steps=6), saving=ls.Saving(best="loss"))
"""
    ended = launch(tmp_path, body, "--run-dir", "run")
    assert ended.returncode == 0, ended.stderr
    best = result(tmp_path)["best"]
    assert best["step"] == 1, "this loss is largest where the model is best"
    assert best["checkpoint"] in os.listdir(tmp_path / "run" / "checkpoints")
    for command in (["inspect", "run"], ["export", "--best", "run", "best.safetensors"]):
        said = ran([str(BIN / "lockstep"), *command], cwd=tmp_path)
        assert (said.returncode, best["checkpoint"] in said.stdout) == (0, True), said


@pytest.mark.slow
def test_an_edited_script_is_not_resumed_unless_that_is_allowed(tmp_path: Path) -> None:
    body = """
rate, factor = float(os.environ["RATE"]), 1.0
class Fails(ls.Hook):
    def before_step(self, run):
        if run.step == 3 and os.environ["RATE"] == "0.1":
            raise RuntimeError("lost")

ls.train(
    recipe(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=rate), loss=lambda o, b: factor * F.mse_loss(o, b[1])),
    hooks=[Fails()], saving=ls.Saving(every=2),
)
"""
    run = ("--run-dir", "run")
    assert "RuntimeError: lost" in launch(tmp_path, body, *run, env={"RATE": "0.1"}).stderr
    refused = launch(tmp_path, body, *run, env={"RATE": "0.2"})
    assert (refused.returncode, "lr of group 0: 0.1, now 0.2" in refused.stderr) == (2, True), (
        refused.stderr
    )
    edited = launch(tmp_path, body.replace("1.0\n", "2.0\n"), *run, env={"RATE": "0.2"})
    assert (edited.returncode, "loss: its code has changed" in edited.stderr) == (2, True), (
        edited.stderr
    )
    assert (
        launch(tmp_path, body, *run, "--allow-change", "optimizer", env={"RATE": "0.2"}).returncode
        == 0
    )


def test_a_loss_with_class_weights_is_told(tmp_path: Path) -> None:
    body = """
x = fixed().tensors[0]
labels = (x.sum(1) > 0).long()
model = lambda: nn.Linear(6, 2)
loss = lambda output, batch: F.cross_entropy(output, batch[1], weight=torch.tensor([1.0, 9.0]))
ls.train(recipe(model=model, data=TensorDataset(x, labels), loss=loss))
"""
    ended = launch(tmp_path, body)
    assert ended.returncode == 0, ended.stderr
    assert "the loss depends on how a batch is cut into microbatches" in ended.stderr


def test_ranks_without_a_microbatch_are_told(tmp_path: Path) -> None:
    ended = launch(tmp_path, "ls.train(recipe(global_batch=8, microbatch=8))\n")
    assert ended.returncode == 0, ended.stderr
    assert "1 of 2 data ranks compute nothing" in ended.stderr


def test_options_that_nobody_takes_are_told(tmp_path: Path) -> None:
    options = ("--plan", "replicate=2", "--run-dir", "run")
    ended = launch(tmp_path, "print('done')\n", *options)
    assert (ended.returncode, "--plan, --run-dir had no effect" in ended.stderr) == (0, True), (
        ended.stderr
    )
    assert launch(tmp_path, "print('done')\n", *options, "--strict").returncode == 2
