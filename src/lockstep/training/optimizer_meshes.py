"""Optimizers whose parameters lie on several meshes: cut over the tensor axis, sharded, both, or whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def separate_meshes(optimizer: Optimizer) -> None:
    """Let each step of `optimizer` treat the parameters of one mesh at a time: torch's foreach and fused kernels refuse a mixture.

    Only within a step are there more param groups, each with the settings of the one that it is a part of; before and after it they
    are the user's own. Called once, for an optimizer of a model that `tensor_parallel` has cut, before its first step.
    """
    if all(len(_by_mesh(group["params"])) == 1 for group in optimizer.param_groups):
        return
    kept: list[list[dict[str, Any]]] = []

    def before(*arguments: Any) -> None:
        after()  # where the step before this one failed
        kept.append(optimizer.param_groups)
        optimizer.param_groups = [{**group, "params": params} for group in kept[0] for params in _by_mesh(group["params"])]

    def after(*arguments: Any) -> None:
        if kept:
            groups = kept.pop()
            parts = iter(optimizer.param_groups)
            for group in groups:
                for _ in _by_mesh(group["params"]):  # some optimizers count steps there, each part alike
                    group.update({name: value for name, value in next(parts).items() if name != "params"})
            optimizer.param_groups = groups

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _by_mesh(parameters: list[Tensor]) -> list[list[Tensor]]:
    found: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(found.values())
