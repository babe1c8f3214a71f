"""The order in which gradients of a block's input are summed: first over its uses in the block.
FSDP2 has a node in autograd's graph between a block and its inputs, which has this effect under
`shard`. For the same bits, a bitwise run has such a node under every plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.torch_private import changed_grad_tensors
from lockstep.model.repeated_inputs import RepeatedInputs


def sum_in_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Sum the gradients of inputs first within each of `blocks`, and within `model`, as FSDP2's
    groups would. Modules without own parameters are no groups."""
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
