"""The machine's accelerator: CUDA (NVIDIA or ROCm), XPU, MPS, or another that torch supports.
Functions with a device as argument also accept the CPU."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import is_nccl_available
from torch.profiler import ProfilerActivity, supported_activities

from lockstep.base.torch_private import default_mps_generator
from lockstep.base.words import counted

_WITHOUT_STREAMS = ("cpu", "meta", "mps")
_HIDING = {"cuda": "CUDA_VISIBLE_DEVICES=", "xpu": "ZE_AFFINITY_MASK=''"}
_VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
DEVICE_FLAGS = frozenset({"is_cpu", "is_meta", "is_cuda", "is_xpu", "is_mps"})
TF32_SINCE = (8, 0)
FLASH_SINCE = (8, 0)
_WITH_FLEX = ("cuda", "xpu")
MIG = "MIG"
"""Result of `identity` for every MIG instance. NCCL treats all MIG instances of a GPU as the same
device."""
_ALL_HIDDEN = ("", "-1", "none", "void", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs. Slurm sets the last value."""


def kind() -> str | None:
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and count() else None


def autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """Return the autocast dtypes for the CPU and for the accelerator. None without autocast."""
    built_for = torch.accelerator.current_accelerator()
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda" if built_for is None else built_for.type)
    )


def count() -> int:
    """Return the number of accelerators. Forked child processes can still use the accelerators."""
    # torch.accelerator's own count would make forks unusable
    built_for = torch.accelerator.current_accelerator()
    if built_for is None:
        return 0
    module = _module(built_for.type)
    if (
        os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
        and not module.is_initialized()
    ):
        # torch asks the driver for MIG instances, which makes forks unusable
        return _counted_by_fork(built_for.type)
    return int(module.device_count())


@cache
def _counted_by_fork(name: str) -> int:
    return int(_asked_of_fork(lambda: _module(name).device_count()) or "0")


