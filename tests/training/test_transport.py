"""What carries the exchanges of a run, and that the run is the same whatever does. The hosts are in
name only."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
from containers import OWN_NAMESPACES, container
from processes import ran
from tiers import tiered
from torch import distributed
from training.subjects import recipe

import lockstep as ls
from lockstep.comm import segment
from lockstep.testing.pool import WorkerPool

INSIDE = "the ranks of each host share memory, and one leader per host sums over the hosts"


def trained(run_dir: str, plan: str, hosts: str) -> tuple[float, str]:
    """Each rank is on the host that its letter names."""
    segment.process_id_space = lambda: [hosts[distributed.get_rank()], 1]  # type: ignore[attr-defined]
    result = ls.train(recipe(steps=5), run_dir=run_dir, plan=plan)
    return result.loss, result.fingerprint


def reasons(run_dir: Path) -> dict[str, str]:
    events: list[dict[str, Any]] = run_files.events(run_dir)
    return {
        event["axis"]: event["reason"] for event in events if event["event"] == "no-shared-memory"
    }


@pytest.mark.parametrize("plan", tiered({"replicate=3": 3, "replicate=2,shard=2": 4}))
def test_a_run_is_the_same_on_one_host_on_two_and_through_gloo(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    size = 3 if plan == "replicate=3" else 4
    ways = {
        "one host": (plan, "aaaa"),
        "two hosts": (plan, "aabb"),
        "gloo": (f"{plan},transport=torch", "aaaa"),
    }
    found = {
        name: pool.run(size, trained, str(tmp_path / name), *way) for name, way in ways.items()
    }
    losses = torch.tensor(
        [loss for everyone in found.values() for loss, _ in everyone], dtype=torch.float64
    )
    torch.testing.assert_close(losses, losses[:1].expand(len(losses)), rtol=1e-5, atol=0)
    assert [len({fingerprint for _, fingerprint in everyone}) for everyone in found.values()] == [
        1,
        1,
        1,
    ]
    assert reasons(tmp_path / "one host") == {}
    assert set(reasons(tmp_path / "gloo").values()) == {"the plan says transport=torch"}
    on_two = reasons(tmp_path / "two hosts")
    assert on_two.keys() == ({"replicate"} if size == 3 else {"data", "replicate"})
    assert "runs on another host" in on_two["replicate"]
    assert INSIDE in on_two["replicate" if size == 3 else "data"]


def without_memory(run_dir: str, plan: str) -> int:
    """On rank 0 the kernel has no memory left for the others."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if distributed.get_rank() == 0:
        os.posix_fallocate = full
    return ls.train(recipe(steps=3), run_dir=run_dir, plan=plan).steps


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_where_no_memory_is_left_a_run_goes_through_gloo_and_says_so(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    assert pool.run(2, without_memory, str(tmp_path / "run"), plan) == [3, 3]
    [(axis, reason)] = reasons(tmp_path / "run").items()
    assert axis == plan.partition("=")[0]
    assert reason.startswith("rank 0: ValueError")
    assert "No space left on device" in reason


SCRIPT = """
import torch, lockstep as ls
from torch import nn
x = torch.randn(64, 2000, generator=torch.Generator().manual_seed(0))
ls.train(ls.Recipe(model=lambda: nn.Linear(2000, 2000), data=torch.utils.data.TensorDataset(x), inputs=lambda b: b[0],
    loss=lambda output, b: output.square().mean(), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    global_batch=16, microbatch=8, steps=4))
"""


def trained_in_containers(
    folder: Path, port: int, namespaces: Sequence[str]
) -> list[subprocess.CompletedProcess[str]]:
    """The ends of two ranks of one run, each in a container of its own on this host."""
    shared = folder / "shared"
    shared.mkdir()
    (shared / "train.py").write_text(SCRIPT)
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "LOCKSTEP_RUN_DIR": str(shared / "run"),
    }
    one = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
        **place,
    }
    with ExitStack() as stack:
        started = []
        for rank in range(2):
            before = stack.enter_context(
                container(folder / f"box-{rank}", volume=shared, namespaces=namespaces)
            )
            environ = os.environ | one | {"RANK": str(rank)}
            line = [*before, sys.executable, "train.py"]
            started.append(
                stack.enter_context(
                    subprocess.Popen(
                        line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                    )
                )
            )
            stack.callback(started[-1].kill)
        said = [each.communicate() for each in started]
    return [
        subprocess.CompletedProcess(each.args, each.returncode, *text)
        for each, text in zip(started, said, strict=True)
    ]


