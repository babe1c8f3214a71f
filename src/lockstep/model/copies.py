"""A copy of a model for one thread to compute with: the model's own parameters in memory, with gradients of their own.

It is what `torch.nn.DataParallel` gives each device, but for parameters that are leaves. What a forward sets on it is thrown away with it,
so it is looked for, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from torch import Tensor, nn

from lockstep.base.torch_private import MODULE_DICTS, RECURRENT_CACHES, gradient_hooks, own_modules, own_parameters

_MISSING = object()


@dataclass(slots=True)
class _Made:
    """A module of the copy."""

    module: nn.Module
    own: nn.Module
    """The model's."""
    before: dict[str, Any]
    """Its attributes before the first forward, containers as copies."""
    made_from: dict[str, Any]
    """The attributes of `own` at that time."""

    @classmethod
    def of(cls, own: nn.Module) -> _Made:
        module = type(own).__new__(type(own))
        object.__setattr__(module, "__dict__", _with_own_containers(vars(own)))
        return cls(module, own, {}, _with_own_containers(vars(own)))

    def note(self) -> None:
        self.before = _with_own_containers(vars(self.module))

    def is_current(self) -> bool:
        """Whether the model's has not been changed since, but for values of its parameters and buffers."""
        return _first_other(vars(self.own), self.made_from) is None and self._moved() is None

    def changed(self) -> str | None:
        """The name of what a forward has set since; not where it is equal to what was there."""
        return _first_other(vars(self.module), self.before) or self._moved()

    def _moved(self) -> str | None:
        """The name of a parameter that is elsewhere in memory than the model's."""
        for name, parameter in own_parameters(self.own).items():
            if parameter is not None and _place(own_parameters(self.module)[name]) != _place(parameter):
                return name
        return None


@dataclass(slots=True)
class Copy:
    """Made by `of`."""

    model: nn.Module
    parameters: dict[int, nn.Parameter] = field(default_factory=dict)
    """By the id of the model's own."""
    _made: dict[int, _Made] = field(default_factory=dict)
    """By the id of the model's own module."""

    @classmethod
    def of(cls, model: nn.Module) -> Copy:
        copy = cls(model)
        copy.model = copy._module(model)
        return copy

    def _module(self, own: nn.Module) -> nn.Module:
        if id(own) in self._made:
            return self._made[id(own)].module
        made = self._made[id(own)] = _Made.of(own)
        for name, parameter in own_parameters(own).items():
            if parameter is not None and id(parameter) not in self.parameters:
                self.parameters[id(parameter)] = _alias(parameter)
            own_parameters(made.module)[name] = None if parameter is None else self.parameters[id(parameter)]
        for name, child in own_modules(own).items():
            own_modules(made.module)[name] = None if child is None else self._module(child)
        made.note()
        return made.module

    def is_current(self) -> bool:
        """Whether it is a copy of the model as it is now."""
        plain = not any(gradient_hooks(parameter) or vars(parameter) for made in self._made.values() for parameter in _parameters(made.own))
        return plain and all(made.is_current() for made in self._made.values())

    def left_behind(self) -> str | None:
        """What forwards have set on a module, in words."""
        for made in self._made.values():
            if (attribute := made.changed()) is not None:
                where = next(name for name, module in self.model.named_modules() if module is made.module)
                return f"{attribute!r} of {where or 'the model'}"
        return None


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """The same values, and the same hooks on its gradient."""
    alias = nn.Parameter(parameter.detach(), parameter.requires_grad)
    alias.__class__ = parameter.__class__
    alias.__dict__.update(parameter.__dict__)
    for hook in gradient_hooks(parameter).values():
        alias.register_hook(hook)  # type: ignore[no-untyped-call]
    return alias


def _with_own_containers(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a module, of which dicts, lists and sets are copies. Hooks are in dicts of another type, and stay the model's."""
    return {name: value.copy() if type(value) in (dict, list, set) or name in MODULE_DICTS else value for name, value in attributes.items()}


def _first_other(now: dict[str, Any], before: dict[str, Any]) -> str | None:
    """The first attribute of a module, parameter, buffer or child that is not what it was."""
    for part in MODULE_DICTS:
        same = len(now[part]) == len(before[part]) and all(map(is_, now[part].values(), before[part].values()))
        if not same and (found := _other(now[part], before[part], is_)) is not None:
            return found
    return None if _equal(now, before) else _other(now, before, _equal)


def _other(now: dict[str, Any], before: dict[str, Any], same: Callable[[Any, Any], bool]) -> str | None:
    """The first name under which there is something else."""
    names = now.keys() | before.keys() if now.keys() != before.keys() else now
    return next(
        (name for name in names if name not in RECURRENT_CACHES and not same(now.get(name, _MISSING), before.get(name, _MISSING))), None
    )


def _equal(one: Any, other: Any) -> bool:
    """Python takes what is identical as equal, also in containers. What cannot say whether it is equal is not."""
    try:
        return bool(one is other or one == other)
    except Exception:
        return False


def _parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in own_parameters(module).values() if parameter is not None)


def _place(parameter: Tensor | None) -> tuple[Any, ...]:
    return () if parameter is None else (parameter.data_ptr(), parameter.shape)
