"""`lockstep doctor --write` on a machine with accelerators, here the stand-in ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner
from device.ranks import on_device

from lockstep.base import accelerator
from lockstep.base.errors import LaunchError
from lockstep.cli import doctor
from lockstep.planner.machines import measuring_gpu
from lockstep.planner.machines.hardware import load_device, parse_target
from lockstep.planner.machines.measuring_gpu import (
    LAUNCHED,
    LONG_SECONDS,
    GpuReadings,
    measure_accelerator,
    timed_collectives,
    write_gpu_sheets,
)
from lockstep.testing.pool import WorkerPool

READINGS = GpuReadings(
    name="Stand-in", generation="other", memory_bytes=16 << 30, multiprocessors=1,
    matmul={"float16": 2e12, "float32": 1e12},
    attention={"flash": 1e12}, attention_dtype="float16", copied_bytes_per_second=1e11,
    launch_seconds=1e-6,
)  # fmt: skip
ROWS = [
    {"collective": name, "size_bytes": size, "seconds": 1e-5 + size / 1e10}
    for name in ("all-reduce", "all-gather", "reduce-scatter")
    for size in (2**10, 2**28)
]


def with_timer(seconds_of_a_call: float) -> tuple[GpuReadings, int]:
    """Measure where each call takes so long. Returns the number of calls too."""
    calls = 0

    def timer(call: Any) -> float:
        nonlocal calls
        calls += 1
        return seconds_of_a_call

    return measure_accelerator(timer), calls


def with_small_sizes() -> GpuReadings:
    small = {"WIDTHS": (64, 128), "LENGTHS": (64, 128), "COPIED_BYTES": (2**16, 2**20)}
    with patch.multiple(measuring_gpu, **small):
        return measure_accelerator()


def test_a_device_is_measured(devices: WorkerPool) -> None:
    (found,) = devices.run(1, on_device, with_small_sizes)
    assert found.memory_bytes == 16 << 30
    assert found.matmul.keys() == {"bfloat16", "float16", "float32", "float64", "tf32"}
    assert all(1e7 < rate < 1e14 for rate in (*found.matmul.values(), *found.attention.values()))
    assert 1e8 < found.copied_bytes_per_second < 1e13
    assert 1e-7 <= found.launch_seconds < 0.1  # the stand-in's kernels run on the host
    assert (found.generation, found.attention_dtype) == ("other", "bfloat16")


def test_a_slow_device_is_measured_with_small_sizes(devices: WorkerPool) -> None:
    ((slow, few),) = devices.run(1, on_device, with_timer, LONG_SECONDS)
    assert slow.matmul["float32"] == pytest.approx(2 * measuring_gpu.WIDTHS[0] ** 3 / LONG_SECONDS)
    assert slow.copied_bytes_per_second == pytest.approx(
        2 * measuring_gpu.COPIED_BYTES[0] / LONG_SECONDS
    )
    assert few < 20


def write(path: Path, devices: int, **fakes: Any) -> list[Path]:
    given = {"spawn": lambda *_, **__: READINGS, "timed_collectives": lambda ranks: ROWS, **fakes}
    with patch.multiple(measuring_gpu, **given):
        return write_gpu_sheets(path, devices)


def test_the_files_are_those_that_a_plan_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert write(Path("mine.toml"), 4) == [Path("mine.toml"), Path("mine-link.toml")]
    cluster = parse_target("8 x mine.toml")
    assert (cluster.devices_per_node, cluster.inside.name) == (4, "Stand-in link")
    assert cluster.device.attention_fraction["flash"] == 0.5


def test_one_device_has_no_link(tmp_path: Path) -> None:
    assert write(tmp_path / "mine.toml", 1, timed_collectives=None) == [tmp_path / "mine.toml"]
    assert load_device(str(tmp_path / "mine.toml")).devices_per_node == 1


def test_the_collectives_of_two_and_of_all_devices_are_timed(tmp_path: Path) -> None:
    asked: list[int] = []
    write(tmp_path / "mine.toml", 8, timed_collectives=lambda ranks: asked.append(ranks) or ROWS)
    assert sorted(asked) == [2, 8]


def test_devices_that_cannot_talk_are_said_to_be_so() -> None:
    with (
        patch(
            "lockstep.doctor.diagnose.diagnose",
            lambda **_: type("", (), {"results": {"timed": []}}),
        ),
        pytest.raises(LaunchError, match="see what lockstep doctor --nproc 4 says"),
    ):
        timed_collectives(4)


def test_the_command_measures_the_gpus_where_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # which the command would set
    path = tmp_path / "mine.toml"
    fakes = {"spawn": lambda *_, **__: READINGS, "timed_collectives": lambda ranks: ROWS}
    with patch.multiple(measuring_gpu, **fakes), patch.object(doctor, "count_gpus", lambda: 2):
        ended = CliRunner().invoke(doctor.command, ["--write", str(path)], standalone_mode=False)
    assert ended.return_value == 0, ended.output
    assert f"lockstep plan --on '2 x {path}' SCRIPT" in ended.output
    assert load_device(str(path)).name == "Stand-in"


def test_a_name_that_a_plan_would_not_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    ended = CliRunner().invoke(
        doctor.command, ["--write", str(tmp_path / "mine")], standalone_mode=False
    )
    assert isinstance(ended.exception, LaunchError)
    assert "name it mine.toml" in str(ended.exception)


def test_without_an_accelerator_there_is_nothing_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    ended = CliRunner().invoke(
        doctor.command, ["--write", str(tmp_path / "mine.toml")], standalone_mode=False
    )
    assert isinstance(ended.exception, LaunchError)
    assert "this machine has none" in str(ended.exception)
    assert parse_target(str(ended.exception).split("--on '")[1].split("'")[0]).count == 1


def test_the_name_of_a_device_is_asked_for_in_a_fork(devices: WorkerPool) -> None:
    assert devices.run(1, on_device, accelerator.product_name) == ["stand-in accelerator"]


def test_a_launch_is_timed_behind_what_the_device_still_computes(devices: WorkerPool) -> None:
    (several,) = devices.run(1, on_device, kernels_by_measurement)
    large, with_small, without = several
    assert with_small - without == LAUNCHED
    assert without >= large == 1


def kernels_by_measurement() -> list[int]:
    """The kernels in each call that is timed for the time of a launch."""
    import standin
    import torch

    counted: list[int] = []

    def timer(call: Any) -> float:
        standin.take_counters()
        call()
        counted.append(sum(standin.take_counters().kernels.values()))
        return measuring_gpu.AHEAD_SECONDS

    measuring_gpu._launch_seconds(torch.device("standin", 0), timer)
    return counted
