"""`lockstep average`: runs whose weights are known, so that those of each average are."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import forked
import pytest
import run_files
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import lockstep as ls

SCRIPT = """
import sys, torch, lockstep as ls
from torch.utils.data import TensorDataset
RIGHT = torch.tensor([[1.0, -2.0, 3.0, 0.5]])
x = torch.randn(29, 4, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x @ RIGHT.T)

def recipe(weights=None):
    return ls.Recipe(
        model=lambda: torch.nn.Linear(4, 1, bias=False),
        weights=weights,
        data=data,
        loss=lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        global_batch=8,
        microbatch=4,
        steps=1,
        evaluation=ls.Evaluation(data=data),
    )

if __name__ == "__main__":
    if sys.argv[1:] == ["fails"]:
        sys.exit(7)
    ls.train(recipe())
    if sys.argv[1:] == ["again"]:
        ls.train(recipe())
"""
WEIGHTS = {"a": [1.5, -2.0, 3.0, 0.5], "b": [0.5, -2.0, 3.0, 0.75], "far": [1.0, 3.0, 3.0, 0.5]}
"""`a` and `b` are on two sides of what is right, so that their mean is better than each."""


def average(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.lockstep("average", *arguments, folder=folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script, and the runs of `WEIGHTS`, each with a checkpoint."""
    folder = tmp_path_factory.mktemp("average")
    (folder / "train.py").write_text(SCRIPT)
    recipe = runpy.run_path(str(folder / "train.py"))["recipe"]
    for name, weights in WEIGHTS.items():
        save_file({"weight": torch.tensor([weights])}, folder / f"{name}.safetensors")
        ls.train(
            recipe(str(folder / f"{name}.safetensors")),
            run_dir=str(folder / name),
            saving=ls.Saving(every=1),
        )
    return folder


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "soup.safetensors")


def weights_in(path: str) -> list[float]:
    found: list[float] = load_file(path)["weight"][0].tolist()
    return found


def loss_of(folder: Path, weights: list[float]) -> float:
    made = runpy.run_path(str(folder / "train.py"))
    x, y = made["data"].tensors
    return float(((x @ torch.tensor([weights]).T - y) ** 2).mean())


def note_in(path: str) -> list[dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        found: list[dict[str, Any]] = json.loads(file.metadata()["lockstep.average"])
        return found


def left_in(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).parent.iterdir())


def test_the_mean_of_runs_checkpoints_and_files(trained: Path, out: str) -> None:
    (checkpoint,) = (trained / "b" / "checkpoints").iterdir()
    ended = average(trained, "a", str(checkpoint), "far.safetensors", "-o", out)
    assert ended.returncode == 0, ended.stderr
    assert (
        weights_in(out)
        == torch.tensor(list(WEIGHTS.values()), dtype=torch.float64).mean(0).float().tolist()
    )
    assert re.search(r"^a +0\.3333$", ended.stdout, re.MULTILINE)
    assert f"{out}: 1 tensors, " in ended.stdout
    assert ended.stderr == ""
    assert [each["run"] for each in note_in(out)] == ["a", str(checkpoint), "far.safetensors"]
    assert left_in(out) == ["soup.safetensors"]


def test_weights_are_relative_and_a_run_of_none_is_left_out(trained: Path, out: str) -> None:
    ended = average(trained, "a", "b", "far", "-o", out, "--weights", "3,1,0", "--json")
    assert ended.returncode == 0, ended.stderr
    assert weights_in(out) == [1.25, -2.0, 3.0, 0.5625]
    said = json.loads(ended.stdout)
    assert [(row["run"], row["weight"]) for row in said["runs"]] == [
        ("a", 0.75),
        ("b", 0.25),
        ("far", 0.0),
    ]
    assert (said["path"], said["metrics"], said["warnings"]) == (out, None, [])
    assert note_in(out) == [{"run": "a", "weight": 0.75}, {"run": "b", "weight": 0.25}]


@pytest.mark.command
def test_each_run_and_the_average_are_evaluated_by_the_recipe(trained: Path, out: str) -> None:
    ended = average(
        trained, "a", "b", "-o", out, "--evaluate", "train.py", "--nproc", "2", "--json"
    )
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    for row in said["runs"]:
        result = run_files.result(trained / row["run"])
        assert row["metrics"] == pytest.approx(result["metrics"])
    assert said["metrics"]["loss"] == pytest.approx(loss_of(trained, weights_in(out)), rel=1e-5)
    assert left_in(out) == ["soup.safetensors"], "temporary files are beside it"


