"""Verified reads of a checkpoint: each block is checked as it is read. Needs no torch."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from lockstep.checkpoint.manifest import (
    BLOCK_BYTES,
    MOST_BYTES,
    BlockHashes,
    DamagedError,
    Manifest,
    UnreachableError,
    begins_as_manifest,
    hash_bytes,
)
from lockstep.checkpoint.storage import MANIFEST, CheckpointName, Storage

_HEAD_BYTES = 1 << 20
"""Bytes of a manifest that are read first; of a file that is no manifest, no more are read."""
DAMAGE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.EIO,
    errno.EINVAL,
    errno.EFBIG,
)
"""Error numbers of a file that is missing, damaged, or not a run's."""


def read_manifest(folder: Storage, name: CheckpointName) -> Manifest:
    """Read and verify the manifest. Raises `UnreadableError`."""
    with _storage_errors(MANIFEST):
        data = folder.read(name, MANIFEST, 0, _HEAD_BYTES)
        if len(data) == _HEAD_BYTES and begins_as_manifest(data):
            data += folder.read(name, MANIFEST, _HEAD_BYTES, MOST_BYTES)
    found = Manifest.decode(data)
    if found.step != name.step:
        raise DamagedError(f"the manifest is that of step {found.step}")
    return found


def read_block(
    folder: Storage,
    name: CheckpointName,
    file: str,
    hashes: BlockHashes,
    block: int,
    parts: Sequence[memoryview],
) -> None:
    """Read a block into `parts`, of its size, and check its hash. Raises `DamagedError`,
    `UnreachableError`."""
    start, stop = hashes.span(block)
    length = 0

    def read() -> Iterator[memoryview]:
        nonlocal length
        for part in folder.read_into(name, file, start, parts):
            length += len(part)
            yield part

    with _storage_errors(file):
        found = hash_bytes(read())  # hash what was just read, while it is in the processor's cache
    if length < stop - start:
        raise DamagedError(_too_short(file, start + length, hashes))
    if found != hashes.blocks[block]:
        raise DamagedError(f"{file} has other bytes than were written between {start} and {stop}")


def check(folder: Storage, name: CheckpointName) -> list[str]:
    """Read every byte, and describe each damage. Raises `UnknownFormatError`,
    `UnreachableError`."""
    try:
        manifest = read_manifest(folder, name)
    except DamagedError as error:
        return [str(error)]
    hashes_of = {file: entry.hashes for file, entry in manifest.files.items()}
    largest = max((min(hashes.size_bytes, BLOCK_BYTES) for hashes in hashes_of.values()), default=0)
    spare = [bytearray(largest) for _ in range(folder.readers)]

    def damage(file: str, block: int) -> str | None:
        start, stop = hashes_of[file].span(block)
        buffer = spare.pop()
        try:
            read_block(
                folder, name, file, hashes_of[file], block, [memoryview(buffer)[: stop - start]]
            )
        except DamagedError as error:
            return str(error)
        finally:
            spare.append(buffer)
        return None

    with ThreadPoolExecutor(folder.readers) as threads:
        lengths = list(
            threads.map(lambda file: _wrong_length(folder, name, file, hashes_of[file]), hashes_of)
        )
        files = [file for file, wrong in zip(hashes_of, lengths, strict=True) if wrong is None]
        blocks = [(file, block) for file in files for block in range(len(hashes_of[file].blocks))]
        found = [*lengths, *threads.map(lambda block: damage(*block), blocks)]
    return [text for text in found if text is not None]


def _wrong_length(
    folder: Storage, name: CheckpointName, file: str, hashes: BlockHashes
) -> str | None:
    try:
        with _storage_errors(file):
            size = folder.size(name, file)
    except DamagedError as error:
        return str(error)
    if size > hashes.size_bytes:
        return f"{file} goes on behind its end: it has {size} bytes for {hashes.size_bytes}"
    return _too_short(file, size, hashes) if size < hashes.size_bytes else None


def _too_short(file: str, size: int, hashes: BlockHashes) -> str:
    return f"{file} ends too early: it has {size} of {hashes.size_bytes} bytes"


@contextmanager
def _storage_errors(file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise DamagedError(f"{file} is missing") from error
        text = f"{file} cannot be read: {error.strerror or error}"
        raise (DamagedError if error.errno in DAMAGE else UnreachableError)(text) from error
