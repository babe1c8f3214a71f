"""The bytes that a trace says are exchanged are those that real processes exchange, collective by
collective.

Real processes on Gloo train under each plan, and a mode of torch's dispatcher counts the
collectives that pass through it, whether Python calls them, autograd, or DDP in C++. Left out, by
where they are called and not by their size:

- exchanges of JSON values and of flags, and rows of evaluations: the methods of `World` that
  `FakeWorld` has of its own, `counting.LEFT_OUT`;
- what hooks exchange between two steps;
- what happens once: boundaries of pipeline stages are found in the first step, and in the second
  DDP broadcasts the sizes of its new buckets. So the third step is counted.
"""

from __future__ import annotations

from collections import Counter

import pytest
from planner.counting import LEFT_OUT, Exchanges, counted_in_turn
from planner.subjects import CHANGES, adamw, processes, recipe, traced
from tiers import tier

from lockstep.comm.world import World
from lockstep.planner.tracing.fake_world import FakeWorld
from lockstep.testing.pool import WorkerPool

PLANS = [
    *(
        "replicate=2",
        "shard=2",
        "shard=2,sharding=gradients",
        "tensor=2",
        "shard=2,checkpointing=full",
    ),
    *("replicate=2,numerics=bitwise", "shard=2,numerics=bitwise"),
    *(
        "pipeline=2",
        "pipeline=2,schedule=gpipe",
        "pipeline=2,schedule=interleaved",
        "pipeline=2,schedule=zero-bubble",
        "pipeline=2,numerics=bitwise",
        "tensor=2,numerics=bitwise,slices=2",
    ),
    *(
        "replicate=4",
        "shard=4",
        "tensor=4",
        "pipeline=4",
        "replicate=4,numerics=bitwise",
        "shard=4,numerics=bitwise",
    ),
    *(
        "replicate=2,shard=2",
        "replicate=2,shard=2,numerics=bitwise",
        "shard=2,tensor=2",
        "replicate=2,tensor=2",
    ),
    *("replicate=2,pipeline=2", "tensor=2,pipeline=2", "shard=2,pipeline=2"),
    "shard=2,pipeline=2,sharding=gradients",
    "shard=2,pipeline=2,schedule=zero-bubble",
    *("replicate=2,pipeline=2,numerics=bitwise", "shard=2,pipeline=2,numerics=bitwise"),
    *(
        "tensor=2,pipeline=2,numerics=bitwise,slices=2",
        "shard=2,tensor=2,numerics=bitwise,slices=2",
    ),
]
COMPRESSED = ("powersgd", "quantized")
CASES = [
    *((plan, "transformer") for plan in PLANS),
    *(
        (plan, name)
        for plan in ("replicate=2", "shard=2")
        for name in CHANGES
        if name not in ("transformer", "sequences", *COMPRESSED)
    ),
    *(("replicate=2", name) for name in COMPRESSED),
    *(
        (plan, "sequences")
        for plan in (
            *("context=2", "context=2,exchange=keys", "shard=2,context=2"),
            *("pipeline=2,numerics=bitwise", "pipeline=2,context=2,numerics=bitwise"),
            "shard=2,pipeline=2,numerics=bitwise",
        )
    ),
    *(("replicate=2,shard=2", name) for name in ("running statistics", "wide")),
    *(
        (plan, "running statistics")
        for plan in ("replicate=2,numerics=bitwise", "shard=2,numerics=bitwise")
    ),
]
FREE_SPLIT = {("replicate=2", "wide")}
"""DDP splits the gradients into buckets by the order in which they came in the first step, which no
trace has."""


Real = dict[tuple[str, str], list[Exchanges]]


def cases(size: int, *, changed: bool) -> list[tuple[str, str]]:
    return [
        (plan, name)
        for plan, name in CASES
        if processes(plan) == size and (name != "transformer") is changed
    ]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(cases(2, changed=False), id="2 processes"),
        pytest.param(
            cases(2, changed=True), id="2 processes, other recipes", marks=pytest.mark.slow
        ),
        pytest.param(cases(4, changed=False), id="4 processes", marks=tier(4)),
        pytest.param(cases(4, changed=True), id="4 processes, other recipes", marks=tier(4)),
    ],
)
def real(
    request: pytest.FixtureRequest, pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> Real:
    """What each rank exchanges in each case."""
    folder, size = str(tmp_path_factory.mktemp("runs")), processes(request.param[0][0])
    by_rank = pool.run(size, counted_in_turn, request.param, folder, timeout_seconds=300)
    return {case: [found[place] for found in by_rank] for place, case in enumerate(request.param)}


@pytest.mark.timeout(300)
def test_every_collective_of_a_step_is_in_the_trace(real: Real) -> None:
    wrong = {}
    for (plan, name), by_rank in real.items():
        given = recipe(optimizer=adamw, **CHANGES[name])
        for rank, found in enumerate(by_rank):
            if rank and "pipeline" not in plan and name == "transformer":
                continue  # all ranks do the same
            if "pipeline" in plan and "bitwise" in plan and rank < len(by_rank) // 2:
                continue  # a trace takes all stages to have as many rows as its own: the last has
            trace = traced(f"{plan},transport=torch", given, rank=rank, is_gpu=False)
            predicted = Counter((each.kind, each.bytes) for each in trace.collectives())
            if (plan, name) in FREE_SPLIT:
                found, predicted = total(found), total(predicted)
            if predicted != found:
                wrong[plan, name, rank] = (
                    f"only in reality {found - predicted}, only in the trace {predicted - found}"
                )
    assert not wrong
    assert all(found.total() for by_rank in real.values() for found in by_rank)


def total(exchanges: Exchanges) -> Exchanges:
    """The bytes of each kind of collective."""
    sums: Exchanges = Counter()
    for (kind, size), count in exchanges.items():
        sums[kind, 0] += size * count
    return sums


def test_what_is_left_out_is_what_a_trace_does_not_exchange() -> None:
    own = {
        name
        for name, value in vars(FakeWorld).items()
        if callable(value) and not name.startswith("_")
    }
    assert own == set(LEFT_OUT) & vars(World).keys()
