"""Traces built from tensors, for tests of the code that compares traces."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.evidence.tensors import Summaries, TensorSummary
from lockstep.evidence.trace import RankTrace, StepTrace, Trace
from lockstep.evidence.tracer import summarize_tensor


class Built(Trace):
    """A trace without files. `exact`: its tensors by kind, step and name."""

    exact: Mapping[tuple[str, int, str], Any]

    def tensor(self, step: int, kind: str, name: str) -> Any:
        value = getattr(self, "exact", {}).get((kind, step, name))
        return None if value is None else np.asarray(value, dtype=np.float64).reshape(-1)


def built(
    gradients: Sequence[Mapping[str, Tensor | None]],
    *,
    loss: float = 1.0,
    plan: str = "replicate=1",
) -> Built:
    """Return a trace of one rank with these gradients in each step, and the same tensors as
    parameters."""
    steps = []
    for tensors in gradients:
        summaries = summarized(tensors)
        steps.append(
            StepTrace(
                loss=loss, weight=None, norm=None, lr=None, gain=1.0,
                tensors={"gradients": summaries, "states": {}, "parameters": summaries,
                "buffers": {}},
            )
        )  # fmt: skip
    return Built(
        None,
        plan,
        1,
        {},
        0,
        {0: RankTrace({"parameters": summarized(gradients[0]), "buffers": {}}, steps)},
        [],
    )


def summarized(tensors: Mapping[str, Tensor | None]) -> Summaries:
    return {
        name: None if value is None else TensorSummary.from_json(summarize_tensor(name, value))
        for name, value in tensors.items()
    }


def noise(seed: int, name: str, size: int) -> Tensor:
    """Return standard normal numbers, the same in every run."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.randn(
        size, generator=torch.Generator().manual_seed(int.from_bytes(digest[:6], "little"))
    )
