"""Blocks are visited by every rank in one order, whatever branch a rank's microbatch takes.

FSDP2 gathers a block's parameters when the block runs. A rank that leaves out a block which others run would answer their gathering with
another one, and hang or corrupt. Here it visits the block for nothing: the block is called with an identity in the place of its forward,
so that FSDP2's own hooks do all they do, in the forward and in the backward, and the gradient of its parameters is zero.

So it is known which block comes next, and on a CPU its parameters are on their way while the one before it computes. On a GPU FSDP2 sees
to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lockstep.base.errors import RecipeError


class SkippedBlockGuard:
    """Made before the model is sharded, and entered after it, so that its hooks run outside of FSDP2's."""

    def __init__(self, model: nn.Module, blocks: Sequence[Any], *, gathers_ahead: bool) -> None:
        """`blocks`: in their order. `gathers_ahead`: start to gather a block's parameters when the one before it runs."""
        self._model = model
        self._blocks = list(blocks)
        self._gathers_ahead = gathers_ahead
        self._next = 0
        self._for_nothing = False
        model.register_forward_hook(self._after_all)

    def enter(self) -> None:
        """Once the model is sharded."""
        self._model.register_forward_pre_hook(self._start, prepend=True)
        for place, block in enumerate(self._blocks):
            block.register_forward_pre_hook(self._before(place), prepend=True, with_kwargs=True)

    def _start(self, _: nn.Module, __: Any) -> None:
        self._next = 0

    def _before(self, place: int) -> Any:
        def hook(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if self._for_nothing:
                return None
            first = place >= self._next
            skipped, self._next = range(self._next, place), max(self._next, place + 1)
            visited = self._visit(skipped, (arguments, keywords)) if skipped else None
            if first and self._gathers_ahead:  # what is gathered here is visited in this forward, before weights can change
                for block in self._blocks[place : place + 2]:
                    block.unshard(async_op=True)
            return visited

        return hook

    def _after_all(self, _: nn.Module, __: Any, output: Any) -> Any:
        skipped, self._next = range(self._next, len(self._blocks)), len(self._blocks)
        return self._visit(skipped, output) if skipped else None

    def _visit(self, skipped: range, value: Any) -> Any:
        """The same value, of which one tensor has been through the skipped blocks."""
        leaves, structure = tree_flatten(value)
        tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        place = next((place for place in tensors if leaves[place].requires_grad), None)
        if place is None and torch.is_grad_enabled():
            raise RecipeError(
                f"a forward left out block {skipped[0]} of {len(self._blocks)} before anything that has a gradient; with sharded "
                "parameters every rank must gather every block; call the first block in every forward, or name others in Recipe.blocks"
            )
        place = tensors[0] if place is None else place
        self._for_nothing = True
        try:
            for block in skipped:
                leaves[place] = _passed(self._blocks[block], leaves[place])
        finally:
            self._for_nothing = False
        return tree_unflatten(leaves, structure)


def _passed(block: nn.Module, tensor: Tensor) -> Tensor:
    own = block.__dict__.get("forward")
    block.forward = lambda value: value.view_as(value)
    try:
        passed: Tensor = block(tensor)
    finally:
        if own is None:
            del block.forward
        else:
            block.forward = own
    return passed
