"""The writing process alone: what lies in shared memory becomes a checkpoint, at one stroke or not
at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.manifest import BLOCK_BYTES, Manifest, hash_blocks
from lockstep.checkpoint.storage import MANIFEST, CheckpointName, FolderStorage

NAME = CheckpointName(60, "00c0ffee")
FILES = [f"rank-{rank}.safetensors" for rank in range(3)]
SIZES = [2 * BLOCK_BYTES + 100, 64, BLOCK_BYTES]


def image(rank: int) -> bytes:
    return bytes([rank + 1]) * SIZES[rank]


def job(folder: Path, rank: int) -> dict[str, Any]:
    said = {
        "folder": str(folder),
        "step": NAME.step,
        "attempt": NAME.attempt,
        "save": "5a5e",
        "file": FILES[rank],
        "values": {f"of {rank}": rank},
    }
    return said if rank else {**said, "files": FILES, "metadata": {"plan": "shard=3"}}


class Writer:
    def __init__(self, rank: int) -> None:
        self._memory = os.memfd_create(f"test-{rank}")
        os.write(self._memory, image(rank))
        command = [sys.executable, "-m", "lockstep.checkpoint.writer", str(self._memory)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[self._memory],
        )
        self.tell({"bytes": SIZES[rank], "shards": []})

    def tell(self, said: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(said) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    @contextmanager
    def closing(self) -> Iterator[Writer]:
        with self.process:
            try:
                yield self
            finally:
                self.process.communicate()
                os.close(self._memory)


@pytest.fixture
def writers() -> Iterator[list[Writer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Writer(rank).closing()) for rank in range(3)]


def test_all_ranks_files_become_one_checkpoint(tmp_path: Path, writers: list[Writer]) -> None:
    folder = FolderStorage(tmp_path / "checkpoints")
    for rank in (0, 2, 1):
        assert folder.names() == []
        writers[rank].tell(job(folder.path, rank))
    assert [writer.answer() for writer in writers] == [{"error": None, "not_deleted": None}] * 3
    assert folder.names() == [NAME]
    manifest = Manifest.decode(folder.read(NAME, MANIFEST))
    assert (manifest.step, manifest.values, manifest.metadata) == (
        60,
        {"of 0": 0, "of 1": 1, "of 2": 2},
        {"plan": "shard=3"},
    )
    assert sorted(os.listdir(folder.path / str(NAME))) == [MANIFEST, *FILES]
    for rank, file in enumerate(FILES):
        assert folder.read(NAME, file) == image(rank)
        assert manifest.files[file].hashes == hash_blocks(memoryview(image(rank)))


def test_notes_of_an_earlier_save_are_ignored(tmp_path: Path, writers: list[Writer]) -> None:
    folder = FolderStorage(tmp_path)
    writers[1].tell(job(tmp_path, 1) | {"save": "01d1"})
    writers[2].tell(job(tmp_path, 2))
    assert [writer.answer()["error"] for writer in writers[1:]] == [None, None]
    writers[0].tell(job(tmp_path, 0))
    while folder.read_uncommitted(NAME, FILES[0]) != image(0):
        assert writers[0].process.poll() is None
    time.sleep(0.3)
    assert folder.names() == []
    writers[1].tell(job(tmp_path, 1))
    assert [writers[rank].answer()["error"] for rank in (1, 0)] == [None, None]
    assert folder.names() == [NAME]
    writers[1].tell(job(tmp_path, 1))
    assert writers[1].answer()["error"] == f"the checkpoint exists already: {tmp_path / str(NAME)}"


def test_a_write_error_is_reported(tmp_path: Path, writers: list[Writer]) -> None:
    (tmp_path / "file").touch()
    writers[1].tell(job(tmp_path / "file", 1))
    assert writers[1].answer()["error"].startswith("Not a directory")
    writers[1].tell(job(tmp_path / "folder", 1))  # and it goes on
    assert writers[1].answer()["error"] is None


def test_it_ends_with_its_input_while_it_waits_for_notes(
    tmp_path: Path, writers: list[Writer]
) -> None:
    folder = FolderStorage(tmp_path)
    writers[0].tell(job(tmp_path, 0))
    while folder.read_uncommitted(NAME, f"{FILES[0]}.json") is None and (
        folder.read_uncommitted(NAME, FILES[0]) or b""
    ) != image(0):
        assert writers[0].process.poll() is None
    assert writers[0].process.stdin is not None
    writers[0].process.stdin.close()
    writers[0].process.stdin = None
    assert writers[0].process.wait(10) == 0
    assert folder.names() == []
    folder.remove_uncommitted()
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_is_deleted_atomically(tmp_path: Path) -> None:
    folder = FolderStorage(tmp_path)
    for step in (5, 100_000_000, 40):
        name = CheckpointName(step, "0000000a")
        folder.begin(name)
        folder.write(name, "a", [b"x" * 10, memoryview(b"y")])
        folder.commit(name, b"{}")
    (tmp_path / "step-1").mkdir()
    assert [name.step for name in folder.names()] == [5, 40, 100_000_000]
    folder.delete(CheckpointName(40, "0000000a"))
    assert [name.step for name in folder.names()] == [5, 100_000_000]
    assert folder.read(CheckpointName(5, "0000000a"), "a", 9, 20) == b"xy"
    assert sorted(os.listdir(tmp_path)) == [
        "step-00000005-0000000a",
        "step-1",
        "step-100000000-0000000a",
    ]
