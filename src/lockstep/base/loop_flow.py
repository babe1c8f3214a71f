"""Analyses the source of a script's training loop, to find variables that carry a value from one
step into the loss of a later step."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Set
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

_SINKS = ("backward", "compute")
_FILLS = ("zero_", "fill_", "copy_")
_EMPTIES = ("clear", "reset")
_TEXTS = ("__init__", "__repr__", "__str__")
_LENGTHS = ("len", "size")
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

# variable -> the variables whose values at the beginning of the step may have been used to compute
# it
Origins = dict[str, frozenset[str]]
_NONE = frozenset[str]()


class Helper(NamedTuple):
    """A function of the script that a loop calls with the step."""

    code: ast.FunctionDef
    is_method: bool


Helpers = Mapping[str, Helper]
"""Maps the path of a helper in the loop, such as `self.train_step`, to the helper."""


class LoopFlow(NamedTuple):
    """Variables of a loop that affect the loss."""

    used: list[str]
    """All of them. `criterion.[0]` is the first item of a tuple that `criterion` returns."""
    carried: list[str]
    """Those that the loop's body changes, such as `baseline` or `self.baseline`."""


class MethodsFlow(NamedTuple):
    """Attributes of an object whose methods are followed."""

    kept: dict[str, bool]
    """The attributes through which the methods carry values from one call to the next, such as
    `mean` or `ema.mean`. Maps an attribute to True if the methods only set its items."""
    used: set[str]
    """Attributes that affect the loss."""
    assigned: set[str]
    """Names of attributes that a method other than `__init__` assigns."""


def loop_at(source: str, line: int) -> ast.For | None:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    around = (each for each in _around(tree, line) if isinstance(each, ast.For))
    heads = [each for each in around if line < each.body[0].lineno or line == each.lineno]
    return max(heads, key=lambda each: each.lineno, default=None)


def _around(node: ast.AST, line: int) -> Iterator[ast.AST]:
    for each in ast.iter_child_nodes(node):
        if getattr(each, "lineno", line) <= line <= getattr(each, "end_lineno", line):
            yield each
            yield from _around(each, line)


def set_anew(loop: ast.For) -> set[str]:
    """Return the variables that the loop's body sets before it reads them."""
    flow = _flow_of(loop)
    return flow.changed - flow.read - (flow.filled - flow.staged)


def helpers_called(body: ast.AST, steps: Set[str]) -> Iterator[ast.Call]:
    """Yield the calls that pass on a step. `steps` are the names of variables that hold it."""
    for each in ast.walk(body):
        if isinstance(each, ast.Call) and not steps.isdisjoint(_names_passed(each)):
            yield each


def steps_of(loop: ast.For) -> set[str]:
    return {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}


def _parameters_of(call: ast.Call, helper: Helper) -> dict[str, ast.expr]:
    """Return the values of the helper's parameters."""
    owner = [call.func.value] if helper.is_method and isinstance(call.func, ast.Attribute) else []
    arguments = helper.code.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    by_name = {each.arg: each.value for each in call.keywords if each.arg is not None}
    return dict(zip(names, [*owner, *call.args], strict=False)) | by_name


def steps_passed(call: ast.Call, helper: Helper, steps: Set[str]) -> set[str]:
    """Return the names of the helper's parameters that hold a step."""
    values = _parameters_of(call, helper).items()
    return {name for name, each in values if isinstance(each, ast.Name) and each.id in steps}


def flow_of_loop(loop: ast.For, helpers: Helpers | None = None) -> LoopFlow:
    flow = _flow_of(loop, helpers)
    return LoopFlow(sorted(flow.used), sorted(flow.used & flow.changed))


def assigned(body: ast.AST) -> set[str]:
    """Return the names of variables and attributes that are assigned, such as `prev` for
    `self.prev = {}`, other than in an `__init__`."""
    if isinstance(body, ast.FunctionDef) and body.name == "__init__":
        return set()
    name = getattr(body, "attr", getattr(body, "id", None))
    own = {name} if name and isinstance(getattr(body, "ctx", None), ast.Store) else set()
    return own.union(*map(assigned, ast.iter_child_nodes(body)))


def flow_of_methods(sources: Iterable[str], names: Set[str]) -> MethodsFlow:
    """Follow values through the methods of a class. `names` are the attributes that the loss uses,
    `[0]` for an item of what a call returns, and "" for the whole object."""
    code = tuple(sources)
    methods = _methods_of(code)
    used = _used_by(methods, names)
    kept = {name for flow in methods.values() for name in flow.kept}
    filled = {name for flow in methods.values() for name in flow.filled}
    return MethodsFlow(
        {name: name not in kept for name in kept | filled if _is_in(name, used)},
        used,
        set[str]().union(*map(assigned, filter(None, map(_parsed, code)))),
    )


