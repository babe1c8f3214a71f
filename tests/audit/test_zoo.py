"""The scripts of the zoo are whole, and some of them are audited. `make zoo` audits all of them."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.audit.finding import Cause

ZOO = Path(__file__).parents[1] / "zoo"
AUDITED = (
    "ddp/no_sync_missing",
    "ddp/no_sampler",
    "ddp/seed_reset",
    "fsdp/ragged_tokens",
    "models/shard_split",
    "models/batches_from_array",
)
"""Written with torch alone; one for each kind of check: speed, samples, random numbers, loss, data
and steps."""
EXPERTS = "experts/expert_parallel_gradient"


@pytest.fixture(scope="module")
def zoo() -> Iterator[Any]:
    """The module tests/zoo/run.py, which imports what is beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ZOO))
        import run

        yield run
    for name in ("run", "render"):
        sys.modules.pop(name, None)


def unbound(script: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(script)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    bound |= {(name.asname or name.name).split(".")[0] for node in imports for name in node.names}
    return {node.id for node in names} - bound - set(dir(builtins)) - {"__name__", "__file__"}


def test_every_script_and_its_twin_is_whole(zoo: Any) -> None:
    for specimen in zoo.specimens(ZOO):
        faulty, clean = (zoo.render(specimen.text, faulty=fault) for fault in (True, False))
        assert (unbound(faulty), unbound(clean)) == (set(), set()), specimen.path
        assert faulty != clean, specimen.path
        assert zoo.places(specimen.text), specimen.path
        assert specimen.cause.upper() in Cause.__members__, specimen.path
        assert "def main(" not in faulty or faulty.endswith("    main()\n"), specimen.path


@pytest.mark.command
@pytest.mark.forks("watched")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [*AUDITED, pytest.param(EXPERTS, marks=pytest.mark.slow)])
def test_the_fault_is_found_with_its_line_and_nothing_in_the_twin(
    zoo: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (specimen,) = (each for each in zoo.specimens(ZOO) if f"{each.family}/{each.name}" == name)
    result = zoo.audit(specimen, faulty=True, seed=0)
    assert (result.has_cause, result.has_line) == (True, True), (result.found, result.error)
    twin = zoo.audit(specimen, faulty=False, seed=0)
    assert (twin.found, twin.status) == ([], 0), twin.error
