"""The garbage collector is off while much is imported, and afterwards as the user had it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.collector import collector_paused


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("on", [True, False])
def test_afterwards_it_is_as_the_user_had_it(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled() is on
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled() is on


def test_a_model_and_its_optimizer_are_built_without_it(tmp_path: Path) -> None:
    gc.enable()
    seen = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        seen.append(gc.isenabled())
        return torch.optim.SGD(model.parameters(), lr=0.1)

    with ls.Session(run_dir=str(tmp_path / "run")) as session:
        session.prepare(lambda: nn.Linear(2, 2), optimizer)
        seen.append(gc.isenabled())
    assert seen == [False, True]
