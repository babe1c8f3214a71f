"""Random streams of modules: each sequential part of a model (one of the modules that it calls one
after another) draws from default generators with its own seed, its stream. So dropout does not
depend on the rank that computes the part.

[Note: streams] A part's stream starts when the previous part ends. So the generator's state that
`torch.utils.checkpoint` saves for a recomputation is the state of the part's stream, and the
recomputation draws the same numbers as the forward, even if forwards of other microbatches ran in
between, as in a pipeline. If several parts are checkpointed together, their recomputation must
start the streams of the later parts too. For this, the forward records which stream follows which,
by their seeds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.base.torch_private import DropoutBase, in_backward
from lockstep.keys import MASK, key
from lockstep.model.trial import in_trial

DRAWING = (
    DropoutBase,
    nn.RReLU,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)
"""Torch's modules that may draw random numbers in their forward."""
REMEMBERED = 2**16
"""Largest number of streams for which the seed of the next stream is kept for recomputations. At
least (number of parts) x (number of microbatches before their backward) are needed."""


class ModuleRandomStreams:
    """Seeds the default generators when each of a model's sequential parts begins. This is done
    under every plan, so that one process has the same dropout masks as a pipeline. Call `start` or
    `set_position` before each microbatch's forward, with a tuple of integers that identifies the
    microbatch (seed, step, index and others). The first part draws from `key(*position)`, part i
    from `key(*position, i, n)` in the model's n-th forward of this microbatch, and code after the
    last of P parts (such as the loss) from `key(*position, P, n)`. If no part can draw, everything
    draws from `key(*position)`."""

    def __init__(
        self, model: nn.Module, parts: Sequence[str], begin: Callable[[int], None]
    ) -> None:
        """`parts`: names of the model's sequential parts, from `stages.sequential_parts`. `begin`:
        a function that seeds the default generators with an integer."""
        self._begin = begin
        self._position: tuple[int, ...] | None = None
        modules = [model.get_submodule(name) for name in parts]
        draw = [_may_draw(module) for module in modules]
        self.are_several = any(draw)
        """False if no sequential part can draw random numbers. Then only `start` seeds the
        generators, and no part does."""
        # A part that cannot draw needs no stream; the loss always gets one.
        self._needed = [*draw, True]
        self._places: dict[int, list[int]] = {}
        self._calls = _Calls()
        self._followers: dict[int, int] = {}
        for place, module in enumerate(modules):
            self._places.setdefault(id(module), []).append(place)
        once = {id(module): module for module in modules}
        hooked = once.values() if self.are_several else ()
        self._handles = [module.register_forward_hook(self._ended) for module in hooked]

    def start(self, position: tuple[int, ...], part: int = 0) -> None:
        """Seed the generators for the first forward of the microbatch `position`. `part`: the index
        of the sequential part that is computed first, such as the first of a pipeline's stage."""
        self.set_position(position)
        self._begin(key(*position, part, 0) if part and self.are_several else key(*position))

    def set_position(self, position: tuple[int, ...]) -> None:
        """Set the microbatch whose forward begins, if the caller has seeded the generators for its
        first part already."""
        self._position = position
        self._calls.made.clear()

    def stop(self) -> None:
        """Stop seeding generators until the next `start` or `set_position`. For forwards outside of
        microbatches."""
        self._position = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context for forwards outside of microbatches, in which parts do not seed the
        generators."""
        position, self._position = self._position, None
        try:
            yield
        finally:
            self._position = position

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _ended(self, module: nn.Module, _: Any, __: Any) -> None:
        before = torch.default_generator.initial_seed() & MASK
        if in_backward():  # a recomputation, during a backward
            if before in self._followers:
                self._begin(self._followers[before])
            return
        if self._position is None or in_trial():
            return
        if (places := self._places.get(id(module))) is None:
            return  # the module belongs to a copy of the model
        calls = self._calls.made.get(id(module), 0)
        self._calls.made[id(module)] = calls + 1
        following = places[calls % len(places)] + 1
        if self._needed[following]:
            after = key(*self._position, following, calls // len(places))
            self._followers.pop(before, None)
            self._followers[before] = after
            if len(self._followers) > REMEMBERED:
                del self._followers[next(iter(self._followers))]
            self._begin(after)


class _Calls(threading.local):
    """The number of forwards of each sequential part in the current microbatch, separate for each
    thread, because several threads may compute chunks of a microbatch. Keys: the modules' ids."""

    def __init__(self) -> None:
        self.made: dict[int, int] = {}

    def __reduce__(self) -> tuple[type[_Calls], tuple[()]]:
        return _Calls, ()  # a user's hook may copy the model with its modules' hooks


def _may_draw(part: nn.Module) -> bool:
    return any(
        not type(module).__module__.startswith("torch.nn.modules.")
        or isinstance(module, DRAWING)
        or "forward" in module.__dict__
        for module in part.modules()
    )
