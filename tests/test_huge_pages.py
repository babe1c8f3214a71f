"""Memory that is moved into huge pages holds what it held."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from lockstep.testing.huge_pages import HUGE_PAGE_BYTES, movable, move_into_huge_pages
from lockstep.testing.pool import WorkerPool

MAPS = """\
00200000-00800000 r-xp 00000000 08:01 173521 /usr/bin/python3
00a00000-00e00000 rw-p 00600000 08:01 173521 /usr/bin/python3
01000000-01700000 rw-p 00000000 00:00 0 [heap]
7f0000001000-7f0000500000 rw-p 00000000 00:00 0
7f0000600000-7f0000900000 r--p 00000000 00:00 0
7f0000a00000-7f0000bff000 rw-p 00000000 00:00 0
7f0000c00000-7f0001000000 rw-s 00000000 00:01 2048 /dev/zero (deleted)
7ffe00000000-7ffe00800000 rw-p 00000000 00:00 0 [stack]
"""


def test_whole_huge_pages_of_private_anonymous_memory_are_moved() -> None:
    assert movable(MAPS) == [(0x01000000, 0x01600000), (0x7F0000200000, 0x7F0000400000)]


def moved() -> bool:
    """True if memory holds what it held."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, 3 * HUGE_PAGE_BYTES, flags=flags) as memory:
        content = bytes(range(251)) * (len(memory) // 251)
        memory[: len(content)] = content
        first = ctypes.c_char.from_buffer(memory)
        inside = ctypes.addressof(first) + HUGE_PAGE_BYTES
        del first
        ranges = movable(Path("/proc/self/maps").read_text())
        assert any(start <= inside < end for start, end in ranges)
        move_into_huge_pages()
        return memory[: len(content)] == content


def test_moved_memory_holds_what_it_held(pool: WorkerPool) -> None:
    assert pool.run(1, moved) == [True]
