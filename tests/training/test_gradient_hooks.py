"""Hooks on gradients: on those of parameters, once a step; on those of activations and modules, as
torch calls them. What comes out is what a plain loop over whole batches gives, under every plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.subjects import FEATURES, OUTPUTS, each_of, recipe, rows, samples_at

import lockstep as ls
from lockstep.testing.pool import WorkerPool
from lockstep.training.reducers.gradient_hooks import GradientHooks

WIDTH, RATE, STEPS = 16, 0.1, 4
PLANS = {
    "replicate=1": 1,
    "replicate=2": 2,
    "replicate=2,transport=torch": 2,
    "shard=2": 2,
    "shard=2,transport=torch": 2,
    "replicate=1,numerics=bitwise": 1,
    "replicate=2,numerics=bitwise": 2,
    "shard=2,numerics=bitwise": 2,
    "tensor=2": 2,
    "pipeline=2": 2,
}


def clamped(limit: float) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient.clamp(-limit, limit)


def clamp_output(_: nn.Module, __: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(clamped(1e-3))


def hooked() -> nn.Module:
    """Parameters with hooks that the factory registers."""
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))
    trained = (torch.arange(WIDTH) >= 4).float()
    model[0].weight.register_hook(lambda gradient: gradient * trained[:, None])
    model[0].weight.register_hook(clamped(2e-3))
    return model


def network() -> nn.Module:
    """The same with hooks on activations."""
    model = hooked()
    model[0].register_forward_hook(clamp_output)
    model[2].register_full_backward_hook(
        lambda _, given, __: tuple(clamped(2e-3)(each) for each in given)
    )
    return model


MODELS = {"fp32": network, "fp16": hooked}


def optimizer(model: Any) -> torch.optim.Optimizer:
    if model[2].weight is not None:  # another stage of a pipeline has it
        model[2].weight.register_hook(lambda gradient: 0.1 * gradient / gradient.norm())
    return torch.optim.SGD(model.parameters(), lr=RATE)


def in_place(gradient: Tensor) -> None:
    gradient[0] = 0.0


class Watch(ls.Hook):
    """Registers two more hooks, of which one is removed, and notes the parameters at the beginning
    and at the end."""

    def on_start(self, run: Any) -> None:
        self.first = run.full_state_dict()
        if run.model[2].bias is not None:
            run.model[2].bias.register_hook(clamped(0.0)).remove()
            run.model[2].bias.register_hook(in_place)

    def on_finish(self, run: Any) -> None:
        self.last = run.full_state_dict()


def squares(output: Tensor, batch: Any) -> Tensor:
    return ((output - batch[2]) ** 2).mean()


def trained(
    run_dir: str, plan: str, precision: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    watch = Watch()
    given: dict[str, Any] = {
        "model": MODELS[precision],
        "optimizer": optimizer,
        "steps": STEPS,
        "loss": squares,
        "precision": precision,
    }
    styles = {"tensor": {"0": "colwise", "2": "rowwise"}} if "tensor" in plan else {}
    result = ls.train(
        recipe(inputs=lambda batch: batch[1], **given, **styles),
        plan=plan,
        run_dir=run_dir,
        hooks=[watch],
    )
    return watch.first, watch.last, result.fingerprint


def by_hand(first: dict[str, Tensor], precision: str) -> dict[str, Tensor]:
    """Train by a plain loop over whole batches."""
    model: Any = MODELS[precision]()
    model.load_state_dict(first)
    steps = optimizer(model)
    model[2].bias.register_hook(in_place)
    for step in range(STEPS):
        batch = rows(48)[samples_at(16 * step, 16 * step + 16, of=48)]
        steps.zero_grad()
        squares(model(batch[1]), batch).backward()
        steps.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


TRAININGS = {
    ranks: [
        *((plan, "fp32") for plan, size in PLANS.items() if size == ranks),
        *(
            ("replicate=2,transport=torch", "fp16"),
            ("shard=2", "fp16"),
        )[: 2 * (ranks - 1)],
    ]
    for ranks in (1, 2)
}


def test_what_hooks_do_is_what_a_plain_loop_gives(found: dict[int, list[dict[str, Any]]]) -> None:
    fingerprints = set()
    for ranks, rows_of in TRAININGS.items():
        for rank in found[ranks]:
            for (plan, precision), (first, last, fingerprint) in zip(
                rows_of, rank["trained"], strict=True
            ):
                case = f"{plan} in {precision}"
                assert torch.equal(last["0.weight"][:4], first["0.weight"][:4]), case
                assert torch.equal(last["2.bias"][0], first["2.bias"][0]), case
                allowed = (
                    {"rtol": 1e-4, "atol": 1e-6}
                    if precision == "fp32"
                    else {"rtol": 1e-2, "atol": 1e-3}
                )
                for name, expected in by_hand(first, precision).items():
                    torch.testing.assert_close(last[name], expected, **allowed)
                    assert not torch.equal(last[name], first[name]), case
                if "bitwise" in plan:
                    fingerprints.add(fingerprint)
    assert len(fingerprints) == 1


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))


def stepping_in_the_backward(model: Any) -> list[torch.optim.Optimizer]:
    """One optimizer for each parameter, which steps when the parameter's gradient is there."""
    each = {parameter: torch.optim.SGD([parameter], lr=RATE) for parameter in model.parameters()}
    for parameter in each:
        parameter.register_post_accumulate_grad_hook(lambda parameter: each[parameter].step())
    return list(each.values())


