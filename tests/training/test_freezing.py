"""`run.freeze` and `run.unfreeze`: the parameters that are trained change between steps, alike on
all processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.subjects import (
    EachState,
    adamw,
    each_of,
    network,
    recipe,
    rows,
    samples_at,
    squared_error,
    state_of,
)

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.testing.pool import WorkerPool

STEPS = 6


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
        return ls.train(
            recipe(optimizer=adamw, steps=STEPS),
            run_dir=run_dir,
            plan=f"{plan},numerics=bitwise",
            hooks=[hook],
            saving=ls.Saving(every=1) if fail_at else None,
        )

    if fail_at is not None:
        with pytest.raises(RuntimeError, match="lost"):
            attempt(Thaws(fail_at))
    hook = Thaws()
    return attempt(hook).fingerprint, hook.states


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Tensor]]]:
    return train(str(tmp_path_factory.mktemp("alone")), "replicate=1")


def test_a_frozen_parameter_stays_and_the_others_are_trained_as_before(
    alone: tuple[str, list[dict[str, Tensor]]],
) -> None:
    states = alone[1]
    first, last = {"0.weight", "0.bias"}, {"2.bias"}
    frozen: dict[int, set[str]] = {2: first, 3: first, 4: last, 5: last}
    for step in range(1, STEPS):
        before, after = states[step - 1], states[step]
        moved = {name for name in after if not torch.equal(after[name], before[name])}
        assert moved == after.keys() - frozen.get(step, set()), step


def by_hand(initial: dict[str, Tensor]) -> dict[str, Tensor]:
    """Torch alone, on one process: AdamW leaves a parameter without a gradient, and its state, as
    they are."""
    model, columns = network(), rows(48).tensors
    model.load_state_dict(initial)
    optimizer = adamw(model)
    for step in range(STEPS):
        for name, parameter in model.named_parameters():
            frozen = (name.startswith("0.") and step in (2, 3)) or (name == "2.bias" and step >= 4)
            parameter.requires_grad_(not frozen)
        optimizer.zero_grad(set_to_none=True)
        chosen = samples_at(16 * step, 16 * step + 16, of=48)
        squared_error(model, [column[chosen] for column in columns]).backward()
        optimizer.step()
    return model.state_dict()


def test_the_updates_are_torchs_for_parameters_without_a_gradient(
    tmp_path: Path, alone: tuple[str, list[dict[str, Tensor]]]
) -> None:
    initial = EachState()
    ls.train(recipe(optimizer=adamw, steps=1), run_dir=str(tmp_path / "initial"), hooks=[initial])
    torch.testing.assert_close(alone[1][-1], by_hand(initial.states[0]), rtol=1e-4, atol=1e-6)


RUNS = {
    1: [("replicate=1", 3), ("replicate=1", 5)],
    2: [(plan, at) for plan in ("replicate=2", "shard=2") for at in (None, 3, 5)],
    3: [("replicate=3", None)],
    4: [("replicate=2,shard=2", None)],
}
"""By the number of processes: plans, and the step that fails before the run resumes."""


def fingerprints(run_dir: str, processes: int) -> list[str]:
    return [fingerprint for fingerprint, _ in each_of(train, run_dir, RUNS[processes])]


@pytest.mark.parametrize("processes", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_the_bits_are_those_of_one_process_and_of_a_run_without_a_failure(
    pool: WorkerPool,
    tmp_path: Path,
    alone: tuple[str, list[dict[str, Tensor]]],
    processes: int,
) -> None:
    for found in (
        [fingerprints(str(tmp_path), 1)]
        if processes == 1
        else pool.run(processes, fingerprints, str(tmp_path), processes)
    ):
        runs = RUNS[processes]
        assert dict(zip(runs, found, strict=True)) == dict.fromkeys(runs, alone[0])


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
            "on some ranks only; all train the same parameters; call it on every rank"
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


def test_what_cannot_be_frozen_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[str, str, dict[str, Any], str]] = [
        (
            "unfreeze",
            "0.*",
            {"model": frozen_body, "optimizer": head_alone},
            "the optimizer holds no such parameter; it holds 2.weight",
        ),
        ("freeze", "*", {}, "would leave no trainable parameter; a step needs one; freeze fewer"),
    ]
    for verb, pattern, changes, message in cases:
        with pytest.raises(RecipeError) as raised:
            ls.train(recipe(**changes), run_dir=str(tmp_path / verb), hooks=[Calls(verb, pattern)])
        assert message in str(raised.value)


def test_what_was_frozen_from_the_start_is_trained_later_if_the_optimizer_holds_it(
    tmp_path: Path,
) -> None:
    thaws = Thaws()
    ls.train(
        recipe(model=frozen_body, optimizer=adamw, steps=3),
        run_dir=str(tmp_path / "run"),
        hooks=[Calls("unfreeze", "0.bias"), thaws],
    )
    assert not torch.equal(thaws.states[0]["0.bias"], thaws.states[1]["0.bias"])
