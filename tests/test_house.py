"""Names in the package, and that the page on its architecture names what is there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "lockstep"
PAGE = ROOT / "docs" / "architecture.md"


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax tree of each module, by its path in the package."""
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
    }


def class_names() -> Iterator[str]:
    for tree in trees().values():
        yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def test_a_class_name_has_one_owner() -> None:
    owners = Counter(class_names())
    assert not {name: count for name, count in owners.items() if count > 1}


def test_docstrings_begin_with_what_the_thing_is_or_does() -> None:
    heads = re.compile(r"(Of|What|Whether|Where|Then|As|By|So|How)\b")
    bad = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
                and heads.match(node.value.value)
            ):
                bad.append(f"{path}:{node.lineno} {node.value.value[:60]!r}")
    assert not bad


def test_no_text_names_a_file_that_an_installation_does_not_have() -> None:
    """Neither a message nor a docstring, which `help` shows: the pages of docs have titles, and a
    website."""
    texts = [
        (path, node.value)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert not [(path, text[:80]) for path, text in texts if re.search(r"(?<!/)\bdocs/", text)]


def names_in(tree: ast.Module) -> set[str]:
    """The functions, classes and methods of a module, as `function`, `Class` and `Class.method`."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef)
            }
    return names


def test_every_file_on_the_page_of_the_architecture_exists() -> None:
    files = re.findall(r"`([\w/]+\.py|[\w/]+/)`", PAGE.read_text(encoding="utf-8"))
    assert len(files) > 20
    assert not [
        name for name in files if not (PACKAGE / name).exists() and not (ROOT / name).exists()
    ]


def test_every_function_on_the_page_of_the_architecture_exists() -> None:
    """In a row, or a sentence, with one file, each `Class.method` and `function` is one of that
    file's."""
    checked = 0
    for line in re.sub(r"\n(?![|\n#])", " ", PAGE.read_text(encoding="utf-8")).split("\n"):
        for file, names in re.findall(
            r"`([\w/]+\.py)`(?: \|| ?\()((?:[^`]*`\w+(?:\.\w+)?`)+?)(?= ?[|:)])", line
        ):
            known = names_in(trees()[file])
            for name in re.findall(r"`(\w+(?:\.\w+)?)`", names):
                checked += 1
                assert name in known, f"{PAGE.name} says that {file} has {name}"
    assert checked >= 15


@pytest.mark.parametrize("plan", ["replicate", "shard", "pipeline"])
def test_a_microbatch_passes_five_files_under(plan: str) -> None:
    """The three files of every plan, an executor and a reducer (or the other one that the plan may
    use)."""
    text = PAGE.read_text(encoding="utf-8")
    way = text[text.index("## A microbatch's way") : text.index("### Under `replicate=2`")]
    section = text[text.index(f"### Under `{plan}=2`") :].split("\n#")[0]
    common = set(re.findall(r"^\|[^|]*\| `([\w/]+\.py)`", way, flags=re.MULTILINE))
    executors = re.findall(r"^\| executor \| `([\w/]+\.py)`", section, flags=re.MULTILINE)
    reducers = re.findall(r"^\| reducer \| `([\w/]+\.py)`", section, flags=re.MULTILINE)
    assert len(common) == 3
    assert len(executors) == len(reducers) == 1
