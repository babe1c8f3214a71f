"""State of users' hooks: alike on all ranks, and saved, or told."""

from __future__ import annotations

import ast
import copy
import random
import runpy
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_files
import torch
from torch import nn
from training.subjects import recipe, rows

import lockstep as ls
from lockstep.base.errors import CheckpointError
from lockstep.hooks.loop_variables import LoopVariables, loop_of
from lockstep.testing.pool import WorkerPool


class Teacher(ls.Hook):
    """A moving average of the model that no checkpoint holds."""

    def on_start(self, run: Any) -> None:
        self.teacher = copy.deepcopy(run.model)
        self.probe = torch.ones(3)
        self.student = run.model

    @torch.no_grad()
    def after_step(self, run: Any) -> None:
        for mine, its in zip(self.teacher.parameters(), run.model.parameters(), strict=True):
            mine.lerp_(its, 0.1)


class SavedTeacher(Teacher):
    def state_dict(self) -> dict[str, Any]:
        return {"teacher": self.teacher.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.teacher.load_state_dict(state["teacher"])


class GivenTeacher(SavedTeacher):
    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher

    def on_start(self, run: Any) -> None:
        """The teacher is there."""


NETWORK = nn.Linear(2, 2)
NOT_SAVED = ("hook-state-not-saved", "attributes-not-saved", "variables-not-saved")


class MovesAnother(ls.Hook):
    """Moves a network that a variable around it holds."""

    @torch.no_grad()
    def after_step(self, run: Any) -> None:
        for parameter in NETWORK.parameters():
            parameter += 1.0


class Replaced(ls.Hook):
    def __init__(self) -> None:
        self.centre = [torch.zeros(3)]

    def after_step(self, run: Any) -> None:
        self.centre[0] = self.centre[0] + 1.0


class Constant(ls.Hook):
    def __init__(self) -> None:
        self.probe, self.layer, self.outputs = torch.ones(3), nn.Linear(2, 2), None

    def after_step(self, run: Any) -> None:
        self.outputs = self.layer(torch.ones(2))


def told(run_dir: str, hook: type[ls.Hook]) -> list[dict[str, Any]]:
    result = ls.train(
        recipe(steps=4),
        run_dir=run_dir,
        plan="replicate=auto",
        hooks=[hook()],
        saving=ls.Saving(every=1),
    )
    return [event.details for event in result.events if event.name == "hook-state-not-saved"]


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (Teacher, [{"hook": "Teacher", "attributes": ["teacher"]}]),
        (MovesAnother, [{"hook": "MovesAnother", "attributes": ["NETWORK"]}]),
        (Replaced, [{"hook": "Replaced", "attributes": ["centre"]}]),
        (SavedTeacher, []),
        (Constant, []),
    ],
)
def test_tensors_that_a_hook_changes_and_nobody_saves_are_named_once(
    tmp_path: Path, hook: type[ls.Hook], expected: Any
) -> None:
    assert told(str(tmp_path / "run"), hook) == expected


def looped(run_dir: str, *, included: bool) -> list[Any]:
    """The variables of a loop of one's own that are named as not saved."""
    target, frozen = nn.Linear(6, 3), nn.Linear(6, 3)
    with ls.Session(run_dir=run_dir, saving=ls.Saving(every=1)) as session:
        model, optimizer = session.prepare(
            lambda: nn.Linear(6, 3), lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
        )
        both = nn.ModuleList([model, frozen])
        if included:
            session.include("target", target)
        for step in session.steps(rows(16), global_batch=8, microbatch=8, steps=2):
            for _, x, _ in step.microbatches():
                step.backward((both[0](x) - target(x) - both[1](x)).square().mean())
            step.commit(optimizer)
            target.load_state_dict(session.full_state_dict(model))
    return [event["variables"] for event in run_files.events(run_dir, "variables-not-saved")]


