"""The hook that finds values that a script's loop carries from one step into the loss of a later
step, such as a running reward, a hidden state or a replay buffer."""

from __future__ import annotations

import inspect
import tokenize
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base.contents import Reader, attributes, digest_parts, is_users
from lockstep.base.errors import first_few
from lockstep.base.loop_flow import (
    LoopFlow,
    MethodsFlow,
    assigned,
    flow_of_loop,
    flow_of_methods,
    steps_of,
)
from lockstep.base.torch_private import own_buffers, tree_leaves, version
from lockstep.comm.mesh import to_local
from lockstep.hooks.loop_variables import Helpers, frame_of_script, local_variables, loop_of
from lockstep.hooks.loss_check import report_state
from lockstep.training.checksum import checksum
from lockstep.training.hook import ControlHook
from lockstep.training.run import Run
from lockstep.training.set_up import Remark

TOLD_AFTER = (3, 15)
"""Numbers of steps after which findings are reported. The second report finds values that change
only every fourth step."""
_SAVE = "keep it in an object with state_dict and load_state_dict that session.include saves"
_OF_VARIABLES = f"compute it by session.mean or session.gather, and {_SAVE}"
_OF_OBJECTS = (
    "change it after the microbatches, on every rank by the rows of all, which session.gather"
    " returns, in the order of their samples, and give it state_dict and load_state_dict for"
    " session.include"
)
_OF_TRAINED = (
    "make it a model of the session, by session.prepare, with a loop over step.microbatches() and a"
    " step.commit for its own loss"
)
_CONTAINERS = (list, tuple, dict, set, deque, np.ndarray)
_MOST_LEVELS = 8
"""Maximum number of objects inside each other that are looked into."""
_NUMBERS = (bool, int, float, np.number, np.bool_)


class _Seen(NamedTuple):
    """A value that the loss uses, at the beginning of a step."""

    remedy: str
    mark: Any
    """The value that the next step compares: a number, a digest of a container, or a weak reference
    to a tensor. A strong reference would keep the autograd graph alive."""
    writes: Sequence[int] = ()
    is_compared: bool = True
    may_drop: bool = True
    """False for a dict that is assigned anew: keys that it lacks are no eviction from a cache."""


