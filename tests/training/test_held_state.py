"""The state that survivors of a lost process hold is loaded on all ranks; hooks that cannot be set
back are found."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training.subjects import recipe

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.comm.world import World
from lockstep.testing.pool import WorkerPool
from lockstep.training import recovery as hook_state
from lockstep.training.recovery import (
    HeldState,
    Recovery,
    ReplicaReader,
    hook_states,
    why_not_set_back,
)


def state_after(step: int) -> dict[str, Tensor]:
    return {
        "weight": torch.full((3, 2), float(step)).t(),  # not contiguous
        "phase": torch.full((2,), complex(step, -step)),
        "count": torch.tensor(step),
    }


def world_of(size: int) -> World:
    rank = torch.distributed.get_rank()
    return World(rank, size, 0, size, torch.device("cpu"), owns_group=False)


def load(steps: list[int]) -> tuple[int, dict[str, Any], list[list[Any]]]:
    """Load what the ranks hold after `steps`, -1 for nothing. Returns step, values and tensors."""
    world = world_of(len(steps))
    step = steps[world.rank]
    held = None if step < 0 else HeldState(step, state_after(step), {"step": step, "modules": {}})
    reader = ReplicaReader(held, world)
    targets = {name: torch.zeros_like(state_after(0)[name]) for name in reader.tensors}
    reader.load_into(targets, world)
    return (
        reader.manifest.step,
        dict(reader.manifest.values),
        [tensor.tolist() for tensor in targets.values()],
    )


@pytest.mark.parametrize("steps", [[7, 7], [6, 7], [7, -1], [-1, 6, 7]])
def test_all_ranks_get_the_newest_state_that_one_holds(pool: WorkerPool, steps: list[int]) -> None:
    expected = [tensor.tolist() for tensor in state_after(7).values()]
    for found in pool.run(len(steps), load, steps):
        assert found == (7, {"step": 7, "modules": {}}, expected)


def test_without_a_state_there_is_nothing_to_load(pool: WorkerPool) -> None:
    assert pool.run(2, load, [-1, -1]) == [(-1, {}, [])] * 2


NUMBER = 0


class Counter:
    shared = 0
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def counts() -> Callable[[], int]:
    numbers = itertools.count()
    return lambda: next(numbers)


class Plain(ls.Hook):
    def __init__(self) -> None:
        self.number, self.list, self.tensor, self.path = 1, [1], torch.zeros(2), "a"
        self.array, self.drawn, self.of_numpy = (
            np.zeros(2),
            random.Random(0),
            np.random.default_rng(0),
        )
        self.slots, self.closure, self.network = Counter(), counts(), nn.Linear(2, 2)
        self.deep = [[[[[[[0]]]]]]]

    def before_step(self, run: ls.Run, seen: list[int] = []) -> None:  # noqa: B006
        global NUMBER
        NUMBER += self.number + Counter.shared


class WithState(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def change_global(hook: Plain) -> None:
    global NUMBER
    NUMBER += 1


def change_default(hook: Plain) -> None:
    Plain.before_step.__defaults__[0].append(1)  # type: ignore[index]


def change_class(hook: Plain) -> None:
    Counter.shared += 1


CHANGES: dict[str, Callable[[Plain], object]] = {
    "number": lambda hook: setattr(hook, "number", 2),
    "list": lambda hook: hook.list.append(2),
    "tensor": lambda hook: hook.tensor.add_(1),
    "tensor.data": lambda hook: hook.tensor.data.add_(1),
    "other": lambda hook: setattr(hook, "other", 1),
    "array": lambda hook: hook.array.__setitem__(0, 1),
    "drawn": lambda hook: hook.drawn.random(),
    "of_numpy": lambda hook: hook.of_numpy.random(),
    "slots": lambda hook: setattr(hook.slots, "count", 1),
    "closure": lambda hook: hook.closure(),
    "network": lambda hook: hook.network.weight.data.add_(1),
    "deep": lambda hook: hook.deep[0][0][0][0][0][0].append(1),
    "NUMBER": change_global,
    "seen": change_default,
    "shared": change_class,
}


def run_with(hook: ls.Hook) -> Any:
    return SimpleNamespace(hooks=SimpleNamespace(all=[hook]), modules=[])


@pytest.mark.parametrize("kind", [Plain, WithState])
def test_a_hook_without_a_state_dict_is_named_whatever_of_it_has_changed(kind: type[Plain]) -> None:
    for name, change in CHANGES.items():
        run = run_with(kind())
        before = hook_states(run)
        assert why_not_set_back(before, hook_states(run)) is None
        change(run.hooks.all[0])
        found = why_not_set_back(before, hook_states(run))
        assert (found is not None) == (kind is Plain), name
        assert found is None or found.startswith("hook Plain has no state_dict, and "), name
        assert (
            found is None or " has changed since the start: it cannot be set back; add one" in found
        )


class Reads(ls.Hook):
    def __init__(self, held: Any) -> None:
        self.held = held


def test_what_cannot_be_compared_counts_as_changed(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        for held in (file, threading.Lock(), (each for each in [1])):
            states = hook_states(run_with(Reads(held)))
            assert (
                why_not_set_back(states, states)
                == "hook Reads has no state_dict, and held cannot be compared: it cannot be set"
                " back; add one"
            )


def test_what_is_of_the_run_is_set_back_with_it() -> None:
    model = nn.Linear(2, 2)
    run = run_with(Reads([model, model.weight]))
    run.modules = [SimpleNamespace(model=model, optimizers=[])]
    before = hook_states(run)
    model.weight.data.add_(1)
    assert why_not_set_back(before, hook_states(run)) is None


def test_of_a_large_tensor_torch_counts_the_changes_and_a_large_array_cannot_be_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hook_state, "MOST_BYTES", 4)
    tensor, array = torch.zeros(2), np.zeros(2)
    run = run_with(Reads(tensor))
    before = hook_states(run)
    assert why_not_set_back(before, hook_states(run)) is None
    tensor.add_(1)
    assert why_not_set_back(before, hook_states(run)) is not None
    array.setflags(write=False)
    states = [hook_states(run_with(Reads(each))) for each in (array, np.zeros(2))]
    assert [why_not_set_back(each, each) is None for each in states] == [True, False]


class Momentum(torch.optim.SGD):
    """The user's own, of which all attributes are read."""


