"""What the machine is, what of it lockstep uses, and its rates."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable

import torch
from results import CPU, attempt, report


def facts() -> None:
    began = time.monotonic()
    import lockstep.run  # noqa: F401

    report("import lockstep", seconds=round(time.monotonic() - began, 2))
    shm = os.statvfs("/dev/shm")
    report(
        "host",
        cpus=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        host=socket.gethostname(),
        shm_mb=shm.f_bavail * shm.f_frsize >> 20,
    )
    c10d = torch._C._distributed_c10d
    recorders = [
        name for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json") if hasattr(c10d, name)
    ]
    report(
        "torch",
        version=torch.__version__,
        cuda=torch.version.cuda,
        recorders=recorders,
        short=torch.__version__,
    )
    if CPU or not torch.cuda.is_available():
        report("gpu", ok=None if CPU else False, error="torch.cuda.is_available() is False")
        return
    properties = torch.cuda.get_device_properties(0)
    report(
        "gpu",
        name=properties.name,
        memory_gb=round(properties.total_memory / 1e9, 1),
        multiprocessors=properties.multi_processor_count,
        capability=torch.cuda.get_device_capability(),
        count=torch.cuda.device_count(),
        nccl=torch.cuda.nccl.version(),
        cudnn=torch.backends.cudnn.version(),
        short=properties.name,
    )
    for what, function in (
        ("nvidia-smi", smi),
        ("accelerator module", accelerator_module),
        ("rates", rates),
        ("copies to the host", copies),
    ):
        attempt(what, function)


def smi() -> None:
    names = "memory.used,clocks.sm,driver_version,compute_mode,mig.mode.current"
    asked = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    report("nvidia-smi", says=done.stdout.strip() or done.stderr.strip()[:200])


def accelerator_module() -> None:
    """Every function of lockstep.base.accelerator that a run calls."""
    from lockstep.base import accelerator
    from lockstep.logging.flops import peak_of

    device = accelerator.device(0)
    found = {
        "kind": accelerator.kind(),
        "count": accelerator.count(),
        "initialized": accelerator.is_initialized(),
        "name": accelerator.name(device),
        "versions": accelerator.library_versions(),
        "backend": accelerator.process_group_backend(device),
        "bf16": accelerator.computes_bf16(device),
        "capability": accelerator.compute_capability(device),
        "bytes": accelerator.total_bytes(device),
        "peak bytes": accelerator.peak_bytes(device),
        "generators": len(accelerator.generators_of([device])),
        "peak bf16 FLOP/s": peak_of(device, "bf16"),
    }
    accelerator.synchronize(device)
    accelerator.reset_peak_bytes(device)
    one, two = (accelerator.event(device, timed=True) for _ in range(2))
    one.record()
    x = torch.ones(1 << 20, device=device)
    two.record()
    two.synchronize()
    found["elapsed ms"] = one.elapsed_time(two)
    with accelerator.preserved_generators(device):
        torch.rand(3, device=device)
    with accelerator.current(device):
        del x
    accelerator.free_unused_memory(device)
    report("accelerator module", ok=True, **{name: str(value) for name, value in found.items()})


def fastest(function: Callable[[], object], repeats: int = 5) -> float:
    """Return the seconds of the fastest of some calls."""
    function()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def rates() -> None:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bf16 = 2 * 8192**3 / fastest(lambda: a @ b)
    c, d = a.float(), b.float()
    fp32 = 2 * 8192**3 / fastest(lambda: c @ d, 2)
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    copied = 2 * big.numel() / fastest(lambda: big.clone())
    small = torch.ones(1, device="cuda")

    def launches() -> None:
        for _ in range(1000):
            small.add_(1)

    report(
        "rates",
        bf16_tflops=round(bf16 / 1e12),
        fp32_tflops=round(fp32 / 1e12),
        copy_tb_s=round(copied / 1e12, 2),
        launch_us=round(fastest(launches) * 1e3, 2),
        short=f"bf16 {bf16 / 1e12:.0f} TFLOP/s",
    )


def copies() -> None:
    """What a checkpoint's copy into shared memory could cost."""
    from lockstep.checkpoint.writer import SharedFile

    size = 1 << 30
    source = torch.ones(size, dtype=torch.uint8, device="cuda")
    pageable = torch.zeros(size, dtype=torch.uint8)
    pinned = torch.zeros(size, dtype=torch.uint8).pin_memory()
    mapped = torch.frombuffer(SharedFile(size).mapped, dtype=torch.uint8).zero_()
    found = {
        "pageable": size / fastest(lambda: pageable.copy_(source), 2),
        "pinned": size / fastest(lambda: pinned.copy_(source, non_blocking=True), 2),
        "shared file": size / fastest(lambda: mapped.copy_(source), 2),
    }
    runtime = torch.cuda.cudart()
    if int(status := runtime.cudaHostRegister(mapped.data_ptr(), size, 0)) == 0:
        found["shared file, registered"] = size / fastest(
            lambda: mapped.copy_(source, non_blocking=True), 2
        )
        runtime.cudaHostUnregister(mapped.data_ptr())
    gb_s = {name: round(rate / 1e9, 1) for name, rate in found.items()}
    report("copies to the host", register_status=int(status), gb_s=gb_s, short=f"{gb_s} GB/s")
