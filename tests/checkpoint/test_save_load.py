"""State that some processes save is loaded by others, as full or sharded tensors, and every damage
is named."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.states import ATTEMPT, alone, here, load, save, values
from torch.distributed.tensor import Shard, distribute_tensor

from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.manifest import BLOCK_BYTES
from lockstep.checkpoint.saver import Saver, SaveResult
from lockstep.checkpoint.storage import MANIFEST, FolderStorage
from lockstep.comm.mesh import Mesh
from lockstep.plan import Plan
from lockstep.testing.pool import WorkerPool


@pytest.mark.parametrize(
    "ranks", [*(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 2)), 3]
)
def test_what_is_saved_is_loaded_on_any_number_of_processes(
    pool: WorkerPool, tmp_path: Path, ranks: int
) -> None:
    assert (
        pool.run(ranks, save, str(tmp_path), [3, 8])
        == [[SaveResult(3, None), SaveResult(8, None)]] * ranks
    )
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    state = sum(value.nbytes for value in values(0).values())
    assert size <= 2 * (state + 4096 * ranks), "each piece once"
    for readers in (1, 2, 3):
        for turned in (False, True):
            assert pool.run(readers, load, str(tmp_path), turned) == [["same", "same"]] * readers
    assert not list(tmp_path.glob(".*"))


def test_a_save_runs_nothing_that_is_in_the_working_directory(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("json", "queue", "threading", "blake3"):
        (elsewhere / f"{name}.py").write_text("open('was-run', 'w').close(); raise SystemExit(1)")
    monkeypatch.chdir(elsewhere)
    assert pool.run(2, save, str(tmp_path / "saved"), [3]) == [[SaveResult(3, None)]] * 2
    assert not (elsewhere / "was-run").exists()


def test_every_damage_is_named(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, save, str(tmp_path), [1])
    (name,) = FolderStorage(tmp_path).names()
    files = sorted((tmp_path / str(name)).iterdir())
    chance = random.Random(0)
    for number in range(12):
        path = files[number % len(files)]
        right = path.read_bytes()
        place = chance.randrange(len(right))
        wrong = (
            right[:place] + bytes([right[place] ^ 1 << chance.randrange(8)]) + right[place + 1 :]
            if number < 6
            else right[:place]
        )
        path.write_bytes(wrong)
        for (said,) in pool.run(2, load, str(tmp_path)):
            assert ("manifest" in said) if path.name == MANIFEST else said.startswith(path.name), (
                said
            )
        path.unlink()
        for (said,) in pool.run(2, load, str(tmp_path)):
            assert said.endswith(f"{path.name} is missing")
        path.write_bytes(right)
    assert pool.run(2, load, str(tmp_path)) == [["same"]] * 2
    first, second = files[1].read_bytes(), files[2].read_bytes()
    files[1].write_bytes(second)
    files[2].write_bytes(first)
    assert "has other bytes than were written" in pool.run(1, load, str(tmp_path))[0][0]


def test_saving_continues_in_the_background(tmp_path: Path) -> None:
    world = alone()
    saver = Saver(world, tmp_path, ATTEMPT)
    state = values(0)
    try:
        saver.save(1, state, values={"step": 1}, metadata={})
        for value in state.values():
            value.zero_()  # what is saved is what was there
        while (ended := saver.poll()) is None:
            time.sleep(0.001)
        assert ended == SaveResult(1, None)
    finally:
        saver.close()
    again = {key: torch.ones_like(value) for key, value in state.items()}
    CheckpointReader(FolderStorage(tmp_path), FolderStorage(tmp_path).names()[0]).load_into(
        again, world
    )
    assert all(torch.equal(again[key], value) for key, value in values(0).items())


def test_after_prepare_a_save_allocates_nothing(tmp_path: Path) -> None:
    saver = Saver(alone(), tmp_path, ATTEMPT)
    state = values(0)
    try:
        saver.prepare(state)
        made = saver._memory, saver._writer
        assert made[0] is not None
        assert os.fstat(made[0].file.inherited[0]).st_blocks * 512 >= sum(
            value.nbytes for value in state.values()
        ), "memory is there, not promised"
        for step in (1, 2):
            saver.save(step, state, values={}, metadata={})
            assert saver.poll(100) == SaveResult(step, None)
        assert (saver._memory, saver._writer) == made
        state["more"] = torch.ones(3)
        saver.save(3, state, values={}, metadata={})
        assert saver.poll(100) == SaveResult(3, None)
        assert saver._memory is not made[0]
    finally:
        saver.close()


def test_after_a_failed_save_a_new_process_writes(tmp_path: Path) -> None:
    saver = Saver(alone(), tmp_path / "run", ATTEMPT)
    (tmp_path / "run").touch()
    try:
        saver.save(1, values(1), values={}, metadata={})
        failed = saver._writer
        assert saver.poll(100) == SaveResult(
            1, f"Not a directory: {tmp_path / 'run' / f'.step-00000001-{ATTEMPT}'}"
        )
        (tmp_path / "run").unlink()
        saver.save(2, values(2), values={}, metadata={})
        assert saver._writer is not failed
        assert saver.poll(100) == SaveResult(2, None)
    finally:
        saver.close()


def halves(folder: str) -> tuple[int, list[bool]]:
    """How many bytes of files this rank read for its half of a tensor, and whether it is right:
    rows, columns."""
    world = here()
    truth = torch.arange(8 * BLOCK_BYTES // 4).reshape(8, -1).float()
    saver = Saver(world, folder, ATTEMPT)
    saver.save(1, {"large": truth}, values={}, metadata={})
    saver.poll(100)
    saver.close()
    world.gather_values(None)
    mesh = Mesh.of(world, Plan.parse("shard=2,transport=torch").resolve(2)).torch_mesh
    assert mesh is not None
    storage, read = FolderStorage(Path(folder)), list[int]()
    read_into = storage.read_into

    def counted(*given: Any) -> Iterator[memoryview]:
        for part in read_into(*given):
            read.append(len(part))
            yield part

    storage.read_into = counted  # type: ignore[method-assign]
    reader, right = CheckpointReader(storage, storage.names()[0]), []
    for dim in (0, 1):
        part = distribute_tensor(torch.zeros_like(truth), mesh, [Shard(dim)])
        reader.load_into({"large": part}, world)
        right.append(torch.equal(part.to_local(), truth.chunk(2, dim)[world.rank]))
        if dim == 0:
            rows = sum(read)
    return rows, right


def test_a_rank_reads_what_it_needs(pool: WorkerPool, tmp_path: Path) -> None:
    for rows, right in pool.run(2, halves, str(tmp_path)):
        assert right == [True, True]
        assert rows < 6 * BLOCK_BYTES, "of 8: its half, which begins and ends inside blocks"


def test_a_conjugated_tensor_is_saved_and_loaded_as_its_values(tmp_path: Path) -> None:
    world = alone()
    saved = torch.randn(10_000, dtype=torch.complex64).conj()
    saver = Saver(world, tmp_path, ATTEMPT)
    try:
        saver.save(1, {"z": saved}, values={}, metadata={})
        assert saver.poll(100) == SaveResult(1, None)
    finally:
        saver.close()
    target = torch.zeros(10_000, dtype=torch.complex64).conj()
    CheckpointReader(FolderStorage(tmp_path), FolderStorage(tmp_path).names()[0]).load_into(
        {"z": target}, world
    )
    assert torch.equal(target, saved)


def test_an_expanded_tensor_is_saved_and_loaded(tmp_path: Path) -> None:
    """Several of its elements are one place in memory: no copy_ writes to such a tensor."""
    world = alone()
    saved = {
        "rows": torch.randn(1, 6).expand(4, 6),
        "columns": torch.randn(3, 1).expand(3, 5),
        "scalar": torch.randn(()).expand(30, 2),
    }
    saver = Saver(world, tmp_path, ATTEMPT)
    try:
        saver.save(1, saved, values={}, metadata={})
        assert saver.poll(100) == SaveResult(1, None)
    finally:
        saver.close()
    state = {
        "rows": torch.zeros(1, 6).expand(4, 6),
        "columns": torch.zeros(3, 1).expand(3, 5),
        "scalar": torch.zeros(()).expand(30, 2),
    }
    CheckpointReader(FolderStorage(tmp_path), FolderStorage(tmp_path).names()[0]).load_into(
        state, world
    )
    assert all(torch.equal(state[name], saved[name]) for name in saved)
