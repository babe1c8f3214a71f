"""Analyses the source of a script's training loop, to find variables that carry a value from one
step into the loss of a later step."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import takewhile
from typing import NamedTuple

_SINKS = ("backward", "compute")
_FILLS = ("zero_", "fill_", "copy_")
_EMPTIES = ("clear", "reset")
_TEXTS = ("__init__", "__repr__", "__str__")
_LENGTHS = ("len", "size")
_CONSTANT = re.compile(r"\[('[^']*'|\d+)\]")
_IS_TRUE = "[is True]"
"""Follows a variable that a statement has set to True, in a name among the origins. Is forgotten as
an item of the variable, such as `buffer[:n]`."""
_MOST_PARTS = 5
"""Paths through helpers are cut after this many names: `g(g(g(x)))` has 2 ** 3 paths if `g` reads
`x.a` and `x.b`."""
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

# variable -> the variables whose values at the beginning of the step may have been used to compute
# it
Origins = dict[str, frozenset[str]]
_NONE = frozenset[str]()


@dataclass(eq=False)
class Helper:
    """A function of the script that a loop or another helper uses."""

    code: ast.FunctionDef
    is_method: bool = False
    module: str | None = None
    """Name of the module whose variables are the function's globals. None for the script."""
    closed_over: Set[str] = _NONE
    """Variables of the loop's function that the helper reads or sets."""
    helpers: dict[str, Helper] = field(default_factory=dict)
    """Maps the path of a helper in the function, such as `self.train_step`, to the helper."""
    flows: dict[frozenset[str], _Flow] = field(default_factory=dict)
    """For each set of parameters that hold a step: the function's flow."""

    @cached_property
    def own_names(self) -> set[str]:
        return _own_names(self.code)


class LoopFlow(NamedTuple):
    """Variables of a loop that affect the loss."""

    used: list[str]
    """All of them. `criterion.[0]` is the first item of a tuple that `criterion` returns."""
    carried: list[str]
    """Those that the loop's body changes, such as `baseline` or `self.baseline`."""
    kept: Set[str] = _NONE
    """Variables whose new value depends on the one before, whether they affect the loss or not."""


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
    flow = _Flow(steps_of(loop))
    flow.run(loop.body)
    return flow.changed - flow.read - (flow.filled - flow.staged)


def steps_of(loop: ast.For) -> set[str]:
    return {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}


def passed_to(call: ast.Call, helper: Helper) -> dict[str, ast.expr]:
    """Return the values of the helper's parameters. Those that unpacked arguments may set have all
    arguments as their value."""
    arguments, given = helper.code.args, list(call.args)
    if helper.is_method:  # `trainer.train_step(step)`, or `trainer(step)`
        own = call.func
        if isinstance(own, ast.Attribute) and own.attr == helper.code.name:
            own = own.value
        given.insert(0, own)
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    rest = [each.arg for each in (arguments.vararg, arguments.kwarg) if each is not None]
    if any(isinstance(each, ast.Starred) for each in given) or any(
        each.arg is None for each in call.keywords
    ):
        rest += [*names, *(each.arg for each in arguments.kwonlyargs)]
    everything = ast.Tuple([*given, *(each.value for each in call.keywords)])
    in_order = takewhile(lambda each: not isinstance(each, ast.Starred), given)
    by_name = {each.arg: each.value for each in call.keywords if each.arg is not None}
    return dict.fromkeys(rest, everything) | dict(zip(names, in_order, strict=False)) | by_name


def steps_passed(call: ast.Call, helper: Helper, steps: Set[str]) -> set[str]:
    """Return the names of the helper's parameters that hold a step."""
    values = passed_to(call, helper).items()
    return {name for name, each in values if isinstance(each, ast.Name) and each.id in steps}


def flow_of_loop(
    loop: ast.For, helpers: Mapping[str, Helper] | None = None, variables: Set[str] = _NONE
) -> LoopFlow:
    """Follow values through a loop. `variables` are the names of a function's local variables,
    which hide those of its module."""
    flow = _Flow(steps_of(loop), helpers=helpers, variables=variables)
    flow.run(loop.body)
    return LoopFlow(sorted(flow.used), sorted(flow.used & flow.changed), flow.kept)


