from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from types import FrameType
from typing import Any

from torch import Size, Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.base.contents import is_users_file
from lockstep.base.errors import RecipeError
from lockstep.base.nested import tree_tensors
from lockstep.model.random_functions import draws

_LIKE = "_lockstep_like"


class StageDraws(TorchFunctionMode):
    """Refuses random functions without a `generator` in a user's hook on parameters of pipeline
    stages. All ranks of the pipeline have the same seeds in the default generators. A draw in a
    stage's hook would give the numbers that one process draws for the first stage. A tensor that
    only has the shape of a parameter is not refused, unless a variable of the hook holds such a
    parameter."""

    def __init__(self, models: Iterable[nn.Module], pipeline: int) -> None:
        super().__init__()
        self._models = list(models)
        self._pipeline = pipeline
        self._caller: FrameType | None = None

    def __enter__(self) -> StageDraws:
        self._caller = sys._getframe(1)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        self._caller = None  # a frame keeps all of its variables alive
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws(func, args, kwargs) and kwargs.get("generator") is None:
            name = next((each for each in map(self._name, _drawn(args, kwargs)) if each), None)
            if name is not None:
                raise RecipeError(
                    f"{func.__name__}() in a hook, of the shape of {name}, with"
                    f" pipeline={self._pipeline}; each process has the parameters of its own stages"
                    " and would draw other numbers for them than one process; give each parameter"
                    " its own generator, seeded by run.step and the parameter's name:"
                    " torch.empty_like(parameter).normal_(generator=generator), for example"
                )
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and any(id(each) in self._by_identity for each in args):
            setattr(result, _LIKE, True)
        return result

    def _name(self, drawn: Tensor | Size | tuple[int, ...]) -> str | None:
        if isinstance(drawn, Tensor) and id(drawn) in self._by_identity:
            return self._by_identity[id(drawn)]
        shape = drawn.shape if isinstance(drawn, Tensor) else Size(drawn)
        is_of_tensor = isinstance(drawn, Size) or hasattr(drawn, _LIKE)
        name = self._by_shape.get(shape)
        return name if is_of_tensor or (name and self._is_in_variable(shape)) else None

    def _is_in_variable(self, shape: Size) -> bool:
        """Return True if a local variable of the hook is a parameter or gradient of this shape."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._caller:
            if is_users_file(frame.f_code.co_filename) and any(
                isinstance(each, Tensor) and each.shape == shape and id(each) in self._by_identity
                for each in frame.f_locals.values()
            ):
                return True
            frame = frame.f_back
        return False

    @cached_property
    def _by_shape(self) -> dict[Size, str]:
        return {each.shape: name for name, each in self._parameters if math.prod(each.shape) > 1}

    @cached_property
    def _by_identity(self) -> dict[int, str]:
        tensors = ((name, one) for name, each in self._parameters for one in (each, each.grad))
        return {id(each): name for name, each in tensors if each is not None}

    @cached_property
    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [named for model in self._models for named in model.named_parameters()]


def _drawn(args: Any, kwargs: Any) -> Iterator[Tensor | Size | tuple[int, ...]]:
    """Two or more integer arguments are a tensor size. The meaning of a single integer is
    unknown."""
    yield from tree_tensors((args, kwargs))
    for each in (*args, kwargs.get("size"), args):
        is_size = isinstance(each, tuple | list) and all(type(one) is int for one in each)
        if is_size and (isinstance(each, Size) or len(each) > 1):
            yield each if isinstance(each, Size) else tuple(each)
