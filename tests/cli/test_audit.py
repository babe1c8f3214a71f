"""`lockstep audit`, whole. Each run of it starts several processes that import torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import LOCKSTEP, ran, started

from lockstep.testing import audit as audit_in_a_test

pytestmark = [pytest.mark.forks, pytest.mark.timeout(240)]

PARTS = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
    def forward(self, x):
        return self.layer(x)

def train(epochs=3, sampled=True, each=lambda epoch: None, samples=16):
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(samples, 3), torch.randn(samples, 1))
    model = DistributedDataParallel(Small())
    torch.manual_seed(1000 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = DistributedSampler(data) if sampled else None
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        each(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
"""
RIGHT = "from parts import *\ndist.init_process_group('gloo')\ntrain({})\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "parts.py").write_text(PARTS)
    return tmp_path


def audit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return ran([LOCKSTEP, "audit", *arguments], cwd=folder, env=environment)


def found(
    folder: Path, text: str, *options: str, script: str = "train.py", arguments: Sequence[str] = ()
) -> tuple[int, dict[str, Any]]:
    (folder / "train.py").write_text(text)
    ended = audit(folder, "--json", *options, script, *arguments)
    assert ended.stderr == "", ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def causes(report: dict[str, Any]) -> set[str]:
    return {each["cause"] for each in report["findings"]}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["missing.py"],
            (
                "LaunchError: 'missing.py' is not there; SCRIPT is the path of a Python file;"
                " correct it, or give -m before"
            ),
        ),
        (
            ["-m", "missing"],
            (
                "LaunchError: no module named 'missing'; -m takes the name of a module that Python"
                " can import from here"
            ),
        ),
        (
            ["."],
            (
                "LaunchError: '.' is a directory; SCRIPT is the path of a Python file; name the"
                " file in it"
            ),
        ),
        ([], "UsageError: Missing argument 'SCRIPT'; see lockstep audit --help"),
        (
            ["--nproc", "0", "train.py"],
            (
                "UsageError: Invalid value for '--nproc': 0 is not in the range x>=1; see lockstep"
                " audit --help"
            ),
        ),
        (
            ["--steps", "0", "train.py"],
            (
                "UsageError: Invalid value for '--steps': 0 is not in the range x>=1; see lockstep"
                " audit --help"
            ),
        ),
        (
            ["--html", "no/such/place.html", "train.py"],
            "LaunchError: --html no/such/place.html; its directory does not exist; name a file",
        ),
        (
            ["--keep", ".", "train.py"],
            (
                "LaunchError: --keep .; the directory is not empty, and files are kept in an"
                " empty one; name another, or"
            ),
        ),
        (
            ["recipe.py"],
            (
                "LaunchError: recipe.py uses lockstep; lockstep audit is for scripts that do not; use"
                ' lockstep verify recipe.py --plans "replicate=2", which compares every gradient with'
                " one process's\n"
            ),
        ),
        (
            ["-m", "recipe"],
            (
                "LaunchError: recipe uses lockstep; lockstep audit is for scripts that do not; use"
                " lockstep verify recipe"
            ),
        ),
    ],
)
def test_a_mistake_is_one_message_and_status_2(
    folder: Path, arguments: list[str], text: str
) -> None:
    (folder / "train.py").write_text("print('started')")
    (folder / "recipe.py").write_text("import lockstep as ls\nprint('started')")
    ended = audit(folder, *arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "lockstep: " + text in ended.stderr
    assert "\nstarted" not in ended.stderr


def test_help_has_examples() -> None:
    ended = ran([LOCKSTEP, "audit", "--help"])
    assert "lockstep audit --nproc 4 --steps 50 --html audit.html train.py" in ended.stdout
    assert (
        "Exit status: 0 if nothing is wrong, 1 for findings, 2 if the script fails" in ended.stdout
    )


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "print('hello')",
            (
                "train.py ended without an optimizer step; an audit looks at the steps of torch's"
                " optimizers"
            ),
        ),
        (
            "raise ValueError('boom')",
            (
                "train.py failed before an optimizer step (exit status 1); an audit looks at the"
                " steps of torch's optimizers; make"
            ),
        ),
        (
            "import time; time.sleep(1000)",
            (
                "train.py did not come to an optimizer step in 3 s; an audit looks at the steps of torch's"
                " optimizers"
            ),
        ),
    ],
    ids=["never steps", "fails", "sleeps"],
)
def test_a_script_at_which_nothing_can_be_seen_is_status_2(
    folder: Path, body: str, text: str
) -> None:
    (folder / "train.py").write_text(body)
    timeout = ["--timeout", "3"] if "sleep" in body else []
    ended = audit(folder, "--launcher", "python", *timeout, "train.py")
    assert (ended.returncode, ended.stdout) == (2, "")
    said = re.sub(r"in \d+ s;", "in 3 s;", ended.stderr)  # as long as it took, on a busy machine
    assert f"lockstep: LaunchError: {text}" in said
    assert ("`python train.py` work first. It ended with:\nTraceback" in ended.stderr) == (
        "boom" in body
    )
    assert "lockstep/cli" not in ended.stderr


