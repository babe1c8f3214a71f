"""Random streams of a model's sequential parts, which are the modules that the model calls one
after another. Each part draws from default generators with the part's seed. Dropout in a part does
not depend on the rank that computes the part.

[Note: streams] A part's stream starts when the previous part ends. The generator state that
`torch.utils.checkpoint` saves at the start of a part is then the state of the part's stream. If
several parts are checkpointed together, the recomputation must also start the streams of the later
parts. The forward records the order of the streams by their seeds.
"""

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
REMEMBERED = 2**16
"""Largest number of streams whose next stream is remembered until the recomputation."""


class ModuleRandomStreams:
    """Seeds the default generators when each of a model's sequential parts begins. `position`
    identifies a microbatch. The first part draws from `key(*position)`. In the model's n-th forward
    of the microbatch, part i draws from `key(*position, i, n)`. Code after the last of P parts,
    such as the loss, draws from `key(*position, P, n)`."""

    def __init__(
        self, model: nn.Module, parts: Sequence[str], begin: Callable[[int], None]
    ) -> None:
        self._begin = begin
        self._position: tuple[int, ...] | None = None
        modules = [model.get_submodule(name) for name in parts]
        draw = [_may_draw(module) for module in modules]
        self.are_several = any(draw)
        """False if the model has no part that can draw random numbers."""
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
        """Seed the generators for a microbatch's first forward, which begins with part number
        `part`."""
        self.set_position(position)
        self._begin(key(*position, part, 0) if part and self.are_several else key(*position))

    def set_position(self, position: tuple[int, ...]) -> None:
        """Call this method if the generators of the forward's first part are already seeded."""
        self._position = position
        self._calls.made.clear()

    def stop(self) -> None:
        self._position = None

    @contextmanager
    def paused(self) -> Iterator[None]:
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
    """Counts the forwards of each sequential part in the current microbatch. Several threads may
    compute chunks of a microbatch."""

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
