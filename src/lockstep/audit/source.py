"""Reads the source of the audited script, without executing it."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from lockstep.scripts.line import ScriptLine

_STARTS = {
    "torch.multiprocessing.spawn",
    "torch.multiprocessing.start_processes",
    "torch.multiprocessing.spawn.spawn",
    "accelerate.notebook_launcher",
    "accelerate.launchers.notebook_launcher",
}
_PROCESSES = {"torch.multiprocessing.Process", "multiprocessing.Process"}
_RANKS = {"RANK", "LOCAL_RANK"}


@dataclass(frozen=True, slots=True)
class StartCall:
    """A call by which a script starts its own ranks."""

    name: str
    line: int


class ScriptSource:
    """The syntax tree of a script; empty if the script cannot be parsed."""

    def __init__(self, text: str) -> None:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            tree = ast.Module(body=[], type_ignores=[])
        self._nodes = list(ast.walk(tree))
        self._names = dict(_imported(self._nodes))

    @classmethod
    def find(cls, line: ScriptLine) -> ScriptSource:
        path = module_path(line.script) if line.is_module else Path(line.script)
        try:
            return cls("" if path is None else path.read_bytes().decode("utf-8", errors="replace"))
        except OSError:
            return cls("")

    def start_call(self) -> StartCall | None:
        """Return the call by which the script starts its own ranks. Return None if the script reads
        its rank from a launcher."""
        if self._reads_rank():
            return None
        wanted = _STARTS | (_PROCESSES if self._gives_rank() else set())
        calls = [StartCall(name, node.lineno) for node, name in self._calls() if name in wanted]
        return min(calls, key=lambda call: call.line, default=None)

    def uses_lockstep(self) -> bool:
        return any(origin.partition(".")[0] == "lockstep" for origin in self._names.values())

    def _calls(self) -> Iterator[tuple[ast.Call, str]]:
        for node in self._nodes:
            if isinstance(node, ast.Call):
                yield node, self._full_name(node.func)

    def _full_name(self, node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            owner = self._full_name(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return self._names.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    def _reads_rank(self) -> bool:
        for node in self._nodes:
            if (
                isinstance(node, ast.Subscript)
                and isinstance(node.ctx, ast.Load)
                and _is_rank(node.slice)
            ):
                return True
            if isinstance(node, ast.Compare) and _is_rank(node.left):
                return True
            if isinstance(node, ast.Call) and node.args and _is_rank(node.args[0]):
                if isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "getenv"):
                    return True
                if isinstance(node.func, ast.Name) and node.func.id == "getenv":
                    return True
        return False

    def _gives_rank(self) -> bool:
        return any(
            name.endswith("init_process_group")
            and any(keyword.arg == "rank" for keyword in node.keywords)
            for node, name in self._calls()
        )


def module_path(name: str) -> Path | None:
    """Return the source file that `python -m name` would run."""
    places: list[str] | None = [os.getcwd(), *sys.path]
    *packages, last = name.split(".")
    for package in packages:
        spec = PathFinder.find_spec(package, places)
        if spec is None or spec.submodule_search_locations is None:
            return None
        places = list(spec.submodule_search_locations)
    spec = PathFinder.find_spec(last, places)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = PathFinder.find_spec("__main__", list(spec.submodule_search_locations))
    return (
        Path(spec.origin)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py")
        else None
    )


def lines_of_files(places: Iterable[str], roots: Iterable[str]) -> dict[str, list[str]]:
    lines = {}
    for name in {place.rpartition(":")[0] for place in places if place}:
        for path in [Path(root, name) for root in (*roots, os.curdir)]:
            if path.is_file():
                lines[name] = path.read_text(encoding="utf-8", errors="replace").splitlines()
                break
    return lines


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (top, top)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _is_rank(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in _RANKS
