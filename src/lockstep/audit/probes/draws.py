"""Watches what a forward draws from torch's default generator: dropout, and noise in a module."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.audit.probes.gradients import is_compiling
from lockstep.audit.probes.recorder import RecordWriter, guarded, replace
from lockstep.base import accelerator, torch_private

NOISE = ("rand", "randn", "rand_like", "randn_like", "bernoulli", "normal")
"""Functions that count as the forward's if a module calls them; elsewhere they may make the
data."""


class Draws:
    def __init__(self, recorder: RecordWriter) -> None:
        self._recorder = recorder
        self._first = ""  # the state before the first draw of a forward since the last backward
        self._known = ""  # the state after the last backward, batch or seed; empty before the first
        self._is_unplaced = False
        self._depth = 0

    def install(self) -> None:
        for name in NOISE:
            replace(torch, name, self._watched(getattr(torch, name)))

    def note(self) -> None:
        """Note the state before a forward draws. What is computed again in a backward draws the
        same numbers again."""
        if not self._first and not self._depth and not torch_private.in_backward():
            self._first = generator_state()

    @contextmanager
    def others(self) -> Iterator[None]:
        """A time in which a loader or a seed changes the state. What has changed it until then is
        not known."""
        guarded(self._recorder, self._begin_others)()
        try:
            yield
        finally:
            guarded(self._recorder, self._end_others)()

    def take(self, state: str) -> tuple[str, bool]:
        """Return the state before the first draw of a forward since the last call of this, empty if
        none was seen; and whether anything but loaders and seeds has drawn since. `state`: the
        present one."""
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

    def _watched(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def noise(*args: Any, **kwargs: Any) -> Tensor:
            if not is_compiling() and not self._first and kwargs.get("generator") is None:
                guarded(self._recorder, self._note_in_module)()
            return original(*args, **kwargs)

        return noise

    def _note_in_module(self) -> None:
        if _is_in_forward():
            self.note()


def generator_state() -> str:
    """The state of torch's default generator, and of that of the current device, as a digest."""
    states = [torch.default_generator.get_state()]
    if accelerator.is_initialized():
        states.append(accelerator.generator(accelerator.current_device()).get_state())
    return hashlib.blake2b(
        b"".join(each.numpy().tobytes() for each in states), digest_size=8
    ).hexdigest()


def _is_in_forward() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False
