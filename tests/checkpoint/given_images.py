"""Functions that write images in memory on several processes, give the memory to the test's own
process, and read it on others. At module level, so that workers can be told their names."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch
from checkpoint.states import ATTEMPT, here, laid_out, values
from torch import Tensor

from lockstep.checkpoint.image_writer import ImageWriter
from lockstep.checkpoint.images import Images, open_images
from lockstep.comm.mesh import full_tensor
from lockstep.comm.world import World
from lockstep.testing.pool import WorkerPool

STEPS = 3


def state_of(step: int, world: World) -> dict[str, Tensor]:
    """Full and sharded tensors, a tensor of all ranks, and one that only the last rank has."""
    state = {
        **laid_out(values(step), world, turned=False),
        "everywhere": torch.full((3, 5), float(step)),
    }
    if world.rank == world.size - 1:
        state["last"] = torch.full((2,), complex(step, -step))
    return state


def on_hosts(sizes: Sequence[int]) -> World:
    """The world of this process, as if there were hosts with so many ranks."""
    world, host = here(), 0
    local_rank = world.rank
    while local_rank >= sizes[host]:
        local_rank -= sizes[host]
        host += 1
    return replace(world, local_rank=local_rank, local_size=sizes[host])


def give_away(writer: ImageWriter, address: str, rank: int) -> None:
    """Give the memory to the process that listens at `address`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as toward:
        toward.connect(address)
        socket.send_fds(toward, [str(rank).encode()], writer.descriptors)


def write(address: str, steps: Sequence[int], hosts: Sequence[int]) -> None:
    """Write the images of these steps on all ranks, and give the memory away."""
    world = on_hosts(hosts)
    writer = ImageWriter(world, ATTEMPT, {"rank": world.rank})
    for step in steps:
        writer.write(step, state_of(step, world), {"step": step, "ranks": {str(world.rank): step}})
    give_away(writer, address, world.rank)
    writer.close()


@contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("")
        yield listener


@contextmanager
def received(listener: socket.socket, processes: int) -> Iterator[list[list[str]]]:
    """The paths of the memory that each rank has given away."""
    with ExitStack() as stack:
        held = {}
        for _ in range(processes):
            text, descriptors, _, _ = socket.recv_fds(listener, 64, 8)
            held[int(text)] = [f"/proc/{os.getpid()}/fd/{each}" for each in descriptors]
            for each in descriptors:
                stack.callback(os.close, each)
        yield [held[rank] for rank in range(processes)]


@contextmanager
def written(
    pool: WorkerPool,
    processes: int,
    steps: Sequence[int] = range(1, STEPS + 1),
    hosts: Sequence[int] | None = None,
) -> Iterator[list[list[str]]]:
    """The paths of the memory that each rank of so many, which are gone, has given away. `hosts`:
    the number of ranks of each; None: one host."""
    with listening() as listener:
        pool.run(
            processes,
            write,
            listener.getsockname().decode(),
            list(steps),
            [processes] if hosts is None else hosts,
        )
        with received(listener, processes) as paths:
            yield paths


def read(
    seen: Sequence[Sequence[str]], old: int, turned: bool = True
) -> tuple[int | None, list[str], int]:
    """Read the newest image; each rank sees the memory at its own paths. Returns its step, the
    names of the tensors that differ from those that `old` ranks wrote, and the bytes that this rank
    sent or received for tensors."""
    world = here()
    images = open_images(seen[world.rank], world)
    assert world.gather_values(str(images.names)) == [str(images.names)] * world.size
    if images.newest is None:
        return None, [], 0
    state = laid_out(
        {key: torch.zeros_like(value) for key, value in values(0).items()}, world, turned=turned
    )
    state |= {"everywhere": torch.zeros(3, 5), "last": torch.zeros(2, dtype=torch.complex64)}
    moved = loaded(images, state, world, old)
    step = images.newest.step
    truth = {
        **values(step),
        "everywhere": torch.full((3, 5), float(step)),
        "last": torch.full((2,), complex(step, -step)),
    }
    return (
        step,
        [name for name, value in truth.items() if not torch.equal(full_tensor(state[name]), value)],
        moved,
    )


def loaded(images: Images, state: dict[str, Tensor], world: World, old: int) -> int:
    """Load the newest image. Returns the bytes that were broadcast."""
    assert images.newest is not None
    moved, broadcast = [0], torch.distributed.broadcast

    def counted(tensor: Tensor, *args: object, **kwargs: object) -> object:
        moved.append(tensor.nbytes)
        return broadcast(tensor, *args, **kwargs)

    reader = images.reader(images.newest)
    assert reader.manifest.values == {
        "step": images.newest.step,
        "ranks": {str(rank): images.newest.step for rank in range(old)},
    }
    assert reader.manifest.metadata == {"rank": 0}
    assert reader.tensors.keys() == state.keys()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "broadcast", counted)
        reader.load_into(state, world)
    return sum(moved)
