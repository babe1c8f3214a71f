"""A script that sends its gradients in fewer bytes, verified whole: its plans pass, and by how much they differ from exact is said."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

import pytest
from verify.pooled import verified

from lockstep.testing.pool import WorkerPool

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "faults" / "train.py")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("gradient_compression", "least", "most"), [("fp16", 1e-6, 1e-3), ("powersgd:1", 1e-2, 1.0)])
def test_compression_is_told_from_a_fault(pool: WorkerPool, gradient_compression: str, least: float, most: float) -> None:
    pools: SimpleQueue[WorkerPool] = SimpleQueue()
    pools.put(pool)
    report = verified([SCRIPT, "--gradient_compression", gradient_compression], ["replicate=2", "replicate=1"], pools, steps=3, float64=False, other_microbatch=False)
    assert report.passed
    (two,), (one,) = (verdict.compressed for verdict in report.verdicts)
    assert two.gradient_compression == gradient_compression
    assert least < two.gradient < most
    assert 0 < two.parameters < most
    assert (one.gradient, one.parameters, one.loss) == (0.0, 0.0, 0.0)
