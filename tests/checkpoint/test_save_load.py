"""What some processes save, others load: each tensor whole or cut, and every damage is named."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lockstep.checkpoint.blocks import BLOCK_BYTES
from lockstep.checkpoint.folder import MANIFEST, Folder
from lockstep.checkpoint.load import Reader
from lockstep.checkpoint.manifest import Damaged
from lockstep.checkpoint.saver import Ended, Saver
from lockstep.comm.group import World, join
from lockstep.comm.mesh import Mesh, whole
from lockstep.plan import Plan
from lockstep.testing.pool import WorkerPool

SHAPES = {"rows": (7, 5), "columns": (3, 4), "whole": (5,), "few": (2, 3), "step": (), "none": (0, 3), "large": (3 * BLOCK_BYTES // 8, 2)}
TYPES = {"rows": torch.bfloat16, "step": torch.int64, "columns": torch.bool}
CUTS = {"rows": Shard(0), "columns": Shard(1), "few": Shard(0), "large": Shard(0)}
ATTEMPT = "00c0ffee"


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: (torch.randn(shape, generator=generator) * 9).to(TYPES.get(name, torch.float32)) for name, shape in SHAPES.items()}


def here() -> World:
    return join(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]), local_rank=int(os.environ["RANK"]), local_size=1)


def laid_out(state: dict[str, Tensor], world: World, *, turned: bool) -> dict[str, Tensor]:
    """`turned`: what is cut by rows is cut by columns, and the other way."""
    mesh = Mesh.of(world, Plan.parse(f"shard={world.size}").resolve(world.size)).torch_mesh
    if mesh is None:
        return state
    cuts = {name: Shard(1 - cut.dim) if turned else cut for name, cut in CUTS.items()}
    return {name: distribute_tensor(value, mesh, [cuts.get(name, Replicate())]) if name in cuts else value for name, value in state.items()}


def save(folder: str, steps: list[int]) -> list[Ended | None]:
    world = here()
    saver = Saver(world, Path(folder), ATTEMPT)
    ended = []
    try:
        for step in steps:
            saver.save(step, laid_out(values(step), world, turned=False), values={"step": step}, facts={"processes": world.size})
            ended.append(saver.poll(30))
            if world.size > 1:
                torch.distributed.barrier()
        assert saver.poll() is None
    finally:
        saver.close()
    return ended


def load(folder: str, turned: bool = False) -> list[str]:
    """What came of loading each checkpoint, in order."""
    world = here()
    said = []
    for name in Folder(Path(folder)).names():
        state = laid_out({key: torch.zeros_like(value) for key, value in values(0).items()}, world, turned=turned)
        try:
            reader = Reader(Folder(Path(folder)), name)
            reader.fill(state, world)
        except Damaged as error:
            said.append(str(error))
            continue
        truth = values(name.step)
        same = all(torch.equal(whole(state[key]), truth[key]) for key in truth)
        said.append("same" if same and reader.manifest.values == {"step": name.step} else "other")
    return said


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_saved_is_loaded_on_any_number_of_processes(pool: WorkerPool, tmp_path: Path, ranks: int) -> None:
    assert pool.run(ranks, save, str(tmp_path), [3, 8]) == [[Ended(3, None), Ended(8, None)]] * ranks
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    state = sum(value.nbytes for value in values(0).values())
    assert size <= 2 * (state + 4096 * ranks), "each piece once"
    for readers in (1, 2, 3):
        for turned in (False, True):
            assert pool.run(readers, load, str(tmp_path), turned) == [["same", "same"]] * readers
    assert not list(tmp_path.glob(".*"))


def test_every_damage_is_named(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, save, str(tmp_path), [1])
    (name,) = Folder(tmp_path).names()
    files = sorted((tmp_path / str(name)).iterdir())
    chance = random.Random(0)
    for number in range(12):
        path = files[number % len(files)]
        right = path.read_bytes()
        place = chance.randrange(len(right))
        wrong = right[:place] + bytes([right[place] ^ 1 << chance.randrange(8)]) + right[place + 1 :] if number < 6 else right[:place]
        path.write_bytes(wrong)
        for (said,) in pool.run(2, load, str(tmp_path)):
            assert ("manifest" in said) if path.name == MANIFEST else said.startswith(path.name), said
        path.unlink()
        for (said,) in pool.run(2, load, str(tmp_path)):
            assert said.endswith(f"{path.name} is missing")
        path.write_bytes(right)
    assert pool.run(2, load, str(tmp_path)) == [["same"]] * 2
    first, second = files[1].read_bytes(), files[2].read_bytes()
    files[1].write_bytes(second)
    files[2].write_bytes(first)
    assert "has other bytes than were written" in pool.run(1, load, str(tmp_path))[0][0]


def test_saving_goes_on_behind(tmp_path: Path) -> None:
    world = join(rank=0, size=1, local_rank=0, local_size=1)
    saver = Saver(world, tmp_path, ATTEMPT)
    state = values(0)
    try:
        saver.save(1, state, values={"step": 1}, facts={})
        for value in state.values():
            value.zero_()  # what is saved is what was there
        while (ended := saver.poll()) is None:
            time.sleep(0.001)
        assert ended == Ended(1, None)
    finally:
        saver.close()
    again = {key: torch.ones_like(value) for key, value in state.items()}
    Reader(Folder(tmp_path), Folder(tmp_path).names()[0]).fill(again, world)
    assert all(torch.equal(again[key], value) for key, value in values(0).items())
