"""User code run under generators of its own, in a process whose generators belong to somebody else."""

from __future__ import annotations

import random
from types import TracebackType

import numpy as np
import torch


class Isolation:
    """Within it, python's, numpy's and torch's default CPU generators may be seeded and drawn from; on leaving, they
    are as they were.

    Takes about 20 µs. Saving numpy's generator would take 90, so another is put in its place; the second of a pair of
    normal deviates, which numpy's old interface keeps back, is lost.
    """

    def __init__(self) -> None:
        self._own = np.random.MT19937(0)

    def __enter__(self) -> None:
        self._numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._python = random.getstate()
        self._torch = torch.default_generator.get_state()
        np.random.set_bit_generator(self._own)  # type: ignore[attr-defined]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        np.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]
        random.setstate(self._python)
        torch.default_generator.set_state(self._torch)