@pytest.mark.forks
@pytest.mark.command
def test_ranks_in_containers_of_one_host_exchange_through_gloo_and_are_told_the_remedy(
    tmp_path: Path, port: int
) -> None:
    for each in trained_in_containers(tmp_path, port, OWN_NAMESPACES):
        assert each.returncode == 0, each.stderr
        assert "run directory" not in each.stderr
    (reason,) = reasons(tmp_path / "shared" / "run").values()
    assert reason.startswith(
        "rank 1 runs in another container than rank 0, on the same host, and they do not see each"
        " other's processes; "
    )
    assert "--pid=host" in reason


@pytest.mark.forks
@pytest.mark.command
def test_ranks_in_containers_with_the_process_ids_of_their_host_share_memory(
    tmp_path: Path, port: int
) -> None:
    """The remedy of the test above helps."""
    for each in trained_in_containers(
        tmp_path, port, [each for each in OWN_NAMESPACES if each != "--pid"]
    ):
        assert each.returncode == 0, each.stderr
    assert reasons(tmp_path / "shared" / "run") == {}


@pytest.mark.forks
@pytest.mark.command
def test_a_run_directory_that_is_lost_with_its_container_is_told(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + "print(open('/tmp/run/events.jsonl').read())")
    with container(tmp_path / "box") as before:
        line = [
            *before,
            sys.executable,
            "-m",
            "lockstep",
            "run",
            "--nproc",
            "1",
            "--run-dir",
            "/tmp/run",
            str(script),
        ]
        ended = ran(line)
    assert ended.returncode == 0, ended.stderr
    assert (
        "warning: run directory /tmp/run is in the container's own file system (overlay on /), and"
        " is lost" in ended.stderr
    )
    assert "docker run -v" in ended.stderr
    assert '"event": "run-directory-in-container"' in ended.stdout


@pytest.mark.forks
@pytest.mark.command
@pytest.mark.parametrize(
    ("data", "room", "status", "error"),
    [
        (
            "torch.utils.data.TensorDataset(x)",
            "48k",
            1,
            "\nlockstep: /dev/shm is full, through which loader workers hand over batches; ",
        ),
        (
            "[(row,) for row in x]",
            "48k",
            2,
            "DataError: after step 0, microbatch 0: no room in /dev/shm, through which loader"
            " workers ",
        ),
        (
            "[(row,) for row in x]",
            "4k",
            2,
            "LaunchError: no room in /dev/shm for loader workers (No space left on device); ",
        ),
    ],
)
def test_loader_workers_that_find_no_room_in_shared_memory_name_the_remedy(
    data: str, room: str, status: int, error: str, tmp_path: Path
) -> None:
    """The first is found by the queue of batches, the second by torch's default collate, the last
    by semaphores."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("torch.utils.data.TensorDataset(x)", data))
    with container(tmp_path / "box", volume=tmp_path, shm=room) as before:
        line = [
            *before,
            sys.executable,
            "-m",
            "lockstep",
            "run",
            "--nproc",
            "1",
            "--plan",
            "workers=1",
            "--run-dir",
            "run",
            "train.py",
        ]
        ended = ran(line)
    assert ended.returncode == status, ended.stderr
    assert error in ended.stderr
    assert "make it larger (docker run --shm-size" in ended.stderr


@pytest.mark.slow
def test_a_small_shared_memory_folder_is_enough(tmp_path: Path) -> None:
    before = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$@"',
        "sh",
    ]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting in a name space of its own needs root")
    (tmp_path / "train.py").write_text(SCRIPT)
    line = [
        *before,
        sys.executable,
        "-m",
        "lockstep",
        "run",
        "--nproc",
        "2",
        "--run-dir",
        "run",
        "--save-every",
        "100",
        "train.py",
    ]
    ended = ran(line, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert reasons(tmp_path / "run") == {}
