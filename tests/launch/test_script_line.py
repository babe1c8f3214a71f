"""Options of the launcher behind SCRIPT."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.scripts.line import misplaced

SCRIPTS = {
    "no arguments": "import lockstep as ls",
    "an example": (
        '"""lockstep run --plan replicate=2 train.py"""; from lockstep import train  # and'
        " --run-dir a"
    ),
    "hands its arguments on": "from lib import main; from .lockstep import x; main()",
    "its own --plan": "import lockstep as ls; parser.add_argument('--plan')",
    "its own --run-dir": "import lockstep as ls; fire(run_dir=1)",
    "a field": "class Settings: run_dir: str = 'runs'",
    "not Python": "run-dir:",
}


@pytest.mark.parametrize(
    ("script", "arguments", "named"),
    [
        ("no arguments", ["--plan", "replicate=2"], ["--plan"]),
        ("no arguments", ["--run-dir=a", "--plan=shard=2"], ["--plan", "--run-dir"]),
        ("no arguments", ["--lr", "0.1", "plan"], []),
        ("no arguments", ["--run-dir=a", "--", "--plan"], ["--run-dir"]),
        ("hands its arguments on", ["--plan", "replicate=2"], []),
        ("an example", ["--plan", "replicate=2", "--run-dir", "a"], ["--plan", "--run-dir"]),
        ("its own --plan", ["--plan", "--run-dir", "a"], ["--run-dir"]),
        ("its own --run-dir", ["--run-dir", "a"], []),
        ("a field", ["--run-dir", "a"], []),
        ("not Python", ["--run-dir", "a"], []),
        ("absent", ["--run-dir", "a"], []),
    ],
)
def test_options_of_the_launcher_behind_a_script_that_does_not_know_them_are_named(
    tmp_path: Path, script: str, arguments: list[str], named: list[str]
) -> None:
    if script in SCRIPTS:
        (tmp_path / "train.py").write_text(SCRIPTS[script])
    assert (
        misplaced(
            ["--plan", "--run-dir"], arguments, str(tmp_path / "train.py"), imports="lockstep"
        )
        == named
    )


def test_a_script_of_a_command_that_needs_no_package_is_read_whatever_it_imports(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPTS["hands its arguments on"])
    assert misplaced(["--plan"], ["--plan", "replicate=2"], str(tmp_path / "train.py")) == [
        "--plan"
    ]
