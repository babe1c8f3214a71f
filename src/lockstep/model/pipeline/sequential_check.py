"""A check that a model's forward calls its parts one after another and does nothing in between. A
pipeline never calls the model's forward, so its parts must compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.base.errors import RecipeError


class SequentialCheck:
    """The parts of a model, and its original forward. Create it before any axis changes the
    modules' calls."""

    def __init__(self, model: nn.Module, parts: Sequence[str]) -> None:
        self._forward = model.forward
        self._parts = parts
        self._modules = [model.get_submodule(name) for name in parts]
        self._forwards = {id(module): module.forward for module in model.modules()}

    def check(self, call: Callable[[Callable[..., Any]], Any]) -> None:
        """Raise `RecipeError` unless the forward passes each part the output of the one before, and
        returns the last. `call`: calls a function with the model's inputs. The parts are not
        computed, so they need no values."""
        handed: list[_Placeholder] = []
        original: Any = nn.Module.__call__
        known = {id(module) for module in self._modules}

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in known:
                return self._forwards.get(id(module), partial(original, module))(*args, **kwargs)
            place = len(handed)
            if place == len(self._modules) or module is not self._modules[place]:
                raise _NotSequential(self._out_of_turn(place))
            if handed and (kwargs or len(args) != 1 or args[0] is not handed[-1]):
                before = self._parts[place - 1]
                raise _NotSequential(
                    f"must call {self._parts[place]!r} with exactly one argument, the output of "
                    f"{before!r}"
                )
            handed.append(_Placeholder(self._parts[place]))
            return handed[-1]

        nn.Module.__call__ = called  # type: ignore[method-assign]
        try:
            with torch.no_grad():
                returned = call(self._forward)
            if len(handed) < len(self._modules) or returned is not handed[-1]:
                raise _NotSequential(
                    f"returns something other than the output of {self._parts[-1]!r}"
                )
        except Exception as error:
            raise RecipeError(self._said(error, len(handed))) from error
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]

    def _out_of_turn(self, place: int) -> str:
        if place == len(self._parts):
            return f"calls a part after {self._parts[-1]!r}, the last one"
        after = (
            f", which comes after {self._parts[place - 1]!r}" if place else ", which comes first"
        )
        return f"calls another part instead of {self._parts[place]!r}{after}"

    def _said(self, error: Exception, place: int) -> str:
        after = f"after {self._parts[place - 1]!r}" if place else f"before {self._parts[0]!r}"
        own = f"has code of its own {after} ({type(error).__name__}: {error})"
        return (
            f"the model's forward {error if isinstance(error, _NotSequential) else own}; a "
            "pipeline calls only the recipe's stages, each with the output of the one before; "
            "move other code into a part, or name parts that hold it"
        )


class _NotSequential(Exception):
    pass


class _Placeholder:
    """A part's output, which the forward can only pass on."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __iter__(self) -> Any:
        raise _NotSequential(f"takes the output of {self._part!r} apart")

    def __getitem__(self, _: Any) -> Any:
        self.__iter__()
