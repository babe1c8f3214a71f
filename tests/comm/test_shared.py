"""Shared memory beside its definitions; and what it does where a rank dies, hangs, raises or calls something else."""

from __future__ import annotations

import errno
import os
import pickle
import platform
import random
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm import segment, shared
from lockstep.comm.segment import ExchangeError, PeerStopped, Unavailable
from lockstep.comm.shared import SharedGroup
from lockstep.testing.pool import WorkerPool

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.complex64)
# Small, so that a tensor of a few thousand elements takes many rounds.
BUFFER_BYTES = 16 << 10
CASES = 150
# A death is told within a second; this is for a machine with more to do.
DEATH_GRACE_SECONDS = 4.0


def shared_group(group: distributed.ProcessGroup | None = None, **options: Any) -> SharedGroup:
    made = SharedGroup.create(group, buffer_bytes=BUFFER_BYTES, **options)
    assert isinstance(made, SharedGroup), made
    return made


def values(length: int, dtype: torch.dtype, key: tuple[int, ...]) -> Tensor:
    """Of very different sizes, so that another order of a sum gives other bits. The same for the same key, on any rank."""
    generator = torch.Generator().manual_seed(hash(key))
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 100, (length,), generator=generator).to(dtype)
    real = torch.randn(length, generator=generator, dtype=torch.float64) * 10.0 ** torch.randint(-3, 4, (length,), generator=generator)
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


def check_all_reduce(group: SharedGroup, draw: random.Random, dtype: torch.dtype, case: int) -> bool:
    length = lengths(draw)
    everyone = [values(length, dtype, (case, rank)) for rank in range(group.size)]
    mine = everyone[group.rank].clone()
    group.all_reduce(mine)
    return same(mine, total_of(everyone))


def check_reduce_scatter(group: SharedGroup, draw: random.Random, dtype: torch.dtype, case: int) -> bool:
    length = lengths(draw)
    everyone = [values(length * group.size, dtype, (case, rank)) for rank in range(group.size)]
    output = torch.empty(length, dtype=dtype)
    group.reduce_scatter(output, everyone[group.rank])
    return same(output, total_of([each.view(group.size, length)[group.rank] for each in everyone]))


def check_all_gather(group: SharedGroup, draw: random.Random, dtype: torch.dtype, case: int) -> bool:
    length = lengths(draw)
    everyone = [values(length, dtype, (case, rank)) for rank in range(group.size)]
    output = torch.empty(group.size, length, dtype=dtype)
    mine = everyone[group.rank]
    if draw.random() < 0.5:
        mine = output[group.rank].copy_(mine)
    group.all_gather(output, mine)
    return same(output, torch.stack(everyone))


def check_broadcast(group: SharedGroup, draw: random.Random, dtype: torch.dtype, case: int) -> bool:
    length, source = lengths(draw), draw.randrange(group.size)
    mine = values(length, dtype, (case, group.rank))
    group.broadcast(mine, source)
    return same(mine, values(length, dtype, (case, source)))


def check_all_to_all(group: SharedGroup, draw: random.Random, dtype: torch.dtype, case: int) -> bool:
    sizes = [[lengths(draw) if draw.random() < 0.7 else 0 for _ in range(group.size)] for _ in range(group.size)]
    everyone = [values(sum(row), dtype, (case, rank)) for rank, row in enumerate(sizes)]
    received = [row[group.rank] for row in sizes]
    output = torch.empty(sum(received), dtype=dtype)
    group.all_to_all(output, everyone[group.rank], received, sizes[group.rank])
    return same(output, torch.cat([each.split(row)[group.rank] for each, row in zip(everyone, sizes, strict=True)]))


CHECKS = (check_all_reduce, check_reduce_scatter, check_all_gather, check_broadcast, check_all_to_all)


