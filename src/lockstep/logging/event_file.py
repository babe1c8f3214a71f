"""TensorBoard's event files: records of the message `tensorflow.Event`, in the wire format of protocol buffers, with checksums.

Written here, because what writes them elsewhere takes longer to import than everything else that a run needs besides torch. The messages:
event.proto and summary.proto of TensorFlow; the records: its lib/io/record_writer.h.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

import crc32c

_START = 1
"""Of SessionLog's status."""


class EventFile:
    """A new file in a folder. One record holds all values of a step."""

    def __init__(self, folder: Path, now: float) -> None:
        """`now`: seconds since 1970."""
        self._file = (folder / f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}").open("ab")
        self._record(_double(1, now) + _text(3, "brain.Event:2"))

    def write(self, step: int, now: float, numbers: Mapping[str, float]) -> None:
        """The values of a step, by name."""
        values = b"".join(_bytes(1, _text(1, name) + _float(2, number)) for name, number in numbers.items())
        self._record(_double(1, now) + _whole(2, step) + _bytes(5, values))

    def go_on(self, step: int, now: float) -> None:
        """Tell readers to leave out what was said before of steps after `step`."""
        self._record(_double(1, now) + _whole(2, step + 1) + _bytes(7, _whole(1, _START)))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _record(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked(length) + data + _masked(data))


def _masked(data: bytes) -> bytes:
    """The checksum, masked, as it is where data hold checksums of their own."""
    checksum = crc32c.crc32c(data)
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return bytes([field << 3 | 5]) + struct.pack("<f", ctypes.c_float(value).value)  # infinite where a float has no room for it


def _whole(field: int, value: int) -> bytes:
    return bytes([field << 3]) + _varint(value)


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """A whole number of 0 or more, seven bits a byte, the lowest first."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
