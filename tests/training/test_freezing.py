"""`run.freeze` and `run.unfreeze`: the parameters that are trained change between steps, alike on
all processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.subjects import network, recipe, rows, samples_at, squared_error, state_of

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.testing.pool import WorkerPool

PLANS = {"replicate=2": 2, "replicate=3": 3, "shard=2": 2, "replicate=2,shard=2": 4}
STEPS = 6


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Thaws(ls.Hook):
    """Freezes the first layer for steps 2 and 3, and the last one's bias from step 4 on."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.states: list[dict[str, Tensor]] = []
        self._fail_at = fail_at

    def before_step(self, run: Any) -> None:
        if run.step == self._fail_at:
            raise RuntimeError("lost")
        if run.step == 2:
            run.freeze("0.*")
        if run.step == 4:
            run.unfreeze("0.*")
            run.freeze("2.bias")

    def after_step(self, run: Any) -> None:
        self.states.append(state_of(run.model))


def train(
    run_dir: str, plan: str, fail_at: int | None = None
) -> tuple[str, list[dict[str, Tensor]]]:
    def attempt(hook: Thaws) -> ls.Result:
        given = recipe(optimizer=adam, steps=STEPS)
        return ls.train(
            given,
            run_dir=run_dir,
            plan=f"{plan},numerics=bitwise",
            hooks=[hook],
            saving=ls.Saving(every=1),
        )

    if fail_at is not None:
        with pytest.raises(RuntimeError, match="lost"):
            attempt(Thaws(fail_at))
    hook = Thaws()
    return attempt(hook).fingerprint, hook.states


def test_a_frozen_parameter_stays_and_the_others_are_trained_as_before(tmp_path: Path) -> None:
    _, states = train(str(tmp_path / "run"), "replicate=1")
    for step in range(1, STEPS):
        moved = {
            name
            for name, value in states[step].items()
            if not torch.equal(value, states[step - 1][name])
        }
        frozen = {
            2: {"0.weight", "0.bias"},
            3: {"0.weight", "0.bias"},
            4: {"2.bias"},
            5: {"2.bias"},
        }.get(step, set())
        assert moved == states[step].keys() - frozen, step


class Initial(ls.Hook):
    def on_start(self, run: Any) -> None:
        self.state = state_of(run.model)


def by_hand(initial: dict[str, Tensor]) -> dict[str, Tensor]:
    """Torch alone, on one process: AdamW leaves a parameter without a gradient, and its state, as
    they are."""
    model, columns = network(), rows(48).tensors
    model.load_state_dict(initial)
    optimizer = adam(model)
    for step in range(STEPS):
        for name, parameter in model.named_parameters():
            frozen = (name.startswith("0.") and step in (2, 3)) or (name == "2.bias" and step >= 4)
            parameter.requires_grad_(not frozen)
        optimizer.zero_grad(set_to_none=True)
        chosen = samples_at(16 * step, 16 * step + 16, of=48)
        squared_error(model, [column[chosen] for column in columns]).backward()
        optimizer.step()
    return model.state_dict()


def test_the_updates_are_torchs_for_parameters_without_a_gradient(tmp_path: Path) -> None:
    initial = Initial()
    ls.train(recipe(optimizer=adam, steps=1), run_dir=str(tmp_path / "initial"), hooks=[initial])
    _, states = train(str(tmp_path / "run"), "replicate=1")
    for name, value in by_hand(initial.state).items():
        torch.testing.assert_close(states[-1][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan, marks=pytest.mark.slow if ranks > 3 else ())
        for plan, ranks in PLANS.items()
    ],
)
def test_the_bits_are_those_of_one_process(pool: WorkerPool, tmp_path: Path, plan: str) -> None:
    (alone,) = pool.run(1, train, str(tmp_path / "alone"), "replicate=1")
    for found in pool.run(PLANS[plan], train, str(tmp_path / "run"), plan):
        assert found[0] == alone[0]


@pytest.mark.parametrize("plan", ["replicate=1", "replicate=2", "shard=2"])
@pytest.mark.parametrize("fail_at", [3, 5])
def test_a_resumed_run_trains_the_same_parameters(
    pool: WorkerPool, tmp_path: Path, plan: str, fail_at: int
) -> None:
    (alone,) = pool.run(1, train, str(tmp_path / "alone"), "replicate=1")
    for found in pool.run(PLANS.get(plan, 1), train, str(tmp_path / "run"), plan, fail_at):
        assert found[0] == alone[0]


class FreezesOnOneRank(ls.Hook):
    def before_step(self, run: Any) -> None:
        if run.rank == 0:
            run.freeze("0.*")
        else:
            run.freeze("2.*")


def freeze_on_one(run_dir: str) -> str:
    with pytest.raises(RecipeError) as raised:
        ls.train(recipe(), run_dir=run_dir, hooks=[FreezesOnOneRank()])
    return str(raised.value)


def test_ranks_that_freeze_different_parameters_are_refused_on_all(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for message in pool.run(2, freeze_on_one, str(tmp_path / "run")):
        assert message.endswith(
            "on some ranks alone; all train the same parameters; call it on every rank"
        )


class Calls(ls.Hook):
    def __init__(self, verb: str, pattern: str) -> None:
        self._verb, self._pattern = verb, pattern

    def before_step(self, run: Any) -> None:
        getattr(run, self._verb)(self._pattern)


def head_alone(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model[2].parameters(), lr=0.1)


def frozen_body() -> nn.Module:
    model = network()
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("verb", "pattern", "changes", "message"),
    [
        (
            "unfreeze",
            "0.*",
            {"model": frozen_body, "optimizer": head_alone},
            "the optimizer holds no such parameter; it holds 2.weight",
        ),
        ("freeze", "*", {}, "would leave no trainable parameter; a step needs one; freeze fewer"),
    ],
)
def test_what_cannot_be_frozen_is_refused(
    tmp_path: Path, verb: str, pattern: str, changes: Any, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        ls.train(recipe(**changes), run_dir=str(tmp_path / "run"), hooks=[Calls(verb, pattern)])


def test_what_was_frozen_from_the_start_is_trained_later_if_the_optimizer_holds_it(
    tmp_path: Path,
) -> None:
    thaws = Thaws()
    ls.train(
        recipe(model=frozen_body, optimizer=adam, steps=3),
        run_dir=str(tmp_path / "run"),
        hooks=[Calls("unfreeze", "0.bias"), thaws],
    )
    assert not torch.equal(thaws.states[0]["0.bias"], thaws.states[1]["0.bias"])
