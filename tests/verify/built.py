"""Traces built from tensors, for tests of what reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.verify.records import Mark, Marks, Rank, Step, Trace
from lockstep.verify.trace import mark


class Built(Trace):
    """A trace without files; `exact` has the tensors that it knows."""

    exact: Mapping[tuple[str, int, str], Any]

    def tensor(self, step: int, kind: str, name: str) -> Any:
        value = getattr(self, "exact", {}).get((kind, step, name))
        return None if value is None else np.asarray(value, dtype=np.float64).reshape(-1)


def built(gradients: Sequence[Mapping[str, Tensor | None]], *, loss: float = 1.0, plan: str = "replicate=1") -> Built:
    """One rank, whose gradients in each step are these; its parameters are the same tensors."""
    steps = []
    for tensors in gradients:
        marks = marked(tensors)
        steps.append(
            Step(
                loss=loss, weight=None, norm=None, lr=None, gain=1.0,
                tensors={"gradients": marks, "states": {}, "parameters": marks, "buffers": {}},
            )
        )  # fmt: skip
    return Built(None, plan, 1, {}, 0, {0: Rank({"parameters": marked(gradients[0]), "buffers": {}}, steps)}, [])


def marked(tensors: Mapping[str, Tensor | None]) -> Marks:
    return {name: None if value is None else Mark.of(mark(name, value)) for name, value in tensors.items()}


def noise(seed: int, name: str, size: int) -> Tensor:
    """Standard normal, the same in every run."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.randn(size, generator=torch.Generator().manual_seed(int.from_bytes(digest[:6], "little")))
