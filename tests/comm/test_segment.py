"""Shared memory where it cannot be had; and where a rank dies, hangs, raises or calls something
else.

(No `from __future__ import annotations` here: DDP looks at its hooks' annotations, and wants
classes.)
"""

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
from hypothesis import given, strategies as st
from torch import distributed, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from comm.test_shared import shared_group
from lockstep.base.container import process_id_space
from lockstep.comm import segment
from lockstep.comm.segment import ExchangeError, PeerStopped, Unavailable
from lockstep.comm.shared_memory import SharedMemoryGroup
from lockstep.testing import leaks
from lockstep.testing.pool import WorkerPool
from lockstep.testing.worker import loopback_store

# Small, so that a collective takes many rounds.
BUFFER_BYTES = 16 << 10


# A rank that fails. The pool ends a run at its first death, so these ranks are forks of a worker.


def forked(path: str, world_size: int, function: Callable[[int], Any]) -> list[Any]:
    """What `function(rank)` returned in `world_size` processes with a Gloo group of their own; the
    signal of one that was killed."""
    distributed.destroy_process_group()
    children, ports = [], []
    for rank in range(world_size):
        port, tell_port = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                number = int.from_bytes(os.read(port, 4), "little")
                store = distributed.TCPStore("127.0.0.1", number, is_master=False)  # type: ignore[attr-defined]
                distributed.init_process_group(
                    "gloo", store=store, rank=rank, world_size=world_size
                )
                distributed.barrier()
                Path(f"{path}/{rank}").write_bytes(pickle.dumps(function(rank)))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        os.close(port)
        children.append(child)
        ports.append(tell_port)
    # only now: a child that is forked beside its threads may wait for a lock that one of them held
    server = loopback_store()
    for tell_port in ports:
        os.write(tell_port, server.port.to_bytes(4, "little"))
        os.close(tell_port)
    endings = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return [
        pickle.loads(Path(f"{path}/{rank}").read_bytes()) if ending == 0 else ending
        for rank, ending in enumerate(endings)
    ]


Caught = tuple[str, tuple[int, ...], str, float]
"""An error's type, the ranks that it names, its text, and the seconds until it came."""


def caught(group: SharedMemoryGroup, call: Callable[[], object]) -> Caught:
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


def at_round(group: SharedMemoryGroup, number: int, action: Callable[[], object]) -> None:
    """Call `action` when this rank comes to that round, and has written its part but not announced
    it."""
    rounds = group._rounds
    announce = rounds.announce

    def scripted() -> None:
        if rounds.number == number:
            action()
        announce()

    rounds.announce = scripted  # type: ignore[method-assign]


def collective(group: SharedMemoryGroup, operation: str) -> Callable[[], None]:
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


@pytest.mark.parametrize(
    "operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
)
def test_a_killed_rank_is_named_on_all_others(
    pool: WorkerPool, tmp_path: Path, operation: str
) -> None:
    before = leaks.take(["shared-memory"])
    lost, number = random.randrange(3), random.randrange(12)
    [found] = pool.run(1, losing, str(tmp_path), operation, lost, number)
    assert found.pop(lost) == -signal.SIGKILL
    for kind, ranks, text, _ in found:  # and not at the timeout of 10 minutes
        assert (kind, ranks) == ("PeerDied", (lost,)), text
        assert f"for rank {lost}: its process ended" in text
    assert leaks.remaining(before) == []


def sum_bucket(group: SharedMemoryGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    group.all_reduce(bucket.buffer())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def lose_a_rank_in_a_backward(rank: int) -> tuple[str, tuple[int, ...]]:
    group = shared_group()
    parallel = DistributedDataParallel(nn.Linear(30, 40), bucket_cap_mb=0.001)
    parallel.register_comm_hook(group, sum_bucket)
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
    assert pool.run(1, forked, str(tmp_path), 2, lose_a_rank_in_a_backward) == [
        [("PeerDied", (1,)), -signal.SIGKILL]
    ]


def die_while_it_is_made(point: str, rank: int) -> str:
    """Rank 1 is killed after rank 0 has made the memory; rank 0 hears of it from the process group,
    and is killed too."""
    if rank == 1:
        setattr(segment, point, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError):
        SharedMemoryGroup.create()
    os.kill(os.getpid(), signal.SIGKILL)
    return "not reached"


@pytest.mark.parametrize("point", ["_offer", "_open"])
def test_nothing_is_left_where_ranks_are_killed_while_it_is_made(
    pool: WorkerPool, tmp_path: Path, point: str
) -> None:
    before = leaks.take(["shared-memory"])
    [found] = pool.run(1, forked, str(tmp_path), 2, partial(die_while_it_is_made, point))
    assert found == [-signal.SIGKILL] * 2
    assert leaks.remaining(before) == []


def hang() -> Caught | None:
    """Ranks 1 and 2 of four never come; rank 3 does, and waits with rank 0."""
    with shared_group(timeout=timedelta(seconds=4)) as group:
        found = (
            caught(group, lambda: group.all_reduce(torch.ones(10)))
            if group.rank in (0, 3)
            else None
        )
        distributed.barrier()
        return found


def test_a_timeout_names_the_ranks_that_are_missing(pool: WorkerPool) -> None:
    for found in pool.run(4, hang)[::3]:
        assert found is not None
        kind, ranks, text, seconds = found
        assert kind == "PeersLate"
        assert ranks == (1, 2) or (ranks == (1,) and "saw it first" in text)
        assert "within 4 s" in text
        assert seconds >= 3.9


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
            with pytest.raises(
                PeerStopped,
                match="raised ZeroDivisionError: on purpose; this group cannot be used any more",
            ):
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


@pytest.mark.parametrize(
    "function", [partial(raise_in_one, 0), partial(raise_in_one, 3), abort_in_one, close_in_one]
)
def test_a_rank_that_stops_stops_all(pool: WorkerPool, function: Callable[[], Any]) -> None:
    for rank, found in enumerate(pool.run(3, function)):
        if rank == 1:
            assert found == "raised"
            continue
        kind, ranks, text, _ = found
        assert (kind, ranks) == ("PeerStopped", (1,)), text


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
            "dtype": lambda: group.all_reduce(
                torch.zeros(30, dtype=torch.float64 if odd else torch.float32)
            ),
            "operation": lambda: (
                group.broadcast(torch.zeros(30), 0) if odd else group.all_reduce(torch.zeros(30))
            ),
            "source": lambda: group.broadcast(torch.zeros(30), int(odd)),
            "sizes": lambda: group.all_to_all(
                torch.zeros(4 + odd), torch.zeros(4), [2 + odd, 2], [2, 2]
            ),
        }
        return caught(group, calls[which])