def assigned(body: ast.AST) -> set[str]:
    """Return the names of variables and attributes that are assigned, such as `prev` for
    `self.prev = {}`, other than in an `__init__`."""
    if isinstance(body, ast.FunctionDef) and body.name == "__init__":
        return set()
    name = getattr(body, "attr", getattr(body, "id", None))
    own = {name} if name and isinstance(getattr(body, "ctx", None), ast.Store) else set()
    return own.union(*map(assigned, ast.iter_child_nodes(body)))


def flow_of_methods(
    sources: Iterable[str], names: Set[str], *, is_called: bool = True
) -> MethodsFlow:
    """Follow values through the methods of a class. `names` are the attributes that the loss uses,
    `[0]` for an item of what a call returns, and "" for the whole object. `is_called` is False if
    the object is only called as a helper."""
    code = tuple(sources)
    methods = _methods_of(code)
    used = _used_by(methods, names, [name for name in methods if is_called and _is_operator(name)])
    kept = {name for flow in methods.values() for name in flow.kept}
    filled = {name for flow in methods.values() for name in flow.filled}
    return MethodsFlow(
        {name: name not in kept for name in kept | filled if _is_in(name, used)},
        used,
        set[str]().union(*map(assigned, filter(None, map(_parsed, code)))),
    )


def _used_by(methods: Mapping[str, _Flow], names: Set[str], operators: Sequence[str]) -> set[str]:
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
            flow.returns |= flow.used
            for paths in (
                flow.returns,
                flow.containers,
                flow.kept,
                flow.filled,
                *flow.items.values(),
            ):
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


