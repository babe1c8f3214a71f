"""A guard for blocks that a forward skips: every rank runs all blocks, in one order, on every
microbatch. FSDP2 gathers a block's parameters when the block runs. If only some ranks skip a block,
collectives no longer match: ranks deadlock or corrupt data. So the guard calls the skipped block
with an identity as its forward, and FSDP2's hooks run in the forward and in the backward; the
gradient of its parameters is zero. The order of the blocks is then known, so on a CPU the guard
gathers the next block while the present one computes, as FSDP2 does itself on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import tree_flatten, tree_unflatten


class SkippedBlockGuard:
    """Create it before the model is sharded and install it afterwards, so that its hooks run
    outside FSDP2's."""

    def __init__(self, model: nn.Module, blocks: Sequence[Any], *, gathers_ahead: bool) -> None:
        """`blocks`: in their order. `gathers_ahead`: gather a block's parameters when the block
        before it runs."""
        self._model = model
        self._blocks = list(blocks)
        self._gathers_ahead = gathers_ahead
        self._next = 0
        self._passing_through = False
        model.register_forward_hook(self._after_all)

    def install(self) -> None:
        self._model.register_forward_pre_hook(self._start, prepend=True)
        for place, block in enumerate(self._blocks):
            block.register_forward_pre_hook(self._before(place), prepend=True, with_kwargs=True)

    def _start(self, _: nn.Module, __: Any) -> None:
        self._next = 0

    def _before(self, place: int) -> Any:
        def hook(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if self._passing_through:
                return None
            first = place >= self._next
            skipped, self._next = range(self._next, place), max(self._next, place + 1)
            changed = self._pass_through(skipped, (arguments, keywords)) if skipped else None
            # gathered blocks run in this forward, before weights can change
            if first and self._gathers_ahead:
                for block in self._blocks[place : place + 2]:
                    block.unshard(async_op=True)
            return changed

        return hook

    def _after_all(self, _: nn.Module, __: Any, output: Any) -> Any:
        skipped, self._next = range(self._next, len(self._blocks)), len(self._blocks)
        return self._pass_through(skipped, output) if skipped else None

    def _pass_through(self, skipped: range, value: Any) -> Any:
        """Pass one tensor of `value` through the skipped blocks. Return the same structure."""
        leaves, structure = tree_flatten(value)
        tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        place = next((place for place in tensors if leaves[place].requires_grad), None)
        if place is None and torch.is_grad_enabled():
            raise RecipeError(
                f"a forward left out block {skipped[0]} of {len(self._blocks)} before any tensor "
                "with a gradient; with sharded parameters every rank must gather every block; "
                "call the first block in every forward, or name other blocks in Recipe.blocks"
            )
        passed = tensor = leaves[tensors[0] if place is None else place]
        self._passing_through = True
        try:
            for block in skipped:
                passed = _pass_through_block(self._blocks[block], passed)
        finally:
            self._passing_through = False
        return tree_unflatten([passed if leaf is tensor else leaf for leaf in leaves], structure)


def _pass_through_block(block: nn.Module, tensor: Tensor) -> Tensor:
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