@pytest.mark.parametrize(
    ("which", "said"),
    [
        (
            "length",
            ("all_reduce of float32, 30000 elements", "all_reduce of float32, 30001 elements"),
        ),
        ("dtype", ("all_reduce of float32, 30 elements", "all_reduce of float64, 30 elements")),
        (
            "operation",
            (
                "all_reduce of float32, 30 elements",
                "broadcast of float32, 30 elements, from rank 0",
            ),
        ),
        ("source", ("from rank 0", "from rank 1")),
        (
            "sizes",
            ("it called another collective", "rank 0 sends 2 elements to rank 1, which expects 3"),
        ),
    ],
)
def test_ranks_that_call_different_things_are_told(
    pool: WorkerPool, which: str, said: tuple[str, str]
) -> None:
    found = pool.run(2, call_differently, which)
    assert [kind for kind, *_ in found] == ["CallsDiffer"] * 2
    assert any(said[0] in text for _, _, text, _ in found), found
    assert any(said[1] in text for _, _, text, _ in found), found


# Where it cannot be had


def unavailable(rank: int, name: str, value: Any) -> str:
    """On that rank, a function of the system is another; the reason that this rank got, and that
    nothing stayed open."""
    before = set(os.listdir("/proc/self/fd"))
    if distributed.get_rank() == rank:
        module, _, attribute = name.rpartition(".")
        setattr({"os": os, "platform": platform, "segment": segment}[module], attribute, value)
    made = SharedMemoryGroup.create()
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


def another_container() -> list[str | int]:
    boot, _ = process_id_space()
    return [boot, 1]


def no_mark(*_: object) -> int:
    return 8


@pytest.mark.parametrize(
    ("rank", "name", "value", "expected"),
    [
        (
            0,
            "os.posix_fallocate",
            no_space,
            (
                "rank 0: ValueError: \\d+ bytes of shared memory cannot be had: .*No space left on"
                " device"
            ),
        ),
        (1, "os.pidfd_open", not_permitted, "rank 1: PermissionError: .*Operation not permitted"),
        (2, "platform.machine", arm, "rank 2: ValueError: the processor is aarch64; only x86_64"),
        (0, "os.memfd_create", not_permitted, "rank 0: PermissionError"),
        (0, "os.pwrite", no_mark, "rank 0: ValueError: the memory that it opened is not rank 0's"),
        (1, "segment.process_id_space", another_boot, "rank 1 runs on another host than rank 0$"),
        (
            1,
            "segment.process_id_space",
            another_container,
            "rank 1 runs in another container than rank 0, on the same host, .*--pid=host",
        ),
    ],
)
def test_where_one_rank_cannot_all_ranks_get_the_same_reason(
    pool: WorkerPool, rank: int, name: str, value: Any, expected: str
) -> None:
    reasons = pool.run(3, unavailable, rank, name, value)
    assert len(set(reasons)) == 1
    assert re.match(expected, reasons[0]), reasons[0]


def alone() -> object:
    return SharedMemoryGroup.create()


def test_one_process_shares_memory_with_nobody(pool: WorkerPool) -> None:
    assert pool.run(1, alone) == [
        Unavailable("there is one process, which has nobody to share memory with")
    ]


@given(size=st.integers(2, 200), buffers=st.integers(1, 64))
def test_no_two_words_of_the_segment_are_in_one_place(size: int, buffers: int) -> None:
    lines = {
        word for rank in range(size) for word in range(segment._line(rank), segment._line(rank) + 3)
    }
    width = segment._call_words(size)
    first = segment._line(size)
    assert len(lines) == 3 * size
    assert max(lines) < first
    assert min(lines) > 0  # rank 0's mark stands there
    assert width >= size + 1
    assert 8 * (first + 2 * size * width) <= segment._words_bytes(size)
