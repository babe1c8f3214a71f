"""What launchers do so that all ranks of an ordinary script draw the same, and so that no option is
lost."""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import LOCKSTEP, ran

DRAWS = str(Path(__file__).parent.parent / "scripts" / "draws.py")
NOTEBOOK = """
import json, os, random
import numpy as np, torch
import lockstep as ls
random.random(), np.random.random(), torch.rand(3)
def drawn():
    values = [random.random(), float(np.random.random()), float(torch.rand(()))]
    line = json.dumps([int(os.environ["RANK"]), *values, list({"cat", "dog", "frog", "horse"})])
    os.write(1, (line + chr(10)).encode())
ls.spawn(drawn, nproc=2)
"""


def command(*arguments: str, hash_seed: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONHASHSEED", None)
    environment |= {} if hash_seed is None else {"PYTHONHASHSEED": hash_seed}
    return ran(arguments, env=environment)


COMMANDS = {
    "run": [LOCKSTEP, "run", "--nproc", "2", DRAWS],
    "spawn": [sys.executable, DRAWS],
    "fork": [sys.executable, "-c", NOTEBOOK],
}


@pytest.mark.parametrize("how", ["run", pytest.param("spawn", marks=pytest.mark.command), "fork"])
def test_all_ranks_draw_the_same_before_lockstep_is_called(how: str) -> None:
    ended = command(*COMMANDS[how])
    assert (ended.returncode, ended.stderr) == (0, "")
    (_, *first), (_, *second) = rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert {rank for rank, *_ in rows} == {0, 1}
    assert first == second
    generator = torch.Generator().manual_seed(0)
    assert first[:3] == [
        random.Random(0).random(),
        np.random.RandomState(0).random(),
        float(torch.rand((), generator=generator)),
    ]


@pytest.mark.command
def test_the_users_own_hash_seed_stays() -> None:
    alone = command(
        sys.executable, "-c", "print(list({'cat', 'dog', 'frog', 'horse'}))", hash_seed="5"
    ).stdout
    drawn = command(LOCKSTEP, "run", DRAWS, hash_seed="5").stdout
    assert json.loads(drawn)[-1] == ast.literal_eval(alone)


@pytest.mark.forks
@pytest.mark.parametrize(
    ("strict", "status", "word"), [([], 0, "warning"), (["--strict"], 2, "error")]
)
def test_options_that_a_script_does_not_take_are_named(
    tmp_path: Path, strict: list[str], status: int, word: str
) -> None:
    script = tmp_path / "plain.py"
    script.write_text("print('done')")
    ended = command(
        LOCKSTEP,
        "run",
        "--plan",
        "replicate=1",
        "--stop-after",
        "5m",
        "--save-every",
        "10",
        *strict,
        str(script),
    )
    assert (ended.returncode, ended.stdout) == (status, "done\n")
    assert (
        ended.stderr
        == f"lockstep: {word}: --plan, --save-every, --stop-after had no effect, because the "
        "script has not trained with lockstep; call ls.train or enter an ls.Session in it, or "
        "leave the options out\n"
    )


@pytest.mark.forks
def test_a_script_for_torchrun_without_such_options_is_left_alone(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("print('done')")
    ended = command(LOCKSTEP, "run", "--strict", str(script))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
