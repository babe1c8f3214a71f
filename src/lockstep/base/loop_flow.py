"""Analyses the source of a script's training loop, to find variables that carry a value from one
step into the loss of a later step."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator, Set

_SINKS = ("backward", "compute")
_FILLS = ("zero_", "fill_", "copy_")
_EMPTIES = ("clear", "reset")
_TEXTS = ("__init__", "__repr__", "__str__")
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

# variable -> the variables whose values at the beginning of the step may have been used to compute
# it
Origins = dict[str, frozenset[str]]
_NONE = frozenset[str]()


def loop_at(source: str, line: int) -> ast.For | None:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    around = (each for each in _around(tree, line) if isinstance(each, ast.For))
    heads = [each for each in around if line < each.body[0].lineno]
    return max(heads, key=lambda each: each.lineno, default=None)


def _around(node: ast.AST, line: int) -> Iterator[ast.AST]:
    for each in ast.iter_child_nodes(node):
        if getattr(each, "lineno", line) <= line <= getattr(each, "end_lineno", line):
            yield each
            yield from _around(each, line)


def set_anew(loop: ast.For) -> set[str]:
    """Return the variables that the loop's body sets before it reads them."""
    flow = _flow_of(loop)
    return flow.changed - flow.read


def carried_into_loss(loop: ast.For) -> list[str]:
    """Return the variables that the loop's body changes and that affect the loss of the next step,
    such as `baseline` or `self.baseline`."""
    flow = _flow_of(loop)
    return sorted(flow.used & flow.changed)


def used_by_loss(loop: ast.For) -> list[str]:
    return sorted(_flow_of(loop).used)


def kept_by_methods(sources: Iterable[str], names: Set[str]) -> dict[str, bool]:
    """Return the attributes through which an object's methods carry values from one call to the
    next. Maps an attribute to True if the methods only set its items."""
    methods: dict[str, _Flow] = {}
    for source in sources:
        for name, flow in _methods_of(source):
            methods.setdefault(name, flow)
    left = [*names, *(name for name in methods if _is_operator(name))]
    used = set[str]()
    while left:
        if (name := left.pop()) not in used:
            used.add(name)
            left += methods[name].used if name in methods else ()
    kept = {name for flow in methods.values() for name in flow.kept}
    filled = {name for flow in methods.values() for name in flow.filled}
    return {name: name not in kept for name in used & (kept | filled)}


def _methods_of(source: str) -> Iterator[tuple[str, _Flow]]:
    try:
        kind = ast.parse(textwrap.dedent(source)).body[0]
    except (SyntaxError, ValueError):
        return
    for each in kind.body if isinstance(kind, ast.ClassDef) else ():
        if isinstance(each, ast.FunctionDef) and each.args.args:
            own = each.args.args[0].arg
            flow = _Flow(_bound_by(each) - {own}, own)
            flow.run(each.body)
            for paths in (flow.used, flow.kept, flow.filled):
                attributes = {one.removeprefix(f"{own}.").partition(".")[0] for one in paths}
                paths.clear()
                paths |= attributes
            yield each.name, flow


def _is_operator(name: str) -> bool:
    return name == "forward" or (name.startswith("__") and name not in _TEXTS)


def _flow_of(loop: ast.For) -> _Flow:
    flow = _Flow({each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)})
    flow.run(loop.body)
    return flow


