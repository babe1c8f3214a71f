"""Wrappers of a block's forward: activation checkpointing and compilation. Names, parameters and hooks stay."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from lockstep.base.errors import RecipeError
from lockstep.base.torch_private import BatchNormBase, tree_map
from lockstep.plan import Checkpointing


def checkpoint_activations(block: nn.Module, mode: Checkpointing) -> None:
    """Checkpoint the block's activations: recompute most of them in its backward, with the same random numbers.
    `full` keeps the block's inputs (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016). `selective` also
    keeps the results of matrix products, convolutions and attention, which are expensive to recompute (Korthikanti et
    al., Reducing Activation Recomputation in Large Transformer Models, 2022). The forward drops the empty cache of keys
    and values that transformers makes by default, and refuses a filled one with `RecipeError`."""
    if isinstance(block, BatchNormBase):
        return  # it keeps only its input anyway, and a recomputation would update its running statistics twice
    forward: Callable[..., Any] = block.forward
    contexts = noop_context_fn if mode == "full" else functools.partial(create_selective_checkpoint_contexts, _expensive())

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args, kwargs = (tree_map(_without_cache, given, is_leaf=_is_cache) for given in (args, kwargs))
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    block.forward = wrapped


def _is_cache(item: Any) -> bool:
    return any(kind.__name__ == "Cache" and kind.__module__.startswith("transformers.") for kind in type(item).__mro__)


def _without_cache(item: Any) -> Any:
    if not _is_cache(item):
        return item
    if length := item.get_seq_length():
        raise RecipeError(
            f"a block is given a cache of {length} keys (a {type(item).__name__}) with activation checkpointing; computing the block again "
            "would lengthen it; call the model without past_key_values and with use_cache=False, or choose checkpointing=none"
        )
    return None


def compile_forward(block: nn.Module) -> None:
    """Compile the block's forward once for each shape, so that ranks run the same code whatever shapes came before."""
    # fallback_random: random numbers are drawn as in uncompiled code, so that dropout has the same masks.
    block.forward = torch.compile(block.forward, dynamic=False, options={"fallback_random": True})


@functools.cache
def _expensive() -> list[Any]:
    aten = torch.ops.aten
    attention = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    named = ["mm", "addmm", "bmm", "baddbmm", "convolution", *(f"_scaled_dot_product_{kind}" for kind in attention)]
    return [getattr(aten, name).default for name in named]
