"""The fitted numbers of the cost model; `fitted.toml` has their provenance."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Rates in a training step that data sheets do not give."""

    matmul: Mapping[str, float]
    """Rate of matrix products in a long run to the data sheet's best, by generation: heat and power
    hold newer devices back more. `other`: any other."""
    attention: float
    """Rate of fused attention to the data sheet's."""
    backward_attention: float
    """Rate of attention's backward to its forward."""
    memory: float
    """Rate of kernels that move bytes to a plain copy's."""
    inner: float
    """Inner dimension at which a product runs at half its rate."""
    waves: float
    """Part of a partly filled last wave of tiles that is lost in fact."""
    misaligned: float
    """Rate of a product whose rows are no multiple of 16 bytes."""
    misaligned_batch: float
    """The same of a batch of products, as in attention that is not fused."""
    short_lines: float
    """Part of a product's rate lost for each halving below 128 of the bytes that divide its
    rows."""
    eager: float
    """Bytes that eager element-wise kernels move to those in their list."""
    contention: float
    """Part of a collective beside computation that still costs time."""
    tensor_overlap: float
    """Part of tensor parallelism's collectives that overlapping software hides."""
    jitter: float
    """Part of a step that each doubling of the devices adds, waiting for the slowest."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Measured over predicted, for 80% of a source's rows, made without this source."""

    low: float
    high: float


def load_fitted(
    path: Path = Path(__file__).parent / "fitted.toml",
) -> tuple[Fitted, dict[str, Interval]]:
    """Return the fitted numbers, and intervals of `seconds` and `memory`."""
    sheet = tomllib.loads(path.read_text(encoding="utf-8"))
    return Fitted(**sheet["fitted"]), {
        kind: Interval(**each) for kind, each in sheet["interval"].items()
    }
