"""Reads the CPU, memory and process limits of the container in which this process runs (cgroups v1
and v2). `os.cpu_count`, /proc/meminfo and torch show the limits of the whole machine."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 2**60
"""A cgroup limit of at least this value means that there is no limit. Version 1 of cgroups writes
about 2**63."""
_MEMORY = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Memory files of cgroups v1 and v2: controller, limit file, usage file, and the entry of
memory.stat for reclaimable memory."""


def usable_cpus(root: Path = ROOT) -> int:
    """Return the smaller of the process's CPU affinity and its container's CPU quota, at least
    1."""
    return whole_cpus(scheduled_cpus(), cpu_quota(root))


def whole_cpus(scheduled: int, quota: float | None) -> int:
    """Round the CPU quota down. With more threads than the quota, the kernel pauses all threads."""
    return max(1, scheduled if quota is None else min(scheduled, int(quota)))


def scheduled_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = ROOT) -> float | None:
    quotas = []
    for file in _files(root, "", "cpu.max"):
        with suppress(OSError, ValueError):
            quota, period = file.read_text().split()
            if quota != "max":
                quotas.append(int(quota) / int(period))
    for file in _files(root, "cpu", "cpu.cfs_quota_us"):
        allowed, per = number_in(file), number_in(file.with_name("cpu.cfs_period_us"))
        if allowed is not None and per and allowed > 0:
            quotas.append(allowed / per)
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    limits = [
        int(most)
        for controller, name, *_ in _MEMORY
        for file in _files(root, controller, name)
        if (most := number_in(file))
    ]
    least = min(limits, default=_UNLIMITED)
    return least if least < (_meminfo(root, "MemTotal") or _UNLIMITED) else None


def available_memory_bytes(root: Path = ROOT) -> int:
    free = [
        _meminfo(root, "MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ]
    for controller, limit, used, pages in _MEMORY:
        for file in _files(root, controller, limit):
            most, now = number_in(file), number_in(file.with_name(used))
            if most is not None and now is not None and most < _UNLIMITED:
                free.append(int(most - now + _reclaimable(file.with_name("memory.stat"), pages)))
    return max(0, min(free))


def free_tasks(root: Path = ROOT) -> int | None:
    """Return the number of processes and threads that the cgroup still allows. Return None if the
    cgroup has no limit."""
    free = []
    for controller in ("", "pids"):
        for file in _files(root, controller, "pids.max"):
            # without a limit the file contains the word max
            most, now = number_in(file), number_in(file.with_name("pids.current"))
            if most is not None and now is not None:
                free.append(int(most - now))
    return min(free, default=None)


def number_in(path: Path) -> float | None:
    try:
        return float(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _files(root: Path, controller: str, name: str) -> list[Path]:
    mounted = root / "sys/fs/cgroup" / controller
    if not controller and not (mounted / "cgroup.controllers").exists():
        mounted /= "unified"  # both versions are mounted
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                inner = mounted / path.lstrip("/")
                return [
                    folder / name
                    for folder in (inner, *inner.parents)
                    if folder.is_relative_to(mounted)
                ]
    return []


def _meminfo(root: Path, name: str) -> int | None:
    with suppress(OSError):
        known = (root / "proc/meminfo").read_text()
        match = re.search(rf"^{name}:\s+(\d+) kB", known, flags=re.MULTILINE)
        return int(match[1]) * 1024 if match else None
    return None


def _reclaimable(stat: Path, name: str) -> int:
    with suppress(OSError):
        for line in stat.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


ONE_CONTAINER = (
    "run all processes of a host in one container (lockstep run --nproc N), or give its containers"
    " --pid=host --ipc=host"
)
LARGER_SHARED_MEMORY = (
    "make it larger (docker run --shm-size=8g or --ipc=host; Kubernetes: an emptyDir in memory;"
    " mount -o remount,size=8g /dev/shm)"
)
VOLUME = (
    "mount a volume for run directories (docker run -v /data/runs:/runs; Kubernetes:"
    " persistentVolumeClaim), and give --run-dir there"
)
_FIRST_NAMESPACES = {"pid": 4026531836, "ipc": 4026531839, "uts": 4026531838, "cgroup": 4026531835}
"""Inode numbers of the host's namespaces (include/linux/proc_ns.h)."""
_LAYERS = ("overlay", "fuse-overlayfs", "fuse.fuse-overlayfs", "aufs")
_TEMPORARY = (*_LAYERS, "tmpfs", "ramfs")
_ESCAPED = re.compile(rb"\\([0-7]{3})")


def container_engine(environ: Mapping[str, str], root: Path = ROOT) -> str | None:
    """Return the name of the container engine (such as docker). None if this process runs outside
    of a container. The file /.dockerenv alone is not sufficient, because an image of a virtual
    machine may have it."""
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "Kubernetes"
    if "APPTAINER_CONTAINER" in environ or "SINGULARITY_CONTAINER" in environ:
        return "Apptainer"
    if not _has_own_namespaces(root):
        return None
    if (root / ".dockerenv").exists():
        return "Docker"
    if (root / "run/.containerenv").exists():
        return "Podman"
    return "a container" if "container" in environ or mount_of(ROOT, root)[1] in _LAYERS else None


def _has_own_namespaces(root: Path) -> bool:
    for name, first in _FIRST_NAMESPACES.items():
        with suppress(OSError):
            if os.readlink(root / "proc/self/ns" / name) != f"{name}:[{first}]":
                return True
    return False


def mount_of(path: Path, root: Path = ROOT) -> tuple[str, str]:
    """Return the mount point of `path` and the type of its file system, such as `ext4`."""
    with suppress(OSError):
        mounts = (root / "proc/mounts").read_bytes().split(b"\n")
        points = {
            os.fsdecode(_ESCAPED.sub(_unescape, point)): kind.decode()
            for _, point, kind, *_ in (line.split(b" ") for line in mounts if line)
        }
        resolved = path.resolve()
        for each in map(str, (resolved, *resolved.parents)):
            if each in points:
                return each, points[each]
    return "", ""


def _unescape(found: re.Match[bytes]) -> bytes:
    return bytes([int(found[1], 8)])


def ends_with_container(path: Path, environ: Mapping[str, str], root: Path = ROOT) -> str | None:
    """Return the reason why files in `path` are lost when this container ends. Return None if the
    files are kept."""
    point, kind = mount_of(path, root)
    if kind not in _TEMPORARY or container_engine(environ, root) is None:
        return None
    where = "the container's own file system" if kind in _LAYERS else "memory"
    return f"{path} is in {where} ({kind} on {point}), and is lost when the container is removed"


def process_id_space() -> list[str | int]:
    """Return a value that is equal for two processes if they can use each other's process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return [boot, os.stat("/proc/self/ns/pid").st_ino]
    except OSError:  # not Linux
        return [socket.gethostname(), 0]
