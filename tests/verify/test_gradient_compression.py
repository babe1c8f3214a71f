"""A script that compresses its gradients: its plans pass, and the effect of compression is
reported."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

import pytest
from verify.pooled import verified

from lockstep.testing.pool import WorkerPool

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "faults" / "train.py")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("compression", "least", "most"), [("fp16", 1e-6, 1e-3), ("powersgd:1", 1e-2, 1.0)]
)
def test_compression_is_distinguished_from_a_fault(
    pool: WorkerPool, compression: str, least: float, most: float
) -> None:
    pools: SimpleQueue[WorkerPool] = SimpleQueue()
    pools.put(pool)
    report = verified(
        [SCRIPT, "--gradient-compression", compression],
        ["replicate=2", "replicate=1"],
        pools,
        steps=3,
        float64=False,
        check_microbatch_size=False,
    )
    assert report.passed
    (two,), (one,) = (verdict.compression for verdict in report.verdicts)
    assert two.gradient_compression == compression
    assert least < two.gradient < most
    assert 0 < two.parameters < most
    assert (one.gradient, one.parameters, one.loss) == (0.0, 0.0, 0.0)