@pytest.mark.command
def test_the_greedy_soup_leaves_out_a_run_that_makes_it_worse(trained: Path, out: str) -> None:
    ended = average(trained, "far", "a", "b", "-o", out, "--evaluate", "train.py", "--greedy")
    assert ended.returncode == 0, ended.stderr
    assert weights_in(out) == [1.0, -2.0, 3.0, 0.625]
    rows = {line.split("  ")[0]: line.split()[1:] for line in ended.stdout.splitlines()}
    assert rows["far"][:2] == ["left", "out"]
    assert (rows["a"][0], rows["b"][0]) == ("0.5", "0.5")
    assert float(rows["average"][0]) == pytest.approx(loss_of(trained, weights_in(out)), rel=1e-5)
    assert ended.stdout.endswith("the average of a, b\n")
    assert ended.stderr.count("lockstep: evaluating") == 5


@pytest.mark.command
@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--evaluate", "train.py fails"], 7, "evaluating a\n"),
        (
            ["--evaluate", "train.py again"],
            2,
            "train.py trains 2 times; runs are compared by one recipe; give a script that trains "
            "once",
        ),
        (
            ["--evaluate", "train.py", "--greedy", "--metric", "accuracy", "--mode", "max"],
            2,
            "--metric accuracy, but train.py measures loss; give one of these",
        ),
    ],
)
def test_an_evaluation_that_fails_writes_nothing(
    trained: Path, out: str, arguments: list[str], status: int, text: str
) -> None:
    ended = average(trained, "a", "b", "-o", out, *arguments)
    assert ended.returncode == status
    assert text in ended.stderr
    assert left_in(out) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["a"],
            (
                "LaunchError: an average of one run, a; it needs two or more; give others, or use "
                "lockstep export for one"
            ),
        ),
        (
            ["a", "b", "./a"],
            (
                "LaunchError: a is given twice; a run can be in an average once; leave one out, "
                "or raise its weight by --weights"
            ),
        ),
        (
            ["a", "b", "--weights", "1,2,3"],
            (
                "LaunchError: --weights 1,2,3 has 3 numbers for 2 runs; it needs one for each run, in "
                "the order of the runs; give 2"
            ),
        ),
        (
            ["a", "b", "--weights", "1,x"],
            (
                "LaunchError: --weights '1,x': could not convert string to float: 'x'; it takes"
                " numbers with commas"
            ),
        ),
        (
            ["a", "b", "--weights", "1,-1"],
            (
                "CheckpointError: the weight -1 in an average; each is a number of at least 0;"
                " correct it"
            ),
        ),
        (
            ["a", "b", "--weights", "nan,1"],
            (
                "CheckpointError: the weight nan in an average; each is a number of at least 0;"
                " correct it"
            ),
        ),
        (
            ["a", "b", "--weights", "0,0"],
            "CheckpointError: all weights of an average are 0; they are divided by their sum",
        ),
        (
            ["a", "b", "--greedy"],
            (
                "LaunchError: --greedy without --evaluate SCRIPT has no effect; give both, or "
                "leave --greedy out"
            ),
        ),
        (
            ["a", "b", "--nproc", "2"],
            "LaunchError: --nproc without --evaluate SCRIPT has no effect",
        ),
        (
            ["a", "b", "--evaluate", "train.py", "--mode", "max"],
            "LaunchError: --mode without --greedy has no effect",
        ),
        (
            ["a", "b", "--evaluate", "train.py", "--greedy", "--weights", "1,1"],
            (
                "LaunchError: --weights with --greedy; a greedy soup has equal parts; leave one of"
                " the two out"
            ),
        ),
        (
            ["a", "b", "--evaluate", "trian.py"],
            "LaunchError: 'trian.py' is not there; SCRIPT is the path of a Python file",
        ),
        (
            ["a", "b", "--evaluate", "train.py 'x"],
            (
                'LaunchError: --evaluate "train.py \'x": No closing quotation; its syntax is'
                " the shell's"
            ),
        ),
        (
            ["a", "gone"],
            (
                "CheckpointError: gone does not exist; give a run directory, or a checkpoint in "
                "its folder `checkpoints`"
            ),
        ),
        (
            ["a", "train.py"],
            (
                "CheckpointError: train.py is not a .safetensors file; no other file is read, "
                "because a pickle runs code"
            ),
        ),
    ],
)
def test_a_mistake_is_one_message_before_anything_is_read(
    trained: Path, out: str, arguments: list[str], text: str
) -> None:
    ended = average(trained, *arguments, "-o", out)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"lockstep: {text}")
    assert ended.stderr.count("\n") == 1
    assert left_in(out) == []


