"""Ranks of a sharded model over Gloo that call different blocks: named on all ranks, soon, with
the block and the microbatch. Without, they wait for minutes, or Gloo ends the process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import LOCKSTEP, ran

from lockstep.base.errors import USER_ERROR_STATUS

pytestmark = pytest.mark.forks

SCRIPT = Path(__file__).parent.parent / "scripts" / "other_blocks.py"
PLAN = "shard=2,transport=torch"
NAMED = (
    r"rank 0 gathers block 'blocks\.\d' in the (forward|backward) of microbatch \d and rank 1"
    r" gathers block 'blocks\.\d' in the (forward|backward) of microbatch \d; with sharded"
)


@pytest.mark.parametrize(
    "width",
    [
        pytest.param("40", id="sizes differ", marks=pytest.mark.command),
        pytest.param("8", id="numbers differ", marks=pytest.mark.slow),
    ],
)
def test_blocks_that_ranks_call_differently_are_named(tmp_path: Path, width: str) -> None:
    line = ["run", "--nproc", "2", "--plan", PLAN, str(SCRIPT), width, str(tmp_path / "run")]
    ended = ran([LOCKSTEP, *line])
    assert ended.returncode == USER_ERROR_STATUS, ended.stderr
    assert re.search(f"RecipeError: {NAMED}", ended.stderr), ended.stderr
    assert "SIGABRT" not in ended.stderr
