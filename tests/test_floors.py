"""import-linter holds the floors (see pyproject.toml): here, that it sees what it is there to
see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ran

ROOT = Path(__file__).parent.parent

PLANTS = {
    "upward": (
        "lockstep/plan.py",
        "import lockstep.logging.metrics\n",
        "lockstep.plan is not allowed to import lockstep.logging",
    ),
    "upward in a function": (
        "lockstep/comm/world.py",
        "def planted():\n    from lockstep.training import step\n    return step\n",
        "lockstep.comm is not allowed to import lockstep.training",
    ),
    "upward, for type checking only": (
        "lockstep/plan.py",
        (
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n"
            "    from lockstep.run import Result\n"
        ),
        "lockstep.plan is not allowed to import lockstep.run",
    ),
    "sibling": (
        "lockstep/data/loader.py",
        "import lockstep.logging\n",
        "lockstep.data is not allowed to import lockstep.logging",
    ),
    "without a floor": ("lockstep/helpers.py", "", "helpers"),
    "torch in a pure module": (
        "lockstep/tree.py",
        "import torch\n",
        "lockstep.tree is not allowed to import torch",
    ),
    "a test dependency": (
        "lockstep/logging/metrics.py",
        "import psutil\n",
        "lockstep is not allowed to import psutil",
    ),
}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--no-logo"]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "COLUMNS": "200"}
    return ran(command, cwd=folder, env=environment)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(
        ROOT / "src" / "lockstep",
        tmp_path / "src" / "lockstep",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_import_is_found(copy: Path, plant: str) -> None:
    path, text, message = PLANTS[plant]
    with (copy / "src" / path).open("a") as file:
        file.write("\n" + text)
    ended = lint(copy)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert message in ended.stdout
