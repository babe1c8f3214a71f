"""A loss that is a module with parameters of its own, which are trained with the model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from lockstep.base.errors import RecipeError
from lockstep.recipe.recipe import Recipe

NAME = "loss_module"
"""The loss's name in the model, and in the names of its parameters."""


def with_loss_in_model(recipe: Recipe) -> Recipe:
    """The recipe with a loss module as a part of the model, where optimizer, plans and checkpoints
    find its parameters. Unchanged if the loss has none."""
    if not isinstance(recipe.loss, nn.Module) or not any(
        parameter.requires_grad for parameter in recipe.loss.parameters()
    ):
        return recipe
    joined = _LossInModel(recipe.model, recipe.loss)
    return replace(recipe, model=joined.build, loss=joined)


class _LossInModel:
    def __init__(self, build_model: Callable[[], Any], loss: nn.Module) -> None:
        self._build_model = build_model
        self._loss = loss
        self._model: Any = None

    def build(self) -> Any:
        model = self._build_model()
        if not isinstance(model, nn.Module):
            return model
        if hasattr(model, NAME):
            raise RecipeError(
                f"Recipe.loss is a module with parameters, and the model has a {NAME!r} already;"
                " rename that attribute"
            )
        if type(model).forward is nn.Sequential.forward:
            model.__class__ = type(type(model).__name__, (_SequentialBeforeLoss, type(model)), {})
        model.add_module(NAME, copy.deepcopy(self._loss))
        self._model = model
        return model

    def __call__(self, output: Any, batch: Any) -> Any:
        return getattr(self._model, NAME)(output, batch)


class _SequentialBeforeLoss(nn.Sequential):
    def forward(self, input: Any) -> Any:
        for name, module in self._modules.items():  # a module may stand in it twice
            if name != NAME:
                input = module(input)
        return input
