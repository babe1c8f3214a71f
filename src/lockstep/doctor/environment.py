"""Environment variables that bite. Pure: from a mapping to lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.doctor.line import Line

_ON = ("1", "true", "yes", "on", "y", "t")
_OFF = ("0", "false", "no", "off", "n", "f")


@dataclass(frozen=True, slots=True)
class _Bite:
    """A variable with values that cost time, or break something."""

    name: str
    values: tuple[str, ...]
    """In lower case. Empty: any."""
    verdict: Literal["slow", "wrong"]
    why: str
    remedy: str = "unset it, unless you are looking for an error"


_BITES = (
    _Bite("CUDA_LAUNCH_BLOCKING", _ON, "slow", "every kernel waits for the one before: nothing overlaps"),
    _Bite(
        "NCCL_DEBUG", ("info", "trace"), "slow", "NCCL writes much for each communicator, and with TRACE for each call", "NCCL_DEBUG=WARN"
    ),
    _Bite("NCCL_P2P_DISABLE", _ON, "slow", "GPUs of one machine exchange through its memory, not NVLink or PCIe directly"),
    _Bite("NCCL_SHM_DISABLE", _ON, "slow", "GPUs without a direct way exchange through the network stack"),
    _Bite("NCCL_IB_DISABLE", _ON, "slow", "InfiniBand and RoCE are not used: TCP instead", "unset it, unless there is neither"),
    _Bite("NCCL_ALGO", (), "slow", "NCCL no longer chooses by size and topology"),
    _Bite("NCCL_PROTO", (), "slow", "NCCL no longer chooses by size and topology"),
    _Bite("TORCH_NCCL_BLOCKING_WAIT", _ON, "slow", "the processor waits for every collective"),
    _Bite("TORCH_NCCL_ASYNC_ERROR_HANDLING", ("0",), "wrong", "a rank whose peer is gone waits for ever", "unset it"),
    _Bite("TORCH_DISTRIBUTED_DEBUG", ("detail",), "slow", "every collective is preceded by another that compares what ranks call"),
    _Bite("PYTORCH_NO_CUDA_MEMORY_CACHING", _ON, "slow", "every tensor is allocated by the driver, which waits for the GPU"),
    _Bite("CUDA_DEVICE_MAX_CONNECTIONS", ("1",), "slow", "communication waits behind computation; FSDP2's cannot overlap", "unset it"),
    _Bite("OMP_WAIT_POLICY", ("active",), "slow", "waiting threads keep the cores of other processes busy", "unset it"),
    _Bite("KMP_BLOCKTIME", ("infinite",), "slow", "waiting threads keep the cores of other processes busy", "unset it"),
    _Bite("PYTHONDEVMODE", ("1",), "slow", "Python checks its own memory and warns of much"),
)
_PINNING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")
"""Variables that bind threads to cores by number: the same numbers in every process of a machine."""
_OF_A_LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy")
_SHARED = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "CUDA_DEVICE", "PYTHONHASHSEED", "PYTORCH_", "FI_", "UCX_")
"""How the names of those begin that should be the same on all machines."""


def lines_of(environ: Mapping[str, str], *, nproc: int) -> list[Line]:
    """A line for each variable that bites; one that says so where none does. `nproc`: processes on this machine."""
    lines = [
        _line(bite.name, environ[bite.name], bite.verdict, bite.why, bite.remedy)
        for bite in _BITES
        if environ.get(bite.name, "") and (not bite.values or environ[bite.name].lower() in bite.values)
    ]
    if nproc > 1:
        why = f"all {nproc} processes of this machine bind their threads to the same cores"
        lines += [_line(name, environ[name], "slow", why, "unset it") for name in _PINNING if environ.get(name)]
    left = [name for name in _OF_A_LAUNCHER if name in environ]
    if left:
        why = "a script started with python takes itself for one of several processes, and waits for the others"
        remedy = f"unset {' '.join(left)}"
        lines.append(_line(", ".join(left), ", ".join(environ[name] for name in left), "wrong", why, remedy))
    proxies = [name for name in _PROXIES if environ.get(name)]
    if proxies:
        why = "checkpoints on S3 and the like go through that proxy, unless NO_PROXY names their server"
        lines.append(Line(section="environment", check=proxies[0], verdict="ok", found=f"{environ[proxies[0]]}: {why}"))
    if not lines:
        lines.append(Line(section="environment", check="variables", verdict="ok", found="none is set that slows training or misleads it"))
    return lines


def _line(name: str, value: str, verdict: Literal["slow", "wrong"], why: str, remedy: str) -> Line:
    return Line(section="environment", check=name, verdict=verdict, found=f"is {value}: {why}", remedy=remedy)


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """Those variables that should be the same on all machines, but for the interfaces, which may have other names there."""
    return {name: value for name, value in environ.items() if name.startswith(_SHARED) and not name.endswith("_SOCKET_IFNAME")}


def differences(machines: Sequence[str], environments: Sequence[Mapping[str, str]]) -> list[Line]:
    """A line for each variable of `relevant` that is not the same on all machines."""
    lines = []
    for name in sorted({name for environ in environments for name in environ}):
        values = [environ.get(name, "(unset)") for environ in environments]
        if len(set(values)) > 1:
            other = next(number for number, value in enumerate(values) if value != values[0])
            text = f"is {values[0]} on {machines[0]} and {values[other]} on {machines[other]}: ranks may choose different ways to exchange"
            lines.append(Line(section="environment", check=name, verdict="wrong", found=text, remedy="set it alike on all machines"))
    return lines
