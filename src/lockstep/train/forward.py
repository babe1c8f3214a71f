"""How a recipe's model is called: with what its `inputs` make of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lockstep.base.errors import RecipeError


def output_of(inputs: Callable[[Any], Any] | None, model: nn.Module, batch: Any) -> Any:
    """What `loss` and the metrics are called with: the model's output, or the model itself where the recipe has no `inputs`."""
    if inputs is None:
        return model
    given = given_to(inputs, batch)
    if isinstance(given, tuple):
        return model(*given)
    return model(**given) if isinstance(given, dict) else model(given)


def given_to(inputs: Callable[[Any], Any], batch: Any) -> Any:
    """What `inputs` makes of a batch: a tuple of arguments, a dict of keywords, or one argument. Raises `RecipeError` for what is none."""
    given = inputs(batch)
    if given is None or isinstance(given, list):
        made = f"a list of {len(given)}" if isinstance(given, list) else "None"
        raise RecipeError(
            f"Recipe.inputs returned {made}; the model is called with what it returns: a tuple of arguments, a dict of keywords, or one "
            "tensor; the batches of a TensorDataset are lists: return batch[0], or (batch[0], batch[1]); where the model takes a list as "
            "its one argument, return (that_list,)"
        )
    return given
