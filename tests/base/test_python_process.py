"""Processes that lockstep starts for itself import nothing from the working directory."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from processes import ran

import lockstep
from lockstep.base.processes import own_python

SOURCE = Path(lockstep.__file__).parent
THE_USERS_OWN_SCRIPT = {"audit/runner.py", "cli/plan.py"}
"""Where a command line is that of the script, as Python itself would run it."""


def test_every_command_line_of_python_is_made_in_one_place() -> None:
    found = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "executable" in text else ():
            if isinstance(node, ast.List) and any(
                ast.unparse(each) == "sys.executable" for each in node.elts
            ):
                found.add(str(path.relative_to(SOURCE)))
    assert found == {"base/processes.py", *THE_USERS_OWN_SCRIPT}


@pytest.mark.parametrize(
    "arguments",
    [["-c", "import queue; print(queue.Queue.__name__)"], ["-m", "json.tool", "--help"]],
)
def test_a_module_in_the_working_directory_is_not_imported(
    tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('somebody else')")
    (tmp_path / "json.py").write_text("raise SystemExit('somebody else')")
    ended = ran(own_python(*arguments), cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