def accumulated_in_the_factory() -> nn.Module:
    model = layers()
    model[0].weight.register_post_accumulate_grad_hook(
        lambda parameter: parameter.grad.clamp_(-1.0, 1.0)
    )
    return model


def hooked_together() -> nn.Module:
    model = layers()
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), print)
    return model


class InForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.weight.register_hook(clamped(1.0))
        return super().forward(x)


def hooked_in_forward() -> nn.Module:
    return nn.Sequential(InForward(FEATURES, WIDTH), nn.Tanh(), InForward(WIDTH, OUTPUTS))


def hook_with_a_parameter() -> nn.Module:
    """Weight decay by a hook."""
    model = layers()
    weight = model[0].weight
    weight.register_hook(lambda gradient: gradient + 0.1 * weight.detach())
    return model


def hook_with_its_module() -> nn.Module:
    model = layers()
    model[0].weight.register_hook(lambda gradient: gradient + 0.1 * model[0].weight.detach())
    return model


def hook_of_another_shape() -> nn.Module:
    model = layers()
    model[0].weight.register_hook(lambda gradient: gradient.sum(1, keepdim=True))
    return model


class Registers(ls.Hook):
    """Registers a hook on some ranks, after some steps, and removes it after another."""

    def __init__(self, *, ranks: tuple[int, ...] = (0, 1), steps: int = 0, until: int = 9) -> None:
        self.ranks, self.steps, self.until = ranks, steps, until

    def on_start(self, run: Any) -> None:
        self.after_step(run)

    def after_step(self, run: Any) -> None:
        if run.rank in self.ranks and run.step == self.steps:
            self.handle = run.model[0].weight.register_hook(clamped(1.0))
        if run.step == self.until:
            self.handle.remove()


def attempt(run_dir: str, plan: str, changes: dict[str, Any], hooks: list[ls.Hook]) -> None:
    given: dict[str, Any] = {
        "model": layers,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=RATE),
        **changes,
    }
    ls.train(
        recipe(inputs=lambda batch: batch[1], loss=squares, **given),
        plan=plan,
        run_dir=run_dir,
        hooks=hooks,
    )


WEIGHT = "parameter '0.weight'"
AFTER_ACCUMULATION = (
    f"{WEIGHT} has a post-accumulate-grad hook, ",
    " change .grad in after_backward of an ls.Hook, or",
)
CHANGED = (
    f"the hooks on the gradient of {WEIGHT} have changed since the first step, ",
    " register them before the first step: in",
)
Cases = dict[str, tuple[dict[str, Any], list[ls.Hook], tuple[str, ...]]]
REFUSED: Cases = {
    "optimizers that step in the backward": (
        {"optimizer": stepping_in_the_backward},
        [],
        AFTER_ACCUMULATION,
    ),
    "a post-accumulate-grad hook": ({"model": accumulated_in_the_factory}, [], AFTER_ACCUMULATION),
    "a hook of the forward": ({"model": hooked_in_forward}, [], CHANGED),
    "several parameters": ({"model": hooked_together}, [], (" change .grad in after_",)),
    "another shape": (
        {"model": hook_of_another_shape},
        [],
        ("returned (16, 1) and torch.float32; the gradient is (16, 6) and",),
    ),
    "added after a step": ({}, [Registers(steps=1)], CHANGED),
    "removed after a step": ({}, [Registers(until=1)], CHANGED),
}
ON_TWO: Cases = {
    "on one rank": (
        {},
        [Registers(ranks=(1,))],
        ("'0.weight' has the hooks [] on its gradient on rank 0, and ['clamped.<locals>",),
    ),
}
ON_SHARDS: Cases = {
    "a hook with a parameter": (
        {"model": hook_with_a_parameter},
        [],
        (f"refers to the {WEIGHT} that the factory made; ", "shard=2"),
    ),
    "a hook with its module": (
        {"model": hook_with_its_module},
        [],
        (f"a hook on the gradient of {WEIGHT} computes with a sharded",),
    ),
}
REFUSALS = {
    1: {"replicate=1": REFUSED},
    2: {
        "replicate=2": REFUSED | ON_TWO,
        "replicate=2,transport=torch": REFUSED | ON_TWO,
        "shard=2": REFUSED | ON_TWO | ON_SHARDS,
    },
}


