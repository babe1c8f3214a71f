"""Random numbers that a hook draws for sharded tensors, and an optimizer for its update, are those
of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from training.subjects import each_of, network, recipe

import lockstep as ls
from lockstep.testing.pool import WorkerPool


class Noise(ls.Hook):
    def after_backward(self, run: Any, model: nn.Module) -> None:
        for parameter in model.parameters():
            kept = torch.empty_like(parameter.grad).bernoulli_(0.8)
            parameter.grad.mul_(kept).add_(torch.randn_like(parameter.grad), alpha=0.1)


class DropsGradients(ls.Hook):
    def after_backward(self, run: Any, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad.copy_(F.dropout(parameter.grad, 0.5))


class Copies(ls.Hook):
    """Copies the model, and calls the copy."""

    def after_step(self, run: Any) -> None:
        copied = copy.deepcopy(run.model)
        run.log({"output": float(copied(torch.ones(1, 6)).sum())})


class Langevin(torch.optim.Optimizer):
    """A gradient step and noise, as SGLD takes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad + 0.01 * torch.randn_like(parameter)


HOOKS = (Noise, Copies, DropsGradients)


def trained(run_dir: str, plan: str, hook: type[ls.Hook] | None) -> str:
    own = {"optimizer": Langevin} if hook is None else {}
    return ls.train(
        recipe(model=network, steps=4, **own),
        run_dir=run_dir,
        plan=f"{plan},numerics=bitwise",
        hooks=[] if hook is None else [hook()],
    ).fingerprint


def each(run_dir: str, plans: list[str]) -> list[Any]:
    cases = [(plan, hook) for plan in plans for hook in (*HOOKS, None)]
    return each_of(trained, run_dir, cases)


def test_they_are_those_of_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    noise, copied, dropped, langevin = each(str(tmp_path / "one"), ["replicate=1"])
    assert len({noise, copied, dropped, langevin}) == 4
    for found in pool.run(2, each, str(tmp_path / "two"), ["replicate=2", "shard=2"]):
        assert found[:5] == [noise, copied, dropped, langevin, noise]
        sharded = dict(zip(("copied", "dropped", "langevin"), found[5:], strict=True))
        assert "a deepcopy of the model, whose parameters are sharded" in sharded["copied"]
        assert "dropout() of a parameter or gradient that is sharded" in sharded["dropped"]
        assert "Langevin with shard=2" in sharded["langevin"]