class CarriedVariables(ControlHook):
    """Reports variables of a script's loop, and attributes of objects in the loop, whose values
    affect the loss of a later step. A value that changes only once is a cache."""

    def __init__(self) -> None:
        self._steps = 0
        self._flow = LoopFlow([], [])
        self._called: set[str] = set()
        self._modules: Mapping[str, ModuleType] = {}
        self._assigned: set[str] = set()
        self._code: dict[type, tuple[str, ...]] = {}
        self._methods: dict[str, MethodsFlow] = {}
        self._seen: dict[str, _Seen] = {}
        self._changes, self._writes = Counter[str](), Counter[str]()
        self._told: set[str] = set()

    def before_step(self, run: Run) -> None:
        is_watched = run.recipe is None and run.context.recovered_from is None
        if not is_watched or self._steps > TOLD_AFTER[-1]:
            return
        frame = frame_of_script()
        if self._steps == 0 and (loop := loop_of(frame)) is not None:
            helpers = Helpers(frame)
            known = {**frame.f_globals, **local_variables(frame)}
            used = helpers.used_by(loop, steps_of(loop), known)
            self._flow = flow_of_loop(loop, used, helpers.local_names)
            self._called = {path for path, each in used.items() if each.code.name == "__call__"}
            self._modules = helpers.modules
            self._assigned = set[str]().union(*map(assigned, [loop, *helpers.codes()]))
        variables: dict[str, Any] = {}
        if self._flow.used:
            variables = {**self._modules, **frame.f_globals, **local_variables(frame)}
        seen = dict(self._look(variables, run))
        for name, now in seen.items():
            if (before := self._seen.get(name)) is not None:
                self._changes[name] += not _is_same(before.mark, now.mark, may_drop=now.may_drop)
                self._writes[name] += before.writes != now.writes
        self._seen = seen
        if self._steps in TOLD_AFTER:
            self._tell(run)
        if self._steps == TOLD_AFTER[-1]:
            self._seen = {}
        self._steps += 1

    def _look(self, variables: Mapping[str, Any], run: Run) -> Iterator[tuple[str, _Seen]]:
        saved = {id(each) for each in run.training.stateful.values()}
        saved |= {id(each.model) for each in run.training.modules}
        trained_here = {id(each) for one in run.training.modules for each in one.model.parameters()}
        for name in dict.fromkeys(each.partition(".[")[0] for each in self._flow.used):
            if name in self._told:  # a long buffer takes a while to read
                continue
            value = _value_of(variables, name, saved)
            if trained := [each for each in _trained(value) if id(each) not in trained_here]:
                yield name, _Seen(_OF_TRAINED, trained, [version(each) for each in trained])
            elif (
                name in self._flow.carried and (seen := _seen_in(value, _OF_VARIABLES)) is not None
            ):
                is_compared = isinstance(value, _NUMBERS) or _is_scalar(value)
                may_drop = name.rpartition(".")[2] not in self._assigned
                yield name, seen._replace(is_compared=is_compared, may_drop=may_drop)
            yield from self._look_into(name, value, self._flow.used, saved)

    def _look_into(
        self, name: str, value: Any, used: Iterable[str], saved: Set[int]
    ) -> Iterator[tuple[str, _Seen]]:
        """Look at the attributes through which an object carries values. `used` contains the paths
        that the loss uses."""
        if not is_users(type(value).__module__) or isinstance(value, Optimizer | Tensor):
            return
        if name not in self._methods:
            names = {
                each.removeprefix(name).removeprefix(".") for each in used if _is_of(each, name)
            }
            if (kind := type(value)) not in self._code:
                self._code[kind] = tuple(code_of(kind))
            is_called = name not in self._called
            self._methods[name] = flow_of_methods(self._code[kind], names, is_called=is_called)
        methods, own = self._methods[name], _attributes(value)
        by_loop = [each for each in methods.used if f"{name}.{each}" in self._flow.kept]
        for each, only_items in (dict.fromkeys(by_loop, False) | methods.kept).items():
            item = _value_of(own, each, saved)
            if item is None and "." in each:  # such as `buffer.data`
                each = each.partition(".")[0]
                item = _value_of(own, each, saved)
            path = f"{name}.{each}"
            if path in self._told:
                continue
            if only_items and _is_by_name(item):
                continue  # as attributes that are set, such as the outputs of layers
            if (seen := _seen_in(item, _OF_OBJECTS)) is not None:
                yield path, seen._replace(may_drop=each not in methods.assigned)
            elif name.count(".") < _MOST_LEVELS:
                yield from self._look_into(
                    path, item, {f"{name}.{one}" for one in methods.used}, saved | {id(value)}
                )

    def _tell(self, run: Run) -> None:
        """Every rank must call this method."""
        mine = {
            name: _for_all(seen)
            for name, seen in self._seen.items()
            if self._changes[name] + self._writes[name] > 1
        }
        # tensors of variables that are changed in place are reported by ReplicaAudit
        lost = [name for name in mine if self._changes[name] > 1 or "." in name]
        everyone = run.context.world.gather_values((mine, lost))
        names = sorted({name for found, _ in everyone for name in found} - self._told)
        differing = [
            name for name in names if len({repr(found.get(name)) for found, _ in everyone}) > 1
        ]
        what = "the loss uses {}, which the loop carries from one step to the next"
        if differing:
            name = differing[0]
            values = [f"{found.get(name)} on rank {at}" for at, (found, _) in enumerate(everyone)]
            is_number = isinstance(mine.get(name), float)
            report_state(
                run,
                f"{what.format(first_few(differing))}, and {name} is"
                f" {first_few(values) if is_number else 'not the same on all ranks'}: what is"
                f" learned depends on the number of processes; {self._remedy(name)}",
            )
        all_lost = {name for _, found in everyone for name in found}
        if only_lost := [name for name in names if name in all_lost and name not in differing]:
            line = (
                f"warning: {what.format(first_few(only_lost))}: no checkpoint holds it, and a"
                f" resumed run goes on with another value; {self._remedy(only_lost[0])}"
            )
            run.training.remark(Remark("variables-not-saved", {"variables": only_lost}, line))
        self._told |= {*names}

    def _remedy(self, name: str) -> str:
        return self._seen[name].remedy if name in self._seen else _OF_VARIABLES