def test_hooks_that_would_be_called_elsewhere_are_refused(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    for ranks, plans in REFUSALS.items():
        for rank in found[ranks]:
            for plan, cases in plans.items():
                for (name, (_, _, words)), said in zip(
                    cases.items(), rank["refused"][plan], strict=True
                ):
                    assert said.startswith("RecipeError: "), (plan, name, said)
                    assert all(each in said for each in words), (plan, name, said)


class ChangesGradients(ls.Hook):
    """What the errors recommend: weight decay, and a clamp."""

    def after_backward(self, run: Any, model: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.1).clamp_(-1e-2, 1e-2)


def one_each(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([parameter], lr=RATE) for parameter in model.parameters()]


def mended(run_dir: str, plan: str, hooks: list[ls.Hook]) -> str:
    given: dict[str, Any] = {
        "model": layers,
        "optimizer": one_each,
        "loss": squares,
        "steps": STEPS,
    }
    return ls.train(
        recipe(inputs=lambda batch: batch[1], **given),
        plan=f"{plan},numerics=bitwise",
        run_dir=run_dir,
        hooks=hooks,
    ).fingerprint


def all_of(run_dir: str, ranks: int) -> dict[str, Any]:
    plans = ["replicate=1"] if ranks == 1 else ["replicate=2", "shard=2"]
    hooks: list[list[ls.Hook]] = [[ChangesGradients()], *([[]] if ranks == 1 else [])]
    return {
        "trained": each_of(trained, f"{run_dir}/trained", TRAININGS[ranks]),
        "refused": {
            plan: each_of(
                attempt, f"{run_dir}/{plan}", [(plan, *case[:2]) for case in cases.values()]
            )
            for plan, cases in REFUSALS[ranks].items()
        },
        "mended": each_of(
            mended,
            f"{run_dir}/mended",
            [(plan, given) for given in hooks for plan in plans],
            may_refuse=False,
        ),
    }


@pytest.fixture(scope="module")
def found(
    pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[dict[str, Any]]]:
    """What each rank finds, by the number of processes."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        1: [all_of(str(folder / "1"), 1)],
        2: pool.run(2, all_of, str(folder / "2"), 2, timeout_seconds=50),
    }


def test_the_remedies_are_the_same_under_every_plan(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    with_them, without = found[1][0]["mended"]
    assert without != with_them
    assert [rank["mended"] for rank in found[2]] == [[with_them] * 2] * 2


def with_hook(hook: Callable[[Tensor], Any]) -> tuple[GradientHooks, nn.Parameter]:
    layer = nn.Linear(2, 1)
    layer.weight.register_hook(hook)
    hooks = GradientHooks(layer, in_pipeline=False)
    alone: Any = SimpleNamespace(gather_values=lambda value: [value])
    hooks.begin_loop(alone)
    return hooks, layer.weight


def test_a_hook_does_not_hide_an_overflow() -> None:
    hooks, weight = with_hook(lambda gradient: gradient.nan_to_num(0.0, 1.0, -1.0))
    weight.grad = torch.tensor([[8.0, 4.0]])
    hooks.call(4.0)
    assert weight.grad.tolist() == [[8.0, 4.0]]
    weight.grad = torch.tensor([[8.0, math.inf]])
    hooks.call(4.0)
    assert weight.grad.isnan().all()


def test_a_backward_outside_of_a_step_calls_hooks_as_torch_does() -> None:
    hooks, weight = with_hook(lambda gradient: gradient * 3)
    with hooks:
        assert torch.autograd.grad(weight.sum(), weight)[0].tolist() == [[1.0, 1.0]]
    assert torch.autograd.grad(weight.sum(), weight)[0].tolist() == [[3.0, 3.0]]
    hooks.close()
    with hooks:
        assert torch.autograd.grad(weight.sum(), weight)[0].tolist() == [[3.0, 3.0]]
