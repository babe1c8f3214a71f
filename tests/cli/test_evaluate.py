"""`lockstep evaluate`: the weights of a run are measured as the run has measured them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import run_files
from processes import LOCKSTEP, ran

pytestmark = [pytest.mark.command, pytest.mark.forks]
SCRIPT = """
import sys, torch, lockstep as ls
from torch.utils.data import TensorDataset
scale = float(sys.argv[1])
data = TensorDataset(torch.randn(31, 4, generator=torch.Generator().manual_seed(1)) * scale)
recipe = ls.Recipe(
    model=lambda: torch.nn.Linear(4, 1),
    data=data,
    loss=lambda model, batch: (model(batch[0]) ** 2).mean(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=float(sys.argv[2])),
    global_batch=8,
    microbatch=4,
    steps=6,
    evaluation={"all": ls.Evaluation(data=data, every=1)},
)
result = ls.train(recipe, saving=ls.Saving(best="all/loss"))
print("metrics", result.metrics)
"""


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return ran([LOCKSTEP, *arguments])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose loss grows, so that its first step is its best one."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "train.py").write_text(SCRIPT)
    ended = command("run", "--run-dir", str(folder / "run"), str(folder / "train.py"), "2", "0.6")
    assert ended.returncode == 0, ended.stderr
    return folder


def test_a_run_is_measured_by_its_own_script(trained: Path) -> None:
    ended = command("evaluate", "--json", str(trained / "run"))
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == pytest.approx(run_files.result(trained / "run")["metrics"])
    assert "metrics" in ended.stderr, "the script's own output"


def test_the_best_weights_are_measured_on_other_processes(trained: Path) -> None:
    best = run_files.result(trained / "run")["best"]
    assert best["step"] < 6
    ended = command(
        "evaluate",
        "--best",
        "--nproc",
        "2",
        str(trained / "run"),
        str(trained / "train.py"),
        "2",
        "0.6",
    )
    assert ended.returncode == 0, ended.stderr
    assert f"all/loss  {best['value']:.6g}\n" in ended.stdout


def test_the_scripts_own_arguments_change_what_is_measured(trained: Path) -> None:
    ended = command(
        "evaluate",
        "--json",
        str(trained / "run" / "model.safetensors"),
        str(trained / "train.py"),
        "1",
        "0.6",
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["all/loss"] != pytest.approx(
        run_files.result(trained / "run")["metrics"]["all/loss"], rel=1e-2
    )


def test_weights_do_not_say_which_script_made_them(trained: Path) -> None:
    ended = command("evaluate", str(trained / "run" / "model.safetensors"))
    assert ended.returncode == 2
    assert (
        "does not name its script; evaluations come from a script's recipe; give SCRIPT"
        in ended.stderr
    )