def _is_of(path: str, owner: str) -> bool:
    return path == owner or path.startswith(f"{owner}.")


def _value_of(variables: Mapping[str, Any], path: str, saved: Set[int]) -> Any:
    name, *names = path.split(".")
    value = variables.get(name)
    for each in names:
        if isinstance(value, nn.Module | Optimizer) or id(value) in saved:
            return None
        value = attributes(value).get(each)
    return None if isinstance(value, Optimizer) or id(value) in saved else value


def _attributes(value: Any) -> dict[str, Any]:
    return attributes(value) | (own_buffers(value) if isinstance(value, nn.Module) else {})


def _trained(value: Any) -> list[Tensor]:
    tensors = value.parameters() if isinstance(value, nn.Module) else [value]
    return [
        each
        for each in tensors
        if isinstance(each, Tensor) and each.is_leaf and each.requires_grad and _can_be_read(each)
    ]


def _seen_in(value: Any, remedy: str) -> _Seen | None:
    if isinstance(value, _NUMBERS):
        return _Seen(remedy, float(value))
    if not isinstance(value, (Tensor, *_CONTAINERS)) or not all(
        map(_can_be_read, tree_leaves(value))
    ):
        return None
    if isinstance(value, Tensor):
        return _Seen(remedy, weakref.ref(value), [version(value)])
    if isinstance(value, dict):
        return _Seen(remedy, {repr(name): _digest(each) for name, each in value.items()})
    return _Seen(remedy, _digest(value))


def _can_be_read(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return not isinstance(value, nn.Module | Optimizer)
    return to_local(value) is value and value.layout is torch.strided and not value.is_meta


def _is_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _is_same(before: Any, now: Any, *, may_drop: bool) -> bool:
    if isinstance(before, weakref.ref) and isinstance(now, weakref.ref):
        return before() is now()
    # equal if it has only new keys, or lacks some: such a dict is a cache
    if isinstance(before, dict) and isinstance(now, dict):
        return all(
            now[name] == digest if name in now else may_drop for name, digest in before.items()
        )
    # trained tensors: an optimizer changes them in place, which `writes` shows
    if isinstance(before, list):
        return True
    return type(before) is type(now) and repr(before) == repr(now)  # NaN is NaN


def _for_all(seen: _Seen) -> float | str | None:
    if not seen.is_compared:
        return None
    value = seen.mark() if isinstance(seen.mark, weakref.ref) else seen.mark
    if isinstance(value, Tensor):
        return float(value) if _is_scalar(value) else str(int(checksum(value)))
    if isinstance(value, list):
        return repr([int(checksum(each)) for each in value])
    return value if isinstance(value, float) else repr(value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def _digest(value: Any) -> str:
    return repr(digest_parts(Reader(most_bytes=1 << 20).parts(value))[0])


def code_of(kind: type) -> Iterator[str]:
    """Yield the source code of a class and its bases, without classes of lockstep or of installed
    packages."""
    for each in kind.__mro__:
        if is_users(each.__module__):
            # the source file is missing, or was edited since the class was defined
            with suppress(OSError, TypeError, SyntaxError, tokenize.TokenError):
                yield inspect.getsource(each)
