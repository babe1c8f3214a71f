"""The few numbers of the cost model that were fitted to published steps, with their provenance in
`fitted.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The rates of devices in a training step that data sheets do not give."""

    matmul: Mapping[str, float]
    """Rate of matrix multiplications in a long run to the data sheet's best one, by the device's
    generation: newer devices are held back more by heat and power. `other`: any other
    generation."""
    attention: float
    """Rate of fused attention to that on the data sheet."""
    backward_attention: float
    """Rate of attention's backward pass to that of its forward pass."""
    memory: float
    """Rate of kernels that move bytes to that of a plain copy."""
    inner: float
    """Length of a matrix multiplication's inner dimension at which it runs at half its rate."""
    waves: float
    """Part of the time that a last, partly filled wave of tiles loses by arithmetic which is lost
    in fact."""
    misaligned: float
    """Rate of a matrix multiplication whose rows are no multiple of 16 bytes."""
    misaligned_batch: float
    """The same of a batch of matrix multiplications, as attention that is not fused computes."""
    short_lines: float
    """Part of a matrix multiplication's rate lost for each halving below 128 of the bytes that
    divide its rows."""
    eager: float
    """Bytes that eager element-wise kernels move to those that their list of kernels says."""
    contention: float
    """Part of a collective that runs beside computation which still costs time."""
    tensor_overlap: float
    """Part of tensor parallelism's collectives that software which overlaps them hides."""
    jitter: float
    """Part of a step that each doubling of the devices adds: waiting for the slowest."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The interval of measured over predicted that holds 80% of the rows of a source which it was
    made without."""

    low: float
    high: float


def load_fitted(
    path: Path = Path(__file__).parent / "fitted.toml",
) -> tuple[Fitted, dict[str, Interval]]:
    """Return the fitted numbers, and the intervals by kind of prediction: `seconds`, `memory`."""
    sheet = tomllib.loads(path.read_text(encoding="utf-8"))
    return Fitted(**sheet["fitted"]), {
        kind: Interval(**each) for kind, each in sheet["interval"].items()
    }
