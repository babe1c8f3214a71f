"""Measures accelerators, and writes their data sheets for `lockstep plan --on`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lockstep.base import accelerator
from lockstep.base.dtypes import dtype_name
from lockstep.base.errors import LaunchError
from lockstep.launch.spawn import spawn
from lockstep.planner.machines.hardware import Device, Link
from lockstep.planner.trace import Collective, CollectiveKind, sent_bytes

LONG_SECONDS = 5e-3
"""Duration of a measured call in which the launch time is negligible."""
REPEATS = 5
WIDTHS = (512, 1024, 2048, 4096, 8192)
LENGTHS = (512, 1024, 2048, 4096, 8192)
HEADS, HEAD_DIM = 16, 128
COPIED_BYTES = tuple(2**power for power in range(20, 31, 2))
LAUNCHED = 400
"""Number of small kernels in one measurement. A CUDA stream can queue this many kernels before the
host blocks."""
AHEAD_SECONDS = 0.03
"""Duration of the work that the device gets first, while the host queues small kernels."""
GENERATIONS = {70: "Volta", 75: "Turing", 80: "Ampere", 86: "Ampere", 89: "Ada", 90: "Hopper"}
"""Maps 10 × major + minor compute capability to the GPU's generation."""
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
ALONE, BETWEEN = "PCIe4", "Ethernet-100G"
"""Assumed links inside a machine with one device, and between machines."""
MEASURED: Mapping[str, CollectiveKind] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
}
"""The doctor's names of the collectives from which a link's bandwidth is computed."""
Call = Callable[[], Any]
Timer = Callable[[Call], float]


def write_gpu_sheets(path: Path, devices: int) -> list[Path]:
    """Measure the accelerators. Write the device's data sheet to `path`, and the link's data sheet
    next to it."""
    readings = spawn(measure_accelerator, nproc=1)
    sheets: dict[Path, Device | Link] = {}
    inside = ALONE
    if devices > 1:
        timed = {ranks: timed_collectives(ranks) for ranks in {2, devices}}
        inside = str(link_path(path))
        sheets[link_path(path)] = link_of(f"{readings.name} link", timed)
    sheets = {path: readings.device(devices_per_node=devices, inside=inside), **sheets}
    for file, sheet in sheets.items():
        file.write_text(as_toml(sheet), encoding="utf-8")
    return list(sheets)


def timed_collectives(ranks: int) -> list[dict[str, Any]]:
    from lockstep.doctor.diagnose import diagnose  # imported here, because it reads Linux's /proc

    diagnosis = diagnose(nproc=ranks)
    rows: list[dict[str, Any]] | None = diagnosis.results.get("timed")
    if not rows:
        raise LaunchError(
            f"--write: the collectives of {ranks} devices could not be timed; see what lockstep"
            f" doctor --nproc {ranks} says"
        )
    return rows


def measure_accelerator(timer: Timer | None = None) -> GpuReadings:
    device = accelerator.device(0)
    seconds = timer or partial(call_seconds, device=device)
    short = torch.bfloat16 if accelerator.computes_bf16(device) else torch.float16
    matmul = {name: _matmul_rate(dtype, device, seconds) for name, dtype in _dtypes(device, short)}
    with _float32_in_tensor_cores():
        matmul["tf32"] = _matmul_rate(torch.float32, device, seconds)
    total = accelerator.total_bytes(device) or 0
    return GpuReadings(
        name=accelerator.name(device) or device.type,
        generation=_generation(device),
        memory_bytes=total,
        multiprocessors=_multiprocessors(device),
        matmul=matmul,
        attention=_attention_rates(short, device, seconds),
        attention_dtype=dtype_name(short),
        copied_bytes_per_second=_copy_rate(total, device, seconds),
        launch_seconds=_launch_seconds(device, seconds),
    )


def call_seconds(call: Callable[[], Any], device: torch.device) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        accelerator.synchronize(device)
        began = time.perf_counter()
        call()
        accelerator.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


def _dtypes(device: torch.device, short: torch.dtype) -> Iterator[tuple[str, torch.dtype]]:
    halves = (short, torch.float16) if accelerator.computes_fp16(device) else (short,)
    for dtype in dict.fromkeys((*halves, torch.float32, accelerator.wide_dtype(device))):
        yield dtype_name(dtype), dtype


