"""Measures accelerators: matrix products, attention, copies, launches, and collectives.

Sizes double until a call is long enough to be timed, so that slow devices take no longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lockstep.base import accelerator
from lockstep.base.errors import LaunchError
from lockstep.launch.spawn import spawn
from lockstep.planner.machines.sheets import ALONE, GpuReadings, as_toml, link_of, link_path

LONG_SECONDS = 5e-3
"""A call so long hides its launch."""
REPEATS = 5
"""The shortest call counts, because other load only adds."""
WIDTHS = (512, 1024, 2048, 4096, 8192)
"""Rows, columns and inner dimension of products."""
LENGTHS = (512, 1024, 2048, 4096, 8192)
"""Queries and keys of attention."""
HEADS, HEAD_DIM = 16, 128
COPIED_BYTES = tuple(2**power for power in range(20, 31, 2))
LAUNCHED = 400
"""Small kernels of one measurement: fewer than a stream holds before the host waits."""
AHEAD_SECONDS = 0.03
"""The device computes so long, while the host launches the small kernels."""
GENERATIONS = {
    (7, 0): "Volta",
    (7, 5): "Turing",
    (8, 0): "Ampere",
    (8, 6): "Ampere",
    (8, 9): "Ada",
    (9, 0): "Hopper",
}
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
Timer = Callable[[Callable[[], Any]], float]
"""Returns the seconds of a call on the device."""


def write_gpu_sheets(path: Path, devices: int) -> list[Path]:
    """Measure accelerators; write the device's sheet to `path` and the link's beside it. Returns
    the files. Raises `LaunchError`."""
    readings = spawn(measure, nproc=1)
    written, inside = [path], ALONE
    if devices > 1:
        link = link_of(
            f"{readings.name} link", {ranks: timed_collectives(ranks) for ranks in {2, devices}}
        )
        written.append(link_path(path))
        written[1].write_text(as_toml(link), encoding="utf-8")
        inside = str(written[1])
    path.write_text(
        as_toml(readings.device(devices_per_node=devices, inside=inside)), encoding="utf-8"
    )
    return written


def timed_collectives(ranks: int) -> list[dict[str, Any]]:
    """Return the doctor's times of collectives. Raises `LaunchError` without any."""
    from lockstep.doctor.diagnose import diagnose  # reads Linux's /proc

    diagnosis = diagnose(nproc=ranks)
    rows: list[dict[str, Any]] | None = diagnosis.results.get("timed")
    if not rows:
        raise LaunchError(
            f"--write: the collectives of {ranks} devices could not be timed; see what lockstep"
            f" doctor --nproc {ranks} says"
        )
    return rows


def measure(timer: Timer | None = None) -> GpuReadings:
    """Measure the first accelerator."""
    device = accelerator.device(0)
    seconds = timer or partial(device_seconds, device=device)
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
        attention_dtype=_name(short),
        copied_bytes_per_second=_copy_rate(total, device, seconds),
        launch_seconds=_launch_seconds(device, seconds),
    )


def device_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the shortest time until the device has done a call."""
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
        yield _name(dtype), dtype


def _matmul_rate(dtype: torch.dtype, device: torch.device, seconds: Timer) -> float:
    best = 0.0
    for width in WIDTHS:
        one, other = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
        taken = seconds(partial(torch.mm, one, other))
        best = max(best, 2 * width**3 / taken)
        if taken >= LONG_SECONDS:
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
    """Return causal attention's rate by kernel, or the rate of what torch does instead."""
    found = {}
    for kernel, backend in KERNELS.items():
        with sdpa_kernel(backend), suppress(RuntimeError):  # torch's, where a kernel is missing
            found[kernel] = _attention_rate(dtype, device, seconds)
    return found or {"flash": _attention_rate(dtype, device, seconds)}


def _attention_rate(dtype: torch.dtype, device: torch.device, seconds: Timer) -> float:
    best = 0.0
    for length in LENGTHS:
        query, key, value = [
            torch.randn(1, HEADS, length, HEAD_DIM, device=device).to(dtype) for _ in range(3)
        ]
        taken = seconds(partial(scaled_dot_product_attention, query, key, value, is_causal=True))
        best = max(best, 2 * HEADS * length**2 * HEAD_DIM / taken)
        if taken >= LONG_SECONDS:
            break
    return best


def _copy_rate(total_bytes: int, device: torch.device, seconds: Timer) -> float:
    best = 0.0
    for size in COPIED_BYTES:
        if best and size > total_bytes / 8:
            break
        source, target = (torch.ones(size // 4, device=device) for _ in range(2))
        taken = seconds(partial(target.copy_, source))
        best = max(best, 2 * size / taken)
        if taken >= LONG_SECONDS:
            break
    return best


def _launch_seconds(device: torch.device, seconds: Timer) -> float:
    """Return the device's time for an empty kernel, with the host ahead."""
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
    return "Blackwell" if capability[0] >= 10 else GENERATIONS.get(capability, "other")


def _multiprocessors(device: torch.device) -> int:
    properties = getattr(
        torch.get_device_module(device.type), "get_device_properties", lambda _: None
    )(device)
    names = ("multi_processor_count", "max_compute_units")
    return next((int(getattr(properties, name)) for name in names if hasattr(properties, name)), 1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
