"""The formulas of docs/plans/*.md, measured: what each rank sends in a step, as the kernel counts
it, and what it holds.

The formulas' letters are those of the pages. Beyond them a rank may send a fiftieth and a few KiB:
Gloo's headers, and the numbers that a step tells all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from model.costs import (
    BLOCKS,
    CHOSEN,
    LENGTH,
    MICROBATCHES,
    SAMPLES,
    STYLES,
    WIDTH,
    WORDS,
    Costs,
    MixedModel,
    Model,
    TiedModel,
    costs,
)

from lockstep.recipe.checks import Precision
from lockstep.testing.pool import WorkerPool

W = 4 * WORDS * WIDTH
"""Bytes of `words`, and of `head`."""
P = sum(parameter.nbytes for parameter in Model().parameters())
U = 2 * W
"""In no block."""
SHORT_P = sum(
    each.nbytes // 2 if name.endswith("weight") and name != "words.weight" else each.nbytes
    for name, each in Model().named_parameters()
)
"""What is gathered under autocast: weights of linear layers in its precision."""
SHORT_U = W + W // 2
ROWS = sum(parameter.shape[0] for parameter in Model().parameters())
A = 4 * SAMPLES * LENGTH * WIDTH
"""One activation, between blocks, of a microbatch."""
LOGITS = 4 * SAMPLES * LENGTH * WORDS
M = MICROBATCHES
WHOLE = sum(
    parameter.nbytes
    for name, parameter in Model().named_parameters()
    if "blocks" not in name or "down.bias" in name
)
"""Bytes of what the tensor axis leaves whole."""
MIXED = {name: each.nbytes for name, each in MixedModel().named_parameters()}
HELD_BY_EXPERTS = sum(size for name, size in MIXED.items() if "experts" in name)
ROUTERS = sum(size for name, size in MIXED.items() if "router" in name)
DENSE = sum(MIXED.values()) - HELD_BY_EXPERTS
EXTRA_BYTES = 4096
VOCABULARY = STYLES | {"words": "embedding", "head": "vocabulary"}


def ring(ranks: int) -> float:
    """Of n bytes that are gathered, or scattered, the share that a rank sends."""
    return (ranks - 1) / ranks


def sharded(parameters: float, unblocked: float, ranks: int, rounds: int) -> float:
    """Sent under sharding=full: what is in no block is gathered once a round. Gloo's reduce-scatter
    sends what its all-reduce does."""
    return (2 * parameters - unblocked + 2 * parameters) * rounds * ring(ranks)


def layers(ranks: int, microbatches: int, blocks: int = BLOCKS) -> float:
    """Sent by cut layers: `down` sums its output, `up` and `gate` the gradient of their input."""
    return 3 * 2 * A * blocks * microbatches * ring(ranks)


def experts(ranks: int, microbatches: int) -> float:
    """Sent by layers of experts: rows and outputs, and their gradients."""
    return 4 * CHOSEN * A * BLOCKS * microbatches * ring(ranks)


def tensor_part(ranks: int) -> float:
    return WHOLE + (P - WHOLE) / ranks


def block_bytes() -> float:
    return (P - U) / BLOCKS


@dataclass(frozen=True)
class Case:
    plan: str
    ranks: int
    sent: Callable[[int], float]
    """Of each rank, as are the others."""
    held: Callable[[int], float]
    """Parameters."""
    activations: Callable[[int], int] | None = None
    """Blocks times microbatches."""
    model: type[Model] = Model
    styles: tuple[tuple[str, str], ...] = tuple(STYLES.items())
    precision: Precision = "fp32"


def everywhere(value: float) -> Callable[[int], float]:
    return lambda rank: value


def ends(end: float, middle: float, ranks: int) -> Callable[[int], float]:
    return lambda rank: end if rank in (0, ranks - 1) else middle


HALF = everywhere(P / 2)
QUICK = (0, 1, 3, 5, 8, 12, 16, 17, 24, 26)
"""Of the cases; the others are in the slow tier."""
CASES = [
    Case("replicate=2", 2, everywhere(2 * P * ring(2)), everywhere(P), lambda rank: BLOCKS),
    # Shares of [0 1 2] and [3 4 5]: two nodes of the tree each.
    Case("replicate=2,numerics=bitwise", 2, everywhere((2 + 1) * P * ring(2)), everywhere(P)),
    Case(
        "shard=3", 3, everywhere(sharded(P, U, 3, M // 3)), everywhere(P / 3), lambda rank: BLOCKS
    ),
    Case("shard=2,sharding=gradients", 2, everywhere((P + 2 * P) * M // 2 * ring(2)), HALF),
    Case("shard=2,checkpointing=full", 2, everywhere(sharded(P, U, 2, M // 2)), HALF),
    Case(
        "shard=2,numerics=bitwise",
        2,
        everywhere((2 * P - U + P) * M // 2 * ring(2) + 8 * ROWS * ring(2)),
        HALF,
    ),
    Case("replicate=2,shard=2", 4, everywhere(sharded(P, U, 2, 2) + 2 * P / 2 * ring(2)), HALF),
    Case(
        "replicate=2,shard=2,numerics=bitwise",
        4,
        everywhere(
            (2 * P - U) * 2 * ring(2) + P * 2 * ring(4) + P / 2 * ring(2) + 8 * ROWS * ring(2)
        ),
        HALF,
    ),
    Case(
        "shard=2",
        2,
        everywhere((2 * SHORT_P - SHORT_U + 2 * P) * M // 2 * ring(2)),
        HALF,
        lambda rank: BLOCKS,
        precision="bf16",
    ),
    Case(
        "shard=2",
        2,
        everywhere((2 * SHORT_P - SHORT_U + 2 * P) * M // 2 * ring(2)),
        HALF,
        precision="fp16",
    ),
    Case("tensor=2", 2, everywhere(layers(2, M)), everywhere(tensor_part(2))),
    Case(
        "tensor=2",
        2,
        everywhere(layers(2, M) + (2 * A + 2 * A + LOGITS) * M * ring(2)),
        everywhere(tensor_part(2) - U / 2),
        styles=tuple(VOCABULARY.items()),
    ),
    Case(
        "tensor=2",
        2,
        everywhere(layers(2, M) + (2 * A + 2 * A + 2 * 3 * 4 * SAMPLES * LENGTH) * M * ring(2)),
        everywhere(tensor_part(2) - U / 2),
        styles=tuple((VOCABULARY | {"head": "loss"}).items()),
    ),
    Case(
        "replicate=2,tensor=2",
        4,
        everywhere(layers(2, M // 2) + 2 * tensor_part(2) * ring(2)),
        everywhere(tensor_part(2)),
    ),
    Case(
        "shard=2,tensor=2",
        4,
        everywhere(layers(2, M // 2) + sharded(tensor_part(2), U, 2, M // 2)),
        everywhere(tensor_part(2) / 2),
    ),
    Case("pipeline=2,schedule=gpipe", 2, everywhere(A * M), HALF, lambda rank: BLOCKS // 2 * M),
    Case("pipeline=2", 2, everywhere(A * M), HALF, lambda rank: BLOCKS // 2 * (2 - rank)),
    Case(
        "pipeline=2,schedule=interleaved",
        2,
        everywhere(3 * A * M),
        HALF,
        lambda rank: BLOCKS // 4 * (3 * 2 - 2 * rank - 1),
    ),
    Case(
        "pipeline=2,schedule=zero-bubble", 2, everywhere(A * M), HALF, lambda rank: BLOCKS // 2 * 2
    ),
    Case(
        "pipeline=4",
        4,
        ends(A * M, 2 * A * M, 4),
        ends(W + block_bytes(), block_bytes(), 4),
        lambda rank: 4 - rank,
    ),
    # With `words` and `head` one parameter, the first stage sends its gradient, and gets the sum.
    Case("pipeline=2", 2, everywhere(A * M + W), HALF, model=TiedModel),
    Case("replicate=2,pipeline=2", 4, everywhere(A * M // 2 + 2 * P / 2 * ring(2)), HALF),
    Case(
        "shard=2,pipeline=2",
        4,
        everywhere(A * M // 2 + sharded(P / 2, 0, 2, M // 2)),
        everywhere(P / 4),
    ),
    Case(
        "tensor=2,pipeline=2",
        4,
        everywhere(A * M + layers(2, M, BLOCKS // 2)),
        everywhere(tensor_part(2) / 2),
    ),
    Case(
        "expert=2",
        2,
        everywhere(experts(2, M // 2) + 2 * DENSE * ring(2)),
        everywhere(DENSE + HELD_BY_EXPERTS / 2),
        model=MixedModel,
    ),
    Case(
        "replicate=2,expert=2",
        4,
        # ranks 2 and 3 compute one microbatch, and a dummy, which sends no rows
        lambda rank: (
            experts(2, 2 if rank < 2 else 1) + 2 * DENSE * ring(4) + HELD_BY_EXPERTS * ring(2)
        ),
        everywhere(DENSE + HELD_BY_EXPERTS / 2),
        model=MixedModel,
    ),
    Case(
        "expert=2,numerics=bitwise",
        2,
        everywhere(experts(2, M // 2) + DENSE * (M // 2 + 1) * ring(2)),
        everywhere(DENSE + HELD_BY_EXPERTS / 2),
        model=MixedModel,
    ),
    Case(
        "replicate=2,expert=2,numerics=bitwise",
        4,
        lambda rank: (
            experts(2, 2 if rank < 2 else 1)
            + DENSE * (2 + 1) * ring(4)
            + HELD_BY_EXPERTS * (2 + 1 / 2) * ring(2)
        ),
        everywhere(DENSE + HELD_BY_EXPERTS / 2),
        model=MixedModel,
    ),
    Case(
        "shard=2,expert=2,numerics=bitwise",
        4,
        lambda rank: (
            experts(2, 2 if rank < 2 else 1)
            + (2 * DENSE - U + DENSE) * 2 * ring(4)
            + (2 * HELD_BY_EXPERTS / 2 + HELD_BY_EXPERTS) * 2 * ring(2)
        ),
        # the two rows of each router are on the first two of the four ranks
        lambda rank: (DENSE - ROUTERS) / 4 + (ROUTERS / 2 if rank < 2 else 0) + HELD_BY_EXPERTS / 4,
        model=MixedModel,
    ),
    Case(
        "expert=2,pipeline=2",
        4,
        everywhere(A * M // 2 + experts(2, M // 2) / 2 + 2 * DENSE / 2 * ring(2)),
        everywhere(DENSE / 2 + HELD_BY_EXPERTS / 4),
        model=MixedModel,
    ),
    Case(
        "expert=2,pipeline=2,schedule=zero-bubble",
        4,
        everywhere(A * M // 2 + experts(2, M // 2) / 2 + 2 * DENSE / 2 * ring(2)),
        everywhere(DENSE / 2 + HELD_BY_EXPERTS / 4),
        model=MixedModel,
    ),
    Case(
        "expert=2,pipeline=2,numerics=bitwise",
        4,
        everywhere(A * M // 2 + experts(2, M // 2) / 2 + DENSE / 2 * (M // 2 + 1) * ring(2)),
        everywhere(DENSE / 2 + HELD_BY_EXPERTS / 4),
        model=MixedModel,
    ),
    # the weights' backward of the last stage gathers it once more
    Case(
        "shard=2,pipeline=2,schedule=zero-bubble",
        4,
        lambda rank: (
            A * M // 2
            + sharded(P / 2, 0, 2, M // 2)
            + (0 if rank < 2 else P / 2 * M // 2 * ring(2))
        ),
        everywhere(P / 4),
    ),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=() if place in QUICK else pytest.mark.slow, id=f"{case.plan}-{place}"
        )
        for place, case in enumerate(CASES)
    ],
)
def test_a_rank_sends_and_holds_what_the_pages_say(
    pool: WorkerPool, tmp_path: Path, case: Case
) -> None:
    plan = f"{case.plan},transport=torch"
    found: list[Costs] = pool.run(
        case.ranks,
        costs,
        plan,
        str(tmp_path / "run"),
        case.model,
        dict(case.styles),
        case.precision,
    )
    for rank, cost in enumerate(found):
        sent, held = case.sent(rank), case.held(rank)
        assert sent <= cost.sent <= 1.02 * sent + EXTRA_BYTES, (
            f"rank {rank} sent {cost.sent / sent:.3f} of the formula"
        )
        assert (cost.parameters, cost.gradients, cost.optimizer) == (held, held, 2 * held), (
            f"rank {rank}"
        )
        if "shard=" in plan and "sharding=gradients" not in plan:
            assert cost.weights == 0, f"rank {rank}"
        if case.activations is not None:
            assert cost.activations == case.activations(rank), f"rank {rank}"


def test_replicas_of_one_host_send_nothing_of_their_gradients(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for cost in pool.run(2, costs, "replicate=2", str(tmp_path / "run"), Model, STYLES):
        assert 0 < cost.sent < EXTRA_BYTES
