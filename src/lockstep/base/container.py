"""This process's container, and what containers of one host do not share.

`root` is `/` but in tests.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lockstep.base.control_group import ROOT

ONE_CONTAINER = (
    "run all processes of a host in one container (lockstep run --nproc N), or give its containers"
    " --pid=host --ipc=host"
)
"""For containers of one host without common memory: NCCL needs --ipc=host, lockstep --pid=host."""
LARGER_SHARED_MEMORY = (
    "make it larger (docker run --shm-size=8g or --ipc=host; Kubernetes: an emptyDir in memory;"
    " mount -o remount,size=8g /dev/shm)"
)
"""For a /dev/shm that is too small."""
VOLUME = (
    "mount a volume for run directories (docker run -v /data/runs:/runs; Kubernetes:"
    " persistentVolumeClaim), and give --run-dir there"
)
_FIRST_NAMESPACES = {"pid": 4026531836, "ipc": 4026531839, "uts": 4026531838, "cgroup": 4026531835}
"""The kernel's numbers of the host's own namespaces (include/linux/proc_ns.h)."""
_LAYERS = ("overlay", "fuse-overlayfs", "fuse.fuse-overlayfs", "aufs")
_TEMPORARY = (*_LAYERS, "tmpfs", "ramfs")
_ESCAPED = re.compile(rb"\\([0-7]{3})")
"""A byte that would end a field in /proc/mounts."""


def container_engine(environ: Mapping[str, str], root: Path = ROOT) -> str | None:
    """Return what made this process's container, or "a container"; None: it is in none.

    /.dockerenv may come from an image of a virtual machine, so the kernel must know this process in
    namespaces of its own.
    """
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
    """Return the mount point of `path` and its type, such as `ext4`; empty if unknown."""
    with suppress(OSError):
        mounts = [
            line.split(b" ") for line in (root / "proc/mounts").read_bytes().split(b"\n") if line
        ]
        points = {
            os.fsdecode(_ESCAPED.sub(_unescape, point)): kind.decode()
            for _, point, kind, *_ in mounts
        }
        resolved = path.resolve()
        return next(
            (
                (str(each), points[str(each)])
                for each in (resolved, *resolved.parents)
                if str(each) in points
            ),
            ("", ""),
        )
    return "", ""


def _unescape(found: re.Match[bytes]) -> bytes:
    return bytes([int(found[1], 8)])


def ends_with_container(path: Path, environ: Mapping[str, str], root: Path = ROOT) -> str | None:
    """Say why files in `path` are lost with this container; None: they are not."""
    point, kind = mount_of(path, root)
    if kind not in _TEMPORARY or container_engine(environ, root) is None:
        return None
    where = "the container's own file system" if kind in _LAYERS else "memory"
    return f"{path} is in {where} ({kind} on {point}), and is lost when the container is removed"


def process_id_space() -> list[str | int]:
    """Return the kernel's boot id and the namespace of process ids. Where both are equal, processes
    are on one host and know each other's ids; host names do not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return [boot, os.stat("/proc/self/ns/pid").st_ino]
    except OSError:  # not Linux
        return [socket.gethostname(), 0]