def _asked_of_fork(question: Callable[[], object]) -> str:
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(write, str(question()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(process, 0)
    return text


def product_name() -> str:
    first = torch.device(str(kind()), 0)
    named = str(name(first)) if is_initialized() else _asked_of_fork(lambda: name(first) or "")
    return named or first.type


def device(index: int) -> torch.device:
    name = kind()
    assert name is not None, "only where there is one"
    if name != "mps":
        torch.accelerator.set_device_index(index)
    return torch.device(name, index)


def current_device() -> torch.device:
    return torch.device(str(kind()), torch.accelerator.current_device_index())


def how_to_hide() -> str:
    return _HIDING.get(kind() or "cuda", "a torch without it")


def hiding(environ: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={environ[name]!r}" for name in _VISIBLE if name in environ)


def unseen(environ: Mapping[str, str], folder: Path = Path("/dev")) -> str:
    """Return the reason why torch sees none of this machine's NVIDIA GPUs. Returns "" if torch sees
    a GPU, if the machine has none, or if CUDA_VISIBLE_DEVICES hides them."""
    files = sorted(path.name for path in folder.glob("nvidia[0-9]*"))
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if not files or count() or (named is not None and named in _ALL_HIDDEN):
        return ""
    gpus = (
        f"{counted(len(files), 'NVIDIA GPU')} (/dev/{files[0]}{', ...' if len(files) > 1 else ''})"
    )
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA and sees none of {gpus}; install a"
            " torch for CUDA"
        )
    if named is not None:
        return (
            f"CUDA_VISIBLE_DEVICES={named!r} names none of {gpus} that torch can use; correct it,"
            " or unset it"
        )
    return (
        f"torch {torch.__version__} for CUDA {torch.version.cuda} sees none of {gpus}; nvidia-smi"
        " shows whether the driver works"
    )


def identity(device: torch.device, environ: Mapping[str, str]) -> str:
    if environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        return MIG
    properties = getattr(_module(device.type), "get_device_properties", None)

    def uuid(index: int) -> str:
        return (
            str(getattr(properties(index), "uuid", index)) if properties is not None else str(index)
        )

    found, before = uuid(device.index), [uuid(index) for index in range(device.index)]
    return f"{found}/{before.count(found)}"  # the partitions of an AMD GPU may share a UUID


def is_initialized() -> bool:
    name = kind()
    return name is not None and bool(getattr(_module(name), "is_initialized", lambda: False)())


def is_accelerator(where: torch.device | Tensor) -> bool:
    return (where.device if isinstance(where, Tensor) else where).type not in ("cpu", "meta")


def is_for_one_process() -> bool:
    return kind() == "mps"


def runs_data_parallel(device: torch.device) -> bool:
    return device.type == "cuda"


def process_group_backend(device: torch.device) -> str:
    import torch.distributed as dist

    return dist.get_default_backend_for_device(device)


def process_group_device(device: torch.device, backend: str) -> torch.device | None:
    """Return the `device_id` for `init_process_group`. With a `device_id`, NCCL connects at once
    and can split groups."""
    return device if backend == "nccl" else None


def name(device: torch.device) -> str | None:
    named = getattr(_module(device.type), "get_device_name", None)
    return None if device.type == "cpu" or named is None else str(named(device))


def library_versions() -> dict[str, str]:
    versions = {
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "XPU": getattr(torch.version, "xpu", None),
    }
    known = {library: str(version) for library, version in versions.items() if version is not None}
    if ("CUDA" in known or "ROCm" in known) and is_nccl_available():
        communication = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        known["NCCL" if "CUDA" in known else "RCCL"] = ".".join(map(str, communication))
    return known


def traits(device: torch.device) -> dict[str, str]:
    """Return the properties of a device that can change results bitwise."""
    if device.type == "cpu":
        return {"instructions": torch.backends.cpu.get_cpu_capability()}
    properties = getattr(_module(device.type), "get_device_properties", None)
    found = {
        name: str(version) for name, version in library_versions().items()
    } | _cuda_library_versions()
    if (capability := compute_capability(device)) is not None:
        found["capability"] = "{}.{}".format(*capability)
    if (
        properties is not None
        and (processors := getattr(properties(device), "multi_processor_count", None)) is not None
    ):
        found["processors"] = str(processors)
    return found


def _cuda_library_versions() -> dict[str, str]:
    if torch.version.cuda is None:
        return {}
    libraries = {"cuDNN": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
    with suppress(OSError):
        if number := re.search(
            r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        ):
            libraries["driver"] = number[0]
    for package in (f"nvidia-cublas-cu{torch.version.cuda.partition('.')[0]}", "nvidia-cublas"):
        with suppress(metadata.PackageNotFoundError):
            libraries["cuBLAS"] = metadata.version(package)
    return libraries


# Numbers


def wide_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def computes_bf16(device: torch.device) -> bool:
    module = _module(device.type)
    if device.type == "cuda":
        return bool(module.is_bf16_supported(including_emulation=False))
    return bool(getattr(module, "is_bf16_supported", lambda: False)())


def computes_fp16(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (7, 0)


# Kernels of attention


def why_no_varlen_attention(device: torch.device) -> str:
    capability = compute_capability(device)
    if capability is None or capability < FLASH_SINCE:
        return "it needs an NVIDIA GPU of compute capability {}.{} or newer".format(*FLASH_SINCE)
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch is built without flash attention"
    return ""


def why_no_flex_attention(device: torch.device) -> str:
    return "" if device.type in _WITH_FLEX else f"it has no backward on {device.type}"


# Random generators


def generator(device: torch.device) -> torch.Generator:
    if device.type == "mps":
        return default_mps_generator()
    module = _module(device.type)
    if not module.is_initialized():
        module.init()  # makes the generators
    found: torch.Generator = module.default_generators[device.index]
    return found


def generators_of(devices: Sequence[torch.device]) -> list[torch.Generator]:
    return [torch.default_generator, *(generator(each) for each in devices if is_accelerator(each))]


@contextmanager
def preserved_generators(*devices: torch.device) -> Iterator[None]:
    generators = generators_of(devices)
    states = [each.get_state() for each in generators]
    try:
        yield
    finally:
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)


# Streams and profiling


def has_streams(device: torch.device) -> bool:
    return device.type not in _WITHOUT_STREAMS


def current_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def event(device: torch.device, *, timed: bool = False) -> torch.Event:
    return torch.Event(device, enable_timing=timed)


def recorded_event(device: torch.device, *, timed: bool = False) -> torch.Event:
    made = event(device, timed=timed)
    made.record(current_stream(device))
    return made


def is_reached(event: torch.Event, timeout_seconds: float = 0.0) -> bool:
    if event.query() or not timeout_seconds:
        return event.query()
    reached = threading.Event()

    def wait() -> None:
        with suppress(RuntimeError):  # the device has failed
            event.synchronize()
            reached.set()

    threading.Thread(target=wait, name="lockstep-device-event", daemon=True).start()
    return reached.wait(timeout_seconds)


def profiled(device: torch.device) -> list[ProfilerActivity]:
    return list(supported_activities()) if is_accelerator(device) else [ProfilerActivity.CPU]  # type: ignore[no-untyped-call]


def synchronize(device: torch.device) -> None:
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def future(tensor: Tensor) -> torch.futures.Future[Tensor]:
    """Return a CUDA-aware future. `wait` on the future makes the current stream wait for the
    kernels that compute `tensor`."""
    return torch.futures.Future(devices=[tensor.device] if has_streams(tensor.device) else None)


# Memory


def peak_bytes(device: torch.device) -> int | None:
    return torch.accelerator.max_memory_allocated(device) if has_streams(device) else None


def reset_peak_bytes(device: torch.device) -> None:
    if has_streams(device):
        torch.accelerator.reset_peak_memory_stats(device)


def total_bytes(device: torch.device) -> int | None:
    return torch.accelerator.get_memory_info(device)[1] if has_streams(device) else None


_PORTABLE = 1
"""The flag cudaHostRegisterPortable, which pins memory for all devices."""


def can_register_memory(device: torch.device) -> bool:
    runtime = getattr(_module(device.type), "cudart", None) if has_streams(device) else None
    return runtime is not None and hasattr(runtime(), "cudaHostRegister")


def register_memory(memory: Tensor, device: torch.device) -> str | None:
    """Pin host memory. Returns None, or the error as text."""
    status = (
        _module(device.type).cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)
    )
    if int(status) == 0:
        return None
    # CUDA keeps the error, and torch would raise it after the next kernel
    with suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)
    return f"cudaHostRegister of {memory.nbytes:,} bytes failed with status {int(status)}"


def unregister_memory(memory: Tensor, device: torch.device, timeout_seconds: float) -> bool:
    """Unpin host memory. Returns False if the device may still copy to the memory, which must then
    not be freed."""
    with suppress(RuntimeError):
        if is_reached(recorded_event(device), timeout_seconds):
            return int(_module(device.type).cudart().cudaHostUnregister(memory.data_ptr())) == 0
    return False


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def allocation_error(device: torch.device) -> str:
    try:
        torch.accelerator.empty_cache()
        torch.empty(2**21, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0]
    return ""


def leaves_tf32_unused(device: torch.device) -> bool:
    capability = compute_capability(device)
    return (
        capability is not None
        and capability >= TF32_SINCE
        and torch.backends.cuda.matmul.fp32_precision == "none"
    )


def free_unused_memory(device: torch.device) -> None:
    if has_streams(device):
        torch.accelerator.empty_cache()


def _module(name: str) -> Any:
    return torch.get_device_module(name)
