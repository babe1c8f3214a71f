"""Containers without an engine, for tests: what `docker run` makes of a kernel's parts. Namespaces
of their own, a root that is an overlay over this machine's, 64 MB of /dev/shm, control groups with
limits."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import forked
import namespace
import pytest

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_NAMESPACES = ("--mount", "--pid", "--ipc", "--uts", "--cgroup")
_MAKE = """
set -e
mount --make-rprivate /
layers=$1; shm=$2; volume=$3; groups=$4; infiniband=$5; shift 5
mount -t tmpfs tmpfs "$layers"
mkdir "$layers/upper" "$layers/work" "$layers/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$layers/upper,workdir=$layers/work" "$layers/root"
cd "$layers/root"
touch .dockerenv
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs -o "size=$shm" shm dev/shm
mount -t sysfs -o ro sysfs sys
if [ -n "$infiniband" ]; then mount -t tmpfs tmpfs sys/class && mkdir -p "sys/class/infiniband/$infiniband"; fi
mount -t tmpfs tmpfs sys/fs/cgroup
for group in $groups; do mkdir sys/fs/cgroup/$group && mount -t cgroup -o $group cgroup sys/fs/cgroup/$group; done
if [ -n "$volume" ]; then mount --bind "$volume" ".$volume"; fi
"""
_ENTER = """
exec chroot . sh -c 'cd "$0" && exec "$@"' "${volume:-/tmp}" "$@"
"""


@contextmanager
def container(
    folder: Path,
    *,
    shm: str = "64m",
    volume: Path | None = None,
    limits: dict[str, str] | None = None,
    infiniband: str = "",
    namespaces: Sequence[str] = OWN_NAMESPACES,
) -> Iterator[list[str]]:
    """The words to put before a command that is to run in a container. `volume`: a folder of this
    machine, which is at the same path in it. `limits`: of control groups, as in
    {"cpu.cfs_quota_us": "50000"}. `infiniband`: the name of a device that it sees. `namespaces`:
    options of unshare; those that are left out are this machine's."""
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["unshare", *namespaces, "true"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("namespaces need root, and the program unshare")
    layers = folder / "layers"
    layers.mkdir(parents=True)
    with control_groups(limits or {}) as (groups, join):
        words = [
            "unshare",
            *namespaces,
            *(("--fork", "--kill-child") if "--pid" in namespaces else ()),
        ]
        layout = ["sh", str(layers), shm, str(volume or ""), " ".join(groups), infiniband]
        line = [*join, *words, "sh", "-c", _MAKE + _ENTER, *layout]
        if limits:
            yield line
            return

        def enter() -> None:
            namespace.leave(namespaces)
            subprocess.run(["sh", "-c", _MAKE, *layout], check=True)
            os.chroot(layers / "root")
            os.chdir(volume or "/tmp")

        with forked.inside(line, enter):
            yield line


@contextmanager
def control_groups(limits: dict[str, str]) -> Iterator[tuple[list[str], list[str]]]:
    """The controllers of groups with these limits, and the words to put before a command that is to
    be in them."""
    groups = {
        name.partition(".")[0]: (
            CONTROL_GROUPS / name.partition(".")[0] / f"lockstep-test-{os.getpid()}"
        )
        for name in limits
    }
    try:
        for group in groups.values():
            try:
                group.mkdir()
            except OSError as error:
                pytest.skip(f"no control groups of version 1 can be made here ({error})")
        for name, value in limits.items():
            (groups[name.partition(".")[0]] / name).write_text(value)
        files = " ".join(str(group / "cgroup.procs") for group in groups.values())
        yield (
            list(groups),
            [
                "sh",
                "-c",
                f'for file in {files}; do echo $$ > $file; done; exec "$@"',
                "sh",
            ],
        )
    finally:
        for group in groups.values():
            for _ in range(100):
                with suppress(OSError):  # until its last process is gone
                    group.rmdir()
                if not group.exists():
                    break
                time.sleep(0.02)
