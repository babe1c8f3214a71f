"""Tries an optimizer on a small sharded matrix beside the same matrix whole, on the mesh that its
parameters are on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.base import torch_private
from lockstep.training.optim.element_wise import TOLERANCE, updated

COLUMNS, STEPS = 12, 2


def updates_shards_as_wholes(optimizer: Optimizer) -> bool | None:
    """True if the optimizer updates a shard as it would the whole matrix. None if it could not be
    tried.

    All ranks must call it: an optimizer that gathers its tensors communicates.
    """
    for group in optimizer.param_groups:
        sharded = [
            each
            for each in group["params"]
            if torch_private.is_distributed(each) and each.dim() >= 2
        ]
        if (
            sharded
            and sharded[0].device_mesh.ndim == 1
            and (found := _try(optimizer, group, sharded[0].device_mesh)) is not None
        ):
            return found
    return None


def _try(optimizer: Optimizer, group: dict[str, Any], mesh: Any) -> bool | None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    generator = torch.Generator().manual_seed(0)
    rows = 2 * mesh.size() + 1  # the last rank has fewer
    values = [
        torch.randn(rows, COLUMNS, generator=generator).to(mesh.device_type)
        for _ in range(STEPS + 1)
    ]
    rank = mesh.get_local_rank()
    parts = values[0].chunk(mesh.size())

    def sharded(value: Tensor) -> Any:
        own = value.chunk(mesh.size())[rank] if rank < len(parts) else value[:0]
        return DTensor.from_local(
            own.clone(), mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride()
        )

    def replicated(value: Tensor) -> Any:
        return DTensor.from_local(value.clone(), mesh, [Replicate()], run_check=False)

    try:
        whole = torch_private.to_local(
            updated(
                optimizer, group, replicated(values[0]), [replicated(each) for each in values[1:]]
            )
        )
        part = torch_private.to_local(
            updated(optimizer, group, sharded(values[0]), [sharded(each) for each in values[1:]])
        )
    except Exception:
        return None
    if rank >= len(parts):
        return True
    first = sum(len(each) for each in parts[:rank])
    right = whole[first : first + len(part)]
    return bool((part - right).norm() <= TOLERANCE * (right - parts[rank]).norm())
