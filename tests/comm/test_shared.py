"""Collectives through shared memory beside their definitions."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, distributed

from lockstep.base.dtypes import dtype_name
from lockstep.comm import shared_memory as shared, shared_rounds
from lockstep.comm.active_calls import CollectiveCall, active_calls
from lockstep.comm.shared_memory import SharedMemoryGroup
from lockstep.testing.pool import WorkerPool

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.complex64,
)
# Small, so that a tensor of a few thousand elements takes many rounds.
BUFFER_BYTES = 16 << 10
CASES = 150


def shared_group(
    group: distributed.ProcessGroup | None = None, **options: Any
) -> SharedMemoryGroup:
    made = SharedMemoryGroup.create(group, buffer_bytes=BUFFER_BYTES, **options)
    assert isinstance(made, SharedMemoryGroup), made
    return made


def values(length: int, dtype: torch.dtype, key: tuple[int, ...]) -> Tensor:
    """Of very different sizes, so that another order of a sum gives other bits. The same for the
    same key, on any rank."""
    generator = torch.Generator().manual_seed(hash(key))
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 100, (length,), generator=generator).to(dtype)
    real = torch.randn(length, generator=generator, dtype=torch.float64) * 10.0 ** torch.randint(
        -3, 4, (length,), generator=generator
    )
    return real.to(dtype)


def total_of(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype is expected.dtype and torch.equal(found, expected)


# Every rank draws the same cases.


def lengths(draw: random.Random) -> int:
    return draw.choice([0, 1, 2, draw.randrange(100), draw.randrange(3000), draw.randrange(30000)])


def check_all_reduce(
    group: SharedMemoryGroup, draw: random.Random, dtype: torch.dtype, case: int
) -> bool:
    length = lengths(draw)
    everyone = [values(length, dtype, (case, rank)) for rank in range(group.size)]
    mine = everyone[group.rank].clone()
    group.all_reduce(mine)
    return same(mine, total_of(everyone))


def check_reduce_scatter(
    group: SharedMemoryGroup, draw: random.Random, dtype: torch.dtype, case: int
) -> bool:
    length = lengths(draw)
    everyone = [values(length * group.size, dtype, (case, rank)) for rank in range(group.size)]
    output = torch.empty(length, dtype=dtype)
    group.reduce_scatter(output, everyone[group.rank])
    return same(output, total_of([each.view(group.size, length)[group.rank] for each in everyone]))


def check_all_gather(
    group: SharedMemoryGroup, draw: random.Random, dtype: torch.dtype, case: int
) -> bool:
    length = lengths(draw)
    everyone = [values(length, dtype, (case, rank)) for rank in range(group.size)]
    output = torch.empty(group.size, length, dtype=dtype)
    mine = everyone[group.rank]
    if draw.random() < 0.5:
        mine = output[group.rank].copy_(mine)
    group.all_gather(output, mine)
    return same(output, torch.stack(everyone))


def check_start_all_gather(
    group: SharedMemoryGroup, draw: random.Random, dtype: torch.dtype, case: int
) -> bool:
    """Two that are begun, of which the second completes the first, and another call between."""
    length = lengths(draw)
    everyone = [values(length, dtype, (case, rank)) for rank in range(group.size)]
    outputs = [torch.empty(group.size, length, dtype=dtype) for _ in range(2)]
    begun = [group.start_all_gather(output, everyone[group.rank]) for output in outputs]
    right = same(outputs[0], torch.stack(everyone))
    if draw.random() < 0.5:
        right &= check_all_reduce(group, draw, dtype, case)
    begun[0].wait()
    right &= group.pending is not begun[0]
    begun[1].wait()
    return right and same(outputs[1], torch.stack(everyone))


def check_broadcast(
    group: SharedMemoryGroup, draw: random.Random, dtype: torch.dtype, case: int
) -> bool:
    length, source = lengths(draw), draw.randrange(group.size)
    mine = values(length, dtype, (case, group.rank))
    group.broadcast(mine, source)
    return same(mine, values(length, dtype, (case, source)))


def check_all_to_all(
    group: SharedMemoryGroup, draw: random.Random, dtype: torch.dtype, case: int
) -> bool:
    sizes = [
        [lengths(draw) if draw.random() < 0.7 else 0 for _ in range(group.size)]
        for _ in range(group.size)
    ]
    everyone = [values(sum(row), dtype, (case, rank)) for rank, row in enumerate(sizes)]
    received = [row[group.rank] for row in sizes]
    output = torch.empty(sum(received), dtype=dtype)
    group.all_to_all(output, everyone[group.rank], received, sizes[group.rank])
    return same(
        output,
        torch.cat([each.split(row)[group.rank] for each, row in zip(everyone, sizes, strict=True)]),
    )


CHECKS = (
    check_all_reduce,
    check_reduce_scatter,
    check_all_gather,
    check_start_all_gather,
    check_broadcast,
    check_all_to_all,
)


def run_cases(group: SharedMemoryGroup, seed: int, count: int) -> list[str]:
    """What was wrong. The collectives follow each other in a random order, and sums are added in
    either way."""
    draw = random.Random(seed)
    wrong = []
    for case in range(count):
        shared._DIRECT_RANKS, shared._DIRECT_BYTES = draw.choice([0, 4]), draw.choice([0, 8 << 10])
        check, dtype = draw.choice(CHECKS), draw.choice(DTYPES)
        if not check(group, draw, dtype, case):
            wrong.append(f"case {case}: {check.__name__}, {dtype}")
    return wrong


def random_collectives(seed: int) -> list[str]:
    with shared_group() as group:
        return run_cases(group, seed, CASES)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_collectives_of_any_size_and_dtype_are_what_they_are_defined_to_be(
    pool: WorkerPool, world_size: int
) -> None:
    seed = random.randrange(10**6)
    assert pool.run(world_size, random_collectives, seed) == [[]] * world_size, seed


def overlapping_groups() -> list[str]:
    """Ranks 0 and 2, 1 and 2, and all, by turns."""
    groups = [distributed.new_group(ranks) for ranks in ([0, 2], [1, 2])]
    made = [shared_group(group) for group in groups if distributed.get_rank(group) >= 0] + [
        shared_group()
    ]
    wrong = []
    for turn in range(3):
        for group in made:
            wrong += run_cases(group, turn, 5)
    for group in made:
        group.close()
    return wrong


def test_a_process_may_be_in_several_groups(pool: WorkerPool) -> None:
    assert pool.run(3, overlapping_groups) == [[]] * 3


def many_small_ones() -> tuple[bool, Tensor]:
    with shared_group() as group:
        right = True
        vector = torch.empty(5)
        for turn in range(2000):
            vector.fill_(turn + group.rank)
            group.all_reduce(vector)
            right &= vector.tolist() == [group.size * turn + sum(range(group.size))] * 5
        return right, vector


def test_thousands_of_calls_one_after_the_other(pool: WorkerPool) -> None:
    for right, vector in pool.run(3, many_small_ones):
        assert right
        assert vector.tolist() == [6000.0] * 5


def look_at_a_wait() -> tuple[list[CollectiveCall], list[CollectiveCall], list[CollectiveCall]]:
    """What is under way on rank 0: before, while and after it waits for rank 1 to begin a gathering
    too."""
    with shared_group(distributed.new_group([0, 1], group_desc="a pair")) as group:
        output, seen = torch.empty(2, 3), []
        if group.rank == 0:
            group.all_reduce(torch.ones(2))
            begun = group.start_all_gather(output, torch.ones(3))
            seen.append(active_calls())

            def look() -> None:
                while not (found := active_calls()):
                    time.sleep(0.01)
                seen.append(found)
                distributed.send(torch.ones(1), 1)

            looking = threading.Thread(target=look)
            looking.start()
            begun.wait()
            looking.join()
        else:
            group.all_reduce(torch.ones(2))
            distributed.recv(torch.empty(1), 0)
            group.all_gather(output, torch.ones(3))
            seen += [[], []]
        seen.append(active_calls())
        return seen[0], seen[1], seen[2]


def test_a_rank_that_waits_tells_in_which_call_of_which_group(pool: WorkerPool) -> None:
    before, amid, after = pool.run(2, look_at_a_wait)[0]
    assert [before, after] == [[], []]
    assert amid == [
        CollectiveCall("all_gather", "shared memory of a pair", 2, "float32, 3 elements")
    ]


# What is refused


def wrong_tensors() -> list[str]:
    said = []
    for call in (
        lambda group: group.all_reduce(torch.zeros(4, 4).t()[1:]),
        lambda group: group.all_reduce(torch.zeros(4, device="meta")),
        lambda group: group.all_reduce(torch.zeros(4, dtype=torch.float8_e4m3fn)),
        lambda group: group.reduce_scatter(torch.zeros(3), torch.zeros(4)),
        lambda group: group.all_gather(torch.zeros(3), torch.zeros(4)),
        lambda group: group.broadcast(torch.zeros(3), 2),
        lambda group: group.all_to_all(torch.zeros(3), torch.zeros(4), [1, 2], [2, 3]),
        lambda group: group.reduce_scatter((both := torch.zeros(4))[1:3], both),
    ):
        with shared_group() as group:
            with pytest.raises(ValueError) as raised:  # noqa: PT011
                call(group)
            said.append(str(raised.value))
    return said


def test_tensors_that_do_not_fit_are_refused_with_what_would(pool: WorkerPool) -> None:
    for said in pool.run(2, wrong_tensors):
        for text, expected in zip(
            said,
            (
                (
                    "a non-contiguous tensor on cpu; shared memory exchanges contiguous tensors on"
                    " the CPU"
                ),
                "a contiguous tensor on meta; shared memory",
                "torch.float8_e4m3fn cannot be exchanged",
                "reduce_scatter of 4 float32 into 3 float32; the output is 1/2 of the input",
                "all_gather of 4 float32 into 3 float32; the output is 2 times the input",
                "source=2; the ranks of this group are 0 to 1",
                "all_to_all of 4 float32 in chunks of [2, 3] into 3 float32 in chunks of [1, 2]",
                "the output overlaps the input",
            ),
            strict=True,
        ):
            assert text.startswith(expected)


# The pure parts


@given(
    length=st.integers(0, 2**39 - 1),
    collective=st.sampled_from(shared_rounds.NAMES),
    code=st.integers(0, len(shared_rounds.DTYPES) - 1),
    source=st.integers(0, 2**16 - 1),
)
def test_what_is_called_can_be_read_back(
    length: int, collective: str, code: int, source: int
) -> None:
    name, text = shared_rounds.called(shared_rounds.signature_of(collective, code, length, source))
    assert name == collective
    assert text.startswith(dtype_name(shared_rounds.DTYPES[code]))
    assert (f", {length} elements" in text) == (collective != "all_to_all")
    assert (f", from rank {source}" in text) == (collective == "broadcast")
    assert shared_rounds.signature_of(collective, code, length, source) < 2**63


@given(
    parts=st.lists(st.lists(st.floats(width=32), min_size=4, max_size=4), min_size=2, max_size=6)
)
def test_a_sum_is_added_in_the_order_of_the_ranks(parts: list[list[float]]) -> None:
    tensors = [torch.tensor(part, dtype=torch.float32) for part in parts]
    out = torch.empty(4)
    shared_rounds.add(tensors, out)
    torch.testing.assert_close(out, total_of(tensors), rtol=0, atol=0, equal_nan=True)
