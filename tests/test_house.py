"""Names in the package, and that the page on its architecture names what is there, and what a step
passes."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from tiers import LONGEST
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.run import train_in
from lockstep.testing.pool import WorkerPool

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


def floors() -> dict[str, int]:
    """The floor of each part of the package, from the contract in pyproject.toml; 0 is the
    highest."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["type"] == "layers")
    return {part: floor for floor, row in enumerate(layers) for part in row.split(" | ")}


def upward_strings(path: str, tree: ast.Module, modules: set[str]) -> list[str]:
    """The strings in a module that name a module of a higher floor, or of a sibling."""
    known, own = floors(), path.partition("/")[0].removesuffix(".py")
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        part = node.value.removeprefix("lockstep.").partition(".")[0]
        if node.value in modules and part != own and known[part] <= known[own]:
            found.append(f"{path}:{node.lineno} {node.value}")
    return found


def test_nothing_is_imported_upward_by_a_string() -> None:
    """`lockstep/__init__` is above all floors."""
    modules = {
        "lockstep." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in trees()
    }
    assert upward_strings("launch/x.py", ast.parse("f('lockstep.run')"), modules)
    assert not upward_strings("launch/x.py", ast.parse("f('lockstep.base.errors')"), modules)
    assert not [
        each
        for path, tree in trees().items()
        if path != "__init__.py"
        for each in upward_strings(path, tree, modules)
    ]


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


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def mean_square(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


class Traced(ls.Hook):
    """Notes, in the second step, the files of the package between the loop and each call of the
    model, the loss, a backward, the reducer, and the optimizer."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        known = (Part.forward, mean_square, torch.autograd.backward, train_in)
        self._codes = {function.__code__ for function in known}

    def before_step(self, run: ls.Run) -> None:
        if run.step == 1:
            sys.setprofile(self._watch)

    def after_step(self, run: ls.Run) -> None:
        sys.setprofile(None)

    def _watch(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self._is_watched(frame.f_code):
            return
        names = []
        caller: FrameType | None = frame
        while caller is not None:
            path = Path(caller.f_code.co_filename)
            if PACKAGE in path.parents:
                names.append(str(path.relative_to(PACKAGE)))
            if caller.f_code is train_in.__code__:
                self.files.update(names)
            caller = caller.f_back

    def _is_watched(self, code: CodeType) -> bool:
        is_reduce = code.co_name == "reduce" and "/training/reducers/" in code.co_filename
        is_step = code.co_name == "step" and code.co_filename.endswith("sgd.py")
        return code in self._codes or is_reduce or is_step


def files_of_a_step(plan: str, run_dir: str) -> set[str]:
    traced = Traced()
    recipe = ls.Recipe(
        model=lambda: nn.Sequential(*(Part() for _ in range(4))),
        data=TensorDataset(torch.randn(8, 3)),
        inputs=lambda batch: (batch[0],),
        loss=mean_square,
        global_batch=8,
        microbatch=2,
        steps=3,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    ls.train(recipe, plan=plan, run_dir=run_dir, hooks=[traced])
    return traced.files


@pytest.mark.parametrize(("axis", "limit"), [("replicate", 5), ("shard", 5), ("pipeline", 7)])
def test_a_microbatch_passes_the_files_on_the_page_of_the_architecture(
    pool: WorkerPool, tmp_path: Path, axis: str, limit: int
) -> None:
    passed = set().union(*pool.run(2, files_of_a_step, f"{axis}=2", str(tmp_path)))
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index(f"### Under `{axis}=2`") :].split("\n#")[0]
    assert passed == set(re.findall(r"^\| `([\w/]+\.py)`", section, flags=re.MULTILINE))
    assert len(passed) <= limit


def test_the_longest_files_of_tests_exist() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []
