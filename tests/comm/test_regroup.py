"""A survivor's way from a group that has lost a process into a new one, in the same process."""

from __future__ import annotations

import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.base.errors import LaunchError
from lockstep.base.torch_private import PrefixStore, Store, TCPStore
from lockstep.comm.hierarchical import HierarchicalAllReduce
from lockstep.comm.mesh import Mesh
from lockstep.comm.regroup import (
    CollectivesAborted,
    abort_collectives,
    abortable,
    is_aborted,
    join_over,
    leave_groups,
)
from lockstep.comm.world import World
from lockstep.plan import Plan
from lockstep.testing.pool import WorkerPool
from lockstep.testing.worker import loopback_store

ANSWER_SECONDS = 30.0
SOON_SECONDS = 5.0
"""Far below the groups' timeout, and far above what a wake-up takes on a busy machine."""


@dataclass(frozen=True, slots=True)
class Place:
    """The group that a process is to join."""

    port: int
    generation: int
    rank: int
    size: int
    plan: str
    collective: str
    """The collective in which its ranks wait for rank 0, which does not come."""


class Launcher:
    """Processes that join group after group; what lockstep's launcher does when it sees one of them
    end."""

    def __init__(self, count: int) -> None:
        """Fork `count` processes, before this one has threads."""
        dist.destroy_process_group()  # the pool's
        self.waiting = [self._forked() for _ in range(count)]
        """Those that have joined no group yet."""
        self.processes: list[tuple[int, Connection]] = []
        """Those of the group, by rank."""
        self._store = loopback_store()
        self._generation = 0

    def _forked(self) -> tuple[int, Connection]:
        mine, theirs = Pipe()
        child = os.fork()
        if child == 0:
            try:
                _live(theirs)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        theirs.close()
        return child, mine

    def kill(self, rank: int) -> None:
        process, pipe = self.processes.pop(rank)
        end = os.pidfd_open(process)
        os.kill(process, signal.SIGKILL)
        wait([end])
        os.close(end)
        os.waitpid(process, 0)
        pipe.close()

    def stop(self, rank: int) -> None:
        process, pipe = self.processes.pop(rank)
        os.kill(process, signal.SIGSTOP)
        self.waiting.insert(0, (process, pipe))

    def regroup(self, collective: str, plan: str, *, size: int) -> list[Any]:
        """Tell all processes, in whatever they wait, of a new group, with new ones if it is larger.
        Returns what each says of it, by rank."""
        while len(self.processes) < size:
            self.processes.append(self.waiting.pop())
        self._generation += 1
        for rank, (_, pipe) in enumerate(self.processes):
            pipe.send(Place(self._store.port, self._generation, rank, size, plan, collective))
        return [self._answer(*each) for each in self.processes]

    def _answer(self, process: int, pipe: Connection) -> Any:
        assert pipe.poll(ANSWER_SECONDS), f"process {process} does not answer"
        return pipe.recv()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.processes += self.waiting
        while self.processes:
            self.kill(0)


def _live(pipe: Connection) -> None:
    """Join the groups that the launcher names, one after the other, and wait in a collective of
    each."""
    # makes torch's pool of threads, which a fork breaks, anew before two threads do so at once
    torch.set_num_threads(1)
    places: queue.Queue[Place] = queue.Queue()
    places.put(pipe.recv())

    def listen() -> None:
        while True:
            place = pipe.recv()
            abort_collectives()
            places.put(place)

    threading.Thread(target=listen, daemon=True).start()
    hook, left, store = sys.excepthook, 0, None
    while True:
        place = places.get()
        store = store or TCPStore("127.0.0.1", place.port, is_master=False)
        try:
            with abortable(SOON_SECONDS):
                _serve(joined(store, place), place, pipe, left)
        except CollectivesAborted:
            left = leave_groups()
            assert sys.excepthook is hook


def joined(store: Store, place: Place) -> World:
    return join_over(
        PrefixStore(str(place.generation), store),
        rank=place.rank,
        size=place.size,
        local_rank=place.rank,
        local_size=place.size,
        timeout=timedelta(seconds=2 * ANSWER_SECONDS),
    )


def _serve(world: World, place: Place, pipe: Connection, left: int) -> None:
    collective = WAITS[place.collective](Mesh.of(world, Plan.parse(place.plan)))
    collective()
    total = torch.tensor([10.0**place.rank])
    dist.all_reduce(total)
    pipe.send(
        {
            "sum": total.item(),
            "left": left,
            "name": getattr(dist.group.WORLD, "group_name", None),
            **_held(),
        }
    )
    while place.rank:
        collective()
    if is_aborted(2 * ANSWER_SECONDS):  # as a rank does that computes
        raise CollectivesAborted("told while it computed")


def _held() -> dict[str, int]:
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def _all_reduce_in_shared_memory(mesh: Mesh) -> Callable[[], object]:
    assert mesh.data.shared_memory is not None
    return lambda: mesh.data.all_reduce(torch.ones(10))


def _all_reduce_over_hosts(mesh: Mesh) -> Callable[[], object]:
    hosts = [0, 0, *range(1, mesh.world.size - 1)]
    reducer = HierarchicalAllReduce.create(dist.group.WORLD, hosts)
    assert isinstance(reducer, HierarchicalAllReduce)
    HierarchicalAllReduce.connect([reducer.leaders], [reducer])
    return lambda: reducer.all_reduce(torch.ones(10))


def _all_reduce_on_axes(mesh: Mesh) -> Callable[[], object]:
    def all_reduce() -> None:
        for name in ("shard", "replicate"):
            mesh.axis(name).all_reduce(torch.ones(10))

    return all_reduce