def refusals() -> dict[str, str]:
    """Train a little on rank 0, and compare its recipe with rank 1's. Returns what is said of each
    loss."""
    world = world_of(2)
    model = nn.BatchNorm1d(2)
    optimizer = Momentum(model.parameters(), lr=0.1, momentum=0.9)
    hook, holder = ls.Hook(), SimpleNamespace(model=model, optimizer=optimizer)
    hook.count = counter = SimpleNamespace(number=world.rank)  # type: ignore[attr-defined]
    if world.rank == 0:
        model(torch.randn(3, 2)).sum().backward()
        optimizer.step()
    losses: dict[str, Callable[..., Any]] = {
        "a counter": lambda output, batch: counter.number,
        "a hook": lambda output, batch: hook.count.number,  # type: ignore[attr-defined]
        "the model": lambda output, batch: holder.model.running_mean,
        "the optimizer": lambda output, batch: holder.optimizer,
    }
    training: Any = SimpleNamespace(
        context=SimpleNamespace(world=world),
        stateful={},
        modules=[SimpleNamespace(model=model, optimizers=[optimizer])],
    )
    rejoin: Any = SimpleNamespace(trainings=0)
    said = {}
    for name, loss in losses.items():
        try:
            Recovery(rejoin, recipe(loss=loss), [hook]).check_recipe(training)
        except RecipeError as error:
            said[name] = str(error)
    return said


def test_a_recipe_that_uses_what_is_not_set_back_is_refused_on_all_ranks(pool: WorkerPool) -> None:
    assert (
        pool.run(2, refusals)
        == [
            {
                "a counter": "loss uses counter.number, which has changed since the start and cannot be"
                " set back; keep it in a hook with a state_dict, where the recipe's functions may read"
                " it"
            }
        ]
        * 2
    )