def test_nothing_is_written_over(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder.safetensors"
    folder.mkdir()
    for place, text in (
        (str(folder), "is there already; nothing is overwritten"),
        ("soup.pt", "it soup.safetensors"),
    ):
        ended = average(trained, "a", "b", "-o", place)
        assert ended.returncode == 2
        assert text in ended.stderr


def test_a_run_that_has_not_ended_is_named_with_its_checkpoint(
    trained: Path, tmp_path: Path, out: str
) -> None:
    (tmp_path / "parts").mkdir()
    shutil.copy(trained / "b" / "run.json", tmp_path / "parts")
    shutil.copytree(trained / "b" / "checkpoints", tmp_path / "parts" / "checkpoints")
    (checkpoint,) = (trained / "b" / "checkpoints").iterdir()
    ended = average(trained, "a", str(tmp_path / "parts"), "-o", out)
    assert ended.returncode == 2
    assert (
        "parts has no final model, which ls.train writes at its end; only trained models are "
        "averaged" in ended.stderr
    )
    assert (
        f"give its newest checkpoint, {tmp_path / 'parts' / 'checkpoints' / checkpoint.name}"
        in ended.stderr
    )


def saved(folder: Path, **models: Mapping[str, Tensor]) -> list[str]:
    for name, tensors in models.items():
        (folder / name).mkdir()
        save_file(dict(tensors), folder / name / "model.safetensors")
    return [f"{name}/model.safetensors" for name in models]


def test_models_of_other_shapes_are_told_with_the_parameter_that_differs(
    tmp_path: Path, out: str
) -> None:
    one, other = saved(
        tmp_path, wide={"0.weight": torch.zeros(4, 2)}, narrow={"0.weight": torch.zeros(2, 2)}
    )
    for name, width in (("wide", 4), ("narrow", 2)):
        (tmp_path / name / "run.json").write_text(
            json.dumps({"recipe": {"parameters": {"width": width, "lr": 0.1}}})
        )
    ended = average(tmp_path, one, other, "-o", out)
    assert ended.returncode == 2
    assert (
        f"'0.weight' is float32 [4, 2] in {one}, and float32 [2, 2] in {other}; an average is of"
        " tensors of one shape" in ended.stderr
    )
    assert f"({one} was started with width=4 and {other} was started with width=2)" in ended.stderr


def test_running_statistics_and_counters_are_warned_of(tmp_path: Path, out: str) -> None:
    def model(batches: int) -> dict[str, Tensor]:
        count = torch.tensor(batches)
        return {
            "1.running_mean": torch.ones(2),
            "1.running_var": torch.ones(2),
            "1.num_batches_tracked": count,
            "calls": count.clone(),
        }

    one, other = saved(tmp_path, one=model(1), other=model(2))
    ended = average(tmp_path, one, other, "-o", out)
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stderr.splitlines()
    assert (
        "2 running statistics of BatchNorm (1.running_mean, ...) are averaged like weights" in first
    )
    assert (
        f"'calls' differs between {one} and {other}; it is not floating-point and has no mean, so "
        f"{one}" in second
    )
    assert int(load_file(out)["calls"]) == 1


def test_nan_in_a_run_is_named_and_nothing_is_written(tmp_path: Path, out: str) -> None:
    sources = saved(
        tmp_path, one={"w": torch.zeros(3)}, other={"w": torch.tensor([0.0, math.nan, 0.0])}
    )
    ended = average(tmp_path, *sources, "-o", out)
    assert ended.returncode == 2
    assert (
        f"CheckpointError: {sources[1]} has NaN in 'w'; its training has failed; leave it out"
        in ended.stderr
    )
    assert "soup.safetensors" not in left_in(out)
