"""The storage of checkpoints, and its implementation in a folder. Needs no torch.

A checkpoint is written into a hidden folder, its files are synced, and one rename commits it.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol

from lockstep.base.files import open_below, sync
from lockstep.base.system import BINARY

MANIFEST = "manifest.json"
PAGE_BYTES = 4096
READ_BYTES = 1 << 20
"""Size of one read. The bytes stay in the processor's cache until they are hashed."""
_NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """Name of a checkpoint, for example step-00000500-1c9e02d4."""

    step: int
    attempt: str
    """Eight hexadecimal digits for each start of the run. A later start may repeat the step."""

    def __str__(self) -> str:
        return f"step-{self.step:08d}-{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> CheckpointName | None:
        match = _NAME.fullmatch(text)
        return None if match is None else cls(int(match[1]), match[2])


class Storage(Protocol):
    """Storage of checkpoints. Every method may raise `OSError`."""

    wait_seconds: float
    """Seconds between two checks for the file that another process writes to a checkpoint."""
    readers: int
    """Number of reading threads."""

    def __str__(self) -> str:
        """Return a path or URL from which `open_storage` opens the same storage."""

    def names(self) -> list[CheckpointName]:
        """Return the complete checkpoints in order."""

    def remove_uncommitted(self) -> None:
        """Only the process that holds the run's lock calls this method, between saves."""

    def free_bytes(self) -> int | None: ...

    def begin(self, name: CheckpointName) -> None:
        """Any rank may call this method. Raises `FileExistsError` if the checkpoint is complete."""

    def write(self, name: CheckpointName, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file of an uncommitted checkpoint."""

    def read_uncommitted(self, name: CheckpointName, file: str) -> bytes | None:
        """Return None if the file does not exist."""

    def remove(self, name: CheckpointName, file: str) -> None: ...

    def claim(self, name: CheckpointName, file: str) -> bool:
        """Create `<file>.claim` in an uncommitted checkpoint. Return True if this process was
        first."""

    def commit(self, name: CheckpointName, manifest: bytes) -> None:
        """Write the manifest after all other files. One rank calls this method."""

    def size(self, name: CheckpointName, file: str) -> int: ...

    def read(
        self, name: CheckpointName, file: str, start: int = 0, stop: int | None = None
    ) -> bytes:
        """Returns fewer bytes if the file is shorter."""

    def read_into(
        self, name: CheckpointName, file: str, start: int, parts: Iterable[memoryview]
    ) -> Iterator[memoryview]:
        """Yields bytes as they arrive, until the file ends."""

    def delete(self, name: CheckpointName) -> None:
        """Other processes never see the checkpoint incomplete."""


class FolderStorage:
    wait_seconds = 0.02
    readers = 2
    """One thread waits for the disk while the other hashes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[CheckpointName]:
        try:
            with os.scandir(self.path) as entries:
                folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        return sorted(filter(None, map(CheckpointName.parse, folders)))

    def remove_uncommitted(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        for entry in self.path.glob(".step-*"):
            if CheckpointName.parse(entry.name.removeprefix(".").removesuffix(".deleted")) is None:
                continue
            if entry.is_symlink() or not entry.is_dir():
                entry.unlink()
            else:
                shutil.rmtree(entry)

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self.path).free

    def begin(self, name: CheckpointName) -> None:
        committed = self.path / str(name)
        if committed.exists():
            raise FileExistsError(errno.EEXIST, "the checkpoint exists already", str(committed))
        self._temporary(name).mkdir(parents=True, exist_ok=True)

    def write(self, name: CheckpointName, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY
        opened = os.open(self._temporary(name) / file, flags, 0o666)
        try:
            for chunk in chunks:
                rest = memoryview(chunk)
                while rest:
                    rest = rest[_write_some(opened, rest) :]
            os.fsync(opened)
        finally:
            os.close(opened)

    def read_uncommitted(self, name: CheckpointName, file: str) -> bytes | None:
        try:
            return (self._temporary(name) / file).read_bytes()
        except FileNotFoundError:
            return None

    def claim(self, name: CheckpointName, file: str) -> bool:
        try:
            (self._temporary(name) / f"{file}.claim").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def remove(self, name: CheckpointName, file: str) -> None:
        (self._temporary(name) / file).unlink()

    def commit(self, name: CheckpointName, manifest: bytes) -> None:
        self.write(name, MANIFEST, [manifest])
        sync(self._temporary(name))
        os.rename(self._temporary(name), self.path / str(name))
        sync(self.path)

    def discard(self, name: CheckpointName, files: Iterable[str]) -> None:
        """Remove files of an uncommitted checkpoint as far as possible. Remove the folder if no
        other rank has written to it."""
        with suppress(OSError):
            for file in files:
                (self._temporary(name) / file).unlink(missing_ok=True)
            self._temporary(name).rmdir()

    def size(self, name: CheckpointName, file: str) -> int:
        with self._opened(name, file) as opened:
            return os.fstat(opened.fileno()).st_size

    def read(
        self, name: CheckpointName, file: str, start: int = 0, stop: int | None = None
    ) -> bytes:
        with self._opened(name, file) as opened:
            size = os.fstat(opened.fileno()).st_size
            opened.seek(start)
            return opened.read(max(0, min(size, size if stop is None else stop) - start))

    def read_into(
        self, name: CheckpointName, file: str, start: int, parts: Iterable[memoryview]
    ) -> Iterator[memoryview]:
        with self._opened(name, file) as opened:
            opened.seek(start)
            for part in parts:
                rest = part
                while rest:
                    got = opened.readinto(rest[:READ_BYTES])
                    if not got:
                        return
                    yield rest[:got]
                    rest = rest[got:]

    def delete(self, name: CheckpointName) -> None:
        hidden = self.path / f".{name}.deleted"
        os.rename(self.path / str(name), hidden)
        sync(self.path)
        shutil.rmtree(hidden)

    def _opened(self, name: CheckpointName, file: str) -> FileIO:
        return FileIO(open_below(self.path, f"{name}/{file}"))

    def _temporary(self, name: CheckpointName) -> Path:
        return self.path / f".{name}"


@contextmanager
def discarding_after_failure(folder: Storage, name: CheckpointName) -> Iterator[list[str]]:
    """If the body raises `OSError`, remove the files that the body has added to the list: the disk
    may be full. Files in an object store are removed at the next start."""
    files: list[str] = []
    try:
        yield files
    except OSError:
        if isinstance(folder, FolderStorage):
            folder.discard(name, files)
        raise


def _write_some(opened: int, data: memoryview) -> int:
    """Write without the page cache if possible: this takes a tenth of the CPU time."""
    if sys.platform == "linux" and len(data) % PAGE_BYTES == 0:
        import fcntl

        flags = fcntl.fcntl(opened, fcntl.F_GETFL)
        try:
            fcntl.fcntl(opened, fcntl.F_SETFL, flags | os.O_DIRECT)
            return os.write(opened, data)
        except OSError as error:
            # the file system does not support it, or the data is not aligned
            if error.errno != errno.EINVAL:
                raise
        finally:
            fcntl.fcntl(opened, fcntl.F_SETFL, flags)
    return os.write(opened, data)
