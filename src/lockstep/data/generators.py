"""Seeds and restores the default random generators of Python, numpy and torch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lockstep.base import accelerator

_python: Any = random.seed.__self__  # type: ignore[attr-defined]  # the instance behind the functions of `random`
_seed_python = super(random.Random, _python).seed
"""`random.seed` for an int, without type checks. Does not reset `gauss_next`."""


def seed_generators(key: int, device: torch.device) -> None:
    _seed_python(key)
    _python.gauss_next = None
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)
    if device.type != "cpu":
        accelerator.generator(device).manual_seed(key)


class PreservedGenerators:
    """Restores the default CPU random generators of Python, numpy and torch on exit, in 20 µs. In
    the context, numpy's default generator is another one, because saving its state would take 90
    µs."""

    def __init__(self) -> None:
        self._own = np.random.MT19937(0)

    def __enter__(self) -> None:
        self._numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._python = random.getstate()
        self._torch = torch.default_generator.get_state()
        np.random.set_bit_generator(self._own)  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        np.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]
        random.setstate(self._python)
        torch.default_generator.set_state(self._torch)
