"""Planted faults: verify finds each one and names its step, tensor and cause. Correct engines
pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from verify import faults
from verify.engine import Engine, Network, with_rounding

from lockstep.evidence.tolerance import MeasuredRounding
from lockstep.evidence.trace import Trace
from lockstep.verify.causes.evidence import Evidence
from lockstep.verify.compare import BEFORE_FIRST_STEP, Comparison, compare_traces
from lockstep.verify.verification import likely_cause

EPS_RATIO = 2.0**-52 / 2.0**-23


class Expected(NamedTuple):
    engine: type[Engine]
    step: int
    check: str
    name: str
    cause: str
    ranks: int = 2


FAULTS = [
    Expected(faults.MeanOfMeans, 0, "microbatch", "last.bias", "a mean of means"),
    Expected(faults.MeanOfMeansInTheSum, 0, "gradients", "last.bias", "a mean of means"),
    Expected(faults.MeanOfMeansInTheSum, 0, "gradients", "last.bias", "a mean of means", ranks=3),
    Expected(
        faults.NotReduced,
        0,
        "gradients",
        "first.weight",
        "the gradient of 'first.weight' was not reduced",
    ),
    Expected(faults.NothingReduced, 0, "gradients", "last.bias", "the gradient was not reduced"),
    Expected(
        faults.DividedTwice, 0, "gradients", "last.bias", "divided by the world size once too often"
    ),
    Expected(
        faults.DividedTwice,
        0,
        "gradients",
        "last.bias",
        "is 0.3333 times what it should be",
        ranks=3,
    ),
    Expected(
        faults.OneBiasTimesTwo,
        0,
        "gradients",
        "last.bias",
        "the gradient of 'last.bias' is 2 times what it should be, multiplied by",
    ),
    Expected(
        faults.StatisticsOfOneRank,
        0,
        "buffers",
        "norm.running_mean",
        "BatchNorm statistics out of sync",
    ),
    Expected(
        faults.BatchNormInEvalMode,
        0,
        "microbatch",
        "last.bias",
        "BatchNorm statistics: microbatch 3 on rank 1",
    ),
    Expected(
        faults.SlightlyOther,
        0,
        "microbatch",
        "last.bias",
        "or the model or the loss keeps state from one microbatch to the next",
    ),
    Expected(
        faults.SameDropoutMask,
        0,
        "microbatch",
        "last.bias",
        "the same dropout mask on several ranks: microbatch 3 on rank 1",
    ),
    Expected(faults.MaskOfTheRank, 0, "microbatch", "last.bias", "another dropout mask"),
    Expected(faults.SampleSeenTwice, 1, "samples", "", "is seen twice, sample"),
    Expected(
        faults.OtherLabels,
        0,
        "batch",
        "batch[1]",
        "from something that is not the same in every process",
    ),
    Expected(
        faults.LocalNorm,
        0,
        "norm",
        "",
        "about the norm of the rank's own gradient, before the reduction",
    ),
    Expected(faults.NormOfAShard, 0, "norm", "", "that of a part of the gradient"),
    Expected(
        faults.BufferOutOfStep, 1, "buffers", "scale", "a buffer out of sync: 'scale' on rank 1"
    ),
    Expected(
        faults.AnotherSeed,
        BEFORE_FIRST_STEP,
        "initial",
        "last.weight",
        "did not start from rank 0's weights",
    ),
    Expected(faults.ScheduleStepsTwice, 1, "lr", "", "the learning rate 0.0081 is that of step 2"),
    Expected(faults.StateReset, 2, "states", "last.bias/step", "it was reset"),
    Expected(
        faults.UpdateOfAShard,
        2,
        "gradients",
        "last.bias",
        "the optimizer: its update in step 1 is off by 0.1 of its size",
    ),
    Expected(faults.NotCleared, 1, "gradients", "last.bias", "it was not cleared between steps"),
    Expected(
        faults.MicrobatchLeftOut, 0, "gradients", "last.bias", "microbatch 4 (rank 1) is missing"
    ),
    Expected(
        faults.MicrobatchTwice,
        0,
        "gradients",
        "last.bias",
        "microbatch 3 (rank 1) is counted twice",
    ),
    Expected(
        faults.UnusedIsLost,
        0,
        "missing",
        "odd.bias",
        "the gradient of 'odd.bias' was not reduced: ranks",
        ranks=6,
    ),
    Expected(faults.LossOfOneRank, 0, "loss", "", "the loss that rank 0 logs is not"),
    Expected(faults.NotApplied, 1, "states", "last.bias/step", "the optimizer's state"),
    Expected(
        faults.WeightDecayOnARank,
        0,
        "ranks",
        "last.bias",
        "from the same gradient: the optimizer has other settings on one of them",
    ),
    Expected(
        faults.ShortTypeSum,
        0,
        "gradients",
        "last.bias",
        "is a bfloat16 number, and the reference's are not",
    ),
    Expected(
        faults.OneElement,
        0,
        "gradients",
        "odd.weight",
        "1 of the 256 elements of 'odd.weight' are wrong, the first at index 53",
    ),
]


@pytest.fixture(scope="module")
def right(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., tuple[Trace, MeasuredRounding]]:
    """Return a function that makes the reference and its rounding, once for each engine class and
    seed."""

    @cache
    def made(
        kind: type[Engine] = Engine, seed: int = 0, steps: int = 3
    ) -> tuple[Trace, MeasuredRounding]:
        return with_rounding(kind, tmp_path_factory.mktemp("right"), seed=seed, steps=steps)

    return made


def verified(right: Any, trace: Trace, **given: Any) -> tuple[Comparison, str | None]:
    reference, rounding = right(**given)
    comparison = compare_traces(reference, trace, rounding, bitwise=False)
    cause = (
        likely_cause(Evidence(reference, trace, comparison.differences))
        if comparison.differences
        else None
    )
    return comparison, cause


@pytest.mark.parametrize(
    "expected", FAULTS, ids=lambda expected: f"{expected.engine.__name__}-{expected.ranks}"
)
def test_an_injected_fault_is_found_and_named(
    right: Any, tmp_path: Path, expected: Expected
) -> None:
    trace = expected.engine(tmp_path / "plan", ranks=expected.ranks).run()
    comparison, cause = verified(right, trace)
    assert comparison.differences, "not caught"
    first = comparison.differences[0]
    assert (first.step, first.check, first.name) == (expected.step, expected.check, expected.name)
    assert cause is not None
    assert expected.cause in cause


@pytest.mark.parametrize(
    "engine",
    [faults.DividedTwice, faults.MeanOfMeansInTheSum, faults.NotReduced, faults.MicrobatchTwice],
)
def test_a_wrong_sum_differs_from_the_sum_of_the_microbatches(
    right: Any, tmp_path: Path, engine: type[Engine]
) -> None:
    comparison, _ = verified(right, engine(tmp_path / "plan", ranks=2).run())
    assert {finding.name for finding in comparison.differences if finding.check == "sum"} >= {
        "first.weight"
    }


def test_every_faulty_engine_is_tried() -> None:
    engines = {
        value
        for value in vars(faults).values()
        if isinstance(value, type) and issubclass(value, Engine) and value is not Engine
    }
    assert engines == {expected.engine for expected in FAULTS}
    assert len(engines) >= 12


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_a_correct_engine_passes(right: Any, tmp_path: Path, ranks: int) -> None:
    comparison, _ = verified(right, Engine(tmp_path / "plan", ranks=ranks).run())
    assert comparison.differences == []
    assert comparison.largest is None or comparison.largest.times_rounding < 3
    assert comparison.notes == []


class RoundedOtherwise(Engine):
    """Halves a gradient that is nothing but rounding: that of a bias before BatchNorm, which
    cancels."""

    def reduce(self, step: int, locals_: list[Any]) -> list[Any]:
        return [
            {**part, "first.bias": part["first.bias"] * 0.5}
            for part in super().reduce(step, locals_)
        ]


def test_a_gradient_that_is_only_rounding_passes(right: Any, tmp_path: Path) -> None:
    comparison, _ = verified(right, RoundedOtherwise(tmp_path / "plan", ranks=2).run())
    assert comparison.differences == []


class Counts(Engine):
    """The model counts its microbatches, so its output depends on the microbatches before."""

    def start(self, model: nn.Module, rank: int) -> nn.Module:
        calls = itertools.count()
        model.register_forward_hook(lambda module, given, output: output * (1 + 0.01 * next(calls)))
        return model


class WithoutBatchNorm(Network):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)


class CountsWithoutBatchNorm(Counts):
    model = WithoutBatchNorm


class CountsInTurns(Counts):
    def mine(self, rank: int) -> Sequence[int]:
        return range(rank, self.count, self.size)


@pytest.mark.parametrize(
    ("engine", "cause"),
    [
        (
            CountsWithoutBatchNorm,
            (
                "microbatch 3 has another gradient on rank 1 from the same samples and the same"
                " random state: the data"
            ),
        ),
        (
            CountsInTurns,
            (
                "on rank 0 microbatch 0 is right and microbatch 2 is not, which follows other"
                " microbatches there than on one process"
            ),
        ),
    ],
)
def test_a_model_that_keeps_state_between_microbatches_is_named(
    right: Any, tmp_path: Path, engine: type[Engine], cause: str
) -> None:
    kind = CountsWithoutBatchNorm if engine is CountsWithoutBatchNorm else Counts
    comparison, said = verified(right, engine(tmp_path / "plan", ranks=2).run(), kind=kind)
    assert (comparison.differences[0].step, comparison.differences[0].check) == (0, "microbatch")
    assert cause in str(said)
    assert "keeps state from one microbatch to the next" in str(said)


class Momentum(Engine):
    """No clipping, and an optimizer whose update depends on the gradient's size."""

    clip = None

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(14))
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", [Engine, Momentum])
def test_correct_engines_have_no_false_positives(
    right: Any, tmp_path: Path, kind: type[Engine], ranks: int, seed: int
) -> None:
    comparison, _ = verified(
        right,
        kind(tmp_path / "plan", ranks=ranks, seed=seed, steps=8).run(),
        kind=kind,
        seed=seed,
        steps=8,
    )
    assert comparison.differences == []