def _used_by(methods: Mapping[str, _Flow], names: Set[str]) -> set[str]:
    operators = [name for name in methods if _is_operator(name)]
    items = [f"{name}.{each}" for name in operators for each in names if each.startswith("[")]
    left = [*names, *(items if items and "" not in names else operators)]
    used = set[str]()
    while left:
        if (name := left.pop()) not in used:
            used.add(name)
            method, _, item = name.partition(".")
            left += methods[method].returned(item) if method in methods else ()
    return used


def _is_in(path: str, used: Set[str]) -> bool:
    """True if `path` is used, or an object is used that holds it and of which no part is named."""
    owners = [owner for owner in _prefixes(path) if owner in used]
    return path in owners or any(
        not any(each.startswith(f"{owner}.") for each in used) for owner in owners
    )


@lru_cache
def _methods_of(sources: tuple[str, ...]) -> dict[str, _Flow]:
    methods: dict[str, _Flow] = {}
    for source in sources:
        for name, flow in _methods_in(source):
            methods.setdefault(name, flow)
    return methods


def _methods_in(source: str) -> Iterator[tuple[str, _Flow]]:
    kind = _parsed(source)
    for each in kind.body if isinstance(kind, ast.ClassDef) else ():
        if isinstance(each, ast.FunctionDef) and each.args.args:
            own = each.args.args[0].arg
            flow = _Flow(_bound_by(each) - {own}, own)
            flow.run(each.body)
            for paths in (flow.used, flow.kept, flow.filled, *flow.items.values()):
                attributes = {one.removeprefix(f"{own}.") for one in paths}
                paths.clear()
                paths |= attributes
            yield each.name, flow


def _parsed(source: str) -> ast.stmt | None:
    try:
        return ast.parse(textwrap.dedent(source)).body[0]
    except (SyntaxError, ValueError):
        return None


def _is_operator(name: str) -> bool:
    return name == "forward" or (name.startswith("__") and name not in _TEXTS)


def _flow_of(loop: ast.For, helpers: Helpers | None = None) -> _Flow:
    flow = _Flow(steps_of(loop), helpers=helpers)
    flow.run(loop.body)
    return flow