def run_cases(group: SharedGroup, seed: int, count: int) -> list[str]:
    """What was wrong. The collectives follow each other in a random order, and sums are added in either way."""
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
def test_collectives_of_any_size_and_dtype_are_what_they_are_defined_to_be(pool: WorkerPool, world_size: int) -> None:
    seed = random.randrange(10**6)
    assert pool.run(world_size, random_collectives, seed) == [[]] * world_size, seed


def overlapping_groups() -> list[str]:
    """Ranks 0 and 2, 1 and 2, and all, by turns."""
    groups = [distributed.new_group(ranks) for ranks in ([0, 2], [1, 2])]
    made = [shared_group(group) for group in groups if distributed.get_rank(group) >= 0] + [shared_group()]
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


# DDP


def two_models() -> tuple[list[Tensor], list[Tensor]]:
    """The gradients with the hook, and those of all ranks' data on one process."""
    with shared_group() as group:
        models = [nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5)).double() for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        parallel = DistributedDataParallel(models[0], gradient_as_bucket_view=True, bucket_cap_mb=0.002)
        parallel.register_comm_hook(None, group.sum_bucket)
        rows = values(8 * group.size, torch.float64, (0,)).view(group.size, 8)
        for _ in range(3):
            models[0].zero_grad()
            parallel(rows[group.rank].repeat(4)[:30]).square().sum().backward()
        models[1](torch.stack([row.repeat(4)[:30] for row in rows])).square().sum().backward()
        return tuple([p.grad.clone() for p in model.parameters() if p.grad is not None] for model in models)  # type: ignore[return-value]


def test_the_hook_gives_ddp_the_sum_over_ranks(pool: WorkerPool) -> None:
    everyone = pool.run(3, two_models)
    for found, expected in everyone:
        assert len(found) == len(expected) == 4
        for one, other, first in zip(found, expected, everyone[0][0], strict=True):
            torch.testing.assert_close(one, other)
            assert torch.equal(one, first)


# A rank that fails. The pool ends a run at its first death, so these ranks are forks of a worker.


def forked(path: str, world_size: int, function: Callable[[int], Any]) -> list[Any]:
    """What `function(rank)` returned in `world_size` processes with a Gloo group of their own; the signal of one that was killed."""
    distributed.destroy_process_group()
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            try:
                store = distributed.FileStore(f"{path}/store", world_size)
                distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
                distributed.barrier()
                Path(f"{path}/{rank}").write_bytes(pickle.dumps(function(rank)))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        children.append(child)
    endings = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return [pickle.loads(Path(f"{path}/{rank}").read_bytes()) if ending == 0 else ending for rank, ending in enumerate(endings)]


Caught = tuple[str, tuple[int, ...], str, float]
"""An error's type, the ranks that it names, its text, and the seconds until it came."""


def caught(group: SharedGroup, call: Callable[[], object]) -> Caught:
    """Call until it fails; the group stays useless after that."""

    def until_it_fails() -> None:
        for _ in range(1000):
            call()

    start = time.monotonic()
    with pytest.raises(ExchangeError) as first:
        until_it_fails()
    seconds = time.monotonic() - start
    with pytest.raises(type(first.value)) as again:
        group.all_reduce(torch.zeros(3))
    assert again.value.ranks == first.value.ranks
    return type(first.value).__name__, first.value.ranks, str(first.value), seconds


def at_round(group: SharedGroup, number: int, action: Callable[[], object]) -> None:
    """Call `action` when this rank comes to that round, and has written its part but not announced it."""
    meet = group._meet

    def scripted(*, first: bool = False) -> None:
        if group._round == number:
            action()
        meet(first=first)

    group._meet = scripted  # type: ignore[method-assign]


def collective(group: SharedGroup, operation: str) -> Callable[[], None]:
    """A call that takes several rounds."""
    whole, part = torch.ones(10000 * group.size), torch.ones(10000)
    other, sizes = torch.empty(10000 * group.size), [10000] * group.size
    return {
        "all_reduce": lambda: group.all_reduce(whole),
        "reduce_scatter": lambda: group.reduce_scatter(part, whole),
        "all_gather": lambda: group.all_gather(whole, part),
        "broadcast": lambda: group.broadcast(whole, 0),
        "all_to_all": lambda: group.all_to_all(other, whole, sizes, sizes),
    }[operation]


