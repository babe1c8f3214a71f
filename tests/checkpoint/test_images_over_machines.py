"""Images in memory are read bit for bit though each rank sees only some of the parts, and on other numbers of ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
import torch
from checkpoint.states import ATTEMPT, here, laid_out, values
from torch import Tensor

from lockstep.checkpoint.images.reader import Images, open_images
from lockstep.checkpoint.memory_image import ImageWriter
from lockstep.comm.mesh import full_tensor
from lockstep.comm.world import World
from lockstep.testing.pool import WorkerPool

STEPS = 3


def state_of(step: int, world: World) -> dict[str, Tensor]:
    """Full and sharded tensors, a tensor of all ranks, and one that only the last rank has."""
    state = {**laid_out(values(step), world, turned=False), "everywhere": torch.full((3, 5), float(step))}
    if world.rank == world.size - 1:
        state["last"] = torch.full((2,), complex(step, -step))
    return state


def write(address: str, steps: Sequence[int]) -> None:
    """Write the images of these steps on all ranks, and give the memory to the process that listens at `address`."""
    world = here()
    writer = ImageWriter(world, ATTEMPT, {"rank": world.rank})
    for step in steps:
        writer.write(step, state_of(step, world), {"step": step, "ranks": {str(world.rank): step}})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as toward:
        toward.connect(address)
        socket.send_fds(toward, [str(world.rank).encode()], [writer.descriptor])
    writer.close()


@contextmanager
def written(pool: WorkerPool, processes: int, steps: Sequence[int] = range(1, STEPS + 1)) -> Iterator[list[list[str]]]:
    """The paths of the memory that each rank of so many, which are gone, has given away."""
    with ExitStack() as stack, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("")
        pool.run(processes, write, listener.getsockname().decode(), list(steps))
        held = {}
        for _ in range(processes):
            text, descriptors, _, _ = socket.recv_fds(listener, 64, 8)
            held[int(text)] = [f"/proc/{os.getpid()}/fd/{each}" for each in descriptors]
            for each in descriptors:
                stack.callback(os.close, each)
        yield [held[rank] for rank in range(processes)]


def read(seen: Sequence[Sequence[str]], old: int, turned: bool = True) -> tuple[int | None, list[str], int]:
    """Read the newest image; each rank sees the memory at its own paths. Returns its step, the names of the tensors
    that differ from those that `old` ranks wrote, and the bytes that this rank sent or received for tensors."""
    world = here()
    images = open_images(seen[world.rank], world)
    assert world.gather_values(str(images.names)) == [str(images.names)] * world.size
    if images.newest is None:
        return None, [], 0
    state = laid_out({key: torch.zeros_like(value) for key, value in values(0).items()}, world, turned=turned)
    state |= {"everywhere": torch.zeros(3, 5), "last": torch.zeros(2, dtype=torch.complex64)}
    moved = loaded(images, state, world, old)
    step = images.newest.step
    truth = {**values(step), "everywhere": torch.full((3, 5), float(step)), "last": torch.full((2,), complex(step, -step))}
    return step, [name for name, value in truth.items() if not torch.equal(full_tensor(state[name]), value)], moved


def loaded(images: Images, state: dict[str, Tensor], world: World, old: int) -> int:
    """Load the newest image. Returns the bytes that were broadcast."""
    assert images.newest is not None
    moved, broadcast = [0], torch.distributed.broadcast

    def counted(tensor: Tensor, *args: object, **kwargs: object) -> object:
        moved.append(tensor.nbytes)
        return broadcast(tensor, *args, **kwargs)

    reader = images.reader(images.newest)
    assert reader.manifest.values == {"step": images.newest.step, "ranks": {str(rank): images.newest.step for rank in range(old)}}
    assert reader.manifest.metadata == {"rank": 0}
    assert reader.tensors.keys() == state.keys()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "broadcast", counted)
        reader.load_into(state, world)
    return sum(moved)


@pytest.mark.parametrize(
    "seen",
    [
        [[0, 1, 2]],
        [[0, 1, 2], [0, 1, 2]],
        [[0], [1, 2]],
        [[0, 1, 2], []],
        [[], [2, 1, 0]],
        [[2], [0], [1]],
        [[0, 1], [1, 2], []],
    ],
    ids=str,
)
def test_every_rank_reads_what_only_others_see(pool: WorkerPool, seen: list[list[int]]) -> None:
    with written(pool, 3) as paths:
        found = pool.run(len(seen), read, [[path for rank in ranks for path in paths[rank]] for ranks in seen], 3)
    sent = {moved for _, _, moved in found}
    assert [(step, wrong) for step, wrong, _ in found] == [(STEPS, [])] * len(seen)
    assert len(sent) == 1
    assert (sent == {0}) == all(len(ranks) == 3 for ranks in seen), "what all see is not sent"


def test_only_what_a_rank_lacks_is_sent(pool: WorkerPool) -> None:
    """Here each rank has its own shards, and lacks some whole tensors."""
    with written(pool, 2) as paths:
        ((step, wrong, moved), _) = pool.run(2, read, [*paths], 2, False)
    assert (step, wrong) == (STEPS, [])
    assert 0 < moved < values(0)["large"].nbytes / 8


def test_an_image_of_which_a_part_is_nowhere_does_not_count(pool: WorkerPool) -> None:
    with written(pool, 2, [1, 2]) as early, written(pool, 2, [3]) as late:
        assert pool.run(2, read, [[*early[0], *late[0]], [*early[1]]], 2) == [(2, [], pytest.approx(0, abs=1e9))] * 2
        assert pool.run(2, read, [early[0], early[0]], 2) == [(None, [], 0)] * 2
        assert pool.run(1, read, [[]], 2) == [(None, [], 0)]
