"""Where a run writes: on several machines, and where the launcher says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.base.errors import RunDirectoryError
from lockstep.comm.world import World
from lockstep.logging import recorder
from lockstep.logging.recorder import Recorder


class Apart(World):
    """Two ranks on two machines, of which the other one sees no folder that this one made."""

    def gather_values(self, value: Any) -> list[Any]:
        return [value, False if value is True else value]

    def any(self, flag: bool) -> bool:
        return not flag

    def value_of(self, rank: int, value: Any) -> Any:
        return value


def test_a_run_directory_that_another_machine_does_not_see_is_refused_and_given_up(tmp_path: Path) -> None:
    world = Apart(0, 2, 0, 1, torch.device("cpu"), owns_group=False)
    with pytest.raises(RunDirectoryError, match=rf"run directory {tmp_path}, made by rank 0, is not there for rank 1, .*\(--run-dir\)"):
        Recorder(str(tmp_path), world, resume="auto", default=None)
    assert os.listdir(tmp_path) == []


def test_the_launcher_s_default_is_for_the_first_run_that_was_given_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recorder, "_default_is_taken", False)
    world = World(0, 1, 0, 1, torch.device("cpu"), owns_group=False)
    paths = []
    for given in ("given", None, None):
        each = Recorder(given, world, resume="auto", default=str(tmp_path / "default"))
        paths.append(str(each.path.relative_to(tmp_path)))
        each.close()
    assert paths[:2] == ["given", "default"]
    assert paths[2].startswith("runs/")
