"""Options of the launcher behind SCRIPT."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli.arguments.launch import warn_of_misplaced

SCRIPTS = {
    "no arguments": "import lockstep as ls",
    "its own --plan": "import lockstep as ls; parser.add_argument('--plan')",
    "its own --run-dir": "import lockstep as ls; fire(run_dir=1)",
    "without lockstep": "import torch  # and not lockstep",
}


@pytest.mark.parametrize(
    ("script", "arguments", "named"),
    [
        ("no arguments", ["--plan", "replicate=2"], "--plan"),
        ("no arguments", ["--run-dir=a", "--plan=shard=2"], "--plan, --run-dir"),
        ("no arguments", ["--lr", "0.1", "plan"], ""),
        ("its own --plan", ["--plan", "--run-dir", "a"], "--run-dir"),
        ("its own --run-dir", ["--run-dir", "a"], ""),
        ("without lockstep", ["--plan", "a"], ""),
    ],
)
def test_options_of_the_launcher_behind_a_script_that_does_not_know_them_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, arguments: list[str], named: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPTS[script])
    warn_of_misplaced(arguments, str(tmp_path / "train.py"))
    said = capsys.readouterr().err
    assert said.startswith(f"lockstep: warning: {named} comes after SCRIPT") if named else said == ""