def _fsdp(mesh: Mesh) -> Callable[[], object]:
    from torch.distributed.fsdp import fully_shard

    assert mesh.torch_mesh is not None
    model = fully_shard(nn.Linear(8, 8), mesh=mesh.torch_mesh["shard"])
    return lambda: model(torch.ones(2, 8)).sum().backward()  # type: ignore[operator]


WAITS: dict[str, Callable[[Mesh], Callable[[], object]]] = {
    "shared memory": _all_reduce_in_shared_memory,
    "several hosts": _all_reduce_over_hosts,
    "all-reduce": lambda mesh: lambda: dist.all_reduce(torch.ones(10)),
    "barrier": lambda mesh: dist.barrier,
    "axis": _all_reduce_on_axes,
    "FSDP2": _fsdp,
}
"""What waits for the last rank -> a function that makes the collective."""


def lose_and_replace(collective: str, plans: dict[int, str]) -> list[Any]:
    """What the processes say of a group of 4 ranks, of 3 after one was killed, of 4 after one was
    stopped, whose connections stay open, with two other processes."""
    with Launcher(6) as launcher:
        said = [launcher.regroup(collective, plans[4], size=4)]
        for size, lose in ((3, launcher.kill), (4, launcher.stop)):
            # most wait in the collective now; those that do not yet must leave it too
            time.sleep(0.05)
            lose(0)
            said.append(
                launcher.regroup(
                    collective if size in plans else "all-reduce",
                    plans.get(size, "replicate=3"),
                    size=size,
                )
            )
    return said


@pytest.mark.parametrize(
    ("collective", "plans"),
    [
        ("shared memory", {4: "replicate=4", 3: "replicate=3"}),
        ("several hosts", {4: "replicate=4", 3: "replicate=3"}),
        ("all-reduce", {4: "replicate=4,transport=torch", 3: "replicate=3,transport=torch"}),
        ("barrier", {4: "replicate=4", 3: "replicate=3"}),
        ("axis", {4: "replicate=2,shard=2,transport=torch"}),
        ("FSDP2", {4: "shard=4", 3: "shard=3"}),
    ],
)
def test_survivors_leave_a_collective_and_join_a_new_group(
    pool: WorkerPool, collective: str, plans: dict[int, str]
) -> None:
    said = pool.run(1, lose_and_replace, collective, plans)[0]
    assert [[each["sum"] for each in group] for group in said] == [
        [1111.0] * 4,
        [111.0] * 3,
        [1111.0] * 4,
    ]
    assert [each["left"] for group in said for each in group] == [0] * 11


def many_losses(count: int) -> list[Any]:
    with Launcher(3) as launcher:
        return [launcher.regroup("shared memory", "replicate=3", size=3) for _ in range(count)]


def test_nothing_of_a_group_is_left(pool: WorkerPool) -> None:
    said = pool.run(1, many_losses, 8)[0]
    for rank in range(3):
        held = [(group[rank]["descriptors"], group[rank]["threads"]) for group in said]
        assert held[2:] == held[1:-1], held  # the first group starts what stays


def names_of_groups() -> list[list[str]]:
    """What a process that stays, and one that comes later, call their group in each generation."""
    with Launcher(3) as launcher:
        return [
            [
                each["name"]
                for each in launcher.regroup("all-reduce", f"replicate={size}", size=size)
            ]
            for size in (2, 3)
        ]


def test_no_name_of_a_group_is_used_again(pool: WorkerPool) -> None:
    """Torch's meshes find their groups by name: one of before must not find a group of now."""
    before, after = pool.run(1, names_of_groups)[0]
    assert len(set(before)) == len(set(after)) == 1
    assert before[0] != after[0]


def leave_a_group_of_the_script(store: TCPStore) -> None:
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with pytest.raises(LaunchError, match="the script has made the process group itself"):
        leave_groups()
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_a_group_that_the_script_made_is_not_left(pool: WorkerPool) -> None:
    pool.run(1, alone, leave_a_group_of_the_script)


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns where there is no group, in a process with the store of a
    launcher."""
    dist.destroy_process_group()
    return function(loopback_store(), *args)


def abort_while_joining(store: TCPStore) -> list[str]:
    """Join a group whose other rank never comes; then one, after the abort came first."""
    texts = []
    for generation, seconds in enumerate((0.2, 0.0)):
        thread = threading.Timer(seconds, abort_collectives)
        thread.start()
        if not seconds:
            thread.join()
        with pytest.raises(CollectivesAborted) as raised:
            joined(store, Place(store.port, generation, 0, 2, "", ""))
        texts.append(str(raised.value))
        thread.join()
        assert is_aborted()
        assert leave_groups() == 0
        assert not is_aborted()
    store.set("key", "the launcher's own connection is not touched")
    return texts


def test_an_abort_ends_a_join_too(pool: WorkerPool) -> None:
    waiting, before = pool.run(1, alone, abort_while_joining)[0]
    assert waiting.startswith("another process was lost: ")
    assert before == "another process was lost before this one could join"


def abort_beside_other_connections(store: TCPStore) -> bytes:
    """What a connection of the user, which a thread awaits in an epoll, carries after an abort."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as theirs,
    ):
        mine, _ = server.accept()
        with mine, selectors.EpollSelector() as selector:
            selector.register(mine, selectors.EVENT_READ)
            thread = threading.Thread(target=selector.select)
            thread.start()
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            abort_collectives()
            theirs.sendall(b"alive")
            thread.join()
            received = mine.recv(5)
    dist.destroy_process_group()
    leave_groups()
    return received


def test_an_abort_touches_no_connection_but_torchs(pool: WorkerPool) -> None:
    assert pool.run(1, alone, abort_beside_other_connections) == [b"alive"]
