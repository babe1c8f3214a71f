"""Read the properties of this machine that `lockstep.doctor.machine_checks` judges."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from lockstep.base import accelerator
from lockstep.base.container import container_engine, process_id_space
from lockstep.base.control_group import (
    available_memory_bytes,
    cpu_quota,
    free_tasks,
    memory_limit_bytes,
    number_in,
    scheduled_cpus,
)
from lockstep.base.version import __version__
from lockstep.doctor.environment_variables import relevant_variables
from lockstep.doctor.machine_checks import MachineInfo, parse_topology
from lockstep.launch.machines import Machines, address_towards, interface_of

_NVIDIA_SECONDS = 10.0


def read_machine_info(machines: Machines | None, environ: Mapping[str, str]) -> MachineInfo:
    """Read this machine's properties. Raises `LaunchError` if it cannot reach the rendezvous."""
    address = address_towards(machines.resolve(), machines.port) if machines is not None else ""
    interface = interface_of(address) if address else None
    descriptors, hard_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    names, driver = _gpus()
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lockstep": __version__,
    }
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
        topology=(
            parse_topology(_nvidia_smi("topo", "-m"))
            if names and "CUDA_VISIBLE_DEVICES" not in environ
            else {}
        ),
        container=container_engine(environ),
        process_ids=tuple(process_id_space()),
        cores=scheduled_cpus(),
        cpu_quota=cpu_quota(),
        shared_memory_bytes=_free("/dev/shm"),
        available_memory_bytes=available_memory_bytes(),
        memory_limit_bytes=memory_limit_bytes(),
        open_files_limit=_finite(descriptors),
        open_files_hard_limit=_finite(hard_descriptors),
        locked_memory_bytes=None if locked == resource.RLIM_INFINITY else locked,
        infiniband=(
            tuple(sorted(os.listdir("/sys/class/infiniband")))
            if os.path.isdir("/sys/class/infiniband")
            else ()
        ),
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
    """Return the GPUs' names and the driver's version; empty without a driver."""
    rows = [
        line.split(", ")
        for line in _nvidia_smi(
            "--query-gpu=name,driver_version", "--format=csv,noheader"
        ).splitlines()
    ]
    return tuple(row[0] for row in rows), rows[0][-1] if rows else ""


def _nvidia_smi(*arguments: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    with suppress(subprocess.SubprocessError, OSError):
        return subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SECONDS,
            check=True,
        ).stdout
    return ""


def _interface_details(interface: str) -> str:
    folder = Path("/sys/class/net", interface)
    speed, mtu = number_in(folder / "speed"), number_in(folder / "mtu")
    return (f", {speed:g} Mbit/s" if speed is not None and speed > 0 else "") + (
        f", MTU {mtu:g}" if mtu is not None else ""
    )


def _free_tasks() -> int | None:
    free = [] if (allowed := free_tasks()) is None else [allowed]
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
