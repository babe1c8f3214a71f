"""The garbage collector is off while much is imported, and afterwards as the user had it. Objects
are frozen once."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ran

from lockstep.base import garbage
from lockstep.base.garbage import collector_paused


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


IMPORTED = """
import gc, sys

class Seen:
    def find_spec(self, name, path=None, target=None):
        if name in seen:
            seen[name] = gc.isenabled()

seen = dict.fromkeys(("lockstep.session", "torch._dynamo"))
sys.meta_path.insert(0, Seen())
import lockstep as ls
import torch

def model():
    seen["model"] = gc.isenabled()
    return torch.nn.Linear(2, 2)

def optimizer(model):
    seen["optimizer"] = gc.isenabled()
    return torch.optim.SGD(model.parameters(), lr=0.1)

with ls.Session(run_dir=sys.argv[1]) as session:
    session.prepare(model, optimizer)
print(seen)
"""


@pytest.mark.command
def test_it_is_off_for_what_is_imported_and_on_for_what_the_user_does(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IMPORTED, str(tmp_path / "run")]
    done = ran(command, check=True)
    seen = {"lockstep.session": False, "torch._dynamo": False, "model": True, "optimizer": True}
    assert done.stdout.splitlines()[-1] == str(seen)


@pytest.mark.usefixtures("nothing_is_frozen")
def test_frozen_objects_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_is_frozen", False)
    assert not garbage.is_frozen()
    garbage.freeze_for_good()
    assert gc.get_freeze_count() > 0
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("it takes long"))
    assert garbage.is_frozen()
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_is_frozen")
def test_objects_that_the_user_has_frozen_are_seen() -> None:
    gc.freeze()
    assert garbage.is_frozen()
    gc.unfreeze()
    assert not garbage.is_frozen()
