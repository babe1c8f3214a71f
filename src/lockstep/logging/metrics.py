"""Writes the metrics of a run to `metrics.jsonl` and to a TensorBoard file."""

from __future__ import annotations

import ctypes
import json
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import crc32c

from lockstep.base.closing import Closing
from lockstep.base.errors import DataError, RunDirectoryError, cannot_write
from lockstep.base.files import finite, lines_below, write_atomically
from lockstep.logging.run_files import CHECKSUM, RESERVED_NAMES

_FLUSH_SECONDS = 1.0


class MetricsLog(Closing):
    """Writes `metrics.jsonl` and a TensorBoard file, at most once a second. Only rank 0 creates a
    `MetricsLog`."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._rows = (path / "metrics.jsonl").open("a", encoding="utf-8")
        self._events = TensorBoardFile(path, clock())
        self._waiting: list[tuple[int, float, dict[str, float], str | None]] = []
        self._flushed = -math.inf

    def write(self, step: int, values: Mapping[str, float], *, checksum: str | None = None) -> None:
        """NaN and infinity become null, and their names are in `not_finite`. The gradient's
        `checksum` is written to metrics.jsonl only."""
        now = self._clock()
        self._waiting.append((step, now, _numbers(values), checksum))
        if abs(now - self._flushed) >= _FLUSH_SECONDS:
            self._flushed = now
            self.flush()

    def resume(self, step: int) -> None:
        """Remove rows after `step`. Call this method before the first `write`."""
        name = Path(self._rows.name)
        self._rows.close()
        drop_rows_after(step, name)
        self._rows = name.open("a", encoding="utf-8")
        self._events.resume(step, self._clock())

    def flush(self) -> None:
        """Raises `RunDirectoryError` if the disk is full, or if the file has been deleted."""
        waiting, self._waiting = self._waiting, []
        if os.fstat(self._rows.fileno()).st_nlink == 0 and not Path(self._rows.name).exists():
            self._rows.close()
            raise RunDirectoryError(
                f"{self._rows.name} was deleted while the run wrote to it; the logs, checkpoints"
                " and model that a run writes to a deleted run directory are lost; start the run"
                " again"
            )
        try:
            # formatted here, many at once: this takes half as long as inside each step
            for step, time_, numbers, checksum in waiting:
                row = _row(step, time_, numbers)
                if checksum is not None:
                    row[CHECKSUM] = checksum
                self._rows.write(json.dumps(row) + "\n")
                self._events.write(step, time_, numbers)
            self._rows.flush()
            self._events.flush()
        except OSError as error:
            with suppress(OSError):  # closing flushes the rest of the line again
                self._rows.close()
            raise cannot_write(self._rows.name, error) from error

    def close(self) -> None:
        if not self._rows.closed:
            self.flush()
        self._rows.close()
        with suppress(OSError):  # `flush` has already raised the error
            self._events.close()


class StepRows(Closing):
    """A file of JSON lines. Rank 0 creates the file at the first logging step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def resume(self, step: int) -> None:
        if self._file is None and self._path.exists():
            drop_rows_after(step, self._path)

    def write(self, step: int, **values: Any) -> None:
        self._file = self._file or self._path.open("a", encoding="utf-8", buffering=1)
        self._file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def drop_rows_after(step: int, path: Path) -> None:
    """Remove incomplete lines and rows after `step`."""
    kept = [
        line.rstrip("\n") for line in lines_below(path.parent, path.name) if _is_up_to(step, line)
    ]
    write_atomically(path, "".join(f"{line}\n" for line in kept))


def _is_up_to(step: int, line: str) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def _row(step: int, now: float, numbers: dict[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "time": now, **numbers}
    if not all(map(math.isfinite, numbers.values())):
        not_finite: dict[str, str] = {}
        row = finite(row, not_finite) | {"not_finite": not_finite}
    return row


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    if not RESERVED_NAMES.isdisjoint(values):
        name = min(RESERVED_NAMES.intersection(values))
        raise DataError(
            f"a metric is named {name!r}; every row of metrics.jsonl has its own {name!r}; choose"
            " another name"
        )
    return {
        name: value if type(value) is float else as_number(name, value)
        for name, value in values.items()
    }


def as_number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"metric {name!r} is {value!r} (a {type(value).__name__}); a metric is a single number;"
            " reduce it, for example by mean()"
        ) from None


_SESSION_START = 1
"""The value START of the field `status` in TensorBoard's `SessionLog`."""


class TensorBoardFile:
    """An event file of TensorBoard, with a checksummed `tensorflow.Event` for each step
    (event.proto, summary.proto, lib/io/record_writer.h). `torch.utils.tensorboard` is not used,
    because its import is slow."""

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
        """Make TensorBoard discard values after `step`."""
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
    """Return the CRC-32C of the data, masked as in TensorFlow."""
    checksum = crc32c.crc32c(data)
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _double_field(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _float_field(field: int, value: float) -> bytes:
    # a value that is too large for float32 becomes infinity
    return bytes([field << 3 | 5]) + struct.pack("<f", ctypes.c_float(value).value)


def _varint_field(field: int, value: int) -> bytes:
    return bytes([field << 3]) + _varint(value)


def _text_field(field: int, value: str) -> bytes:
    return _bytes_field(field, value.encode())


def _bytes_field(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Encode an integer with seven bits per byte, lowest bits first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