class _Flow:
    """Follows values through the statements of a loop or method. Assumes that each nested loop runs
    at least once."""

    def __init__(
        self,
        given: Set[str],
        own: str | None = None,
        helpers: Mapping[str, Helper] | None = None,
        variables: Set[str] = _NONE,
    ) -> None:
        self._given, self._own, self._helpers = given, own, helpers or {}
        self._variables = variables
        self.used: set[str] = set()
        self.returns: set[str] = set()
        self.items = defaultdict[str, set[str]](set)
        """For each item of the tuples and dicts that a function returns, such as `[0]` or
        `['loss']`, the variables used to compute it."""
        self.containers: set[str] = set()
        """The variables used to compute these tuples and dicts."""
        self.read: set[str] = set()
        self.changed: set[str] = set()
        self.assigned: set[str] = set()
        self.kept: set[str] = set()
        self.filled: set[str] = set()
        self.staged: set[str] = set()
        """Variables of which an item is read that was set before, as `buffer[:n]`."""
        self.origins: Origins = dict.fromkeys(given, _NONE)
        self._decides: frozenset[str] = _NONE  # origins of the conditions around a statement

    def run(self, body: Iterable[ast.stmt]) -> None:
        for each in body:
            self._statement(each)

    def returned(self, item: str) -> set[str]:
        """Return the variables that affect what a function returns, or the `[0]` of it."""
        part = self.items.get(item, set()) if item else self.containers
        return self.returns | part

    def _statement(self, each: ast.stmt) -> None:
        if isinstance(each, _FUNCTION):
            before = dict(self.origins)
            self.origins |= dict.fromkeys(_bound_by(each), _NONE)
            self.run(each.body)
            self.origins = {**before, each.name: self._of(each)}
        elif isinstance(each, ast.For):
            self._look_for_sinks(each.iter)
            self._repeat(each.body, {each.target: each.iter})
        elif isinstance(each, ast.While):
            self._branches(each.test, [each.body], repeated=True)
        elif isinstance(each, ast.If) and f"{path_of(each.test)} {_IS_TRUE}" in self.origins:
            self.run(each.body)
        elif isinstance(each, ast.If):
            self._branches(each.test, [each.body, each.orelse])
        elif isinstance(each, ast.Match):
            last = each.cases[-1]
            is_complete = last.guard is None and getattr(last.pattern, "pattern", last) is None
            bodies = [case.body for case in each.cases]
            self._branches(each.subject, bodies if is_complete else [[], *bodies])
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
                if sum(owner in _prefixes(path) for path in self._paths(each, ())) == 1:
                    self._of(call.func)  # calling a model does not change its attributes
                    self._set_path(owner, _NONE)
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
        called = path_of(value.func) if isinstance(value, ast.Call) else None
        origins, items = self._of(value), self._items_of(value)
        if isinstance(target, ast.Tuple) and not _has_starred(target):
            for place, each in enumerate(target.elts):
                item = f"[{place}]"
                if called in origins:
                    self._set(each, origins - {called} | {f"{called}.{item}"})
                else:
                    self._set(each, items.get(item, origins))
            return
        self._set(target, origins)
        if (path := path_of(target)) is not None and path_of(value) is None:
            self.origins |= {f"{path}{item}": each | self._decides for item, each in items.items()}
            if isinstance(value, ast.Constant) and value.value is True:
                self.origins[f"{path} {_IS_TRUE}"] = _NONE

    def _items_of(self, node: ast.expr) -> Origins:
        """Return the origins of the items of a tuple or dict, as far as they are known."""
        if isinstance(node, ast.Tuple):
            elements = {} if _has_starred(node) else dict(enumerate(node.elts))
            return {f"[{place}]": self._of(each) for place, each in elements.items()}
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            constants = {
                each.value: value for each, value in pairs if isinstance(each, ast.Constant)
            }
            return {f"[{name!r}]": self._of(each) for name, each in constants.items()}
        if (call := self._call_of_helper(node)) is not None:
            found = {item: self._returned(call, item) for item in self._inside(call)[0].items}
            return {item: _NONE.union(*map(self._value, paths)) for item, paths in found.items()}
        start = f"{path_of(node)}["
        known = {name: each for name, each in self.origins.items() if name.startswith(start)}
        return {f"[{name.removeprefix(start)}": each for name, each in known.items()}

    def _called(self, call: ast.Call) -> None:
        called = call.func
        owner = path_of(called.value) if isinstance(called, ast.Attribute) else None
        if self._call_of_helper(call) is not None:
            self._of(call)
        elif len(call.args) == 3 and (name := _attribute_named(call, "setattr")) is not None:
            self._set(name, self._of(call.args[2]))
        elif owner is not None and isinstance(called, ast.Attribute) and called.attr in _FILLS:
            self._set_path(owner, _NONE.union(*map(self._of, call.args)))
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
        before, after = dict(self.origins), list[Origins]()
        for body in bodies:
            self.origins = dict(before)
            self._repeat(body, {}) if repeated else self.run(body)
            after.append(self.origins)
        self.origins = self._merged_origins(after)
        self._decides = outer

    def _repeat(self, body: list[ast.stmt], targets: dict[ast.expr, ast.expr]) -> None:
        after = list[Origins]()
        for _ in range(2):
            for target, value in targets.items():
                self._set(target, self._of(value))
            self.run(body)
            after.append(dict(self.origins))
        self.origins = self._merged_origins(after)

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
            if (owner := path_of(target.value)) is not None:
                if ast.unparse(target.slice) in (":", "..."):
                    self._set_path(owner, origins)
                else:
                    self.filled.add(owner)
                    self.kept |= origins & {owner}
                    origins |= self._of(target.slice)
                    others = self._other_items(owner, target.slice)
                    self._put(owner, origins, reads=False)
                    self.origins |= others
                    if _is_the_same_again(target.slice):
                        self.origins[ast.unparse(target)] = origins | self._decides
        elif (path := path_of(target)) is not None:
            self.assigned.add(path)
            self._set_path(path, origins)

    def _set_path(self, path: str, origins: frozenset[str]) -> None:
        self.changed.add(path)
        self._forget_items(path)
        self.origins = {
            name: each for name, each in self.origins.items() if not name.startswith(f"{path}.")
        }
        self.origins[path] = origins | self._decides
        self.kept |= origins & {path}

    def _put(self, path: str, origins: frozenset[str], *, reads: bool = True) -> None:
        self.changed.add(path)
        self.read |= self._value(path) if reads else _NONE
        self._forget_items(path)
        self.origins[path] = self._value(path) | origins | self._decides

    def _other_items(self, path: str, index: ast.expr) -> Origins:
        """Return the known items that setting the item at a constant index does not change."""
        if not _CONSTANT.fullmatch(f"[{ast.unparse(index)}]"):
            return {}
        items = {name.removeprefix(path): name for name in self.origins if name.startswith(path)}
        return {
            name: self.origins[name] for item, name in items.items() if _CONSTANT.fullmatch(item)
        }

    def _forget_items(self, path: str) -> None:
        """Forget the items that were set, such as `path[:n]` and `buffer[:path]`."""
        named = re.compile(rf"\b{re.escape(path)}\b")
        for name in [each for each in self.origins if "[" in each and named.search(each)]:
            del self.origins[name]

    def _look_for_sinks(self, node: ast.AST) -> None:
        for each in ast.walk(node):
            if isinstance(each, ast.NamedExpr):
                self._set(each.target, self._of(each.value))
            if (call := self._call_of_helper(each)) is not None:
                self._follow(call)
            if isinstance(each, ast.Return | ast.Yield | ast.YieldFrom):
                items = {} if each.value is None else self._items_of(each.value)
                for item, origins in items.items():
                    self.items[item] |= origins | self._decides
                whole = self.containers if items else self.returns
                found = self._of(each) | self._decides
                if self._own is None and _makes_object(each.value):
                    # any of its attributes may be the loss, others are for a log
                    kept = (path for path in found if self.changed.isdisjoint(_prefixes(path)))
                    found = frozenset(kept)
                whole |= found
            elif self._is_sink(each):
                self.used |= self._of(each) | self._decides

    def _call_of_helper(self, node: ast.AST) -> ast.Call | None:
        """Return the call of a helper. If the helper is passed on (`step.compute(inputs, loss)`), a
        call whose arguments are unknown."""
        if isinstance(node, ast.Call):
            return node if path_of(node.func) in self._helpers else None
        if isinstance(node, ast.Name | ast.Attribute) and path_of(node) in self._helpers:
            return ast.Call(node, [], [])
        return None

    def _inside(self, call: ast.Call) -> tuple[_Flow, Helper, dict[str, ast.expr]]:
        """Return a helper's flow, the helper, and the values of its parameters."""
        helper = self._helpers[str(path_of(call.func))]
        steps = frozenset(steps_passed(call, helper, self._given))
        if steps not in helper.flows:
            # the flow of a function that calls itself is unfinished where it is asked for here
            helper.flows[steps] = flow = _Flow(
                steps, helpers=helper.helpers, variables=helper.own_names
            )
            flow.run(helper.code.body)
        return helper.flows[steps], helper, passed_to(call, helper)

    def _returned(self, call: ast.Call, item: str = "") -> Iterator[str]:
        """Yield the paths that affect what a call of a helper returns, or the `[0]` of it."""
        flow, helper, values = self._inside(call)
        passed = self._paths_passed(values, self.origins)
        for path in flow.returned(item):
            yield from self._as_here(path, helper, passed)

    def _paths_passed(
        self, values: Mapping[str, ast.expr], items: Container[str] = ()
    ) -> dict[str, Iterable[str]]:
        paths = {name: path_of(each) for name, each in values.items()}
        return {
            name: dict.fromkeys(self._paths(values[name], items)) if path is None else [path]
            for name, path in paths.items()
        }

    def _as_here(
        self, path: str, helper: Helper, passed: Mapping[str, Iterable[str]]
    ) -> Iterator[str]:
        """Yield the paths that a helper's path has where it is called. `passed` maps its parameters
        to the paths of their values."""
        name, dot, attribute = path.partition(".")
        if name in passed:
            for each in passed[name]:
                yield ".".join(f"{each}{dot}{attribute}".split(".")[:_MOST_PARTS])
        elif name not in helper.own_names:
            if name in helper.closed_over or (
                helper.module is None and name not in self._variables
            ):
                yield path
            elif helper.module is not None:
                yield f"{helper.module}.{path}"

    def _follow(self, call: ast.Call) -> None:
        """Follow the values that a helper gives to the loss, and those that it changes."""
        flow, helper, values = self._inside(call)

        passed = self._paths_passed(values, self.origins)

        @cache
        def origins_of(path: str) -> frozenset[str]:
            here = self._as_here(path, helper, passed)
            return _NONE.union(*map(self._value, here))

        self.used |= _NONE.union(*map(origins_of, flow.used))
        self.used |= self._decides if flow.used else _NONE
        targets = self._paths_passed(values) if flow.changed else {}
        changed = {path: [*self._as_here(path, helper, targets)] for path in flow.changed}
        origins = {
            path: _NONE.union(*map(origins_of, flow.origins.get(path, ())))
            for path, here in changed.items()
            if here
        }
        for path, each in origins.items():
            name = path.partition(".")[0]
            # a parameter that the helper assigns is another variable than the caller's
            is_same = name not in values or path_of(values[name]) is not None
            for one in changed[path]:
                if is_same and not (path in values and path in flow.assigned):
                    self._set_path(one, each)
                else:
                    self._put(one, each)

    def _is_sink(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        owner = node.func.value
        is_step = isinstance(owner, ast.Name) and owner.id in self._given
        return node.func.attr in _SINKS and (is_step or self._own is not None)

    def _of(self, node: ast.AST) -> frozenset[str]:
        paths = list(self._paths(node, self.origins))
        self.staged |= {path.partition("[")[0] for path in paths if "[" in path}
        found = _NONE.union(*map(self._value, paths))
        self.read |= found
        return found

    def _paths(self, node: ast.AST, items: Container[str]) -> Iterator[str]:
        """Yield the paths that an expression reads. `items` contains the known items of
        containers, such as `buffer[:n]`."""
        if (path := path_of(node)) is not None:
            yield path
            if (call := self._call_of_helper(node)) is not None:
                yield from self._returned(call)
            return
        if isinstance(node, ast.Subscript) and (item := ast.unparse(node)) in items:
            yield item
            return
        if isinstance(node, ast.Call) and self._call_of_helper(node) is not None:
            yield from self._returned(node)
            return
        bound = _bound_by(node)
        for each in ast.iter_child_nodes(node):
            paths = self._paths(each, items)
            yield from (path for path in paths if path.partition(".")[0] not in bound)

    def _value(self, path: str) -> frozenset[str]:
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            if (known := self.origins.get(owner := ".".join(parts[:length]))) is not None:
                # in `statistics.update(x); statistics.mean`, the object is still the one before
                return known | self._at_first(path) if owner in known else known
        return self._at_first(path)

    def _at_first(self, path: str) -> frozenset[str]:
        return frozenset(_prefixes(path))


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _makes_object(node: ast.AST | None) -> bool:
    """True for a call such as `Output(loss, running)`."""
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Name) and called.id[0].isupper()


def _has_starred(node: ast.Tuple) -> bool:
    return any(isinstance(each, ast.Starred) for each in node.elts)


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
    return called.value if path_of(called.value) is not None else None


def _is_the_same_again(index: ast.expr) -> bool:
    """True if a second computation of the index gives the same index."""
    calls = [each.func for each in ast.walk(index) if isinstance(each, ast.Call)]
    return all(getattr(each, "id", getattr(each, "attr", "")) in _LENGTHS for each in calls)


def path_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := path_of(node.value)) is not None:
        return f"{owner}.{node.attr}"
    named = _attribute_named(node, "getattr")
    return None if named is None else path_of(named)


def _attribute_named(node: ast.AST, function: str) -> ast.Attribute | None:
    """Return the attribute of a call such as `getattr(state, "ema")`."""
    if not isinstance(node, ast.Call) or path_of(node.func) != function or len(node.args) < 2:
        return None
    owner, name, *_ = node.args
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        return None
    return ast.Attribute(owner, name.value)


def _bound_by(node: ast.AST) -> set[str]:
    if isinstance(node, _FUNCTION):
        return {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
    targets = (each.target for each in getattr(node, "generators", ()))
    return {each.id for one in targets for each in ast.walk(one) if isinstance(each, ast.Name)}