class _Flow:
    """Follows values through the statements of a loop or method. Assumes that each nested loop runs
    at least once."""

    def __init__(self, given: set[str], own: str | None = None) -> None:
        self._given, self._own = given, own
        self.used: set[str] = set()
        self.read: set[str] = set()
        self.changed: set[str] = set()
        self.kept: set[str] = set()
        self.filled: set[str] = set()
        self._origins: Origins = dict.fromkeys(given, _NONE)
        self._decides: frozenset[str] = _NONE  # origins of the conditions around a statement

    def run(self, body: Iterable[ast.stmt]) -> None:
        for each in body:
            self._statement(each)

    def _statement(self, each: ast.stmt) -> None:
        if isinstance(each, _FUNCTION):
            before = dict(self._origins)
            self._origins |= dict.fromkeys(_bound_by(each), _NONE)
            self.run(each.body)
            self._origins = {**before, each.name: self._of(each)}
        elif isinstance(each, ast.For):
            self._look_for_sinks(each.iter)
            self._repeat(each.body, {each.target: each.iter})
        elif isinstance(each, ast.While):
            self._branches(each.test, [each.body], repeated=True)
        elif isinstance(each, ast.If):
            self._branches(each.test, [each.body, each.orelse])
        elif isinstance(each, ast.With):
            for item in each.items:
                self._look_for_sinks(item.context_expr)
                if item.optional_vars is not None:
                    self._set(item.optional_vars, self._of(item.context_expr))
            self.run(each.body)
        elif isinstance(each, ast.Try):
            self.run([*each.body, *(one for handler in each.handlers for one in handler.body)])
            self.run([*each.orelse, *each.finalbody])
        else:
            self._simple(each)

    def _simple(self, each: ast.stmt) -> None:
        self._look_for_sinks(each)
        if isinstance(each, ast.Assign):
            for target in each.targets:
                self._set(target, self._of(each.value))
        elif isinstance(each, ast.AnnAssign) and each.value is not None:
            self._set(each.target, self._of(each.value))
        elif isinstance(each, ast.AugAssign):
            self._set(each.target, self._of(each.value) | self._of(each.target))
        elif isinstance(each, ast.Expr) and isinstance(each.value, ast.Call):
            self._called(each.value)
        else:
            self._of(each)

    def _called(self, call: ast.Call) -> None:
        called = call.func
        owner = _path(called.value) if isinstance(called, ast.Attribute) else None
        if owner is not None and isinstance(called, ast.Attribute) and called.attr in _FILLS:
            self._set(called.value, _NONE.union(*map(self._of, call.args)))
        elif owner is not None and isinstance(called, ast.Attribute) and called.attr in _EMPTIES:
            self._of(called)  # calling a model does not change its attributes
            self._set(called.value, _NONE)
        elif owner is not None and owner != self._own:
            self.kept |= self._value(owner) & {owner}
            self._put(owner, self._of(call))
        else:
            self._of(call)

    def _branches(
        self, test: ast.expr, bodies: list[list[ast.stmt]], *, repeated: bool = False
    ) -> None:
        self._look_for_sinks(test)
        outer, self._decides = self._decides, self._decides | self._of(test)
        before, after = dict(self._origins), list[Origins]()
        for body in bodies:
            self._origins = dict(before)
            self._repeat(body, {}) if repeated else self.run(body)
            after.append(self._origins)
        self._origins = self._merged_origins(after)
        self._decides = outer

    def _repeat(self, body: list[ast.stmt], targets: dict[ast.expr, ast.expr]) -> None:
        before = dict(self._origins)
        for _ in range(2):
            for target, value in targets.items():
                self._set(target, self._of(value))
            self.run(body)
            after = self._origins
            self._origins = self._merged_origins([before, after])
        self._origins = after

    def _merged_origins(self, several: list[Origins]) -> Origins:
        names = {name for each in several for name in each}
        return {
            name: _NONE.union(*(each.get(name, self._at_first(name)) for each in several))
            for name in names
        }

    def _set(self, target: ast.expr, origins: frozenset[str]) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._set(each, origins)
        elif isinstance(target, ast.Starred):
            self._set(target.value, origins)
        elif isinstance(target, ast.Subscript):
            if (owner := _path(target.value)) is not None:
                if ast.unparse(target.slice) in (":", "..."):
                    self._set(target.value, origins)
                else:
                    self.filled.add(owner)
                    self.kept |= origins & {owner}
                    self._put(owner, origins | self._of(target.slice))
        elif (path := _path(target)) is not None:
            self.changed.add(path)
            self._origins = {
                name: each
                for name, each in self._origins.items()
                if not name.startswith(f"{path}.")
            }
            self._origins[path] = origins | self._decides
            self.kept |= origins & {path}

    def _put(self, path: str, origins: frozenset[str]) -> None:
        self.changed.add(path)
        self.read |= self._value(path)
        self._origins[path] = self._value(path) | origins | self._decides

    def _look_for_sinks(self, node: ast.AST) -> None:
        for each in ast.walk(node):
            if self._is_sink(each):
                self.used |= self._of(each) | self._decides

    def _is_sink(self, node: ast.AST) -> bool:
        if self._own is not None and isinstance(node, ast.Return | ast.Yield):
            return True
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        owner = node.func.value
        is_step = isinstance(owner, ast.Name) and owner.id in self._given
        return node.func.attr in _SINKS and (is_step or self._own is not None)

    def _of(self, node: ast.AST) -> frozenset[str]:
        found = _NONE.union(*map(self._value, _paths(node)))
        self.read |= found
        return found

    def _value(self, path: str) -> frozenset[str]:
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            if (known := self._origins.get(owner := ".".join(parts[:length]))) is not None:
                # in `statistics.update(x); statistics.mean`, the object is still the one before
                return known | self._at_first(path) if owner in known else known
        return self._at_first(path)

    def _at_first(self, path: str) -> frozenset[str]:
        parts = path.split(".")
        return frozenset(".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _path(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _path(node.value)) is not None:
        return f"{owner}.{node.attr}"
    return None


def _paths(node: ast.AST) -> Iterator[str]:
    if (path := _path(node)) is not None:
        yield path
        return
    bound = _bound_by(node)
    for each in ast.iter_child_nodes(node):
        yield from (path for path in _paths(each) if path.partition(".")[0] not in bound)


def _bound_by(node: ast.AST) -> set[str]:
    if isinstance(node, _FUNCTION):
        return {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
    targets = (each.target for each in getattr(node, "generators", ()))
    return {each.id for one in targets for each in ast.walk(one) if isinstance(each, ast.Name)}
