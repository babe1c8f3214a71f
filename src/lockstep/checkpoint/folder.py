"""Where the checkpoints of a run are, on a file system: a folder of folders, each complete or not there (law 6). Needs no torch.

A checkpoint is written into a hidden folder, everything in it is synced, and one rename makes it a checkpoint. What a crash leaves hidden
is nobody's, and is cleared away by the next run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lockstep.base.files import sync

MANIFEST = "manifest.json"
PAGE_BYTES = 4096
READ_BYTES = 1 << 20
"""At most at once: a processor's own cache holds it until it is hashed."""
_NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """Of a checkpoint."""

    step: int
    """Steps done."""
    attempt: str
    """Eight hexadecimal digits, of the run that wrote it: a step may be done again."""

    def __str__(self) -> str:
        return f"step-{self.step:08d}-{self.attempt}"

    @classmethod
    def read(cls, text: str) -> Name | None:
        """None where it is not a checkpoint's."""
        found = _NAME.fullmatch(text)
        return None if found is None else cls(int(found[1]), found[2])


class Storage(Protocol):
    """The checkpoints of a run, wherever they are. All raise `OSError`."""

    @property
    def wait_seconds(self) -> float:
        """Between two looks for a file that another process is to write."""

    @property
    def readers(self) -> int:
        """Threads that read at once."""

    def names(self) -> list[Name]:
        """Of all that are complete, in order of their steps."""

    def clear(self) -> None:
        """Remove what was never committed. For whoever holds the run's lock, before the first save."""

    def room_bytes(self) -> int | None:
        """For so much more there is room; None where nobody can say."""

    def begin(self, name: Name) -> None:
        """Make the place of a checkpoint to be. Every rank may; one is enough. Raises `FileExistsError` where there is one."""

    def write(self, name: Name, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write one file of a checkpoint to be; it lasts once this returns."""

    def written(self, name: Name, file: str) -> bytes | None:
        """A file of a checkpoint to be; None where it is not there."""

    def drop(self, name: Name, file: str) -> None:
        """Remove a file of a checkpoint to be."""

    def claim(self, name: Name, file: str) -> bool:
        """Whether this process is the first to claim a file of a checkpoint to be. The claim is a file beside it, `<file>.claim`."""

    def commit(self, name: Name, manifest: bytes) -> None:
        """Make it a checkpoint: it has all its other files by now. One rank."""

    def size(self, name: Name, file: str) -> int:
        """The bytes that a file of a checkpoint has."""

    def read(self, name: Name, file: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes [start, stop) of a file of a checkpoint; fewer where it is shorter."""

    def read_into(self, name: Name, file: str, start: int, parts: Iterable[memoryview]) -> Iterator[memoryview]:
        """Read a file of a checkpoint, from `start` on, into memory, part behind part. Gives what has been filled, as it comes; it ends
        where the file does."""

    def delete(self, name: Name) -> None:
        """Take a checkpoint away, so that none is ever half there."""


class Folder:
    """The checkpoints in one folder: a `Storage`."""

    wait_seconds = 0.02
    readers = 2
    """One waits for the disk while the other hashes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[Name]:
        try:
            entries = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return sorted(name for entry in entries if (name := Name.read(entry)) is not None)

    def clear(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        for entry in self.path.glob(".step-*"):
            if Name.read(entry.name.removeprefix(".").removesuffix(".deleted")) is not None:
                shutil.rmtree(entry)

    def room_bytes(self) -> int | None:
        return shutil.disk_usage(self.path).free

    def begin(self, name: Name) -> None:
        if (self.path / str(name)).exists():
            raise FileExistsError(errno.EEXIST, "it is there already", str(self.path / str(name)))
        self._hidden(name).mkdir(parents=True, exist_ok=True)

    def write(self, name: Name, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        opened = os.open(self._hidden(name) / file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            for chunk in chunks:
                rest = memoryview(chunk)
                while rest:
                    rest = rest[_write_some(opened, rest) :]
            os.fsync(opened)
        finally:
            os.close(opened)

    def written(self, name: Name, file: str) -> bytes | None:
        try:
            return (self._hidden(name) / file).read_bytes()
        except FileNotFoundError:
            return None

    def claim(self, name: Name, file: str) -> bool:
        try:
            os.close(os.open(self._hidden(name) / f"{file}.claim", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def drop(self, name: Name, file: str) -> None:
        (self._hidden(name) / file).unlink()

    def commit(self, name: Name, manifest: bytes) -> None:
        self.write(name, MANIFEST, [manifest])
        sync(self._hidden(name))
        os.rename(self._hidden(name), self.path / str(name))
        sync(self.path)

    def size(self, name: Name, file: str) -> int:
        return (self.path / str(name) / file).stat().st_size

    def read(self, name: Name, file: str, start: int = 0, stop: int | None = None) -> bytes:
        with open(self.path / str(name) / file, "rb", buffering=0) as opened:
            size = os.fstat(opened.fileno()).st_size
            opened.seek(start)
            return opened.read(max(0, min(size, size if stop is None else stop) - start))

    def read_into(self, name: Name, file: str, start: int, parts: Iterable[memoryview]) -> Iterator[memoryview]:
        at = start
        with open(self.path / str(name) / file, "rb", buffering=0) as opened:
            for part in parts:
                rest = part
                while rest:
                    got = os.preadv(opened.fileno(), [rest[:READ_BYTES]], at)
                    if not got:
                        return
                    yield rest[:got]
                    rest, at = rest[got:], at + got

    def delete(self, name: Name) -> None:
        hidden = self.path / f".{name}.deleted"
        os.rename(self.path / str(name), hidden)
        sync(self.path)
        shutil.rmtree(hidden)

    def _hidden(self, name: Name) -> Path:
        return self.path / f".{name}"


def _write_some(opened: int, data: memoryview) -> int:
    """Past the system's cache where that is possible: it takes a tenth of the processor's time, which is training's."""
    if len(data) % PAGE_BYTES == 0:
        flags = fcntl.fcntl(opened, fcntl.F_GETFL)
        try:
            fcntl.fcntl(opened, fcntl.F_SETFL, flags | os.O_DIRECT)
            return os.write(opened, data)
        except OSError as error:
            if error.errno != errno.EINVAL:  # not on this file system, or not from where the data lies
                raise
        finally:
            fcntl.fcntl(opened, fcntl.F_SETFL, flags)
    return os.write(opened, data)
