"""A state of full and sharded tensors of many dtypes, and functions that save and load it on
several processes."""

from __future__ import annotations

import json
import os

import torch
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from lockstep.checkpoint.images import open_images
from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.manifest import BLOCK_BYTES, FORMAT, DamagedError, _hash
from lockstep.checkpoint.object_store import open_storage
from lockstep.checkpoint.saver import Saver, SaveResult
from lockstep.comm.mesh import Mesh, full_tensor
from lockstep.comm.world import World, join
from lockstep.plan import Plan

SHAPES = {
    "rows": (7, 5),
    "columns": (3, 4),
    "whole": (5,),
    "few": (2, 3),
    "step": (),
    "none": (0, 3),
    "large": (3 * BLOCK_BYTES // 8, 2),
}
TYPES = {"rows": torch.bfloat16, "step": torch.int64, "columns": torch.bool}
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "few": Shard(0), "large": Shard(0)}
ATTEMPT = "00c0ffee"


def with_right_hash(content: object) -> bytes:
    """A manifest of any content."""
    text = json.dumps(content, separators=(",", ":"))
    checksum = _hash(FORMAT, text.encode())
    return f'{{"format":{FORMAT},"blake3":"{checksum}","content":{text}}}\n'.encode()


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 9).to(TYPES.get(name, torch.float32))
        for name, shape in SHAPES.items()
    }


def here() -> World:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return join(rank=rank, size=size, local_rank=rank, local_size=size)


def laid_out(state: dict[str, Tensor], world: World, *, turned: bool) -> dict[str, Tensor]:
    """`turned`: tensors sharded by rows are sharded by columns, and the reverse."""
    mesh = Mesh.of(
        world, Plan.parse(f"shard={world.size},transport=torch").resolve(world.size)
    ).torch_mesh
    if mesh is None:
        return state
    placements = {
        name: Shard(1 - shard.dim) if turned else shard for name, shard in PLACEMENTS.items()
    }
    return {
        name: distribute_tensor(value, mesh, [placements[name]]) if name in placements else value
        for name, value in state.items()
    }


def save(folder: str, steps: list[int]) -> list[SaveResult | None]:
    world = here()
    saver = Saver(world, folder, ATTEMPT)
    ended = []
    try:
        for step in steps:
            saver.save(
                step,
                laid_out(values(step), world, turned=False),
                values={"step": step},
                metadata={"processes": world.size},
            )
            ended.append(saver.poll(100))
            if world.size > 1:
                torch.distributed.barrier()
        assert saver.poll() is None
    finally:
        saver.close()
    return ended


def load(folder: str, turned: bool = False) -> list[str]:
    """The results of loading each checkpoint, in order."""
    world = here()
    said = []
    storage = open_storage(folder)
    for name in storage.names():
        state = laid_out(
            {key: torch.zeros_like(value) for key, value in values(0).items()}, world, turned=turned
        )
        try:
            reader = CheckpointReader(storage, name)
            reader.load_into(state, world)
        except DamagedError as error:
            said.append(str(error))
            continue
        truth = values(name.step)
        same = all(torch.equal(full_tensor(state[key]), truth[key]) for key in truth)
        said.append("same" if same and reader.manifest.values == {"step": name.step} else "other")
    return said


def alone() -> World:
    return join(rank=0, size=1, local_rank=0, local_size=1)


def numbered(step: int, tensors: int = 4, numbers: int = 6) -> dict[str, Tensor]:
    """A state of which every element is `step`, and which has other shapes with other arguments."""
    return {
        f"tensor {place}": torch.full((numbers, place + 1), float(step)) for place in range(tensors)
    }


def loaded(paths: list[str]) -> dict[int, set[float]]:
    """Step -> all numbers in its image, for each that is complete on all ranks."""
    images, found = open_images(paths, alone()), {}
    for name in images.names:
        reader = images.reader(name)
        state = {tensor: torch.full(shape, -1.0) for tensor, (_, shape) in reader.tensors.items()}
        reader.load_into(state, alone())
        assert state
        found[name.step] = {float(each) for tensor in state.values() for each in tensor.unique()}
        found[name.step] |= {float(reader.manifest.values["step"])}
    return found
