"""Activation checkpointing and compilation of a block's forward. The names of modules and
parameters do not change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from lockstep.base import accelerator
from lockstep.base.errors import PlanError, RecipeError
from lockstep.base.torch_private import BatchNormBase, tree_leaves, tree_map
from lockstep.model.context.active import in_checkpointed_block
from lockstep.plan import Checkpointing


def checkpoint_activations(block: nn.Module, mode: Checkpointing) -> None:
    """The mode `full` keeps the block's inputs (Chen et al., Training Deep Nets with Sublinear
    Memory Cost, 2016). The mode `selective` also keeps the results of matrix products, convolutions
    and attention (Korthikanti et al., Reducing Activation Recomputation in Large Transformer
    Models, 2022)."""
    if isinstance(block, BatchNormBase):
        # BatchNorm keeps only its input anyway, and a recomputation would update its running
        # statistics twice
        return
    forward: Callable[..., Any] = block.forward
    contexts: Callable[[], tuple[Any, Any]] = noop_context_fn
    if mode != "full":
        contexts = functools.partial(create_selective_checkpoint_contexts, _expensive())

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args, kwargs = (
            tree_map(_without_cache, given, is_leaf=_is_cache) for given in (args, kwargs)
        )
        tensors = [*tree_leaves((args, kwargs)), *block.parameters()]
        used = {each.device for each in tensors if isinstance(each, Tensor)}
        generators = accelerator.generators_of(list(used))

        with in_checkpointed_block() as sequence:

            def both() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
                computation, recomputation = contexts()
                return computation, _ReplayedGenerators(generators, [sequence, recomputation])

            return checkpoint(
                forward,
                *args,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=both,
                **kwargs,
            )

    block.forward = wrapped


class _ReplayedGenerators:
    """Replays a checkpointed block's random numbers during its recomputation. Create the object
    before the forward. Torch restores generators only on CUDA and XPU, and only for devices of
    positional arguments (https://github.com/pytorch/pytorch/issues/127676)."""

    def __init__(
        self, generators: Sequence[torch.Generator], contexts: Sequence[AbstractContextManager[Any]]
    ) -> None:
        self._generators, self._contexts = generators, contexts
        self._states = self._before = [each.get_state() for each in generators]

    def __enter__(self) -> None:
        self._before = [each.get_state() for each in self._generators]
        self._set(self._states)
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            for context in reversed(self._contexts):
                context.__exit__(*error)
        finally:
            self._set(self._before)

    def _set(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _is_cache(item: Any) -> bool:
    return any(
        kind.__name__ == "Cache" and kind.__module__.startswith("transformers.")
        for kind in type(item).__mro__
    )


def _without_cache(item: Any) -> Any:
    if not _is_cache(item):
        return item
    if length := item.get_seq_length():
        raise RecipeError(
            f"a block gets a cache of {length} keys (a {type(item).__name__}) under activation "
            "checkpointing; computing the block again would lengthen it; call the model without "
            "past_key_values and with use_cache=False, or choose checkpointing=none"
        )
    return None


def error_of_compiling(error: BaseException | None, plan: object) -> PlanError | None:
    said = "does not currently support double backward"
    if not isinstance(error, RuntimeError) or said not in str(error):
        return None
    return PlanError(
        f"{plan}: torch.compile cannot differentiate a gradient (autograd.grad with"
        " create_graph=True, as in a gradient penalty or a physics-informed network); leave"
        " compile=yes out"
    )


def compile_forward(block: nn.Module, *, bitwise: bool) -> None:
    """Compile the forward once for each shape of the inputs. Every rank runs the same code for a
    shape."""
    # fallback_random: dropout has the same masks as in uncompiled code. deterministic: kernels are
    # not chosen by their time, so all ranks and runs sum in the same order.
    block.forward = torch.compile(
        block.forward, dynamic=False, options={"fallback_random": True, "deterministic": bitwise}
    )


@functools.cache
def _expensive() -> list[Any]:
    aten = torch.ops.aten
    attention = "flash_attention_for_cpu flash_attention efficient_attention cudnn_attention"
    named = ["mm", "addmm", "bmm", "baddbmm", "convolution"]
    named += [f"_scaled_dot_product_{kind}" for kind in attention.split()]
    return [getattr(aten, name).default for name in named]
