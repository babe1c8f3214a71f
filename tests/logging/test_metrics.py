"""The metrics log: valid JSON lines and TensorBoard events with the same numbers, from one write,
without a thread."""

from __future__ import annotations

import json
import math
import shutil
import struct
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from lockstep.base.errors import DataError, RunDirectoryError
from lockstep.base.events import Event, EventLog
from lockstep.logging.metrics import MetricsLog, TensorBoardFile

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("CRC32C_SW_MODE", "auto")  # which the import sets, for good
    from tensorboardX.proto.event_pb2 import Event as Message  # type: ignore[import-untyped]


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self, now: float = 1_000_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line, parse_constant=pytest.fail)
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def crc32c(data: bytes) -> int:
    """CRC-32C of RFC 3720, bit by bit."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def events(folder: Path) -> list[Any]:
    """The records of the one event file, with their checksums checked."""
    (path,) = folder.glob("events.out.tfevents.*")
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
        body = data[12 : 12 + length]
        assert len(body) == length
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked(body)
        found.append(Message.FromString(body))
        data = data[16 + length :]
    return found


def test_the_checksum_of_this_test_is_the_published_one() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_a_write_is_one_line_of_json(tmp_path: Path) -> None:
    clock = Clock()
    with MetricsLog(tmp_path, clock) as log:
        log.write(1, {"loss": 2.5, "lr": 3e-4})
        clock.now += 2
        log.write(
            2, {"evaluation/loss": np.float32(2.25), "accuracy": torch.tensor(0.5), "count": 3}
        )
    assert rows(tmp_path) == [
        {"step": 1, "time": 1_000_000_000.0, "loss": 2.5, "lr": 3e-4},
        {
            "step": 2,
            "time": 1_000_000_002.0,
            "evaluation/loss": 2.25,
            "accuracy": 0.5,
            "count": 3.0,
        },
    ]


def test_a_write_is_one_tensorboard_record_with_all_values(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, Clock()) as log:
        log.write(10, {"loss": 2.5, "evaluation/accuracy": 0.75})
        log.write(20, {"loss": 2.25})
    header, first, second = events(tmp_path)
    assert header.file_version == "brain.Event:2"
    assert (first.step, first.wall_time) == (10, 1_000_000_000.0)
    assert [(value.tag, value.simple_value) for value in first.summary.value] == [
        ("loss", 2.5),
        ("evaluation/accuracy", 0.75),
    ]
    assert [(value.tag, value.simple_value) for value in second.summary.value] == [("loss", 2.25)]


def test_numbers_that_are_not_finite_are_null_with_a_sign_and_the_json_stays_valid(
    tmp_path: Path,
) -> None:
    with MetricsLog(tmp_path, Clock()) as log:
        log.write(1, {"loss": math.nan, "norm": math.inf, "least": -math.inf, "lr": 0.1})
    (row,) = rows(tmp_path)
    assert row == {
        "step": 1,
        "time": 1_000_000_000.0,
        "loss": None,
        "norm": None,
        "least": None,
        "lr": 0.1,
        "not_finite": {"loss": "nan", "norm": "inf", "least": "-inf"},
    }
    values = [value.simple_value for value in events(tmp_path)[1].summary.value]
    assert math.isnan(values[0])
    assert values[1:3] == [math.inf, -math.inf]


def test_numbers_too_large_for_tensorboards_floats_do_not_end_a_run(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, Clock()) as log:
        log.write(1, {"loss": 1e300})
    assert rows(tmp_path)[0]["loss"] == 1e300
    assert events(tmp_path)[1].summary.value[0].simple_value == math.inf


def test_rows_can_be_read_at_once_and_then_at_most_a_second_late(tmp_path: Path) -> None:
    clock = Clock()

    def seen() -> tuple[int, int]:
        return len(rows(tmp_path)), len(events(tmp_path)) - 1

    with MetricsLog(tmp_path, clock) as log:
        log.write(0, {"loss": 1.0})
        assert seen() == (1, 1)
        for step in range(1, 10):
            clock.now += 0.1
            log.write(step, {"loss": 1.0})
        assert seen() == (1, 1)
        clock.now += 0.11
        log.write(10, {"loss": 1.0})
        assert seen() == (11, 11)
        log.write(11, {"loss": 1.0})
        assert seen() == (11, 11)
        log.flush()
        assert seen() == (12, 12)
        log.write(12, {"loss": 1.0})
    assert seen() == (13, 13)


def test_a_clock_that_is_set_back_does_not_keep_rows_from_the_file(tmp_path: Path) -> None:
    clock = Clock()
    with MetricsLog(tmp_path, clock) as log:
        log.write(1, {"loss": 1.0})
        clock.now -= 3600
        log.write(2, {"loss": 1.0})
        assert len(rows(tmp_path)) == 2


@pytest.mark.parametrize("name", ["step", "time", "not_finite"])
def test_a_metric_with_a_name_of_the_row_itself_is_refused(tmp_path: Path, name: str) -> None:
    with MetricsLog(tmp_path, Clock()) as log, pytest.raises(DataError) as refused:
        log.write(1, {"loss": 1.0, name: 2.0})
    assert (
        str(refused.value)
        == f"a metric is named '{name}'; every row of metrics.jsonl has its own '{name}'; choose"
        " another name"
    )
    assert rows(tmp_path) == []


@pytest.mark.parametrize(
    ("value", "found"),
    [("high", "'high' (a str)"), (None, "None (a NoneType)"), ([1.0], "[1.0] (a list)")],
)
def test_a_metric_that_is_no_number_is_refused(tmp_path: Path, value: Any, found: str) -> None:
    with MetricsLog(tmp_path, Clock()) as log, pytest.raises(DataError) as refused:
        log.write(1, {"quality": value})
    assert (
        str(refused.value)
        == f"metric 'quality' is {found}; a metric is a single number; reduce it, for example by"
        " mean()"
    )


@pytest.mark.parametrize("value", [torch.zeros(2), torch.tensor(1j)])
def test_a_tensor_that_is_not_one_real_number_is_refused(tmp_path: Path, value: Any) -> None:
    with (
        MetricsLog(tmp_path, Clock()) as log,
        pytest.raises(DataError, match=r"metric 'quality' is tensor.*reduce it, for example"),
    ):
        log.write(1, {"quality": value})


def test_closing_twice_is_fine_and_no_thread_is_ever_started(tmp_path: Path) -> None:
    before = threading.active_count()
    log = MetricsLog(tmp_path, Clock())
    log.write(1, {"loss": 1.0})
    assert threading.active_count() == before
    log.close()
    log.close()


@given(
    numbers=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), st.floats(), max_size=40
    ),
    step=st.integers(0, 2**63 - 1),
    now=st.floats(0, 1e10),
)
def test_a_record_is_the_message_that_protocol_buffers_make(
    numbers: dict[str, float], step: int, now: float
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = TensorBoardFile(Path(folder), 0.0)
        file.write(step, now, numbers)
        file.resume(min(step, 2**63 - 2), now)
        file.close()
        _, first, second = events(Path(folder))
    written = Message(wall_time=now, step=step)
    written.summary.SetInParent()
    for name, number in numbers.items():
        written.summary.value.add(tag=name, simple_value=number)
    assert first.SerializeToString() == written.SerializeToString()
    again = Message(wall_time=now, step=min(step, 2**63 - 2) + 1)
    again.session_log.status = 1
    assert second == again


def test_a_full_disk_is_told_once_by_the_name_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = MetricsLog(tmp_path)
    with pytest.raises(
        RunDirectoryError,
        match=r"cannot write .*metrics\.jsonl: No space left on device; .* make room",
    ):
        log.write(1, {"loss": 1.0})
    log.close()


@pytest.mark.skipif(sys.platform == "win32", reason="there, an open file cannot be deleted")
def test_a_run_directory_that_is_deleted_ends_the_run(tmp_path: Path) -> None:
    (folder := tmp_path / "run").mkdir()
    log = MetricsLog(folder)
    log.write(1, {"loss": 1.0})
    log.flush()
    shutil.rmtree(folder)
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl was deleted while the run wrote"):
        log.flush()
    log.close()


def test_events_after_a_full_disk_are_in_memory_only(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(OSError, match=r"No space left on device: '.*events\.jsonl'"):
        log.record(Event("run-started", 0))
    log.record(Event("run-failed", 0))
    log.close()
    assert [event.name for event in log.events] == ["run-started", "run-failed"]