def _matmul_rate(dtype: torch.dtype, device: torch.device, seconds: Timer) -> float:
    def product(width: int) -> tuple[int, Call]:
        one, other = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
        return 2 * width**3, partial(torch.mm, one, other)

    return _best_rate(map(product, WIDTHS), seconds)


def _best_rate(calls: Iterable[tuple[int, Call]], seconds: Timer) -> float:
    best = 0.0
    for work, call in calls:
        elapsed = seconds(call)
        best = max(best, work / elapsed)
        if elapsed >= LONG_SECONDS:
            break
    return best


@contextmanager
def _float32_in_tensor_cores() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _attention_rates(dtype: torch.dtype, device: torch.device, seconds: Timer) -> dict[str, float]:
    rates = {}
    for kernel, backend in KERNELS.items():
        # torch raises it if it does not have the kernel
        with sdpa_kernel(backend), suppress(RuntimeError):
            rates[kernel] = _attention_rate(dtype, device, seconds)
    return rates or {"flash": _attention_rate(dtype, device, seconds)}


def _attention_rate(dtype: torch.dtype, device: torch.device, seconds: Timer) -> float:
    def attention(length: int) -> tuple[int, Call]:
        shape = 1, HEADS, length, HEAD_DIM
        query, key, value = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
        call = partial(scaled_dot_product_attention, query, key, value, is_causal=True)
        return 2 * HEADS * length**2 * HEAD_DIM, call

    return _best_rate(map(attention, LENGTHS), seconds)


def _copy_rate(total_bytes: int, device: torch.device, seconds: Timer) -> float:
    def copy(size: int) -> tuple[int, Call]:
        source, target = (torch.ones(size // 4, device=device) for _ in range(2))
        return 2 * size, partial(target.copy_, source)

    least, *larger = COPIED_BYTES
    sizes = (least, *(size for size in larger if size <= total_bytes / 8))
    return _best_rate(map(copy, sizes), seconds)


def _launch_seconds(device: torch.device, seconds: Timer) -> float:
    large, small = torch.randn(2048, 2048, device=device), torch.ones(1, device=device)
    times = max(1, round(AHEAD_SECONDS / seconds(partial(torch.mm, large, large))))

    def ahead(launched: int) -> None:
        for _ in range(times):
            torch.mm(large, large)
        for _ in range(launched):
            small.add_(1)

    return max(1e-7, (seconds(partial(ahead, LAUNCHED)) - seconds(partial(ahead, 0))) / LAUNCHED)


def _generation(device: torch.device) -> str:
    capability = accelerator.compute_capability(device)
    if capability is None:
        return "other"
    major, minor = capability
    return "Blackwell" if major >= 10 else GENERATIONS.get(10 * major + minor, "other")


def _multiprocessors(device: torch.device) -> int:
    module = torch.get_device_module(device.type)
    properties = getattr(module, "get_device_properties", lambda _: None)(device)
    names = ("multi_processor_count", "max_compute_units")
    return next((int(getattr(properties, name)) for name in names if hasattr(properties, name)), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReadings:
    name: str
    generation: str
    memory_bytes: int
    multiprocessors: int
    matmul: Mapping[str, float]
    attention: Mapping[str, float]
    attention_dtype: str
    copied_bytes_per_second: float
    launch_seconds: float

    def device(self, *, devices_per_node: int, inside: str) -> Device:
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
    few, most = min(timed), max(timed)
    latency = {
        ranks: min(row["seconds"] for row in rows if row["collective"] == "all-reduce")
        for ranks, rows in timed.items()
    }
    slowness = {
        ranks: fmean(1 / _rate(rows, kind, ranks, latency[ranks] / 2) for kind in MEASURED)
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
    values = {each.name: getattr(sheet, each.name) for each in fields(sheet)}
    tables = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    lines = [f"{name} = {_toml(value)}" for name, value in values.items() if name not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def link_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}-link.toml")


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _rate(rows: Sequence[Mapping[str, Any]], collective: str, ranks: int, latency: float) -> float:
    sizes = (row for row in rows if row["collective"] == collective)
    row = max(sizes, key=lambda row: row["size_bytes"])
    kind = MEASURED.get(collective, "all_reduce")
    seconds: float = max(row["seconds"] - latency, row["seconds"] / 2)
    return sent_bytes(Collective(kind, ranks, 1, row["size_bytes"])) / seconds
