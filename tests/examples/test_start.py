"""The commands of docs/start.md, in their order, as a newcomer types them; and both scripts of the
page on FSDP."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import forked
import pytest
from processes import ran

from website.rewriting import two_scripts

DOCS = Path(__file__).resolve().parents[2] / "docs"
INSTALLATION = "pip install ."
"""It has been done where this test runs."""
COMMON = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep as ls

torch.manual_seed(0)
x = torch.randn(192, 8)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
device, accumulation = torch.device("cpu"), 2
losses = []


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


def build():
    return Network()


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-2)


def reset_parameters(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def loss_of(output, y):
    loss = nn.functional.mse_loss(output.float(), y)
    losses.append(loss.item())
    return loss

"""
LAST = "\nprint('fell' if sum(losses[-6:]) < 0.6 * sum(losses[:6]) else losses)\n"

PROGRAMS = {
    "python": [sys.executable],
    "lockstep": [forked.LOCKSTEP],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}

pytestmark = [pytest.mark.command, pytest.mark.forks, pytest.mark.timeout(240)]


def run(command: str, folder: Path) -> str:
    """What a command prints."""
    name, *words = shlex.split(command)
    return printed([*PROGRAMS[name], *words], folder)


def printed(line: list[str], folder: Path) -> str:
    """What a process prints. It finds the interpreter and the commands of this environment
    first."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
    }
    ended = ran(line, cwd=folder, env=environment)
    assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def test_every_command_of_the_start_page_runs(tmp_path: Path) -> None:
    text = (DOCS / "start.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(script)
    blocks = re.findall(r"^```console\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    commands = re.findall(r"^\$ (.*)$", "".join(blocks), flags=re.MULTILINE)
    first, second, *others = commands
    assert first == INSTALLATION
    shown = {second: printed(["bash", "-c", second], tmp_path)}
    shown.update((command, run(command, tmp_path)) for command in others)
    assert len(shown) >= 8
    assert re.search(r"accuracy 0\.[89]", shown["python train.py"]), "the example learns"
    alone, together = (
        shown["python train.py"],
        shown["lockstep run --nproc 2 --run-dir runs/two train.py"],
    )
    assert (
        re.findall(r"^loss .*", alone, flags=re.MULTILINE)
        == re.findall(r"^loss .*", together, flags=re.MULTILINE)
        != []
    )
    assert (tmp_path / "model.safetensors").is_file()
    assert (tmp_path / "runs" / "two" / "report.html").is_file()


@pytest.mark.parametrize("side", ["theirs", "ours"])
def test_both_scripts_of_the_page_on_fsdp_train(side: str, tmp_path: Path) -> None:
    found = two_scripts((DOCS / "moving-in" / "fsdp.md").read_text(encoding="utf-8"))
    assert found is not None
    (tmp_path / "train.py").write_text(COMMON + (found[1] if side == "theirs" else found[3]) + LAST)
    command = (
        "torchrun --standalone --nproc-per-node 2"
        if side == "theirs"
        else "lockstep run --nproc 2 --plan shard=2"
    )
    assert "fell" in run(f"{command} train.py", tmp_path)
