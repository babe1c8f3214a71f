"""Random numbers that a hook draws for sharded tensors, and an optimizer for its update, are those
of one process."""

from __future__ import annotations

import copy
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F, init
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
        recipe(model=network, **own),
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


def filled(like: Tensor) -> Tensor:
    return torch.empty_like(like).bernoulli_(0.8)


def of_its_shape(like: Tensor) -> Tensor:
    return torch.randn(like.shape)


def of_its_sizes(like: Tensor) -> Tensor:
    return torch.randn(*like.shape)


def of_named_size(like: Tensor) -> Tensor:
    return torch.normal(0.0, 1.0, size=like.size())


def initialized(like: Tensor) -> Tensor:
    return init.normal_(like.detach())


DRAWS = (torch.randn_like, filled, of_its_shape, of_its_sizes, of_named_size, initialized)


class Draws(ls.Hook):
    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def after_backward(self, run: Any, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad.add_(self.draw(parameter.grad), alpha=0.1)


class ByName(ls.Hook):
    """Draws as the error says, and numbers that have nothing to do with parameters."""

    def after_backward(self, run: Any, model: nn.Module) -> None:
        probe = torch.randn(16, 6)  # the shape of the first weight
        scale = 0.1 * torch.rand(()) * torch.rand(3).sum() * probe.sum()
        for name, parameter in model.named_parameters():
            seed = zlib.crc32(f"{run.step} {name}".encode())
            generator = torch.Generator().manual_seed(seed)
            noise = torch.empty_like(parameter.grad).normal_(generator=generator)
            parameter.grad.add_(noise * scale)


def trained_in_parts(run_dir: str, plan: str, hook: ls.Hook) -> str:
    cut = recipe(
        model=network,
        inputs=lambda batch: (batch[1],),
        loss=lambda output, batch: F.mse_loss(output, batch[2]),
    )
    return ls.train(cut, run_dir=run_dir, plan=f"{plan},numerics=bitwise", hooks=[hook]).fingerprint


def each_in_parts(run_dir: str) -> list[Any]:
    by_name = [(plan, ByName()) for plan in ("shard=2", "pipeline=2")]
    drawn = [("pipeline=2", Draws(draw)) for draw in DRAWS]
    return each_of(trained_in_parts, run_dir, [*by_name, *drawn])


def test_a_pipeline_refuses_what_each_stage_would_draw_for_itself(
    pool: WorkerPool, tmp_path: Path
) -> None:
    by_name = trained_in_parts(str(tmp_path / "one"), "replicate=1", ByName())
    (sharded, in_stages, *refusals), _ = pool.run(2, each_in_parts, str(tmp_path / "two"))
    assert sharded == in_stages == by_name
    for draw, refusal in zip(DRAWS, refusals, strict=True):
        assert "() in a hook, of the shape of " in refusal, draw
        assert "with pipeline=2; each process has the parameters of its own stages" in refusal
