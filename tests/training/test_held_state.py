"""The state that survivors of a lost process hold is loaded on all ranks; hooks that cannot be set back are found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lockstep as ls
from lockstep.comm.world import World
from lockstep.testing.pool import WorkerPool
from lockstep.training.recovery.held_state import HeldState, ReplicaReader
from lockstep.training.recovery.recovery import changed_hooks, hook_marks


def state_after(step: int) -> dict[str, Tensor]:
    return {
        "weight": torch.full((3, 2), float(step)).t(),  # not contiguous
        "phase": torch.full((2,), complex(step, -step)),
        "count": torch.tensor(step),
    }


def load(steps: list[int]) -> tuple[int, dict[str, Any], list[list[Any]]]:
    """Load what the ranks hold after `steps`, -1 for nothing. Returns step, values and tensors."""
    world = World(torch.distributed.get_rank(), len(steps), 0, len(steps), torch.device("cpu"), owns_group=False)
    step = steps[world.rank]
    held = None if step < 0 else HeldState(step, state_after(step), {"step": step, "modules": {}})
    reader = ReplicaReader(held, world)
    targets = {name: torch.zeros_like(state_after(0)[name]) for name in reader.tensors}
    reader.load_into(targets, world)
    return reader.manifest.step, dict(reader.manifest.values), [tensor.tolist() for tensor in targets.values()]


@pytest.mark.parametrize("steps", [[7, 7], [6, 7], [7, -1], [-1, 6, 7]])
def test_all_ranks_get_the_newest_state_that_one_holds(pool: WorkerPool, steps: list[int]) -> None:
    expected = [tensor.tolist() for tensor in state_after(7).values()]
    for found in pool.run(len(steps), load, steps):
        assert found == (7, {"step": 7, "modules": {}}, expected)


def test_without_a_state_there_is_nothing_to_load(pool: WorkerPool) -> None:
    assert pool.run(2, load, [-1, -1]) == [(-1, {}, [])] * 2


class Plain(ls.Hook):
    def __init__(self) -> None:
        self.number, self.list, self.tensor, self.path = 1, [1], torch.zeros(2), "a"


class WithState(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def change_number(hook: Plain) -> None:
    hook.number += 1


def grow_list(hook: Plain) -> None:
    hook.list.append(2)


def change_tensor(hook: Plain) -> None:
    hook.tensor.add_(1)


def add_attribute(hook: Plain) -> None:
    hook.other = 1  # type: ignore[attr-defined]


def change_nothing(hook: Plain) -> None:
    pass


@pytest.mark.parametrize("kind", [Plain, WithState])
@pytest.mark.parametrize("change", [change_number, grow_list, change_tensor, add_attribute, change_nothing])
def test_a_hook_without_a_state_dict_that_has_changed_is_named(kind: type[Plain], change: Any) -> None:
    hook = kind()
    run: Any = SimpleNamespace(hooks=SimpleNamespace(all=[hook]))
    before = hook_marks(run)
    change(hook)
    is_found = kind is Plain and change is not change_nothing
    assert changed_hooks(before, hook_marks(run)) == (["Plain"] if is_found else [])
