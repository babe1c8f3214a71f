"""A script that trains several times: a directory for each, and a restart that goes on where the
script was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import run_files
from processes import LOCKSTEP, ran

pytestmark = [pytest.mark.forks, pytest.mark.command, pytest.mark.timeout(120)]
SCRIPT = """
import os
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import lockstep as ls

x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(1, keepdim=True))

class Dies(ls.Hook):
    def before_step(self, run):
        if run.step == 5 and run.rank == 1 and "DIES" in os.environ and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), 9)

def train(rate, **options):
    recipe = ls.Recipe(
        model=lambda: nn.Linear(6, 1), data=data, inputs=lambda batch: batch[0], loss=lambda output, batch: F.mse_loss(output, batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=rate), global_batch=8, microbatch=2, steps=8,
        evaluation=ls.Evaluation(data=data, every=None), weights=options.pop("weights", None),
    )
    return recipe, ls.train(recipe, saving=ls.Saving(every=2), **options)

recipe, first = train(0.1)
if os.path.exists(f"{first.run_dir}/model.safetensors"):  # not under lockstep evaluate
    assert ls.evaluate(recipe, f"{first.run_dir}/model.safetensors") == first.metrics
train(0.01, weights=f"{first.run_dir}/model.safetensors", hooks=[Dies()])
"""


FOLDS = (
    SCRIPT[: SCRIPT.index("recipe, first =")]
    + """
print([train(0.1 * (fold + 1), run_dir=f"fold{fold}", hooks=[Dies()] * (fold == 1))[1].fingerprint for fold in range(3)])
"""
)


def lockstep(
    folder: Path, *arguments: str, environ: Any = None
) -> subprocess.CompletedProcess[str]:
    (folder / "two.py").write_text(SCRIPT)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
    return ran([LOCKSTEP, *arguments], cwd=folder, env=environ)


def fingerprints(folder: Path, name: str) -> list[str]:
    return [run_files.fingerprint(folder / each) for each in (name, f"{name}-2", f"{name}-3")]


def resumed_after(path: Path) -> list[int]:
    """The steps of the checkpoints that the starts of a run were resumed from."""
    events = run_files.events(path)
    return [event["step"] for event in events if event["event"] == "resumed"]


def test_a_restart_goes_on_with_the_training_that_was_interrupted(tmp_path: Path) -> None:
    run = ("run", "--nproc", "2", "--plan", "numerics=bitwise")
    whole = lockstep(tmp_path, *run, "--run-dir", "whole", "two.py")
    assert whole.returncode == 0, whole.stderr
    restarted = lockstep(
        tmp_path, *run, "--max-restarts", "1", "--run-dir", "again", "two.py", environ={"DIES": "1"}
    )
    assert (restarted.returncode, (tmp_path / "died").exists()) == (0, True), restarted.stderr
    assert fingerprints(tmp_path, "again") == fingerprints(tmp_path, "whole")
    assert resumed_after(tmp_path / "again")[0] >= 2, (
        "of the first training, the end alone is repeated"
    )
    assert resumed_after(tmp_path / "again-3")[0] >= 2
    refused = lockstep(tmp_path, *run, "--run-dir", "again-3", "two.py")
    assert (refused.returncode, "already holds a run that has ended" in refused.stderr) == (2, True)


@pytest.mark.slow
def test_the_same_command_goes_on_and_each_training_is_evaluated(tmp_path: Path) -> None:
    run = ("run", "--nproc", "2", "--plan", "numerics=bitwise", "--run-dir", "run", "two.py")
    assert lockstep(tmp_path, *run, environ={"DIES": "1"}).returncode == 128 + signal.SIGKILL
    again = lockstep(tmp_path, *run)
    assert again.returncode == 0, again.stderr
    assert resumed_after(tmp_path / "run")[0] >= 2
    evaluated = lockstep(tmp_path, "evaluate", "--json", "run/model.safetensors", "two.py")
    assert evaluated.returncode == 0, evaluated.stderr
    first = run_files.result(tmp_path / "run")["metrics"]
    assert json.loads(evaluated.stdout) == [pytest.approx(first)] * 2


@pytest.mark.parametrize("processes", [1, 2])
def test_a_script_that_names_its_directories_goes_on_where_it_was(
    tmp_path: Path, processes: int
) -> None:
    def run(folder: Path, script: str = FOLDS, **environ: str) -> subprocess.CompletedProcess[str]:
        folder.mkdir(exist_ok=True)
        (folder / "folds.py").write_text(
            script.replace("run.rank == 1", f"run.rank == {processes - 1}")
        )
        line = (
            [sys.executable, "folds.py"]
            if processes == 1
            else [LOCKSTEP, "run", "--nproc", str(processes), "folds.py"]
        )
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
        return ran(line, cwd=folder, env=environ)

    whole = run(tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    killed = run(tmp_path / "again", DIES="1")
    assert killed.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if processes == 1:
        edited = run(tmp_path / "again", FOLDS.replace("0.1 * (fold", "0.3 * (fold"))
        assert "the recipe has changed since the run in its run directory ended" in edited.stderr
    again = run(tmp_path / "again")
    assert again.returncode == 0, again.stderr
    assert again.stdout == whole.stdout
    assert resumed_after(tmp_path / "again" / "fold0")[0] >= 2, (
        "of a fold that has ended, the end alone is repeated"
    )
