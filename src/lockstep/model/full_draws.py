from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode

from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import tree_leaves
from lockstep.model.random_functions import draws

_LIKE = frozenset({torch.randn_like, torch.rand_like, torch.randint_like})
_FILLING = frozenset(
    {
        Tensor.bernoulli_,
        Tensor.cauchy_,
        Tensor.exponential_,
        Tensor.geometric_,
        Tensor.log_normal_,
        Tensor.normal_,
        Tensor.random_,
        Tensor.uniform_,
    }
)


class FullDraws(TorchFunctionMode):
    """Every rank draws the random numbers of the full DTensor and keeps the numbers of its shard.
    Torch itself would draw separate numbers for each rank's shard. The default generators must have
    the same seeds on all ranks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        sharded = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
        if not sharded:
            return func(*args, **kwargs)
        is_first = bool(args) and args[0] is sharded[0] and len(sharded) == 1
        if not is_first or func not in _LIKE | _FILLING:
            name = func.__name__
            raise RecipeError(
                f"{name}() of a parameter or gradient that is sharded; each rank would draw the"
                " numbers of its own part; draw them for the full tensor,"
                f" torch.randn_like(parameter) or parameter.uniform_() for example, and compute"
                f" {name}() from them, or choose replicate"
            )
        tensor = sharded[0]
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        with torch.no_grad():
            drawn = distribute_tensor(
                func(full, *args[1:], **kwargs),
                tensor.device_mesh,
                tensor.placements,
                src_data_rank=None,
            )
            if func in _LIKE:
                return drawn
            tensor.to_local().copy_(drawn.to_local())
        return tensor
