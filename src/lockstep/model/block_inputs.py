"""Hooks on the inputs of a model's blocks. A block with these hooks computes the same bits as under
FSDP2."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.torch_private import changed_grad_tensors, tree_flatten, tree_unflatten


def sum_in_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Change the order in which autograd sums an input's gradients to the order of FSDP2. The uses
    of the input inside a block are summed first."""
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


@dataclass(frozen=True, slots=True)
class _SameAs:
    place: int


class RepeatedInputs:
    """Passes one tensor object to a block that gets the same tensor as several arguments. FSDP2
    makes a new tensor for each argument. With separate tensors, `query is key` would be False, and
    `nn.MultiheadAttention` would compute different bits. Create the object before the block is
    sharded and install it afterwards. The hooks of `RepeatedInputs` then run around the hooks of
    FSDP2."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._stands_in = False
        block.register_forward_pre_hook(self._put_back, prepend=True, with_kwargs=True)

    def install(self) -> None:
        self._block.register_forward_pre_hook(self._take_out, prepend=True, with_kwargs=True)

    def _take_out(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self._stands_in = False
        is_one_tensor = not keywords and len(arguments) == 1 and isinstance(arguments[0], Tensor)
        if is_one_tensor or not torch.is_grad_enabled():
            return None
        leaves, structure = tree_flatten((arguments, keywords))
        first: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            if (
                isinstance(leaf, Tensor)
                and leaf.requires_grad
                and first.setdefault(id(leaf), place) != place
            ):
                leaves[place] = _SameAs(first[id(leaf)])
                self._stands_in = True
        return tree_unflatten(leaves, structure) if self._stands_in else None

    def _put_back(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if not self._stands_in:
            return None
        self._stands_in = False
        leaves, structure = tree_flatten((arguments, keywords))
        return tree_unflatten(
            [leaves[leaf.place] if isinstance(leaf, _SameAs) else leaf for leaf in leaves],
            structure,
        )
