"""What is said of a machine, from facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from lockstep.doctor.check_result import CheckResult, machine_names, worst
from lockstep.doctor.machine_checks import (
    MachineInfo,
    clock_check,
    environment_checks,
    machine_checks,
    parse_topology,
    relevant_variables,
    shared_memory_differences,
    variable_differences,
    version_differences,
)

HEALTHY = MachineInfo(
    host="a", address="10.0.0.1", interface="eth0", interfaces=("lo", "eth0", "docker0"),
    interface_details=", 10000 Mbit/s",
    versions={"python": "3.11.2", "torch": "2.13.0"}, gpus=0, gpu_names=(), topology={},
    container=None,
    process_ids=("boot", 1), cores=8, cpu_quota=None,
    shared_memory_bytes=8 << 30, available_memory_bytes=16 << 30, memory_limit_bytes=None,
    open_files_limit=4096, open_files_hard_limit=10**6, locked_memory_bytes=8 << 20,
    infiniband=(), free_tasks=10000,
)  # fmt: skip


def check_of(
    check: str, environ: Mapping[str, str] | None = None, nproc: int = 4, **changed: Any
) -> CheckResult:
    checks = machine_checks(
        replace(HEALTHY, **changed), environ or {}, nproc=nproc, world_size=nproc
    )
    (found,) = [each for each in checks if each.check == check]
    return found


def test_a_quota_is_followed_and_a_container_is_shown_with_its_limits() -> None:
    assert (
        check_of("threads", nproc=2, cpu_quota=4.5).found
        == "2 processes × 2 threads on 4 cores (of 8, by the control group's CPU quota of 4.5)"
    )
    shown = check_of("container", container="Podman", cpu_quota=4.5, memory_limit_bytes=2 << 30)
    assert (shown.verdict, shown.found) == (
        "ok",
        "Podman: a quota of 4.5 of 8 CPUs, 2 GiB of memory",
    )
    assert (
        check_of("container", container="Docker").found
        == "Docker: no CPU quota, no limit of memory"
    )


def test_the_bridge_of_containers_is_no_matter_on_one_machine() -> None:
    assert check_of("interface", {"GLOO_SOCKET_IFNAME": "docker0"}, address="").verdict == "ok"


def test_containers_of_one_host_that_share_no_memory_are_named() -> None:
    spaces = [("host1", 5), ("host2", 5), ("host1", 6), ("host1", 5), ("host3", 7)]
    (check,) = shared_memory_differences(
        list("abcde"), [{"process_ids": space} for space in spaces]
    )
    assert (check.check, check.verdict) == ("one host", "slow")
    assert check.found.startswith("a, c are containers of one host")
    assert "--pid=host --ipc=host" in check.remedy
    assert (
        shared_memory_differences(["a", "b"], [{"process_ids": space} for space in spaces[:2]])
        == []
    )


def test_a_machine_that_is_well_has_nothing_to_mend() -> None:
    assert worst(machine_checks(HEALTHY, {}, nproc=4, world_size=4)) == "ok"
    shared = replace(HEALTHY, gpus=1, gpu_names=("H100",))
    assert (
        worst(machine_checks(shared, {"LOCKSTEP_SHARE_DEVICES": "1"}, nproc=4, world_size=4))
        == "ok"
    )


@pytest.mark.parametrize(
    ("check", "changed", "environ", "text", "remedy"),
    [
        ("/dev/shm", {"shared_memory_bytes": 64 << 20}, {}, "64 MiB free; up to 512 MiB needed for 4 processes", "--shm-size"),
        ("/dev/shm", {"shared_memory_bytes": None}, {}, "does not exist", "tmpfs"),
        ("threads", {}, {"OMP_NUM_THREADS": "8"}, "4 processes × 8 threads on 8 cores", "OMP_NUM_THREADS=2"),
        ("threads", {"cpu_quota": 5.9}, {"OMP_NUM_THREADS": "2"}, "on 5 cores (of 8, by the control group's", "OMP_NUM_THREADS=1"),
        ("threads", {"cpu_quota": 2.0}, {}, "4 processes × 1 thread on 2 cores", "docker run --cpus"),
        ("threads", {"cores": 2}, {"OMP_NUM_THREADS": "1"}, "share cores", "--nproc 2"),
        ("threads", {}, {"OMP_NUM_THREADS": "1"}, "are idle", "OMP_NUM_THREADS=2"),
        ("threads", {}, {"OMP_NUM_THREADS": "4,2"}, "not a number", "unset"),
        ("open files", {"open_files_limit": 256}, {}, "256", "ulimit -n"),
        ("locked memory", {"infiniband": ("mlx5_0",)}, {}, "8 MiB, with mlx5_0", "ulimit -l"),
        ("processes and threads", {"free_tasks": 20}, {}, "20 more", "pids-limit"),
        ("memory", {"available_memory_bytes": 1 << 30}, {}, "1 GiB", "docker run --memory"),
        ("devices", {"gpu_names": ("H100",)}, {}, "torch sees none", "CUDA"),
        ("devices", {"gpu_names": ("H100",)}, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES=", "unset"),
        ("devices", {"gpus": 2, "gpu_names": ("H100", "A100")}, {}, "2 GPUs: A100, H100", "slowest"),
        ("processes", {"gpus": 2, "gpu_names": ("H100", "H100")}, {}, "4 processes for 2 GPUs", "--share-devices"),
        ("interface", {}, {"GLOO_SOCKET_IFNAME": "eth1"}, "'eth1'; the interfaces are lo, eth0, docker0", "unset"),
        ("interface", {}, {"GLOO_SOCKET_IFNAME": "docker0"}, "docker0 is the bridge of this host's containers", "unset"),
        ("interface", {}, {"NCCL_SOCKET_IFNAME": "=docker0"}, "=docker0 is the bridge", "unset"),
        ("interface", {}, {"NCCL_SOCKET_IFNAME": "ib"}, "matches none", "unset"),
        ("interface", {}, {"NCCL_SOCKET_IFNAME": "=eth"}, "matches none", "unset"),
        ("interface", {}, {"NCCL_SOCKET_IFNAME": "^lo,eth,docker"}, "matches none", "unset"),
    ],
)  # fmt: skip
def test_a_defect_is_named_with_a_remedy(
    check: str, changed: dict[str, Any], environ: dict[str, str], text: str, remedy: str
) -> None:
    check = check_of(check, environ, **changed)
    assert check.is_bad
    assert text in check.found
    assert remedy in check.remedy


@pytest.mark.parametrize("name", ["eth", "=eth0", "^docker", "^=lo,docker0", "ib,eth"])
def test_what_nccl_takes_for_interfaces_is_understood(name: str) -> None:
    assert check_of("interface", {"NCCL_SOCKET_IFNAME": name}).verdict == "ok"


@pytest.mark.parametrize(
    ("offset", "error", "verdict"),
    [(0.1, 0.001, "ok"), (-30.0, 0.001, "failed"), (1.4, 1.0, "ok"), (1.4, 0.1, "failed")],
)
def test_a_clock_is_wrong_beyond_half_a_second_and_what_is_not_known(
    offset: float, error: float, verdict: str
) -> None:
    check = clock_check("b", offset, error, "a")
    assert check.verdict == verdict
    assert ("behind a" if offset < 0 else "ahead of a") in check.found


def test_versions_that_differ_between_machines_are_named() -> None:
    (check,) = version_differences(
        ["a", "b", "c"], [{"torch": "2.13"}, {"torch": "2.13"}, {"torch": "2.12"}]
    )
    assert (check.verdict, check.found) == ("failed", "torch is 2.13 on a and 2.12 on c")


def test_machines_are_told_apart() -> None:
    def names(*machines: tuple[str, str]) -> list[str]:
        return machine_names([{"info": {"host": one, "address": two}} for one, two in machines])

    assert names(("a", "1"), ("b", "1")) == ["a", "b"]
    assert names(("a", "1"), ("a", "2")) == ["1", "2"]
    assert names(("a", "1"), ("a", "1")) == ["a#0", "a#1"]


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tSYS\t0-47\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
"""


