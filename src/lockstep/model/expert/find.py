"""Finds the modules that hold the experts of a model. A module of experts computes all experts of a
layer. The parameters of the module are stacked, with the experts as dim 0. The forward takes tokens
(S, D), the chosen experts of each token (S, k), and the weights of the choices (S, k)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import indent

from torch import nn

from lockstep.base.errors import RecipeError
from lockstep.model.blocks import check_not_nested, matching_names, outermost

ARGUMENTS = 3
TO_WRITE = """
import torch
from torch import nn
from torch.nn import functional as F

class Experts(nn.Module):
    def __init__(self, experts={experts}, width={width}, hidden={hidden}):
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)

    def forward(self, tokens, index, weights):  # (S, D), (S, k), (S, k)
        output = torch.zeros_like(tokens)
        for expert in index.unique().tolist():
            row, choice = (index == expert).nonzero(as_tuple=True)
            computed = F.silu(tokens[row] @ self.up[expert]) @ self.down[expert]
            weighted = computed * weights[row, choice, None]
            output = output.index_add(0, row, weighted.to(output.dtype))
        return output
"""
"""Code of a module of experts that an error suggests. The suggested code replaces a list of expert
modules."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A module that computes all experts of a layer."""

    module: nn.Module
    count: int


def find_experts(model: nn.Module, names: Sequence[str] | None) -> dict[str, Experts]:
    """If `names` is None, find the modules that have stacked parameters and a forward of three
    arguments. Raises `RecipeError` for names of other modules, and for experts in a list of
    modules."""
    experts = stacked_experts(model, names)
    if names is None and not experts and (lists := _lists_of_experts(model)):
        raise RecipeError(_refused_list(*next(iter(lists.items()))))
    return experts


def stacked_experts(model: nn.Module, names: Sequence[str] | None) -> dict[str, Experts]:
    modules = {name: module for name, module in model.named_modules() if name}
    if names is None:
        outer = outermost([name for name, module in modules.items() if _looks_like(module)])
    else:
        matches = [
            outermost(matching_names(list(modules), pattern, "Recipe.experts has", "*.experts"))
            for pattern in names
        ]
        outer = [name for name in modules if any(name in several for several in matches)]
        check_not_nested(outer, "experts")
    return {name: Experts(modules[name], _count(name, modules[name])) for name in outer}


def _looks_like(module: nn.Module) -> bool:
    shapes = [parameter.shape for parameter in module.parameters()]
    return (
        any(len(shape) > 2 for shape in shapes)
        and all(shape[:1] == shapes[0][:1] for shape in shapes)
        and _takes_three(module)
    )


def _takes_three(module: nn.Module) -> bool:
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = [
        each for each in inspect.signature(module.forward).parameters.values() if each.kind in kinds
    ]
    required = [each for each in given if each.default is inspect.Parameter.empty]
    return len(required) <= ARGUMENTS <= len(given)


def _count(name: str, module: nn.Module) -> int:
    if isinstance(module, nn.ModuleList):
        raise RecipeError(_refused_list(name, module))
    shapes = {each: tuple(tensor.shape) for each, tensor in module.named_parameters()}
    counts = {shape[:1] for shape in shapes.values()}
    if len(counts) != 1 or not (count := next(iter(counts))):
        said = ", ".join(f"{each} {shape}" for each, shape in shapes.items()) or "no parameters"
        raise RecipeError(
            f"Recipe.experts names {name!r}, which has {said}; the experts are dim 0 of every"
            " parameter of such a module; name the module whose parameters are stacked so, without"
            " its router"
        )
    return count[0]


def _lists_of_experts(model: nn.Module) -> dict[str, nn.ModuleList]:
    lists = {}
    for name, module in model.named_modules():
        for child, members in module.named_children():
            if not isinstance(members, nn.ModuleList) or len(members) < 2:
                continue
            routers = [getattr(each, "out_features", 0) for each in module.children()]
            if len({_shapes(each) for each in members}) == 1 and (
                "expert" in child or len(members) in routers
            ):
                lists[f"{name}.{child}" if name else child] = members
    return lists


def _shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in module.parameters())


def _refused_list(name: str, members: nn.ModuleList) -> str:
    linear = [each for each in members.modules() if isinstance(each, nn.Linear)]
    width, hidden = (linear[0].in_features, linear[0].out_features) if linear else (512, 2048)
    lines = TO_WRITE.format(experts=len(members), width=width, hidden=hidden)
    return (
        f"{name} is a list of {len(members)} modules; the experts of a layer are one module whose"
        " parameters are stacked, so that each rank can hold some of them, and whose forward takes"
        f" all tokens; write one module instead, and call it once with all tokens:\n"
        f"{indent(lines, '    ')}"
    )