class _Flow:
    """Follows values through the statements of a loop or method. Assumes that each nested loop runs
    at least once."""

    def __init__(
        self, given: set[str], own: str | None = None, helpers: Helpers | None = None
    ) -> None:
        self._given, self._own, self._helpers = given, own, helpers or {}
        self.used: set[str] = set()
        self.items = defaultdict[int, set[str]](set)
        """For each item of the tuples that a method returns, the attributes used to compute it."""
        self.read: set[str] = set()
        self.changed: set[str] = set()
        self.kept: set[str] = set()
        self.filled: set[str] = set()
        self.staged: set[str] = set()
        """Variables of which an item is read that was set before, as `buffer[:n]`."""
        self._origins: Origins = dict.fromkeys(given, _NONE)
        self._decides: frozenset[str] = _NONE  # origins of the conditions around a statement

    def run(self, body: Iterable[ast.stmt]) -> None:
        for each in body:
            self._statement(each)

    def returned(self, item: str) -> set[str]:
        """Return the attributes that affect what a method returns, or the `[0]` of it."""
        parts = [each for place, each in self.items.items() if item in ("", f"[{place}]")]
        return self.used.union(*parts)

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
        for call in ast.walk(each):
            if isinstance(call, ast.Call) and (emptied := _emptied_by(call)) is not None:
                owner = ast.unparse(emptied)
                if sum(owner in _prefixes(path) for path in _paths(each, ())) == 1:
                    self._of(call.func)  # calling a model does not change its attributes
                    self._set(emptied, _NONE)
        self._look_for_sinks(each)
        if isinstance(each, ast.Assign):
            for target in each.targets:
                self._assign(target, each.value)
        elif isinstance(each, ast.AnnAssign) and each.value is not None:
            self._set(each.target, self._of(each.value))
        elif isinstance(each, ast.AugAssign):
            self._set(each.target, self._of(each.value) | self._of(each.target))
        elif isinstance(each, ast.Expr) and isinstance(each.value, ast.Call):
            self._called(each.value)
        else:
            self._of(each)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        called = _path(value.func) if isinstance(value, ast.Call) else None
        origins = self._of(value)
        is_taken_apart = isinstance(target, ast.Tuple) and not any(
            isinstance(each, ast.Starred) for each in target.elts
        )
        if called not in origins or not isinstance(target, ast.Tuple) or not is_taken_apart:
            self._set(target, origins)
            return
        for place, each in enumerate(target.elts):
            self._set(each, origins - {called} | {f"{called}.[{place}]"})

    def _called(self, call: ast.Call) -> None:
        called = call.func
        owner = _path(called.value) if isinstance(called, ast.Attribute) else None
        if owner is not None and isinstance(called, ast.Attribute) and called.attr in _FILLS:
            self._set(called.value, _NONE.union(*map(self._of, call.args)))
        elif owner is not None and owner != self._own and _emptied_by(call) is None:
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
        names = {name for name in names if "[" not in name or all(name in one for one in several)}
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
                    origins |= self._of(target.slice)
                    self._put(owner, origins, reads=False)
                    if _is_the_same_again(target.slice):
                        self._origins[ast.unparse(target)] = origins | self._decides
        elif (path := _path(target)) is not None:
            self.changed.add(path)
            self._forget_items(path)
            self._origins = {
                name: each
                for name, each in self._origins.items()
                if not name.startswith(f"{path}.")
            }
            self._origins[path] = origins | self._decides
            self.kept |= origins & {path}

    def _put(self, path: str, origins: frozenset[str], *, reads: bool = True) -> None:
        self.changed.add(path)
        self.read |= self._value(path) if reads else _NONE
        self._forget_items(path)
        self._origins[path] = self._value(path) | origins | self._decides

    def _forget_items(self, path: str) -> None:
        """Forget the items that were set, such as `path[:n]` and `buffer[:path]`."""
        named = re.compile(rf"\b{re.escape(path)}\b")
        for name in [each for each in self._origins if "[" in each and named.search(each)]:
            del self._origins[name]

    def _look_for_sinks(self, node: ast.AST) -> None:
        for each in ast.walk(node):
            if isinstance(each, ast.Call) and _path(each.func) in self._helpers:
                self._follow(each, str(_path(each.func)))
            if not self._is_sink(each):
                continue
            if isinstance(each, ast.Return | ast.Yield) and isinstance(each.value, ast.Tuple):
                for place, item in enumerate(each.value.elts):
                    self.items[place] |= self._of(item) | self._decides
            else:
                self.used |= self._of(each) | self._decides

    def _follow(self, call: ast.Call, path: str) -> None:
        """Follow the values through a helper that gets the step."""
        helper = self._helpers[path]
        steps = steps_passed(call, helper, self._given)
        inner = {name: each for name, each in self._helpers.items() if name != path}
        flow, values = _Flow(steps, helpers=inner), _parameters_of(call, helper)
        flow.run(helper.code.body)
        own = _own_names(helper.code)

        def of_caller(path: str) -> list[str]:
            name, dot, attribute = path.partition(".")
            if name not in values:
                return [] if name in own else [path]
            return [f"{each}{dot}{attribute}" for each in _paths(values[name], ())]

        for each in chain.from_iterable(map(of_caller, flow.used)):
            self.used |= self._value(each) | self._decides
        for each in chain.from_iterable(map(of_caller, flow.changed)):
            self._put(each, _NONE)

    def _is_sink(self, node: ast.AST) -> bool:
        if self._own is not None and isinstance(node, ast.Return | ast.Yield):
            return True
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        owner = node.func.value
        is_step = isinstance(owner, ast.Name) and owner.id in self._given
        return node.func.attr in _SINKS and (is_step or self._own is not None)

    def _of(self, node: ast.AST) -> frozenset[str]:
        paths = list(_paths(node, self._origins))
        self.staged |= {path.partition("[")[0] for path in paths if "[" in path}
        found = _NONE.union(*map(self._value, paths))
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
        return frozenset(_prefixes(path))


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _names_passed(call: ast.Call) -> set[str]:
    values = [*call.args, *(each.value for each in call.keywords)]
    return {each.id for each in values if isinstance(each, ast.Name)}


def _own_names(function: ast.FunctionDef) -> set[str]:
    """Return the variables of a function: its parameters, and those that it sets."""
    nodes = list(ast.walk(function))
    shared = {
        name for each in nodes if isinstance(each, ast.Global | ast.Nonlocal) for name in each.names
    }
    stored = (each for each in nodes if isinstance(each, ast.Name))
    names = {each.id for each in stored if isinstance(each.ctx, ast.Store)}
    return (names | _bound_by(function)) - shared


def _emptied_by(call: ast.Call) -> ast.expr | None:
    called = call.func
    if not isinstance(called, ast.Attribute) or called.attr not in _EMPTIES:
        return None
    return called.value if _path(called.value) is not None else None


def _is_the_same_again(index: ast.expr) -> bool:
    """True if a second computation of the index gives the same index."""
    calls = [each.func for each in ast.walk(index) if isinstance(each, ast.Call)]
    return all(getattr(each, "id", getattr(each, "attr", "")) in _LENGTHS for each in calls)


def _path(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _path(node.value)) is not None:
        return f"{owner}.{node.attr}"
    return None


def _paths(node: ast.AST, items: Container[str]) -> Iterator[str]:
    """Yield the paths that an expression reads. `items` contains the known items of containers,
    such as `buffer[:n]`."""
    if (path := _path(node)) is not None:
        yield path
        return
    if isinstance(node, ast.Subscript) and (item := ast.unparse(node)) in items:
        yield item
        return
    bound = _bound_by(node)
    for each in ast.iter_child_nodes(node):
        yield from (path for path in _paths(each, items) if path.partition(".")[0] not in bound)


def _bound_by(node: ast.AST) -> set[str]:
    if isinstance(node, _FUNCTION):
        return {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
    targets = (each.target for each in getattr(node, "generators", ()))
    return {each.id for one in targets for each in ast.walk(one) if isinstance(each, ast.Name)}