def test_equal_bits_have_no_distance(right: Any, tmp_path: Path) -> None:
    reference, rounding = right()
    same = compare_traces(reference, Engine(tmp_path / "same").run(), rounding, bitwise=True)
    assert (same.differences, same.largest) == ([], None)
    assert set(same.divergence["gradients"]) == {0.0}


def test_bitwise_allows_no_rounding(right: Any, tmp_path: Path) -> None:
    reference, rounding = right()
    trace = Engine(tmp_path / "plan", ranks=3).run()
    assert compare_traces(reference, trace, rounding, bitwise=False).passed
    first = compare_traces(reference, trace, rounding, bitwise=True).differences[0]
    assert (first.step, first.check) == (0, "gradients")
    assert first.times_rounding < 10


class SmallFactor(Engine):
    """A factor that float32 cannot tell from rounding."""

    def reduce(self, step: int, locals_: list[Any]) -> list[Any]:
        if self.size == 1:
            return super().reduce(step, locals_)
        return [
            {name: gradient * (1 + 2e-8) for name, gradient in part.items()}
            for part in super().reduce(step, locals_)
        ]


def test_float64_shows_a_fault_that_rounding_hides(right: Any, tmp_path: Path) -> None:
    reference, rounding = right()
    assert compare_traces(
        reference, SmallFactor(tmp_path / "short", ranks=2).run(), rounding, bitwise=False
    ).passed
    exact = Engine(tmp_path / "exact", steps=1, float64=True).run()
    perturbed = [
        Engine(tmp_path / f"perturbed-{noise}", steps=1, float64=True, noise=noise).run()
        for noise in range(2)
    ]
    scaled = rounding.in_float64(exact, perturbed, scale=4 * EPS_RATIO, margin=4)
    right_plan = compare_traces(
        exact,
        Engine(tmp_path / "right", ranks=2, steps=1, float64=True).run(),
        scaled,
        bitwise=False,
    )
    assert right_plan.differences == []
    trace = SmallFactor(tmp_path / "wrong", ranks=2, steps=1, float64=True).run()
    wrong = compare_traces(exact, trace, scaled, bitwise=False)
    assert wrong.differences[0].check == "gradients"
    assert wrong.differences[0].times_rounding > 1e3
    assert "mean of means" not in (likely_cause(Evidence(exact, trace, wrong.differences)) or "")