def test_a_network_that_a_loop_changes_is_named_unless_it_is_included(tmp_path: Path) -> None:
    assert looped(str(tmp_path / "left out"), included=False) == [["target"]]
    assert looped(str(tmp_path / "included"), included=True) == []


class Holds:
    """An object with a state dict, around a network."""

    def __init__(self) -> None:
        self.networks = [nn.Linear(6, 3)]

    def state_dict(self) -> dict[str, Any]:
        return self.networks[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.networks[0].load_state_dict(state)


def test_variables_that_are_saved_as_a_part_of_something_are_not_named(tmp_path: Path) -> None:
    """By a hook, an included object or an optimizer, nor one that each step resets. And constants
    may be of inference mode."""
    teacher, holder, lr = nn.Linear(2, 3), Holds(), torch.tensor(0.1)
    with torch.inference_mode():
        scale = torch.ones(3)
    hooks, network, left_out = [GivenTeacher(teacher)], holder.networks[0], torch.zeros(3)
    total = torch.zeros(())
    with ls.Session(run_dir=tmp_path, saving=ls.Saving(every=1), hooks=hooks) as session:
        model, optimizer = session.prepare(
            lambda: nn.Linear(2, 3), lambda model: torch.optim.Adam(model.parameters(), lr=lr)
        )
        session.include("holder", holder)
        for step in session.steps(rows(16), global_batch=8, microbatch=8, steps=2):
            total.zero_()
            for _, x, _ in step.microbatches():
                loss = (model(x[:, :2]) * scale.clone() - network(x)).square().mean()
                step.backward(loss)
                total += loss.detach()
            step.commit(optimizer)
            step.log({"total": total.item()})
            with torch.no_grad():
                for tensor in (network.weight, lr, left_out):
                    tensor.add_(0.1)
    (found,) = run_files.events(tmp_path, *NOT_SAVED)
    assert found["variables"] == ["left_out"]


def test_variables_are_not_kept_alive_nor_changed() -> None:
    gone, stays = torch.zeros(2), torch.zeros(2)
    known = weakref.ref(gone)
    variables = LoopVariables(())
    del gone
    assert known() is None
    stays.add_(1)
    assert variables.changed() == ["stays"]
    of_script = locals()
    LoopVariables(())
    assert of_script["stays"] is stays


def loops() -> Iterator[ast.For | None]:
    """Yield the loop that asks for the next value."""
    yield loop_of(sys._getframe(1))


class OfMethod:
    """Loops in a method, after text at the left margin."""

    def loop(self) -> ast.For | None:
        text = """
def at_the_margin():
    for loop in text:
"""
        for _ in text:
            for found in loops():
                return found
        return None


def test_the_loop_of_a_method_and_of_a_script_is_found(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("text = 1\nfor found in (\n    loops()):\n    found\n")
    of_script = runpy.run_path(str(tmp_path / "script.py"), {"loops": loops})["found"]
    for found in (OfMethod().loop(), of_script):
        assert ast.unparse(found).startswith("for found in loops():")
    unreadable: dict[str, Any] = {"loops": loops}
    exec("for found in loops(): pass", unreadable)
    assert unreadable["found"] is None


class Rescaled(nn.Linear):
    """A number and a tensor of its own that are neither parameters nor buffers, and a cache that
    each forward sets."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale, self.shift, self.constant = 1.0, torch.zeros(1), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = super().forward(x * self.scale + self.shift) * self.constant
        return self.cache


class Rescales(ls.Hook):
    def after_step(self, run: Any) -> None:
        run.model.scale *= 0.9
        run.model.shift += 0.1


class Counting(torch.optim.SGD):
    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps = self.steps + 1
        return super().step(closure)


@pytest.mark.parametrize(
    ("hooks", "optimizer", "expected"),
    [
        ([Rescales()], torch.optim.SGD, [["Rescaled.scale", "Rescaled.shift"]]),
        ([], torch.optim.SGD, []),
        ([], Counting, [["Counting.steps"]]),
    ],
)
def test_attributes_that_change_and_nobody_saves_are_named_once(
    tmp_path: Path, hooks: Any, optimizer: Any, expected: Any
) -> None:
    given = recipe(
        steps=4,
        model=lambda: Rescaled(6, 3),
        optimizer=lambda model: optimizer(model.parameters(), lr=0.1),
    )
    result = ls.train(given, run_dir=str(tmp_path / "run"), hooks=hooks, saving=ls.Saving(every=1))
    assert [
        event.details["attributes"]
        for event in result.events
        if event.name == "attributes-not-saved"
    ] == expected


class Counts(ls.Hook):
    """State that differs between ranks if `own` is given."""

    def __init__(self, own: str) -> None:
        self.own, self.value, self.tensor = own, 0, torch.zeros(2)

    def after_step(self, run: Any) -> None:
        self.value += 1 + run.rank * (self.own == "number")
        self.tensor += 1.0 + run.rank * (self.own == "tensor")

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.tensor = state["value"], state["tensor"]


def counted(run_dir: str, own: str, plan: str) -> int:
    return ls.train(
        recipe(steps=4), run_dir=run_dir, plan=plan, hooks=[Counts(own)], saving=ls.Saving(every=2)
    ).steps


@pytest.mark.parametrize("own", ["number", "tensor"])
@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_a_state_that_differs_between_ranks_is_not_saved(
    pool: WorkerPool, tmp_path: Path, own: str, plan: str
) -> None:
    with pytest.raises(
        CheckpointError,
        match=(
            r"^after step \d: the state of '0-Counts' differs between rank 0 and rank 1;"
            r" .*run\.loss"
        ),
    ):
        pool.run(2, counted, str(tmp_path / "run"), own, plan)
    assert pool.run(2, counted, str(tmp_path / "alike"), "", plan) == [4, 4]


def averaged(run_dir: str, plan: str) -> int:
    hooks = (
        [ls.ExponentialMovingAverage(0.9), SavedTeacher()]
        if plan == "replicate=2"
        else [ls.ExponentialMovingAverage(0.9)]
    )
    given = recipe(
        steps=4,
        inputs=lambda batch: batch[1],
        loss=squared_error_of,
        tensor={"0": "colwise", "2": "rowwise"},
    )
    return ls.train(given, run_dir=run_dir, plan=plan, hooks=hooks, saving=ls.Saving(every=2)).steps


def squared_error_of(output: Any, batch: Any) -> Any:
    return (output - batch[2]).square().mean()


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "tensor=2", "pipeline=2"])
def test_the_average_is_alike_or_sharded(pool: WorkerPool, tmp_path: Path, plan: str) -> None:
    assert pool.run(2, averaged, str(tmp_path / "run"), plan) == [4, 4]


class Draws(ls.Hook):
    """What it draws at each moment, and the model that it adds noise to."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def draw(self) -> None:
        self.drawn += [torch.rand(()).item(), float(np.random.rand()), random.random()]

    def before_step(self, run: Any) -> None:
        self.draw()

    @torch.no_grad()
    def after_step(self, run: Any) -> None:
        self.draw()
        for parameter in run.model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))

    def on_finish(self, run: Any) -> None:
        self.draw()


def drawn(run_dir: str, plan: str) -> tuple[str, list[float]]:
    hook = Draws()
    result = ls.train(
        recipe(steps=3), run_dir=run_dir, plan=f"{plan},numerics=bitwise", hooks=[hook]
    )
    return result.fingerprint, hook.drawn


def test_what_a_hook_draws_is_the_same_on_any_number_of_processes(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (alone,) = pool.run(1, drawn, str(tmp_path / "1"), "replicate=1")
    assert pool.run(3, drawn, str(tmp_path / "3"), "replicate=3") == [alone] * 3
    assert len(set(alone[1])) == len(alone[1]) == 21
