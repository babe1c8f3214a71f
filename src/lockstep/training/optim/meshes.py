"""Optimizers whose parameters are on several meshes: tensor parallel, sharded, both, or neither."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def separate_meshes(optimizer: Optimizer) -> None:
    """Make each step of `optimizer` update the parameters of one mesh at a time: torch's foreach and fused kernels refuse a mixture.

    During a step, each param group is split by mesh; before and after it, the groups are the user's own. Call it once, before the
    optimizer's first step, if tensor parallelism has sharded some of its parameters.
    """
    if all(len(_by_mesh(group["params"])) == 1 for group in optimizer.param_groups):
        return
    kept: list[list[dict[str, Any]]] = []

    def before(*arguments: Any) -> None:
        after()  # if the previous step failed
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
