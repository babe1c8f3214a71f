"""The gradients of a block's inputs, summed over their uses in the block before those elsewhere.

FSDP2 has a node in autograd's graph between a block and its inputs, so under `shard` the uses of an
input in the block are summed first. For the same bits, a bitwise run has such a node under the
other plans too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.torch_private import changed_grad_tensors
from lockstep.model.repeated_inputs import RepeatedInputs


def sum_in_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Sum the gradients of inputs within each of the `blocks` first, and within the `model`, as
    FSDP2 would if these were its groups: those without parameters of their own are none."""
    seen: set[int] = set()
    for module in (*blocks, model):
        own = {id(parameter) for parameter in module.parameters()} - seen
        seen |= own
        if own:
            inputs = RepeatedInputs(module)
            module.register_forward_pre_hook(_through_a_node, prepend=True, with_kwargs=True)
            inputs.install()


def _through_a_node(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return changed_grad_tensors((arguments, keywords), _views) if torch.is_grad_enabled() else None


def _views(*tensors: Tensor) -> list[Tensor]:
    return [tensor.view_as(tensor) for tensor in tensors]
