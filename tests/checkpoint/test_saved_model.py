"""The tensors of a checkpoint, whole, without a model: of parts, and across blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint.states import save, values

from lockstep.base.dtypes import tensor_spec
from lockstep.checkpoint.manifest import DamagedError
from lockstep.checkpoint.saved_model import StoredCheckpoint
from lockstep.checkpoint.storage import FolderStorage
from lockstep.testing.pool import WorkerPool


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_full_tensor_is_read(pool: WorkerPool, tmp_path: Path, ranks: int) -> None:
    pool.run(ranks, save, str(tmp_path), [1])
    stored = StoredCheckpoint(FolderStorage(tmp_path), FolderStorage(tmp_path).names()[0])
    expected = values(1)
    assert stored.specs() == {name: tensor_spec(value) for name, value in expected.items()}
    for name, value in expected.items():
        assert bytes(stored.read(name)) == bytes(value.reshape(-1).view(torch.uint8).numpy()), name


def test_a_damaged_tensor_is_not_read(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, save, str(tmp_path), [1])
    (name,) = FolderStorage(tmp_path).names()
    (path,) = (tmp_path / str(name)).glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="has other bytes than were written"):
        StoredCheckpoint(FolderStorage(tmp_path), name).read("large")
