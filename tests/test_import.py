"""What importing costs, and what may be imported from where."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from processes import ran

import lockstep
from lockstep.base.errors import USER_ERROR_STATUS

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "numpy", "rich", "safetensors", "psutil")
PURE = (
    "base.errors",
    "base.events",
    "keys",
    "recipe",
    "plan",
    "schedule",
    "assignment",
    "tree",
    "order",
)


def modules_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after `code`."""
    script = (
        f"import sys\n{code}\nprint('\\n'.join({{name.partition('.')[0] for name in sys.modules}}))"
    )
    ended = ran([sys.executable, "-c", script], check=True)
    names = set(ended.stdout.split())
    assert "sys" in names, "the interpreter ended before it could say"
    return names


def test_import_lockstep_imports_nothing_heavy() -> None:
    assert modules_after("import lockstep").isdisjoint(HEAVY)


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_does_not_import_torch(name: str) -> None:
    assert "torch" not in modules_after(f"import lockstep.{name}")


def test_pure_names_of_the_public_face_do_not_import_torch() -> None:
    code = (
        "import lockstep as ls; ls.Recipe, ls.Plan, ls.Evaluation, ls.Loss, ls.Sum, ls.Mean,"
        " ls.Gathered, ls.Weights, ls.warmup_cosine"
    )
    assert "torch" not in modules_after(code)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["doctor", "--help"],
        ["--version"],
        ["run", "no-such-script.py"],
    ],
    ids=" ".join,
)
def test_what_the_command_answers_without_training_imports_nothing_heavy(
    arguments: list[str],
) -> None:
    code = f"""
sys.argv = ["lockstep", *{arguments!r}]
from lockstep.cli.main import main
from lockstep.base.errors import UserError
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit, UserError):
    main()
"""
    assert modules_after(code).isdisjoint(HEAVY)


@pytest.mark.parametrize("name", lockstep.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(lockstep, name).__name__ == name
    assert name in dir(lockstep)


def test_no_module_hides_a_public_name() -> None:
    code = """
import importlib, pkgutil, lockstep
for module in pkgutil.walk_packages(lockstep.__path__, "lockstep."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert [name for name in lockstep.__all__ if getattr(lockstep, name).__name__ != name] == []
"""
    assert "torch" in modules_after(code)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'lockstep' has no attribute 'nonesuch'"):
        _ = lockstep.nonesuch


def test_an_uncaught_user_error_is_one_line_and_status_2() -> None:
    script = "import lockstep\nlockstep.Plan.parse('shard=0')"
    ended = ran([sys.executable, "-c", script])
    assert ended.returncode == USER_ERROR_STATUS
    assert ended.stderr.startswith("lockstep: PlanError: shard=0;")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name
)
def test_an_example_uses_the_public_face_alone(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if name.startswith("lockstep.")], (
            f"{path.name}:{node.lineno} imports {names}"
        )  # type: ignore[attr-defined]
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "ls"
        ):
            assert node.attr in lockstep.__all__, f"{path.name}:{node.lineno} uses ls.{node.attr}"
