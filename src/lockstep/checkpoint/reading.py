"""Reading the blocks of a checkpoint, each of them checked; and checking all, for whoever wants to know only that. Needs no torch."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from lockstep.checkpoint.block_hashes import BLOCK_BYTES, Seal, digest
from lockstep.checkpoint.folder import MANIFEST, Name, Storage
from lockstep.checkpoint.manifest import Damaged, Manifest, Unreachable

DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)
"""What the system says of a file that is not there, or not as it was written."""


def read_manifest(folder: Storage, name: Name) -> Manifest:
    """Raises `Damaged`, `Unreadable`, `Unreachable`."""
    with _in_words(MANIFEST):
        data = folder.read(name, MANIFEST)
    found = Manifest.decode(data)
    if found.step != name.step:
        raise Damaged(f"the manifest is that of step {found.step}")
    return found


def read_block(folder: Storage, name: Name, file: str, seal: Seal, block: int, parts: Sequence[memoryview]) -> None:
    """Read a block into memory, part behind part, as long as the block together, and check it. Raises `Damaged`, `Unreachable`."""
    start, stop = seal.span(block)
    length = 0

    def read() -> Iterator[memoryview]:
        nonlocal length
        for part in folder.read_into(name, file, start, parts):
            length += len(part)
            yield part

    with _in_words(file):
        found = digest(read())  # of what has just been read, while the processor has it at hand
    if length < stop - start:
        raise Damaged(_too_short(file, start + length, seal))
    if found != seal.blocks[block]:
        raise Damaged(f"{file} has other bytes than were written between {start} and {stop}")


def check(folder: Storage, name: Name) -> list[str]:
    """Read every byte of a checkpoint. Returns what is damaged, in words; nothing where it is whole. Raises `Unreadable`, `Unreachable`."""
    try:
        manifest = read_manifest(folder, name)
    except Damaged as error:
        return [str(error)]
    seals = {file: entry.seal for file, entry in manifest.files.items()}
    spare = [bytearray(BLOCK_BYTES) for _ in range(folder.readers)]

    def damage(file: str, block: int) -> str | None:
        start, stop = seals[file].span(block)
        room = spare.pop()
        try:
            read_block(folder, name, file, seals[file], block, [memoryview(room)[: stop - start]])
        except Damaged as error:
            return str(error)
        finally:
            spare.append(room)
        return None

    with ThreadPoolExecutor(folder.readers) as threads:
        lengths = list(threads.map(lambda file: _wrong_length(folder, name, file, seals[file]), seals))
        blocks = [
            (file, block) for file, wrong in zip(seals, lengths, strict=True) if wrong is None for block in range(len(seals[file].blocks))
        ]
        said = [*lengths, *threads.map(lambda place: damage(*place), blocks)]
    return [text for text in said if text is not None]


def _wrong_length(folder: Storage, name: Name, file: str, seal: Seal) -> str | None:
    try:
        with _in_words(file):
            size = folder.size(name, file)
    except Damaged as error:
        return str(error)
    if size > seal.size_bytes:
        return f"{file} goes on behind its end: it has {size} bytes for {seal.size_bytes}"
    return _too_short(file, size, seal) if size < seal.size_bytes else None


def _too_short(file: str, size: int, seal: Seal) -> str:
    return f"{file} ends too early: it has {size} of {seal.size_bytes} bytes"


@contextmanager
def _in_words(file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise Damaged(f"{file} is missing") from error
        text = f"{file} cannot be read: {error.strerror or error}"
        raise (Damaged if error.errno in DAMAGE else Unreachable)(text) from error
