"""A save that fails removes what it wrote, because the disk may be full."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint import writer
from lockstep.checkpoint.emergency_save import emergency_save
from lockstep.checkpoint.storage import CheckpointName, FolderStorage

NAME = CheckpointName(60, "00c0ffee")
CONTENT = memoryview(bytes(1000))


class FullDisk(FolderStorage):
    """The disk is full in the write number `at` of this process, after a part of the file."""

    def __init__(self, path: Path, at: int) -> None:
        super().__init__(path)
        self.left = at

    def write(self, name: CheckpointName, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        self.left -= 1
        if self.left:
            super().write(name, file, chunks)
            return
        super().write(name, file, [memoryview(next(iter(chunks)))[:1]])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save(folder: Path, rank: int, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "open_storage", lambda _: FullDisk(folder, at))
    job = {"folder": str(folder), "step": NAME.step, "attempt": NAME.attempt, "save": "a"}
    job |= {"file": f"rank-{rank}.safetensors", "values": {}}
    if rank == 0:
        job |= {"files": ["rank-0.safetensors", "rank-1.safetensors"], "metadata": {}}
    writer.save(job, {}, CONTENT)


def test_a_failed_save_removes_the_files_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in (1, 2):  # its file, its note
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path, 1, at, monkeypatch)
        assert os.listdir(tmp_path) == []
    save(tmp_path, 1, 9, monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 0, 1, monkeypatch)
    assert sorted(os.listdir(tmp_path / f".{NAME}")) == [
        "rank-1.safetensors",
        "rank-1.safetensors.json",
    ]
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 0, 2, monkeypatch)  # the manifest: all ranks have written
    assert os.listdir(tmp_path) == []
    save(tmp_path, 1, 9, monkeypatch)
    save(tmp_path, 0, 9, monkeypatch)
    assert FolderStorage(tmp_path).names() == [NAME]


def rescue(folder: FolderStorage, part: int) -> bool:
    tensors = {f"weight.{part}": torch.ones(3)}
    return emergency_save(folder, NAME, part=part, parts=2, tensors=tensors, values={}, metadata={})


def test_a_failed_emergency_save_removes_the_files_of_its_part(tmp_path: Path) -> None:
    for at in (1, 2):  # its file, its note
        with pytest.raises(OSError, match="No space left"):
            rescue(FullDisk(tmp_path, at), 0)
        assert os.listdir(tmp_path) == []
    assert rescue(FolderStorage(tmp_path), 0)
    with pytest.raises(OSError, match="No space left"):
        rescue(FullDisk(tmp_path, 3), 1)  # the manifest
    assert os.listdir(tmp_path) == []
    assert rescue(FolderStorage(tmp_path), 0)
    assert rescue(FolderStorage(tmp_path), 1)
    assert FolderStorage(tmp_path).names() == [NAME]
