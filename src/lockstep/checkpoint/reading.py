"""Reading the blocks of a checkpoint, each of them checked; and checking all, for whoever wants to know only that. Needs no torch."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from lockstep.checkpoint.blocks import BLOCK_BYTES, Seal
from lockstep.checkpoint.folder import MANIFEST, Name, Storage
from lockstep.checkpoint.manifest import Damaged, Manifest, Unreachable

THREADS = 2
"""One waits for the disk while the other hashes."""
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)
"""What the system says of a file that is not there, or not as it was written."""


def read_manifest(folder: Storage, name: Name) -> Manifest:
    """Raises `Damaged`, `Unreadable`, `Unreachable`."""
    with _in_words(MANIFEST):
        data = folder.read(name, MANIFEST)
    return Manifest.decode(data)


def read_block(folder: Storage, name: Name, file: str, seal: Seal, block: int, parts: Sequence[memoryview]) -> None:
    """Read a block into memory, part behind part, as long as the block together, and check it. Raises `Damaged`, `Unreachable`."""
    start, stop = seal.span(block)
    with _in_words(file):
        length = folder.read_into(name, file, start, parts)
    if length < stop - start:
        raise Damaged(f"{file} ends too early: it has {start + length} of {seal.size_bytes} bytes")
    if not seal.is_right(block, *parts):
        raise Damaged(f"{file} has other bytes than were written between {start} and {stop}")


def check(folder: Storage, name: Name) -> list[str]:
    """Read every byte of a checkpoint. Returns what is damaged, in words; nothing where it is whole. Raises `Unreadable`, `Unreachable`."""
    try:
        manifest = read_manifest(folder, name)
    except Damaged as error:
        return [str(error)]
    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(lambda share: _damage(folder, name, manifest, share), range(THREADS)))
    return list(dict.fromkeys(text for _, text in sorted(place for share in found for place in share)))


def _damage(folder: Storage, name: Name, manifest: Manifest, share: int) -> list[tuple[tuple[str, int], str]]:
    """In every so many-th block of each file: where it is, and what. The first share looks at the files' ends."""
    found: list[tuple[tuple[str, int], str]] = []
    room = memoryview(bytearray(BLOCK_BYTES))
    for file, entry in manifest.files.items():
        seal = entry.seal
        try:
            with _in_words(file):
                size = folder.size(name, file)
            if size > seal.size_bytes:
                found.append(((file, len(seal.blocks)), f"{file} goes on behind its end, after {seal.size_bytes} bytes"))
        except Damaged as error:
            found.append(((file, 0), str(error)))
            continue
        for block in range(share, len(seal.blocks), THREADS):
            start, stop = seal.span(block)
            if start and start >= size:
                break
            try:
                read_block(folder, name, file, seal, block, [room[: stop - start]])
            except Damaged as error:
                found.append(((file, block), str(error)))
    return found


@contextmanager
def _in_words(file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise Damaged(f"{file} is missing") from error
        text = f"{file} cannot be read: {error.strerror or error}"
        raise (Damaged if error.errno in DAMAGE else Unreachable)(text) from error