def test_the_driver_s_table_of_links_is_read() -> None:
    assert parse_topology(TOPOLOGY) == {"0-1": "NV18", "0-2": "SYS", "1-2": "PHB"}
    assert parse_topology("") == {}
    check = check_of(
        "GPU links", nproc=3, gpus=3, gpu_names=("H100",) * 3, topology=parse_topology(TOPOLOGY)
    )
    assert check.found.startswith("NV18 × 1, PHB × 1, SYS × 1")


@pytest.mark.parametrize(
    ("environ", "verdict"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "slow"),
        ({"NCCL_DEBUG": "INFO"}, "slow"),
        ({"NCCL_P2P_DISABLE": "1"}, "slow"),
        ({"NCCL_ALGO": "Ring"}, "slow"),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "slow"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "failed"),
        ({"KMP_AFFINITY": "compact"}, "slow"),
        ({"WORLD_SIZE": "4"}, "failed"),
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "29400"}, "failed"),
    ],
    ids=lambda value: str(value),
)
def test_a_variable_that_bites_is_named_with_why(environ: dict[str, str], verdict: str) -> None:
    (check,) = environment_checks(environ, nproc=2)
    assert check.verdict == verdict
    assert all(name in check.check for name in environ)
    assert all(value in check.found for value in environ.values())
    assert "unset" in check.remedy or "NCCL_DEBUG=WARN" in check.remedy


@pytest.mark.parametrize(
    "environ",
    [{}, {"NCCL_DEBUG": "WARN"}, {"CUDA_LAUNCH_BLOCKING": "0"}, {"http_proxy": "http://proxy"}],
)
def test_what_does_not_bite_is_nothing_to_mend(environ: dict[str, str]) -> None:
    checks = environment_checks(environ, nproc=2)
    assert [check.verdict for check in checks] == ["ok"]
    assert all(value in checks[0].found for name, value in environ.items() if "proxy" in name)


def test_variables_that_differ_between_machines_are_named() -> None:
    all_of_them = [
        {"NCCL_ALGO": "Ring", "HOME": "/a", "NCCL_SOCKET_IFNAME": "eth0"},
        {"HOME": "/b", "NCCL_SOCKET_IFNAME": "eth1"},
    ]
    (check,) = variable_differences(["a", "b"], [relevant_variables(each) for each in all_of_them])
    assert check.found.startswith("is Ring on a and (unset) on b")
