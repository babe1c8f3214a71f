"""Data sheets of a measured accelerator and its link, as files for `--on`. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lockstep.planner.machines.hardware import Device, Link
from lockstep.planner.trace import Collective, CollectiveKind, sent_bytes

ALONE, BETWEEN = "PCIe4", "Ethernet-100G"
"""Links that were not measured: inside a machine with one device, and between machines."""
MEASURED: Mapping[str, CollectiveKind] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
}
"""Collectives that show a link's bandwidth, by the doctor's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReadings:
    name: str
    generation: str
    memory_bytes: int
    multiprocessors: int
    matmul: Mapping[str, float]
    """FLOP/s of the best product by dtype; at least `float32`."""
    attention: Mapping[str, float]
    """FLOP/s on a long sequence by kernel: `flash`, `cudnn`, or both."""
    attention_dtype: str
    copied_bytes_per_second: float
    """Read and written."""
    launch_seconds: float

    def device(self, *, devices_per_node: int, inside: str) -> Device:
        """Return the device. `inside`: name or file of the link in a machine."""
        peak = self.matmul[self.attention_dtype]
        reached = {kernel: rate / peak for kernel, rate in self.attention.items()}
        slowest = min(reached.values())
        return Device(
            name=self.name,
            generation=self.generation,
            peak_flops=self.matmul,
            matmul_fraction=1.0,
            attention_fraction={
                kernel: reached.get(kernel, slowest) for kernel in ("flash", "cudnn")
            },
            memory_bytes=self.memory_bytes,
            memory_bytes_per_second=self.copied_bytes_per_second,
            memory_fraction=1.0,
            launch_seconds=self.launch_seconds,
            multiprocessors=self.multiprocessors,
            devices_per_node=devices_per_node,
            inside=inside,
            between=BETWEEN,
            source=(
                "measured by lockstep doctor --write: rates are those that were reached; the link"
                " between machines was not measured"
            ),
        )


def link_of(name: str, timed: Mapping[int, Sequence[Mapping[str, Any]]]) -> Link:
    """Return the link. `timed`: ranks -> the doctor's rows, for two ranks and perhaps all."""
    few, most = min(timed), max(timed)
    latency = {
        ranks: min(row["seconds"] for row in rows if row["collective"] == "all-reduce")
        for ranks, rows in timed.items()
    }
    slowness = {
        ranks: _mean(1 / _rate(rows, kind, ranks, latency[ranks] / 2) for kind in MEASURED)
        for ranks, rows in timed.items()
    }
    # A group of n ranks takes 1 + few_ranks / n times as long as a large one.
    added = max(0.0, (slowness[few] - slowness[most]) / (1 / few - 1 / most)) if few < most else 0.0
    large = slowness[most] - added / most
    if large <= 0:
        added, large = 0.0, slowness[most]
    return Link(
        name=name,
        bytes_per_second=1 / large,
        fraction=1.0,
        latency_seconds=latency[few],
        hop_seconds=max(0.0, latency[most] - latency[few]) / (most - few) if few < most else 0.0,
        few_ranks=added / large,
        all_reduce_gain=_rate(timed[most], "all-reduce", most, latency[most]) * slowness[most],
        source=(
            "measured by lockstep doctor --write: collectives of"
            f" {' and '.join(map(str, sorted(timed)))} devices"
        ),
    )


def as_toml(sheet: Device | Link) -> str:
    """Return the text of a sheet's file."""
    values = {each.name: getattr(sheet, each.name) for each in fields(sheet)}
    tables = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    lines = [f"{name} = {_toml(value)}" for name, value in values.items() if name not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def link_path(path: Path) -> Path:
    """Return the path of the link's file beside the device's."""
    return path.with_name(f"{path.stem}-link.toml")


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _rate(rows: Sequence[Mapping[str, Any]], collective: str, ranks: int, latency: float) -> float:
    """Return the bytes a second of a rank in the largest collective, beyond its latency."""
    row = max(
        (row for row in rows if row["collective"] == collective), key=lambda row: row["size_bytes"]
    )
    kind = MEASURED.get(collective, "all_reduce")
    seconds: float = max(row["seconds"] - latency, row["seconds"] / 2)
    return sent_bytes(Collective(kind, ranks, 1, row["size_bytes"])) / seconds


def _mean(values: Iterable[float]) -> float:
    several = list(values)
    return sum(several) / len(several)
