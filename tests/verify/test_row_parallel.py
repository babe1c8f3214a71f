"""Plans that shard layers: a correct row-wise tensor-parallel layer adds partial products, which
changes rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from verify.engine import FEATURES, TOKENS, Engine, with_rounding

from lockstep.evidence.tolerance import MeasuredRounding
from lockstep.evidence.trace import Trace
from lockstep.verify.compare import compare_traces

WIDTH = 48
PARTS = 2


class RowWise(nn.Linear):
    """A linear layer with its input dim in parts: the parts' products are rounded to the compute
    dtype, then added."""

    parts = 1
    bias_times = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.parts == 1:
            return super().forward(x)
        pieces = zip(x.chunk(self.parts, -1), self.weight.chunk(self.parts, -1), strict=True)
        products = [F.linear(piece, weight) for piece, weight in pieces]
        return torch.stack(products).sum(0) + self.bias_times * self.bias.to(products[0].dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = RowWise(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.last = nn.Linear(WIDTH, TOKENS)

    def forward(self, sample: Tensor, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


class Unsharded(Engine):
    model = Deep
    clip = 1.0


class UnshardedBf16(Unsharded):
    compute = torch.bfloat16


def row_parallel(kind: type[Engine], bias_times: float = 1.0) -> type[Engine]:
    class RowParallel(kind):  # type: ignore[valid-type,misc]
        def start(self, model: nn.Module, rank: int) -> nn.Module:
            for module in model.modules():
                if isinstance(module, RowWise):
                    module.parts, module.bias_times = PARTS, bias_times
            return model

    return RowParallel


@pytest.fixture(scope="module")
def right(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[type[Engine], int], tuple[Trace, MeasuredRounding]]:
    return cache(
        lambda kind, seed: with_rounding(kind, tmp_path_factory.mktemp("right"), seed=seed, steps=4)
    )


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
@pytest.mark.parametrize("kind", [Unsharded, UnshardedBf16])
def test_a_correct_row_parallel_layer_passes_in_any_compute_dtype(
    right: Callable[..., tuple[Trace, MeasuredRounding]],
    tmp_path: Path,
    kind: type[Engine],
    seed: int,
) -> None:
    reference, rounding = right(kind, seed)
    found = compare_traces(
        reference,
        row_parallel(kind)(tmp_path / "sharded", seed=seed, steps=4).run(),
        rounding,
        bitwise=False,
    )
    assert found.differences == []
    assert found.largest is not None
    assert found.largest.times_rounding < 5


@pytest.mark.parametrize("kind", [Unsharded, UnshardedBf16])
def test_a_bias_that_every_rank_adds_is_found_in_any_compute_dtype(
    right: Callable[..., tuple[Trace, MeasuredRounding]], tmp_path: Path, kind: type[Engine]
) -> None:
    reference, rounding = right(kind, 0)
    found = compare_traces(
        reference,
        row_parallel(kind, bias_times=PARTS)(tmp_path / "sharded", steps=4).run(),
        rounding,
        bitwise=False,
    )
    assert found.differences[0].step == 0
    assert found.differences[0].check == "microbatch"


def test_differing_bits_of_a_microbatch_are_noted_unless_the_plan_compiles(
    right: Callable[..., tuple[Trace, MeasuredRounding]], tmp_path: Path
) -> None:
    reference, rounding = right(Unsharded, 0)
    trace = row_parallel(Unsharded)(tmp_path / "sharded", steps=4).run()
    (note,) = compare_traces(reference, trace, rounding, bitwise=False).notes
    assert "gradients of single microbatches differ from the reference's in some bits" in note
    assert (
        compare_traces(
            reference,
            replace(trace, plan="replicate=2,numerics=fast,compile=yes"),
            rounding,
            bitwise=False,
        ).notes
        == []
    )
