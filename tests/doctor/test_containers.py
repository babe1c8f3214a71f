"""The doctor in a container that lacks what training needs, and in one that was started as its
remedies say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from containers import container
from processes import ran

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name
    not in (
        "OMP_NUM_THREADS",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "LOCKSTEP_RUN_DIR",
    )
}


def examined(before: Sequence[str], *options: str) -> dict[str, dict[str, Any]]:
    """The doctor's checks by name. It may lock 64 KiB of memory, as in a container of Docker's."""
    line = [
        *before,
        "sh",
        "-c",
        'ulimit -l 64; exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "lockstep",
        "doctor",
        "--nproc",
        "1",
        "--json",
        *options,
    ]
    ended = ran(line, env=ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""})
    assert ended.stdout, ended.stderr
    return {check["check"]: check for check in json.loads(ended.stdout)["checks"]}


def test_what_a_container_lacks_is_named_with_its_remedy(tmp_path: Path) -> None:
    limits = {"cpu.cfs_quota_us": "50000", "memory.limit_in_bytes": str(900 << 20)}
    with container(tmp_path, limits=limits, infiniband="mlx5_0") as before:
        found = examined(before, "--run-dir", "/root/runs")
    assert found["container"]["found"].startswith("Docker: a quota of 0.5 of ")
    assert found["container"]["found"].endswith(" CPUs, 900 MiB of memory")
    expected = {
        "/dev/shm": (
            "64 MiB free; up to 128 MiB needed for 1 process",
            "docker run --shm-size=8g or --ipc=host",
        ),
        "locked memory": ("64 KiB, with mlx5_0", "docker run --ulimit memlock=-1"),
        "memory": ("MiB available", "docker run --memory"),
        "lifetime": (
            "/root is in the container's own file system (overlay on /), and is lost",
            "docker run -v",
        ),
    }
    for name, (text, remedy) in expected.items():
        assert found[name]["verdict"] == "failed", found[name]
        assert text in found[name]["found"]
        assert remedy in found[name]["remedy"]
    cores = len(os.sched_getaffinity(0))
    assert found["threads"]["found"].startswith(
        f"1 process × 1 thread on 1 core (of {cores}, by the control group's CPU quota of 0.5)"
    )


@pytest.mark.command
def test_the_remedies_help(tmp_path: Path) -> None:
    """But for the locked memory, which not even root may raise where the kernel withholds
    CAP_SYS_RESOURCE."""
    runs = tmp_path / "runs"
    runs.mkdir()
    limits = {"cpu.cfs_quota_us": "100000", "memory.limit_in_bytes": str(4 << 30)}
    with container(tmp_path, limits=limits, shm="1g", volume=runs) as before:
        found = examined(before, "--run-dir", str(runs))
    assert {
        found[name]["verdict"] for name in ("container", "/dev/shm", "memory", "threads", "path")
    } == {"ok"}
    assert not {"lifetime", "locked memory"} & found.keys()


@pytest.mark.forks
@pytest.mark.command
def test_two_containers_of_one_host_are_told_that_they_share_no_memory(
    tmp_path: Path, port: int
) -> None:
    words = [
        "doctor",
        "--nproc",
        "1",
        "--nnodes",
        "2",
        "--rdzv",
        f"127.0.0.1:{port}",
        "--run-dir",
        str(tmp_path),
        "--json",
    ]
    with ExitStack() as stack:
        started = []
        for box in ("one", "two"):
            before = stack.enter_context(container(tmp_path / box, shm="1g", volume=tmp_path))
            line = [*before, sys.executable, "-m", "lockstep", *words]
            environ = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            started.append(
                stack.enter_context(
                    subprocess.Popen(
                        line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                    )
                )
            )
            stack.callback(started[-1].kill)
        said = [each.communicate() for each in started]
    (check,) = [check for check in json.loads(said[0][0])["checks"] if check["check"] == "one host"]
    assert check["verdict"] == "slow"
    assert "are containers of one host, and do not see each other's processes" in check["found"]
    assert "--pid=host --ipc=host" in check["remedy"]
