"""Finds the variables of a script's loop over steps whose value of one step goes into the loss of a
later one, by the loop's code."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

_SINKS = ("backward", "compute")
"""Methods of a step that take the loss, or the function that computes it."""
_FILLS = ("zero_", "fill_", "copy_")
"""Methods of a tensor that replace all of its values."""
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

# variable -> the variables whose values at the beginning of the step may be in it
Origins = dict[str, frozenset[str]]
_NONE = frozenset[str]()


def loop_at(source: str, line: int) -> ast.For | None:
    """Return the innermost `for` whose head is at this line."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    loops = (each for each in ast.walk(tree) if isinstance(each, ast.For))
    heads = [each for each in loops if each.lineno <= line < each.body[0].lineno]
    return max(heads, key=lambda each: each.lineno, default=None)


def set_anew(loop: ast.For) -> set[str]:
    """Return the variables that each step sets or fills before it reads them."""
    flow = _Flow(loop)
    flow.run(loop.body)
    return flow.changed - flow.read


def carried_into_loss(loop: ast.For) -> list[str]:
    """Return the variables, such as `baseline` or `self.baseline`, that the loop's body changes and
    whose value at the beginning of a step goes into `step.backward` or `step.compute`."""
    flow = _Flow(loop)
    flow.run(loop.body)
    return sorted(flow.used & flow.changed)


class _Flow:
    """Follows values through the body of a loop, statement after statement. Inner loops are taken
    to run at least once."""

    def __init__(self, loop: ast.For) -> None:
        self._steps = {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
        self.used: set[str] = set()
        self.read: set[str] = set()
        """Variables whose value at the beginning of the step is read."""
        self.changed: set[str] = set()
        """Variables that the body sets, or whose methods it calls for their effect."""
        self._origins: Origins = dict.fromkeys(self._steps, _NONE)
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
        """Follow a call that is a statement, such as `returns.append(value)`."""
        called = call.func
        owner = _path(called.value) if isinstance(called, ast.Attribute) else None
        if owner is not None and isinstance(called, ast.Attribute) and called.attr in _FILLS:
            self._set(called.value, _NONE.union(*map(self._of, call.args)))
        elif owner is not None:
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
                    self._put(owner, origins | self._of(target.slice))
        elif (path := _path(target)) is not None:
            self.changed.add(path)
            self._origins = {
                name: each
                for name, each in self._origins.items()
                if not name.startswith(f"{path}.")
            }
            self._origins[path] = origins | self._decides

    def _put(self, path: str, origins: frozenset[str]) -> None:
        """Put a value into an object, which keeps its others."""
        self.changed.add(path)
        self.read |= self._value(path)
        self._origins[path] = self._value(path) | origins | self._decides

    def _look_for_sinks(self, node: ast.AST) -> None:
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                owner = call.func.value
                is_step = isinstance(owner, ast.Name) and owner.id in self._steps
                if is_step and call.func.attr in _SINKS:
                    self.used |= self._of(call) | self._decides

    def _of(self, node: ast.AST) -> frozenset[str]:
        """Return the origins of the values that a piece of code reads."""
        found = _NONE.union(*map(self._value, _paths(node)))
        self.read |= found
        return found

    def _value(self, path: str) -> frozenset[str]:
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            if (known := self._origins.get(".".join(parts[:length]))) is not None:
                return known
        return self._at_first(path)

    def _at_first(self, path: str) -> frozenset[str]:
        parts = path.split(".")
        return frozenset(".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _path(node: ast.AST) -> str | None:
    """Return a variable, or an attribute of one, as text such as `self.baseline`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _path(node.value)) is not None:
        return f"{owner}.{node.attr}"
    return None


def _paths(node: ast.AST) -> Iterator[str]:
    """Yield the variables and attributes that a piece of code reads: the longest paths."""
    if (path := _path(node)) is not None:
        yield path
        return
    bound = _bound_by(node)
    for each in ast.iter_child_nodes(node):
        yield from (path for path in _paths(each) if path.partition(".")[0] not in bound)


def _bound_by(node: ast.AST) -> set[str]:
    """Return a function's parameters, or the variables of a comprehension: they are no variables of
    the loop, whatever their names."""
    if isinstance(node, _FUNCTION):
        return {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
    targets = (each.target for each in getattr(node, "generators", ()))
    return {each.id for one in targets for each in ast.walk(one) if isinstance(each, ast.Name)}
