"""Read the properties of this machine that `lockstep.doctor.machine_checks` judges."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from lockstep.base import accelerator
from lockstep.base.version import __version__
from lockstep.doctor.environment_variables import relevant_variables
from lockstep.doctor.machine_checks import MachineInfo, parse_topology
from lockstep.launch.machines import Machines, address_towards, interface_of

_CGROUP = Path("/sys/fs/cgroup")
_NVIDIA_SECONDS = 10.0
_UNLIMITED = 2**60
"""A limit of this size or above means no limit: version 1 of control groups reports about 2**63 then."""


def read_machine_info(machines: Machines | None, environ: Mapping[str, str]) -> MachineInfo:
    """Return the properties of this machine. Raises `LaunchError` if it cannot reach the rendezvous of `machines`."""
    address = address_towards(machines.resolve(), machines.port) if machines is not None else ""
    interface = interface_of(address) if address else None
    descriptors, hard_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    names, driver = _gpus()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "lockstep": __version__}
    return MachineInfo(
        host=socket.gethostname(),
        address=address,
        interface=interface,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        interface_details=_interface_details(interface) if interface is not None else "",
        versions=versions | accelerator.library_versions() | ({"driver": driver} if driver else {}),
        gpus=accelerator.count(),
        gpu_names=names,
        # If some GPUs are hidden, torch and the driver number them differently.
        topology=parse_topology(_nvidia_smi("topo", "-m")) if names and "CUDA_VISIBLE_DEVICES" not in environ else {},
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_quota=_cpu_quota(),
        shared_memory_bytes=_free("/dev/shm"),
        available_memory_bytes=_available_memory(),
        open_files_limit=_finite(descriptors),
        open_files_hard_limit=_finite(hard_descriptors),
        locked_memory_bytes=None if locked == resource.RLIM_INFINITY else locked,
        infiniband=tuple(sorted(os.listdir("/sys/class/infiniband"))) if os.path.isdir("/sys/class/infiniband") else (),
        free_tasks=_free_tasks(),
        variables=relevant_variables(environ),
    )


def _finite(limit: int) -> int:
    return 2**31 if limit == resource.RLIM_INFINITY else limit


def _free(path: str) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _gpus() -> tuple[tuple[str, ...], str]:
    """Return the names of the GPUs and the driver's version. Both are empty if there is no driver."""
    rows = [line.split(", ") for line in _nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()]
    return tuple(row[0] for row in rows), rows[0][-1] if rows else ""


def _nvidia_smi(*arguments: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    with suppress(subprocess.SubprocessError, OSError):
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_NVIDIA_SECONDS, check=True).stdout
    return ""


def _interface_details(interface: str) -> str:
    folder = Path("/sys/class/net", interface)
    speed, mtu = _number(folder / "speed"), _number(folder / "mtu")
    return (f", {speed:g} Mbit/s" if speed is not None and speed > 0 else "") + (f", MTU {mtu:g}" if mtu is not None else "")


def _number(path: Path) -> float | None:
    """Return the number in a file. None if there is no number, or no file."""
    try:
        return float(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _cgroup_files(controller: str, name: str) -> list[Path]:
    """Return a file of this process's control groups, innermost first. `controller`: empty for version 2."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                root = _CGROUP / controller if controller else _CGROUP
                inner = root / path.lstrip("/")
                return [folder / name for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
    return []


def _cpu_quota() -> float | None:
    found = []
    for file in _cgroup_files("", "cpu.max"):
        with suppress(OSError, ValueError):
            quota, period = file.read_text().split()
            if quota != "max":
                found.append(int(quota) / int(period))
    for file in _cgroup_files("cpu", "cpu.cfs_quota_us"):
        allowed, per = _number(file), _number(file.with_name("cpu.cfs_period_us"))
        if allowed is not None and per and allowed > 0:
            found.append(allowed / per)
    return min(found, default=None)


def _available_memory() -> int:
    """Return the bytes that can be allocated now: the least of the machine's and the control groups'."""
    text = Path("/proc/meminfo").read_text() if os.path.exists("/proc/meminfo") else ""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, flags=re.MULTILINE)
    free = [int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for controller, limit, used, pages in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for file in _cgroup_files(controller, limit):
            most, now = _number(file), _number(file.with_name(used))
            if most is not None and now is not None and most < _UNLIMITED:
                free.append(int(most - now + _reclaimable(file.with_name("memory.stat"), pages)))
    return max(0, min(free))


def _reclaimable(stat: Path, name: str) -> int:
    """Return the bytes of the page cache that the kernel frees when memory is short."""
    with suppress(OSError):
        for line in stat.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


def _free_tasks() -> int | None:
    free = []
    for controller in ("", "pids"):
        for file in _cgroup_files(controller, "pids.max"):
            most, now = _number(file), _number(file.with_name("pids.current"))  # without a limit the file has the word max
            if most is not None and now is not None:
                free.append(int(most - now))
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        free.append(soft - _threads_of_this_user())
    return min(free, default=None)


def _threads_of_this_user() -> int:
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.geteuid():
                count += len(os.listdir(folder / "task"))
    return count
