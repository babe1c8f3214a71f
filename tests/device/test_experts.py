"""Experts on accelerators: the host waits once for each forward of a layer of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from device.ranks import on_device
from device.test_training import Waits, steps
from torch import Tensor, nn

import lockstep as ls
from lockstep.testing.pool import WorkerPool

EXPERTS, WIDTH = 4, 6


class Products(nn.Module):
    """Computes each row with the matrix of its expert; the host waits for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        chosen = torch.einsum("sd,skde->ske", tokens, self.up[index])
        return (chosen * weights[..., None]).sum(1)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Products()

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, index, weights)  # type: ignore[no-any-return]


def mixtures() -> nn.Module:
    return nn.Sequential(Mixture(), Mixture(), nn.Linear(WIDTH, 3))


def train(plan: str, run_dir: str) -> tuple[float, list[dict[str, int]]]:
    """Return the last loss, and the host's waits in the third and the fourth step."""
    hook = Waits()
    made = ls.train(
        steps(model=mixtures, tensor=None), plan=plan, run_dir=run_dir, hooks=[hook], log_every=100
    )
    return made.loss, hook.waits[3:]


def train_each(plans: list[str], run_dir: str) -> list[Any]:
    return [train(plan, f"{run_dir}/{plan}") for plan in plans]


@pytest.mark.timeout(240)
def test_the_host_waits_once_a_forward_of_a_layer(devices: WorkerPool, tmp_path: Path) -> None:
    ((expected, _),) = devices.run(1, on_device, train, "replicate=1", str(tmp_path / "one"))
    forwards = {"expert=2": 4, "expert=2,numerics=bitwise": 4, "expert=2,checkpointing=full": 8}
    """Two layers, two rounds; a recomputation is a second forward."""
    for rank in devices.run(2, on_device, train_each, [*forwards], str(tmp_path / "two")):
        for (loss, waits), number in zip(rank, forwards.values(), strict=True):
            assert loss == pytest.approx(expected, rel=1e-5)
            assert waits == [{"a copy to the host": number}] * 2


TWO_AXES = ("shard=2,expert=2", "shard=2,expert=2,numerics=bitwise")
OFFLOADED = [f"{plan},offload=yes" for plan in TWO_AXES]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_sharded_experts_that_wait_on_the_cpu(devices: WorkerPool, tmp_path: Path) -> None:
    ((expected, _),) = devices.run(1, on_device, train, "replicate=1", str(tmp_path / "one"))
    plans = [TWO_AXES[1], *OFFLOADED]
    for rank in devices.run(4, on_device, train_each, plans, str(tmp_path / "four")):
        assert [loss for loss, _ in rank] == [pytest.approx(expected, rel=1e-5)] * 3
