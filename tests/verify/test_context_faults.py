"""Planted faults of ranks that share out sequences: verify finds each one and names its cause.
Correct engines pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from verify import context_faults as faults
from verify.context_engine import ContextEngine
from verify.engine import with_rounding

from lockstep.evidence.tolerance import MeasuredRounding
from lockstep.evidence.trace import Trace
from lockstep.verify.causes.evidence import Evidence
from lockstep.verify.compare import Comparison, compare_traces
from lockstep.verify.verification import likely_cause

STEPS = 2
Right = Callable[[type[ContextEngine]], tuple[Trace, MeasuredRounding]]


class Expected(NamedTuple):
    engine: type[ContextEngine]
    check: str
    name: str
    cause: str
    ranks: int = 2


FAULTS = [
    Expected(
        faults.StaleKeysInTheBackward,
        "microbatch",
        "query.1.bias",
        "the backward of attention between ranks: in microbatch 0 the output and the loss of every",
    ),
    Expected(
        faults.OwnKeysGradientAlone,
        "microbatch",
        "value.1.bias",
        "or did not add the gradients of keys and values over the ranks",
    ),
    Expected(faults.PairDropped, "microbatch", "head.bias", "a pair lost at each cut: the loss"),
    Expected(
        faults.PairDropped,
        "microbatch",
        "head.bias",
        "whose next token is in another part",
        ranks=3,
    ),
    Expected(faults.PairTwice, "microbatch", "head.bias", "a pair counted twice at each cut"),
    Expected(
        faults.LabelsShiftedInAPart,
        "microbatch",
        "head.bias",
        "labels shifted within a part of the sequence: the loss of the tokens at",
    ),
    Expected(
        faults.DoublePositions,
        "microbatch",
        "head.bias",
        "places of another chunk: in microbatch 0 outputs are right up to token 3 and wrong from",
    ),
    Expected(faults.PositionsInOrder, "microbatch", "head.bias", "places of another chunk"),
    Expected(
        faults.TokenOnTwoRanks, "microbatch", "head.bias", "of microbatch 0 is computed by 2 ranks"
    ),
    Expected(
        faults.GradientOfOnePart,
        "gradients",
        "head.bias",
        "the gradient was not summed over context: rank 0 holds the gradient of its own part",
    ),
    Expected(
        faults.GradientOfOnePartReplicated,
        "gradients",
        "head.bias",
        "what ranks 1 and 3 computed is missing",
        ranks=4,
    ),
    Expected(
        faults.MeanOverContext, "gradients", "head.bias", "divided by the world size once too often"
    ),
    Expected(
        faults.MaskOfOnes, "microbatch", "head.bias", "a document leak: in microbatch 0 outputs are"
    ),
]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Right:
    """Return a function that makes the reference and its rounding, once for each engine."""

    return cache(lambda kind: with_rounding(kind, tmp_path_factory.mktemp("right"), steps=STEPS))


def compared(
    right: Right, engine: type[ContextEngine], path: Path, ranks: int
) -> tuple[Comparison, str | None]:
    base = faults.PackedEngine if engine.packed else ContextEngine
    reference, rounding = right(base)
    trace = engine(path / "plan", ranks=ranks, steps=STEPS).run()
    comparison = compare_traces(reference, trace, rounding, bitwise=False)
    if not comparison.differences:
        return comparison, None
    return comparison, likely_cause(Evidence(reference, trace, comparison.differences))


@pytest.mark.parametrize(
    "expected", FAULTS, ids=lambda expected: f"{expected.engine.__name__}-{expected.ranks}"
)
def test_a_planted_fault_is_found_and_named(
    right: Right, tmp_path: Path, expected: Expected
) -> None:
    comparison, cause = compared(right, expected.engine, tmp_path, expected.ranks)
    assert comparison.differences, "not caught"
    first = comparison.differences[0]
    assert cause is not None
    assert expected.cause in cause
    assert (first.step, first.check, first.name) == (0, expected.check, expected.name)


def test_every_faulty_engine_is_tried() -> None:
    engines = {
        value
        for value in vars(faults).values()
        if isinstance(value, type) and issubclass(value, ContextEngine)
    }
    right = {ContextEngine, faults.PackedEngine, faults.Replicated}
    assert engines - right == {expected.engine for expected in FAULTS}


@pytest.mark.parametrize(
    ("engine", "ranks"),
    [
        (ContextEngine, 2),
        (ContextEngine, 3),
        (faults.Replicated, 4),
        (faults.PackedEngine, 2),
    ],
)
def test_a_correct_engine_passes(
    right: Right, tmp_path: Path, engine: type[ContextEngine], ranks: int
) -> None:
    comparison, _ = compared(right, engine, tmp_path, ranks)
    assert comparison.differences == []
    assert comparison.largest is None or comparison.largest.times_rounding < 4
    assert comparison.notes == [], "a sum of parts has other bits"
