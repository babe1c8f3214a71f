from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from torch import Size, Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import tree_leaves
from lockstep.model.random_functions import draws


class StageDraws(TorchFunctionMode):
    """Refuses random functions without a `generator` in a user's hook on parameters of pipeline
    stages. The default generators have the same seeds on all ranks of the pipeline. Each stage
    would draw the numbers that one process draws for the first stage."""

    def __init__(self, models: Iterable[nn.Module], pipeline: int) -> None:
        super().__init__()
        self._models = list(models)
        self._pipeline = pipeline

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
        return func(*args, **kwargs)

    def _name(self, drawn: Tensor | Size) -> str | None:
        if isinstance(drawn, Tensor):
            return self._by_identity.get(id(drawn)) or self._by_shape.get(drawn.shape)
        return self._by_shape.get(drawn)

    @cached_property
    def _by_shape(self) -> dict[Size, str]:
        return {each.shape: name for name, each in self._parameters if math.prod(each.shape) > 1}

    @cached_property
    def _by_identity(self) -> dict[int, str]:
        return {id(one): name for name, each in self._parameters for one in (each, each.grad)}

    @cached_property
    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [named for model in self._models for named in model.named_parameters()]


def _drawn(args: Any, kwargs: Any) -> Iterator[Tensor | Size]:
    """Two or more integers are a size. A single integer may mean anything."""
    yield from (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
    for each in (*args, kwargs.get("size"), args):
        is_size = isinstance(each, tuple | list) and all(type(one) is int for one in each)
        if is_size and (isinstance(each, Size) or len(each) > 1):
            yield Size(each)
