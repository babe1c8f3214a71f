"""Every command that starts a script says so in one line if the script never trains."""

from __future__ import annotations

from pathlib import Path

import forked
import psutil
import pytest
import torch
from processes import ran
from safetensors.torch import save_file

LINES = {
    "run": "run --strict --run-dir runs/a train.py",
    "verify": "verify --plans replicate=2 -- train.py",
    "audit": "audit --json train.py",
    "plan": "plan --on H100 train.py",
    "search": "search --trials 2 train.py",
    "sweep": "sweep --set lr=1,2 train.py",
    "average": "average a.safetensors b.safetensors -o c.safetensors --evaluate train.py",
    "evaluate": "evaluate a.safetensors train.py",
}


@pytest.mark.command
@pytest.mark.parametrize("name", LINES)
def test_a_script_that_never_trains_is_named_with_status_2(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("if False:\n    import lockstep\n" * (name != "audit"))
    for file in "ab":
        save_file({"weight": torch.ones(2)}, tmp_path / f"{file}.safetensors")
    with forked.use(watched=name == "audit"):
        ended = ran([forked.LOCKSTEP, *LINES[name].split()], cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    (said,) = [line for line in ended.stderr.splitlines() if "train" in line and "rror: " in line]
    assert said.startswith(
        "lockstep: error: --run-dir had no effect, because the script has not trained"
        if name == "run"
        else "lockstep: LaunchError: train.py ended without a"
    )
    assert "Traceback" not in ended.stderr
    left = [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(tmp_path)]
    assert not left
