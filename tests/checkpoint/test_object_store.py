"""Checkpoints on an object store: what holds in a folder holds there, and a server that goes away
costs the save under way, no more."""

from __future__ import annotations

import os
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoint import states
from checkpoint.servers import Line, environment, s3
from checkpoint.states import alone

from lockstep.base.errors import RunDirectoryError
from lockstep.checkpoint import object_store
from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.manifest import (
    BLOCK_BYTES,
    DamagedError,
    FileEntry,
    Manifest,
    check,
    hash_blocks,
)
from lockstep.checkpoint.object_store import PART_BYTES, ObjectStorage, open_storage
from lockstep.checkpoint.saver import SaveResult
from lockstep.checkpoint.storage import CheckpointName, FolderStorage, Storage
from lockstep.testing.pool import WorkerPool

NAME = CheckpointName(40, "0000000a")


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[int]:
    with s3() as port:
        yield port


@pytest.fixture
def bucket(server: int, request: pytest.FixtureRequest) -> Iterator[str]:
    """Its URL, in an environment in which that can be read."""
    name = f"b{abs(hash(request.node.name))}"
    urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{server}/{name}", method="PUT")
    ).close()
    with environment(server):
        yield f"s3://{name}"


@pytest.fixture(params=["path", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "path":
        return FolderStorage(tmp_path / "run")
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()
        return ObjectStorage("memory://run")
    return ObjectStorage(request.getfixturevalue("bucket") + "/some/run")


def put(storage: Storage, name: CheckpointName, *, commit: bool = True) -> None:
    storage.begin(name)
    storage.write(name, "a", [b"x" * 10, memoryview(b"y")])
    if commit:
        storage.commit(name, b"{}")


def test_a_checkpoint_is_complete_or_not_there(storage: Storage) -> None:
    assert storage.names() == []
    put(storage, NAME, commit=False)
    assert storage.read_uncommitted(NAME, "a") == b"x" * 10 + b"y"
    assert storage.read_uncommitted(NAME, "b") is None
    assert storage.names() == []
    storage.commit(NAME, b"{}")
    with pytest.raises(FileExistsError, match="the checkpoint exists already"):
        storage.begin(NAME)
    put(storage, CheckpointName(5, "0000000b"))
    put(storage, CheckpointName(50, "0000000a"), commit=False)
    assert [name.step for name in storage.names()] == [5, 40]
    storage.remove_uncommitted()
    assert storage.read_uncommitted(CheckpointName(50, "0000000a"), "a") is None
    storage.delete(NAME)
    assert [name.step for name in storage.names()] == [5]
    with pytest.raises(FileNotFoundError):
        storage.read(NAME, "a")


def test_a_checkpoint_that_is_half_deleted_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("memory").store.clear()
    storage = ObjectStorage("memory://run")
    put(storage, NAME)
    monkeypatch.setattr(type(storage._fs), "rm", lambda *_, **__: raise_())
    with pytest.raises(OSError, match="memory://run: RuntimeError: gone away"):
        storage.delete(NAME)
    assert storage.read_uncommitted(NAME, "a") is not None
    assert storage.names() == []


def test_a_store_that_does_not_answer_is_not_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("memory").store.clear()
    storage = ObjectStorage("memory://run")
    put(storage, NAME)
    with monkeypatch.context() as patch:
        patch.setattr(type(storage._fs), "info", lambda *_, **__: raise_())
        for question in (storage.remove_uncommitted, storage.names):
            with pytest.raises(OSError, match="memory://run: RuntimeError: gone away"):
                question()
    assert storage.names() == [NAME]


def raise_() -> None:
    raise RuntimeError("gone away")


def test_parts_of_a_file_are_read(storage: Storage) -> None:
    put(storage, NAME)
    assert storage.size(NAME, "a") == 11
    assert (
        storage.read(NAME, "a", 8),
        storage.read(NAME, "a", 9, 20),
        storage.read(NAME, "a", 0, 2),
    ) == (b"xxy", b"xy", b"xx")
    for start, there in ((8, b"xxy"), (4, b"xxxxxxy"[:6]), (11, b""), (30, b"")):
        room = bytearray(6)
        assert (
            b"".join(
                storage.read_into(NAME, "a", start, [memoryview(room)[:1], memoryview(room)[1:]])
            )
            == there
        )
        assert room == there.ljust(6, b"\0")
    with pytest.raises(FileNotFoundError):
        list(storage.read_into(NAME, "b", 3, [memoryview(bytearray(1))]))


def test_another_process_opens_it_by_its_name(storage: Storage) -> None:
    if str(storage).startswith("memory:"):
        pytest.skip("memory of one process, which open_storage refuses")
    put(storage, NAME)
    again = open_storage(str(storage))
    assert (type(again), again.names()) == (type(storage), [NAME])


def test_only_one_claim_succeeds(storage: Storage) -> None:
    storage.begin(NAME)
    assert [storage.claim(NAME, "a"), storage.claim(NAME, "a"), storage.claim(NAME, "b")] == [
        True,
        False,
        True,
    ]


def test_reads_are_concurrent(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("memory").store.clear()
    storage, content = ObjectStorage("memory://run"), bytes(6 * BLOCK_BYTES)
    storage.begin(NAME)
    storage.write(NAME, "rank-0.safetensors", [content])
    manifest = Manifest(
        step=40,
        files={"rank-0.safetensors": FileEntry(hash_blocks(memoryview(content)), {})},
        values={},
        metadata={},
    )
    storage.commit(NAME, manifest.encode())
    raise_on_all_ranks, read_into = threading.Barrier(6, timeout=20), storage.read_into
    monkeypatch.setattr(
        storage, "read_into", lambda *given: (raise_on_all_ranks.wait() and 0) or read_into(*given)
    )
    assert check(storage, NAME) == []
    CheckpointReader(storage, NAME).load_into({}, alone())


def test_large_files_are_uploaded_in_parts(bucket: str) -> None:
    content = os.urandom(2 * PART_BYTES + 5)
    storage = ObjectStorage(bucket)
    storage.write(
        NAME, "a", (content[at : at + 3_000_000] for at in range(0, len(content), 3_000_000))
    )
    assert storage.read(NAME, "a") == content
    assert len(storage._fs.info(f"{bucket}/{NAME}/a")["ETag"].split("-")) == 2, (
        "S3 marks what came in parts"
    )


@pytest.mark.parametrize(
    ("ranks", "readers"),
    [*(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 2), (3, 1))), (2, 3)],
)
def test_what_is_saved_is_loaded(
    pool: WorkerPool, bucket: str, server: int, ranks: int, readers: int
) -> None:
    assert (
        pool.run(ranks, save, bucket, server, [3, 8])
        == [[SaveResult(3, None), SaveResult(8, None)]] * ranks
    )
    assert pool.run(readers, load, bucket, server) == [["same", "same"]] * readers


@pytest.mark.command
def test_damage_is_named(pool: WorkerPool, bucket: str, server: int) -> None:
    assert pool.run(2, save, bucket, server, [3]) == [[SaveResult(3, None)]] * 2
    storage = ObjectStorage(bucket)
    (name,) = storage.names()
    assert (check(storage, name), loaded(storage, name)) == ([], "same")
    file = "rank-0.safetensors"
    right = storage.read(name, file)
    for wrong, said in {
        right[:-1]: "ends too early",
        right[:50]: "ends too early",
        right[:99] + bytes([right[99] ^ 1]) + right[100:]: "has other bytes",
    }.items():
        storage.write(name, file, [wrong])
        assert said in loaded(storage, name)
        assert [said in damage for damage in check(storage, name)] == [True]
    storage.remove(name, file)
    assert [loaded(storage, name)] == check(storage, name) == [f"{file} is missing"]


def loaded(storage: Storage, name: CheckpointName) -> str:
    truth = states.values(name.step)
    state = {key: torch.zeros_like(value) for key, value in truth.items()}
    try:
        CheckpointReader(storage, name).load_into(state, alone())
    except DamagedError as error:
        return str(error)
    return "same" if all(torch.equal(state[key], truth[key]) for key in truth) else "other"


@pytest.mark.command
def test_a_server_that_disconnects_fails_the_save_in_progress(
    pool: WorkerPool, bucket: str, server: int
) -> None:
    assert pool.run(2, save, bucket, server, [3])[0] == [SaveResult(3, None)]
    with closing(Line(server, disconnect_after_bytes=8_000_000)) as line:
        (committing,), (other,) = pool.run(2, save, bucket, line.port, [8])
        assert committing is None or bucket in committing.error
        # its part may have been there before it disconnected
        assert other is None or other.error is None or bucket in other.error
        assert line.was_cut
        with (
            environment(line.port),
            pytest.raises(OSError, match=r"s3://.*Could not connect to the endpoint"),
        ):
            ObjectStorage(bucket).names()
    assert pool.run(2, load, bucket, server) == [["same"]] * 2
    with environment(server):
        ObjectStorage(bucket).remove_uncommitted()
        assert {path.split("/")[1] for path in fsspec.filesystem("s3").find(bucket)} == {
            f"step-00000003-{states.ATTEMPT}"
        }


def test_a_server_that_does_not_answer_times_out(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "CALL_SECONDS", 0.5)
    with environment((silent := socket.create_server(("127.0.0.1", 0))).getsockname()[1]):
        with silent, pytest.raises(TimeoutError, match="no answer within 0 s") as caught:
            ObjectStorage(bucket).write(NAME, "a", [b"x"])
        assert caught.value.filename == bucket
        # the call ends once the server is gone
        while any(thread.name == "lockstep-store" for thread in threading.enumerate()):
            time.sleep(0.05)


def test_missing_write_permission_is_reported(bucket: str, server: int) -> None:
    def ask_for_credentials_after(actions: int) -> None:
        plain = {"Content-Type": "text/plain"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{server}/moto-api/reset-auth",
            str(actions).encode(),
            plain,
            method="POST",
        )
        urllib.request.urlopen(request).close()

    ask_for_credentials_after(0)
    try:
        with pytest.raises(OSError, match=rf"{bucket}: PermissionError: .*[Aa]ccess"):
            ObjectStorage(bucket).write(NAME, "a", [b"x"])
        with pytest.raises(OSError, match=rf"{bucket}: PermissionError"):
            ObjectStorage(bucket).names()
    finally:
        ask_for_credentials_after(1 << 60)


def test_a_missing_bucket_is_reported(bucket: str) -> None:
    with pytest.raises(FileNotFoundError, match="The specified bucket does not exist") as caught:
        ObjectStorage("s3://nowhere/run").write(NAME, "a", [b"x"])
    assert caught.value.filename == "s3://nowhere/run"


def test_paths_and_urls_of_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        found = open_storage(place)
        assert isinstance(found, FolderStorage)
        assert found.path == tmp_path
    with pytest.raises(
        RunDirectoryError,
        match=r"^gs://b/run: the driver of gs:// is not installed; Please install gcsfs",
    ):
        open_storage("gs://b/run")
    with pytest.raises(
        RunDirectoryError,
        match=(
            r"^grid://b: no driver is known for grid://; give a path, or a URL like"
            r" s3://bucket/run$"
        ),
    ):
        open_storage("grid://b")
    with pytest.raises(
        RunDirectoryError,
        match=r"^memory://b is memory of one process, but another process writes the checkpoints",
    ):
        open_storage("memory://b")

    for nowhere, what in (("s3://", "bucket"), ("gs:///run", "bucket"), ("://run", "store")):
        with pytest.raises(
            RunDirectoryError,
            match=(
                rf"^{nowhere} names no {what} \(is a variable unset\?\); give one like"
                r" s3://bucket/run$"
            ),
        ):
            open_storage(nowhere)
    with pytest.raises(
        RunDirectoryError,
        match=(
            r"^github://b: github:// cannot hold checkpoints \(TypeError: .*; give a path, or a URL"
        ),
    ):
        open_storage("github://b")

    def missing(protocol: str) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(
        RunDirectoryError,
        match=r"^s3://b: the driver of s3:// is not installed; pip install 'lockstep-train\[s3\]'$",
    ):
        open_storage("s3://b")


def save(url: str, port: int, steps: list[int]) -> list[SaveResult | None]:
    with environment(port):
        return states.save(url, steps)


def load(url: str, port: int) -> list[str]:
    with environment(port):
        return states.load(url)
