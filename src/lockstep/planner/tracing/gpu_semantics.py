"""Torch's choices for a GPU, on tensors that stand for a GPU's: autocast and attention. Code that
asks where a tensor is hears that it is not on a CPU.

Operations that autocast computes in float32:
https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.base.torch_private import tree_map
from lockstep.planner.tracing.torch_fakes import TorchFunctionMode

SHORT = (torch.bfloat16, torch.float16)
IN_FLOAT32 = frozenset(
    {
        *(
            functional.layer_norm,
            functional.group_norm,
            functional.softmax,
            functional.log_softmax,
            functional.cross_entropy,
        ),
        *(
            functional.nll_loss,
            functional.mse_loss,
            functional.l1_loss,
            functional.smooth_l1_loss,
            functional.kl_div,
        ),
        *(
            functional.cosine_similarity,
            functional.cosine_embedding_loss,
            functional.normalize,
            functional.softplus,
        ),
        *(
            torch.softmax,
            torch.log_softmax,
            torch.exp,
            torch.log,
            torch.pow,
            torch.sum,
            torch.prod,
            torch.cumsum,
            torch.norm,
            torch.rsqrt,
        ),
        *(
            torch.layer_norm,
            torch.reciprocal,
            torch.cosh,
            torch.sinh,
            torch.tan,
            torch.acos,
            torch.asin,
            torch.log2,
            torch.log10,
        ),
        *(
            Tensor.softmax,
            Tensor.log_softmax,
            Tensor.exp,
            Tensor.log,
            Tensor.pow,
            Tensor.sum,
            Tensor.prod,
            Tensor.cumsum,
            Tensor.norm,
        ),
        *(Tensor.rsqrt, Tensor.reciprocal, Tensor.__pow__),
    }
)

IS_CPU = Tensor.is_cpu.__get__  # type: ignore[attr-defined]


class GpuSemantics(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function == IS_CPU:
            return False
        if function is functional.scaled_dot_product_attention:
            # a CPU computes attention with dropout in parts; a GPU in one kernel
            kwargs.pop("dropout_p", None)
            args = args[:4] + ((0.0, *args[5:]) if len(args) > 4 else ())
        elif function in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_widened, (args, kwargs))
        return function(*args, **kwargs)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in SHORT else value
