"""The example of a search: alone, with other values, and as a short search."""

from __future__ import annotations

import csv
import json
import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
from processes import LOCKSTEP, ran

from lockstep.recipe.parameters import declared

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = EXAMPLES / "search.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The example as a module, in a process that has asked for no parameters yet."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, value in {"parameters": {}, "values": {}, "is_closed": False}.items():
        monkeypatch.setattr(declared, name, value)
    # tests/search would be called `search`, too
    spec = spec_from_file_location("example_of_a_search", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with patch.dict(os.environ):  # scikit-learn sets variables of other libraries
        spec.loader.exec_module(module)
    return module


def test_alone_it_trains_with_its_defaults(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    result = example.main(["--steps", "150", "--every", "50"])
    assert result.metrics["accuracy"] >= 0.8
    assert "lr=0.001, width=64, dropout=0.2" in capsys.readouterr().out
    parameters = json.loads(Path(result.run_dir, "run.json").read_text())["recipe"]["parameters"]
    assert parameters == {"lr": 1e-3, "width": 64, "dropout": 0.2}


def test_it_takes_values_from_the_command_line(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_SET", json.dumps(["lr=0.01", "width=16"]))
    example.main(["--steps", "2"])
    assert "lr=0.01, width=16, dropout=0.2" in capsys.readouterr().out


def test_it_knows_the_public_face_alone() -> None:
    assert [
        line for line in SCRIPT.read_text().splitlines() if "lockstep" in line and "import" in line
    ] == ["import lockstep as ls"]


@pytest.mark.command
@pytest.mark.forks
@pytest.mark.timeout(180)
def test_a_short_search_of_it(tmp_path: Path) -> None:
    command = [
        LOCKSTEP,
        "search",
        "--metric",
        "accuracy",
        "--mode",
        "max",
        "--trials",
        "5",
    ]
    command += [
        "--parallel",
        "2",
        "--pruner",
        "asha",
        "--json",
        "--csv",
        "trials.csv",
        str(SCRIPT),
        "--steps",
        "100",
    ]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = ran(command, cwd=tmp_path, env=environ)
    assert ended.returncode == 0, ended.stderr
    results = json.loads(ended.stdout)
    assert [trial["state"] in ("complete", "pruned") for trial in results["trials"]] == [True] * 5
    assert results["trials"][0]["parameters"] == {"lr": 1e-3, "width": 64, "dropout": 0.2}
    assert (
        results["best"]["value"]
        == max(trial["value"] for trial in results["trials"] if trial["state"] == "complete")
        > 0.3
    )
    with open(tmp_path / "trials.csv", encoding="utf-8") as file:
        assert [row["lr"] for row in csv.DictReader(file)] == [
            str(trial["parameters"]["lr"]) for trial in results["trials"]
        ]
