"""Where a run writes: on several machines, and where the launcher says so."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import ALONE

from lockstep.base.errors import CheckpointError, RunDirectoryError
from lockstep.comm.world import World
from lockstep.logging import recorder
from lockstep.logging.progress import Progress
from lockstep.logging.recorder import Recorder


class Apart(World):
    """Two ranks on two machines, of which the other one sees no folder that this one made."""

    def gather_values(self, value: Any) -> list[Any]:
        return [value, False if value is True else value]

    def any(self, flag: bool) -> bool:
        return not flag

    def value_of(self, rank: int, value: Any) -> Any:
        return value


def test_a_run_directory_that_another_machine_does_not_see_is_refused_and_given_up(
    tmp_path: Path,
) -> None:
    world = Apart(0, 2, 0, 1, torch.device("cpu"), owns_group=False)
    with pytest.raises(
        RunDirectoryError,
        match=(
            rf"run directory {tmp_path}, made by rank 0, is not there for rank 1, .*\(--run-dir\)"
        ),
    ):
        Recorder(str(tmp_path), world, resume="auto", launched=None)
    assert os.listdir(tmp_path) == []


def test_the_time_left_of_a_resumed_run_counts_the_steps_of_this_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "progress_stream", lambda: stream)
    now, stream = [100.0], io.StringIO()
    monkeypatch.setattr(recorder, "Progress", partial(Progress, clock=lambda: now[0]))
    each = Recorder(
        str(tmp_path),
        ALONE,
        resume="auto",
        launched=None,
    )
    each.resume(300, "checkpoints")
    each.show(1380)
    now[0] += 10.0
    each.step(310, {"loss": 1.0, "lr": 0.1, "samples_per_second": 1.0}, {})
    line, *_ = stream.getvalue().splitlines()
    each.close()
    assert line.endswith("~17:50 left"), "1 s a step, and 1070 steps"


def paths_of(runs: list[tuple[str | None, str | None]], **options: Any) -> list[str]:
    """The directories of runs of one process: (the script's, the launcher's) of each."""
    world = ALONE
    paths = []
    for given, launched in runs:
        each = Recorder(given, world, resume="auto", launched=launched, **options)
        paths.append(os.path.relpath(each.path))
        each.close()
    return paths


def test_each_run_of_a_script_has_a_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recorder, "_runs_in_launched", 0)
    assert paths_of([("mine", None), (None, "all"), ("mine", "all"), (None, "all")]) == [
        "mine",
        "all",
        "all-2",
        "all-3",
    ]
    assert paths_of([(None, None)])[0].startswith("runs/")


def in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_runs_in_launched", 0), ("_opened", []), ("_goes_through_again", False)):
        monkeypatch.setattr(recorder, name, value)


@pytest.mark.parametrize("run", [(None, "all"), ("all", None)])
@pytest.mark.parametrize(("followed", "restarted"), [(True, False), (False, True)])
def test_a_run_that_has_ended_is_opened_again_on_the_way_to_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any, followed: bool, restarted: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("all", "last"):
        Path(name).mkdir()
        for file in ("run.json", "result.json", "model.safetensors"):
            Path(name, file).write_text("{}")
    if followed:
        in_a_new_process(monkeypatch)
        paths_of([run, ("next", None)], restarted=True)
        assert Path("all", "followed-by.txt").read_text() == f"{tmp_path / 'next'}\n"
    in_a_new_process(monkeypatch)
    assert paths_of([run], restarted=restarted) == ["all"]
    assert Path("all", "result.json").read_text() == "{}"
    with pytest.raises(RunDirectoryError, match="already holds a run that has ended"):
        paths_of([("all", None)])  # it was trained in this process
    if followed:
        assert paths_of([("last", None)]) == ["last"]
    Path("all", "followed-by.txt").unlink(missing_ok=True)
    in_a_new_process(monkeypatch)
    with pytest.raises(RunDirectoryError, match="already holds a run that has ended"):
        paths_of([run])


def test_a_run_that_has_ended_is_not_opened_again_if_it_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(recorded: Mapping[str, Any]) -> None:
        raise CheckpointError(str(recorded))

    in_a_new_process(monkeypatch)
    for name in ("run.json", "result.json", "followed-by.txt"):
        (tmp_path / name).write_text('{"recipe": 1}')
    with pytest.raises(CheckpointError, match="'recipe': 1"):
        paths_of([(str(tmp_path), None)], check_ended=refuse)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        paths_of([(str(tmp_path), None)])