@pytest.mark.command
def test_a_right_script_passes_with_its_arguments_modules_and_working_directory(
    folder: Path,
) -> None:
    """argparse, a relative import in a package, files beside the working directory; and the pages
    and records."""
    package = folder / "project"
    package.mkdir()
    (package / "__init__.py").touch()
    (folder / "parts.py").rename(package / "parts.py")
    (folder / "beside.txt").write_text("3")
    (package / "train.py").write_text(
        "import argparse\n"
        "from .parts import *\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--epochs')\n"
        "given = parser.parse_args()\n"
        "assert given.epochs == open('beside.txt').read()\n"
        "dist.init_process_group('gloo')\n"
        "print('trains')\n"
        "train(int(given.epochs))\n"
    )
    ended = audit(
        folder,
        "--steps",
        "6",
        "--html",
        "page.html",
        "--keep",
        "kept",
        "-m",
        "project.train",
        "--epochs",
        "3",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (
        ended.stdout.splitlines()[0]
        == "-m project.train --epochs 3: 2 processes, 6 steps: nothing found"
    )
    assert "right: samples: " in ended.stdout
    assert ended.stderr.count("trains\n") == 2
    assert max(map(len, ended.stdout.splitlines())) <= 100
    assert "nothing found" in (folder / "page.html").read_text()
    assert len(list((folder / "kept").glob("process-*.jsonl"))) >= 2


@pytest.mark.command
@pytest.mark.forks("watched")
def test_a_fault_is_shown_with_its_line_and_its_remedy(folder: Path) -> None:
    (folder / "train.py").write_text(RIGHT.format("sampled=False"))
    ended = audit(folder, "--steps", "6", "--html", "page.html", "train.py")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "train.py: 2 processes, 6 steps: 1 finding" in ended.stdout
    assert "1. several ranks train on the same samples (parts.py:" in ended.stdout
    assert "   law: every sample is seen exactly once in an epoch" in ended.stdout
    assert "\n         sampler = DistributedSampler(dataset)\n" in ended.stdout
    assert (
        "loader = DataLoader(data, batch_size=4, sampler=sampler)"
        in (folder / "page.html").read_text()
    )


@pytest.mark.command
@pytest.mark.forks("watched")
def test_a_script_that_fails_later_shows_its_findings_and_its_error(folder: Path) -> None:
    fails = "each=lambda epoch: 1 / (2 - epoch)"
    status, report = found(folder, RIGHT.format(f"{fails}, sampled=False"))
    assert (status, report["steps"], report["exit_status"]) == (1, 8, 1)
    assert causes(report) == {"same_samples"}
    assert "ZeroDivisionError: division by zero" in report["error"]
    assert "ChildFailedError" not in report["error"]
    (folder / "train.py").write_text(RIGHT.format(fails))
    ended = audit(folder, "train.py")
    assert ended.returncode == 2
    assert "nothing found; the script failed" in ended.stdout
    assert "ZeroDivisionError" in ended.stdout


@pytest.mark.command
def test_a_script_that_starts_its_own_processes_is_run_by_python(folder: Path, port: int) -> None:
    text = """
from parts import *
import torch.multiprocessing as mp

def main(rank, size):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    train()

if __name__ == "__main__":
    mp.spawn(main, args=(2,), nprocs=2)
"""
    status, report = found(folder, text, "--steps", "4", arguments=(str(port),))
    assert (status, report["processes"], report["steps"]) == (0, 2, 4), report
    (note,) = [note for note in report["notes"] if "starts the processes itself" in note]
    assert note.startswith(
        "train.py:11 starts the processes itself (torch.multiprocessing.spawn), so it was run as"
        " python train.py"
    )


@pytest.mark.command
@pytest.mark.forks("watched")
@pytest.mark.parametrize(
    ("waits", "cause"),
    [
        ("dist.barrier()", "collective_mismatch"),
        pytest.param("time.sleep(1000)", "hang", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_hangs_is_a_finding_and_leaves_no_process(
    folder: Path, waits: str, cause: str
) -> None:
    text = f"""
def each(epoch):
    open(f'pid-{{dist.get_rank()}}', 'w').write(str(os.getpid()))
    if epoch == 1 and dist.get_rank():
        {waits}
    while epoch == 1:
        time.sleep(1)
"""
    right = RIGHT.format("each=each").replace("train(", text + "train(")
    script = str(folder / "train.py")
    status, report = found(folder, right, "--hang-after", "15", script=script)
    assert (status, report["steps"]) == (1, 2)
    assert causes(report) == {cause}
    places = sorted(
        note.partition(" stands at ")[2] for note in report["notes"] if " stands at " in note
    )
    assert places == ["train.py:7, in each", "train.py:9, in each"], report["notes"]
    for rank in (0, 1):
        assert not psutil.pid_exists(int((folder / f"pid-{rank}").read_text()))


@pytest.mark.command
@pytest.mark.forks("watched")
def test_a_rank_that_leaves_early_is_a_finding(folder: Path) -> None:
    status, report = found(
        folder,
        RIGHT.format("epochs=1, sampled=False, samples=16 - 4 * dist.get_rank()"),
        "--hang-after",
        "20",
    )
    assert (status, report["steps"]) == (1, 3)
    assert "uneven_inputs" in causes(report)


@pytest.mark.command
@pytest.mark.forks("watched")
def test_sigterm_leaves_no_process_and_no_folder(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import os, time\n"
        "open(f\"pid-{os.environ['RANK']}\", 'w').write(str(os.getpid()))\n"
        "time.sleep(1000)"
    )
    (folder / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    with started(
        [LOCKSTEP, "audit", "train.py"], cwd=folder, env=environment, stderr=subprocess.DEVNULL
    ) as command:
        files = [folder / f"pid-{rank}" for rank in (0, 1)]
        while not all(file.exists() and file.read_text() for file in files):
            time.sleep(0.05)
        assert list((folder / "tmp").glob("lockstep-audit-*"))
        command.terminate()
    assert command.returncode == 143
    for file in files:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(int(file.read_text())).wait()
    assert not list((folder / "tmp").glob("lockstep-audit-*"))


@pytest.mark.command
@pytest.mark.forks("watched")
def test_a_test_of_another_project_can_ask(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text(RIGHT.format("int(sys.argv[1])"))
    assert audit_in_a_test("train.py", "2", nproc=2, steps=4).passed