def lose(operation: str, lost: int, number: int, rank: int) -> Caught:
    group = shared_group()
    if rank == lost:
        at_round(group, number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    found = caught(group, collective(group, operation))
    group.close()
    return found


def losing(path: str, operation: str, lost: int, number: int) -> list[Any]:
    return forked(path, 3, partial(lose, operation, lost, number))


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"])
def test_a_killed_rank_is_named_on_all_others_within_a_second(pool: WorkerPool, tmp_path: Path, operation: str) -> None:
    before = os.listdir("/dev/shm")
    lost, number = random.randrange(3), random.randrange(12)
    [found] = pool.run(1, losing, str(tmp_path), operation, lost, number)
    assert found.pop(lost) == -signal.SIGKILL
    for kind, ranks, text, seconds in found:
        assert (kind, ranks) == ("PeerDied", (lost,)), text
        assert f"for rank {lost}: its process ended" in text
        assert seconds < 1 + DEATH_GRACE_SECONDS
    assert set(os.listdir("/dev/shm")) <= set(before)


def lose_a_rank_in_a_backward(rank: int) -> tuple[str, tuple[int, ...]]:
    group = shared_group()
    parallel = DistributedDataParallel(nn.Linear(30, 40), bucket_cap_mb=0.001)
    parallel.register_comm_hook(None, group.sum_bucket)
    if rank == 1:
        at_round(group, 3, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def train() -> None:
        for _ in range(1000):
            parallel(torch.ones(30)).sum().backward()

    with pytest.raises(ExchangeError) as raised:
        train()
    group.close()
    return type(raised.value).__name__, raised.value.ranks


def test_a_backward_raises_the_error_of_its_hook(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(1, forked, str(tmp_path), 2, lose_a_rank_in_a_backward) == [[("PeerDied", (1,)), -signal.SIGKILL]]


def die_while_it_is_made(point: str, rank: int) -> str:
    """Rank 1 is killed after rank 0 has made the memory; rank 0 hears of it from the process group, and is killed too."""
    if rank == 1:
        setattr(segment, point, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError):
        SharedGroup.create()
    os.kill(os.getpid(), signal.SIGKILL)
    return "not reached"


@pytest.mark.parametrize("point", ["_facts", "_open"])
def test_nothing_is_left_where_ranks_are_killed_while_it_is_made(pool: WorkerPool, tmp_path: Path, point: str) -> None:
    before = os.listdir("/dev/shm")
    [found] = pool.run(1, forked, str(tmp_path), 2, partial(die_while_it_is_made, point))
    assert found == [-signal.SIGKILL] * 2
    assert set(os.listdir("/dev/shm")) <= set(before)


def hang() -> Caught | None:
    """Ranks 1 and 2 of four never come; rank 3 does, and waits with rank 0."""
    with shared_group(timeout=timedelta(seconds=0.5)) as group:
        found = caught(group, lambda: group.all_reduce(torch.ones(10))) if group.rank in (0, 3) else None
        distributed.barrier()
        return found


def test_a_timeout_names_the_ranks_that_are_missing(pool: WorkerPool) -> None:
    for found in pool.run(4, hang)[::3]:
        assert found is not None
        kind, ranks, text, seconds = found
        assert kind == "PeersLate"
        assert ranks == (1, 2) or (ranks == (1,) and "saw it first" in text)
        assert "for 0.5 s" in text
        assert seconds >= 0.4


def met_again(result: Caught | str) -> Caught | str:
    """Returned on every rank once all are here: no group is closed before."""
    distributed.barrier()
    return result


def raise_in_one(number: int) -> Caught | str:
    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    with shared_group() as group:
        if group.rank == 1:
            at_round(group, number, fail)
            with pytest.raises(ZeroDivisionError):
                collective(group, "all_reduce")()
            with pytest.raises(PeerStopped, match="raised ZeroDivisionError: on purpose; this group is of no more use"):
                collective(group, "all_gather")()
            return met_again("raised")
        return met_again(caught(group, collective(group, "all_reduce")))


def abort_in_one() -> Caught | str:
    with shared_group() as group:
        group.all_reduce(torch.ones(3))
        if group.rank == 1:
            group.abort()
            with pytest.raises(PeerStopped, match="rank 1 aborted"):
                group.all_reduce(torch.ones(3))
            return met_again("raised")
        return met_again(caught(group, lambda: group.all_reduce(torch.ones(3))))


def close_in_one() -> Caught | str:
    with shared_group() as group:
        group.all_reduce(torch.ones(3))
        if group.rank == 1:
            group.close()
            group.close()
            with pytest.raises(PeerStopped, match="has closed this group"):
                group.all_reduce(torch.ones(3))
            return "raised"
        return caught(group, lambda: group.all_reduce(torch.ones(3)))


@pytest.mark.parametrize("function", [partial(raise_in_one, 0), partial(raise_in_one, 3), abort_in_one, close_in_one])
def test_a_rank_that_stops_stops_all(pool: WorkerPool, function: Callable[[], Any]) -> None:
    for rank, found in enumerate(pool.run(3, function)):
        if rank == 1:
            assert found == "raised"
            continue
        kind, ranks, text, seconds = found
        assert (kind, ranks) == ("PeerStopped", (1,)), text
        assert seconds < 1 + DEATH_GRACE_SECONDS


def abort_a_wait() -> Caught | None:
    """Another thread ends this rank's own wait."""
    with shared_group() as group:
        found = None
        if group.rank == 0:
            thread = threading.Thread(target=group.abort)
            at_round(group, 0, thread.start)
            found = caught(group, lambda: group.all_reduce(torch.ones(3)))
            thread.join()
        distributed.barrier()
        return found


def test_another_thread_can_end_a_wait(pool: WorkerPool) -> None:
    found = pool.run(2, abort_a_wait)[0]
    assert found[:2] == ("PeerStopped", (0,))


def call_differently(which: str) -> Caught:
    with shared_group() as group:
        odd = group.rank == 1
        calls: dict[str, Callable[[], None]] = {
            "length": lambda: group.all_reduce(torch.zeros(30000 + odd)),
            "dtype": lambda: group.all_reduce(torch.zeros(30, dtype=torch.float64 if odd else torch.float32)),
            "operation": lambda: group.broadcast(torch.zeros(30), 0) if odd else group.all_reduce(torch.zeros(30)),
            "source": lambda: group.broadcast(torch.zeros(30), int(odd)),
            "sizes": lambda: group.all_to_all(torch.zeros(4 + odd), torch.zeros(4), [2 + odd, 2], [2, 2]),
        }
        return caught(group, calls[which])


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("length", ("all_reduce of float32, 30000 elements", "all_reduce of float32, 30001 elements")),
        ("dtype", ("all_reduce of float32, 30 elements", "all_reduce of float64, 30 elements")),
        ("operation", ("all_reduce of float32, 30 elements", "broadcast of float32, 30 elements, from rank 0")),
        ("source", ("from rank 0", "from rank 1")),
        ("sizes", ("it called another collective", "rank 0 sends 2 elements to rank 1, which expects 3")),
    ],
)
def test_ranks_that_call_different_things_are_told(pool: WorkerPool, which: str, said: tuple[str, str]) -> None:
    found = pool.run(2, call_differently, which)
    assert [kind for kind, *_ in found] == ["CallsDiffer"] * 2
    assert any(said[0] in text for _, _, text, _ in found), found
    assert any(said[1] in text for _, _, text, _ in found), found


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
                "a non-contiguous tensor on cpu; shared memory exchanges contiguous tensors on the CPU",
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


# Where it cannot be had


def unavailable(rank: int, name: str, value: Any) -> str:
    """On that rank, a function of the system is another; the reason that this rank got, and that nothing stayed open."""
    before = set(os.listdir("/proc/self/fd"))
    if distributed.get_rank() == rank:
        module, _, attribute = name.rpartition(".")
        setattr({"os": os, "platform": platform, "segment": segment}[module], attribute, value)
    made = SharedGroup.create()
    assert isinstance(made, Unavailable)
    assert set(os.listdir("/proc/self/fd")) == before
    return made.reason


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def not_permitted(*_: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def arm() -> str:
    return "aarch64"


def another_boot() -> list[str | int]:
    return ["another", 1]


def no_mark(*_: object) -> int:
    return 8


@pytest.mark.parametrize(
    ("rank", "name", "value", "expected"),
    [
        (0, "os.posix_fallocate", no_space, "rank 0: ValueError: \\d+ bytes of shared memory cannot be had: .*No space left on device"),
        (1, "os.pidfd_open", not_permitted, "rank 1: PermissionError: .*Operation not permitted"),
        (2, "platform.machine", arm, "rank 2: ValueError: the processor is aarch64; x86_64 alone"),
        (0, "os.memfd_create", not_permitted, "rank 0: PermissionError"),
        (0, "os.pwrite", no_mark, "rank 0: ValueError: the memory that it opened is not rank 0's"),
        (1, "segment._host", another_boot, "rank 1 runs on another host than rank 0, or in another container"),
    ],
)
def test_where_one_rank_cannot_all_ranks_get_the_same_reason(pool: WorkerPool, rank: int, name: str, value: Any, expected: str) -> None:
    reasons = pool.run(3, unavailable, rank, name, value)
    assert len(set(reasons)) == 1
    assert re.match(expected, reasons[0]), reasons[0]


def alone() -> object:
    return SharedGroup.create()


def test_one_process_shares_memory_with_nobody(pool: WorkerPool) -> None:
    assert pool.run(1, alone) == [Unavailable("there is one process, which has nobody to share memory with")]


# The pure parts


@given(size=st.integers(2, 200), buffers=st.integers(1, 64))
def test_no_two_words_of_the_segment_are_in_one_place(size: int, buffers: int) -> None:
    lines = {word for rank in range(size) for word in range(segment._line(rank), segment._line(rank) + 3)}
    width = segment._call_words(size)
    first = segment._line(size)
    assert len(lines) == 3 * size
    assert max(lines) < first
    assert min(lines) > 0  # rank 0's mark stands there
    assert width >= size + 1
    assert 8 * (first + 2 * size * width) <= segment._words_bytes(size)


@given(
    length=st.integers(0, 2**39 - 1),
    operation=st.integers(0, 4),
    code=st.integers(0, len(shared._DTYPES) - 1),
    source=st.integers(0, 2**16 - 1),
)
def test_what_is_called_can_be_read_back(length: int, operation: int, code: int, source: int) -> None:
    text = shared._called(shared._signature_of(operation, code, length, source))
    assert text.startswith(f"{shared._NAMES[operation]} of {str(shared._DTYPES[code]).removeprefix('torch.')}")
    assert (f", {length} elements" in text) == (shared._NAMES[operation] != "all_to_all")
    assert (f", from rank {source}" in text) == (shared._NAMES[operation] == "broadcast")
    assert shared._signature_of(operation, code, length, source) < 2**63


@given(parts=st.lists(st.lists(st.floats(width=32), min_size=4, max_size=4), min_size=2, max_size=6))
def test_a_sum_is_added_in_the_order_of_the_ranks(parts: list[list[float]]) -> None:
    tensors = [torch.tensor(part, dtype=torch.float32) for part in parts]
    out = torch.empty(4)
    shared._add(tensors, out)
    torch.testing.assert_close(out, total_of(tensors), rtol=0, atol=0, equal_nan=True)
