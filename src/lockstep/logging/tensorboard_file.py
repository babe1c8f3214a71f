"""TensorBoard's event files: checksummed records of `tensorflow.Event` (event.proto, summary.proto,
lib/io/record_writer.h). `torch.utils.tensorboard` would take longer to import than all of
lockstep."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

import crc32c

_SESSION_START = 1
"""START of SessionLog's `status`."""


class TensorBoardFile:
    """A new event file, with one record for each step."""

    def __init__(self, folder: Path, now: float) -> None:
        self._file = (folder / f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}").open(
            "ab"
        )
        self._write_record(_double_field(1, now) + _text_field(3, "brain.Event:2"))

    def write(self, step: int, now: float, numbers: Mapping[str, float]) -> None:
        values = b"".join(
            _bytes_field(1, _text_field(1, name) + _float_field(2, number))
            for name, number in numbers.items()
        )
        self._write_record(_double_field(1, now) + _varint_field(2, step) + _bytes_field(5, values))

    def resume(self, step: int, now: float) -> None:
        """Tell readers to discard values after `step`."""
        self._write_record(
            _double_field(1, now)
            + _varint_field(2, step + 1)
            + _bytes_field(7, _varint_field(1, _SESSION_START))
        )

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write_record(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked_checksum(length) + data + _masked_checksum(data))


def _masked_checksum(data: bytes) -> bytes:
    """Return the CRC-32C, masked as TensorFlow does."""
    checksum = crc32c.crc32c(data)
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _double_field(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _float_field(field: int, value: float) -> bytes:
    # overflows to infinity
    return bytes([field << 3 | 5]) + struct.pack("<f", ctypes.c_float(value).value)


def _varint_field(field: int, value: int) -> bytes:
    return bytes([field << 3]) + _varint(value)


def _text_field(field: int, value: str) -> bytes:
    return _bytes_field(field, value.encode())


def _bytes_field(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Encode seven bits per byte, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
