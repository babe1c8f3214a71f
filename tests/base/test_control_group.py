"""The CPUs and the memory that a process may use: in real control groups, and from files of
machines of other kinds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from containers import control_groups
from processes import ran

from lockstep.base.container import (
    available_memory_bytes,
    cpu_quota,
    free_tasks,
    memory_limit_bytes,
    usable_cpus,
    whole_cpus,
)

READ = """
import os
from lockstep.base.container import cpu_quota, memory_limit_bytes, available_memory_bytes, usable_cpus
from lockstep.launch.environment import Environment
print(usable_cpus(), cpu_quota(), memory_limit_bytes(), available_memory_bytes() < 300 << 20, Environment.read({}).threads)
"""


def read_in(limits: dict[str, str]) -> list[str]:
    with control_groups(limits) as (_, join):
        ended = ran([*join, sys.executable, "-c", READ])
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_a_process_keeps_to_the_quota_of_its_control_group_and_to_its_memory() -> None:
    limits = {"cpu.cfs_quota_us": "150000", "memory.limit_in_bytes": str(256 << 20)}
    assert read_in(limits) == ["1", "1.5", str(256 << 20), "True", "1"]


def test_a_process_keeps_to_the_cpus_of_its_control_group() -> None:
    assert read_in({"cpuset.cpus": "1", "cpuset.mems": "0"}) == ["1", "None", "None", "False", "1"]


@pytest.mark.parametrize(
    ("scheduled", "quota", "found"), [(8, None, 8), (8, 2.5, 2), (8, 0.5, 1), (2, 16.0, 2)]
)
def test_a_quota_is_a_whole_number_of_threads(
    scheduled: int, quota: float | None, found: int
) -> None:
    assert whole_cpus(scheduled, quota) == found


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


GIB = 1 << 30
MACHINE = {
    "proc/meminfo": (
        f"MemTotal:       {8 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable:   {4 * GIB // 1024} kB"
    )
}
VERSION_2 = MACHINE | {"sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids"}


def test_version_2_and_the_groups_around_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    inner = "sys/fs/cgroup/kubepods.slice/pod1/box"
    root = files(
        tmp_path,
        VERSION_2
        | {
            "proc/self/cgroup": "0::/kubepods.slice/pod1/box",
            f"{inner}/cpu.max": "max 100000",
            "sys/fs/cgroup/kubepods.slice/pod1/cpu.max": "400000 100000",
            "sys/fs/cgroup/kubepods.slice/cpu.max": "800000 100000",
            f"{inner}/memory.max": str(2 * GIB),
            f"{inner}/memory.current": str(GIB),
            f"{inner}/memory.stat": f"anon 5\ninactive_file {GIB // 2}",
            "sys/fs/cgroup/kubepods.slice/memory.max": "max",
            f"{inner}/pids.max": "100",
            f"{inner}/pids.current": "40",
        },
    )
    assert (cpu_quota(root), usable_cpus(root)) == (4.0, 4)
    assert (memory_limit_bytes(root), available_memory_bytes(root)) == (2 * GIB, GIB + GIB // 2)
    assert free_tasks(root) == 60


def test_version_1_in_a_container_that_sees_its_group_as_the_root(tmp_path: Path) -> None:
    root = files(
        tmp_path,
        MACHINE
        | {
            "proc/self/cgroup": "4:memory:/docker/4f2a\n3:cpu,cpuacct:/docker/4f2a\n0::/",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(3 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(2 * GIB),
        },
    )
    assert (cpu_quota(root), memory_limit_bytes(root), available_memory_bytes(root)) == (
        2.5,
        3 * GIB,
        GIB,
    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": "max",
            "sys/fs/cgroup/cpu.max": "max 100000",
        },
        {
            "proc/self/cgroup": "4:memory:/\n3:cpu:/\n0::/",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
        },
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": str(64 * GIB),
            "sys/fs/cgroup/memory.current": "1",
        },
    ],
    ids=["no control groups", "version 2", "version 1", "a limit above the machine's memory"],
)
def test_without_limits_there_is_the_machine(tmp_path: Path, more: dict[str, str]) -> None:
    root = files(tmp_path, VERSION_2 | more)
    assert (
        cpu_quota(root),
        memory_limit_bytes(root),
        available_memory_bytes(root),
        free_tasks(root),
    ) == (None, None, 4 * GIB, None)


def test_both_versions_at_once_have_the_second_in_a_folder_of_its_own(tmp_path: Path) -> None:
    more = {"proc/self/cgroup": "0::/box", "sys/fs/cgroup/unified/box/cpu.max": "50000 100000"}
    assert cpu_quota(files(tmp_path, MACHINE | more)) == 0.5
