"""Others' weights: the file's values are the model's, under every plan, each rank reading its own parts; and what does not fit is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiers import tiered
from torch import nn
from training.kept import PLANS
from training.started import read_bytes, started, theirs, trained, write

import lockstep as ls
from lockstep.errors import RecipeError
from lockstep.testing.pool import WorkerPool


def files(folder: Path) -> dict[str, str]:
    """The same weights in every kind of file."""
    state = theirs().state_dict()
    write(folder / "one.safetensors", state)
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    (folder / "several").mkdir()
    for file, own in parts.items():
        write(folder / "several" / file, {name: state[name] for name in own})
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "several" / "model.safetensors.index.json").write_text(ls_json(index))
    torch.save(state, folder / "tutorial.pt")
    return {"one": "one.safetensors", "several": "several", "index": "several/model.safetensors.index.json", "tutorial": "tutorial.pt"}


def ls_json(value: Any) -> str:
    import json

    return json.dumps(value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    files(path)
    return path


@pytest.mark.parametrize("plan", tiered({**PLANS, "split=2": 1}, always=["shard=2,tensor=2"]))
def test_the_model_has_the_files_values_under_every_plan(pool: WorkerPool, tmp_path: Path, folder: Path, plan: str) -> None:
    processes = {**PLANS, "split=2": 1}[plan]
    for number, file in enumerate(("one.safetensors", "several", "tutorial.pt")):
        found = pool.run(processes, started, plan, str(tmp_path / str(number)), str(folder / file))
        assert [fingerprint for fingerprint, _ in found] == [ls.fingerprint(theirs())] * processes, found
        assert found[0][1]["converted"] == {}
        assert found[0][1]["kept"] == []
