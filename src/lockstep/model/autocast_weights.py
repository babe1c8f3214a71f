"""Weights that autocast casts in every use; FSDP2 gathers them in autocast's precision. Casting a
gathered weight gives the same bits as gathering the casts of its shards. But autograd would keep
the former from forward to backward, and FSDP2 could not free it: the full model in bf16 on every
rank. Other code could use such a weight in another operation and get a rounded one; `check_uses`
finds it in the first backward.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lockstep.base.errors import PlanError
from lockstep.base.torch_private import (
    fsdp_parameter_group,
    gather_in,
    gathered_short,
    own_parameters,
    owners_of,
)

_WEIGHTS: dict[type[nn.Module], tuple[str, ...]] = {
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), ("weight",)),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), ("weight",)),
    nn.MultiheadAttention: ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
}
"""Modules of torch -> the parameters that their forwards use in matrix products and convolutions
alone."""
SMALL_PART = 200
"""A weight is small if it has less than 1 / 200 of the elements of its group. A router has at most
1 / (2 h), where h is the width of the experts' hidden layer; the smallest projection of a large
model's attention has 1 / 100."""
VIEWS = (
    "(T|Transpose|Permute|View|UnsafeView|Split|SplitWithSizes|Chunk|Slice|Select|Squeeze|Unsqueeze"
    "|Expand|Alias|Unbind)"
)
"""Nodes of autograd's graph that are views."""
_PRODUCTS = r"Addmm|Mm|Bmm|Baddbmm|Addbmm|Addmv|Mv|Dot|Linear|\w*Convolution"
_OTHERS = rf"(?!({VIEWS}|{_PRODUCTS})Backward)\w+Backward\d"
"""Torch's own operations that are no products and no views."""
_TWO_DTYPES = (
    r"[^\n]*(have the same dtype|should be the same|expected scalar"
    r" type)[^\n]*(BFloat16|Half)[^\n]*"
)
_A_FORWARD_OF_ITS_OWN = (
    "give the layer a class with a forward of its own, class Gate(nn.Linear): def forward(self, x):"
    " return super().forward(x), whose weights are gathered as they are, or use replicate"
)


@dataclass(frozen=True, slots=True)
class AutocastWeights:
    """The weights of a model that FSDP2 gathers in `dtype`. `owners`: their modules and names."""

    dtype: torch.dtype
    owners: Collection[tuple[nn.Module, str]]

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype) -> Self:
        """Find the float32 weights that autocast to `dtype` casts whenever their module computes:
        weights of torch's layers and of transformers' `Conv1D`, if the class's forward is
        unchanged. Call it before the model's forwards are changed."""
        kinds = dict(_WEIGHTS)
        if transformers := sys.modules.get("transformers.pytorch_utils"):
            kinds[transformers.Conv1D] = ("weight",)
        owners = {
            (module, name)
            for module in model.modules()
            for name, parameter in own_parameters(module).items()
            if parameter is not None and parameter.dtype is torch.float32
            if any(name in names and _computes_as(module, kind) for kind, names in kinds.items())
        }
        return cls(dtype, owners)

    def gather_short(self, groups: Iterable[nn.Module]) -> None:
        """Have FSDP2's groups gather these weights in `dtype`, except weights that another module
        uses too, and small ones: a router may be called outside of autocast."""
        for group in groups:
            held = fsdp_parameter_group(group)
            parameters = [] if held is None else held.fsdp_params
            elements = sum(each.sharded_param.numel() for each in parameters)
            for parameter in parameters:
                is_large = parameter.sharded_param.numel() * SMALL_PART >= elements
                if is_large and all(owner in self.owners for owner in owners_of(parameter)):
                    gather_in(parameter, self.dtype)


def check_uses(groups: Iterable[nn.Module], loss: Tensor) -> None:
    """Raise `PlanError` if the graph of `loss` uses a weight that is gathered short in another
    operation than matrix products and convolutions. Cannot see into compiled code and the user's
    autograd functions."""
    parameters = [
        each
        for group in groups
        if (held := fsdp_parameter_group(group))
        for each in held.fsdp_params
    ]
    names = {id(gathered): name for name, gathered in filter(None, map(gathered_short, parameters))}
    waiting = [loss.grad_fn] if names and loss.grad_fn is not None else []
    found = set(waiting)
    while waiting:
        node = waiting.pop()
        for following in [each for each, _ in node.next_functions if each is not None]:
            if (name := _name_of(following, names)) and re.match(_OTHERS, node.name()):
                operation = node.name().partition("Backward")[0]
                raise PlanError(
                    f"under shard the weight {name!r} is gathered in the precision of autocast, and"
                    f" {operation} uses it too, which would have it in float32 under other plans;"
                    f" {_A_FORWARD_OF_ITS_OWN}"
                )
            if following not in found:
                found.add(following)
                waiting.append(following)


def error_of_autocast(error: BaseException | None, plan: object) -> PlanError | None:
    """Explain an error of torch about two dtypes, if weights are gathered short; None for another
    error. `plan`: shards them."""
    if not isinstance(error, RuntimeError) or not (said := re.search(_TWO_DTYPES, str(error))):
        return None
    return PlanError(
        f"{plan}: {said.group()}; under shard the weights of torch's layers are gathered in the"
        " precision of autocast, and one may have been called without it; if so, call the model"
        f" within session.autocast(); to compute a layer in float32, {_A_FORWARD_OF_ITS_OWN}"
    )


def _name_of(node: Node, names: Mapping[int, str]) -> str | None:
    """Return the name of the weight whose gradient, or whose view's gradient, `node`
    accumulates."""
    while (
        re.match(f"{VIEWS}Backward", node.name())
        and (following := node.next_functions[0][0]) is not None
    ):
        node = following
    return names.get(id(getattr(node, "variable", None)))


def _computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and "forward" not in vars(module)
    )
