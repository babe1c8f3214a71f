"""What is trained or changes is in the checkpoint: a run that is asked to end goes on as if it had
not been."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from training.subjects import FEATURES, OUTPUTS, recipe

import lockstep as ls
from lockstep.launch.termination import Preempted
from lockstep.testing.pool import WorkerPool

STEPS, STOPPED_AT = 4, 2


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = (
            nn.Linear(FEATURES, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, OUTPUTS),
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(self.body(x)).tanh())
        return output


class Renamed(Body):
    """A state dict with other names."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {
            f"inner.{name}": value for name, value in super().state_dict(*args, **kwargs).items()
        }


class Teacher(Body):
    """A state dict without what is trained below the head, and without a frozen teacher, which a
    hook moves through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(FEATURES, OUTPUTS).requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {
            name: value
            for name, value in super().state_dict(*args, **kwargs).items()
            if name.startswith("head.")
        }

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.teacher(x)

    def between(self) -> None:
        self.teacher.weight.data.mul_(0.9)


class Scaled(nn.Linear):
    """A scale outside of its parameters and buffers, as layers in fp8 have."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)

    def get_extra_state(self) -> Any:
        return torch.tensor([self.scale], dtype=torch.float64)

    def set_extra_state(self, state: Any) -> None:
        self.scale = float(state)


class Changing(Body):
    """State that a hook changes: a buffer that is not persistent, rotated, so that its sum stays;
    one that is replaced by a longer one; a persistent one that grows; a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Scaled(8, OUTPUTS)
        self.register_buffer("queue", torch.arange(8.0), persistent=False)
        self.register_buffer("longer", torch.zeros(1), persistent=False)
        self.register_buffer("mask", torch.ones(8), persistent=False)
        self.register_buffer("codes", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.queue[0] + self.longer.sum() + self.codes.sum()

    def between(self) -> None:
        self.queue.copy_(self.queue.roll(1))
        self.longer = torch.cat([self.longer, self.queue[:1]])
        self.codes = torch.cat([self.codes, torch.ones(1)])
        self.head.scale *= 0.9


class Between(ls.Hook):
    """Calls the model's `between` after each step, and asks for the end after one."""

    def __init__(self, at: int | None) -> None:
        self.at = at

    def after_step(self, run: Any) -> None:
        if hasattr(run.model, "between"):
            run.model.between()
        if run.step == self.at:
            os.kill(os.getpid(), signal.SIGUSR1)


def loss(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[2]).square().mean()


def given(model: Callable[[], nn.Module], **changes: Any) -> ls.Recipe:
    changed = {"inputs": lambda batch: batch[1], "loss": loss, "steps": STEPS, **changes}
    return recipe(model=model, **changed)


def trained_part(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


MODELS: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each for each in (Renamed, Teacher, Changing)
}


def trained(model: str, run_dir: str, plan: str, at: int | None = None) -> str:
    """Returns the fingerprint; empty if the run was asked to end."""
    try:
        return ls.train(
            given(MODELS[model], optimizer=trained_part),
            hooks=[Between(at)],
            run_dir=run_dir,
            plan=plan,
        ).fingerprint
    except Preempted:
        return ""


def resumed(folder: str, plan: str) -> dict[str, tuple[str, str]]:
    """For each model the fingerprint of a whole run, and of one that was asked to end and goes
    on."""
    found = {}
    for name in MODELS:
        whole, cut = f"{folder}/{name}-whole", f"{folder}/{name}-cut"
        expected = trained(name, whole, plan)
        assert trained(name, cut, plan, STOPPED_AT) == ""
        found[name] = expected, trained(name, cut, plan)
    return found


@pytest.mark.parametrize(
    ("plan", "processes"), [("replicate=1", 1), ("replicate=2", 2), ("shard=2", 2)]
)
def test_what_a_state_dict_leaves_out_is_taken_up_again(
    pool: WorkerPool, tmp_path: Path, plan: str, processes: int
) -> None:
    for found in pool.run(processes, resumed, str(tmp_path), plan):
        assert {name: after for name, (_, after) in found.items()} == {
            name: whole for name, (whole, _) in found.items()
        }
    files = {
        name: set(load_file(tmp_path / f"{name}-cut" / "model.safetensors")) for name in MODELS
    }
    plain = set(Body().state_dict())
    assert files["Renamed"] == {f"inner.{name}" for name in plain}
    assert files["Teacher"] == {*plain, "teacher.weight"}
    assert files["Changing"] == {*plain, "codes", "head._extra_state"}
