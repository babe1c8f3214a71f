"""Records the random numbers that a forward draws, such as dropout masks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.audit.probes.recorder import RecordWriter, frames
from lockstep.base import accelerator, torch_private

NOISE = ("rand", "randn", "rand_like", "randn_like", "bernoulli", "normal")
"""Functions that draw random numbers. Only calls inside a module's forward count."""


class Draws:
    def __init__(self, recorder: RecordWriter) -> None:
        self._recorder = recorder
        self._first = ""  # the state before the first draw of a forward since the last backward
        self._known = ""  # the state after the last backward, batch or seed; empty before the first
        self._is_unplaced = False
        self._depth = 0

    def install(self) -> None:
        for name in NOISE:
            self._recorder.watch(torch, name, self._noise, traced=True)

    def note(self) -> None:
        """Record the state of the generators before a forward draws. The draws of a recomputation
        by activation checkpointing are ignored."""
        if not self._first and not self._depth and not torch_private.in_backward():
            self._first = generator_state()

    @contextmanager
    def others(self) -> Iterator[None]:
        """Ignore the random numbers that are drawn inside the `with` block, by a data loader or a
        seed."""
        self._recorder.safely(self._begin_others)
        try:
            yield
        finally:
            self._recorder.safely(self._end_others)

    def take(self, state: str) -> tuple[str, bool]:
        """Return the generator's state before the first draw of a forward. The second result is
        True if an unknown caller has drawn."""
        self._see(state)
        taken = self._first, self._is_unplaced
        self._first, self._is_unplaced, self._known = "", False, state
        return taken

    def _begin_others(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._see(generator_state())

    def _end_others(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._known = generator_state()

    def _see(self, state: str) -> None:
        self._is_unplaced = self._is_unplaced or (bool(self._known) and state != self._known)

    def _noise(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if not self._first and kwargs.get("generator") is None:
            self._recorder.safely(self._note_in_module)
        return original(*args, **kwargs)

    def _note_in_module(self) -> None:
        if any(
            frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module)
            for frame in frames()
        ):
            self.note()


def generator_state() -> str:
    states = [torch.default_generator.get_state()]
    if accelerator.is_initialized():
        states.append(accelerator.generator(accelerator.current_device()).get_state())
    return short_digest(b"".join(each.numpy().tobytes() for each in states))


def short_digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
