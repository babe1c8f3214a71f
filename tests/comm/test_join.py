"""Meeting the other processes."""

import os
import socket
import sys

import pytest
import torch
from processes import ran

from lockstep.base import accelerator
from lockstep.comm.world import join


def test_a_rendezvous_port_in_use_is_an_error_with_status_2_and_no_traceback() -> None:
    script = (
        "from lockstep.comm.world import join; join(rank=0, size=2, local_rank=0, local_size=2)"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": "0",
            "WORLD_SIZE": "2",
        }
        command = [sys.executable, "-c", script]
        done = ran(command, env={**os.environ, **environment})
    assert done.returncode == 2
    message = next(line for line in done.stderr.splitlines() if line.startswith("lockstep: "))
    assert (
        message
        == f"lockstep: LaunchError: the rendezvous port 127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT)"
        " is in use by another program; give another, or let lockstep run choose"
    )
    assert "Traceback" not in done.stderr


def test_several_processes_on_a_mac_compute_on_the_cpu_and_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accelerator, "count", lambda: 1)
    monkeypatch.setattr(accelerator, "kind", lambda: "mps")
    assert join(rank=0, size=1, local_rank=0, local_size=2).device.type == "cpu"
    assert (
        capsys.readouterr().err
        == "lockstep: 2 processes compute on the CPU; the GPU of this machine is for one process\n"
    )
    assert join(rank=0, size=1, local_rank=0, local_size=1).device == torch.device("mps", 0)


def test_a_world_of_one_has_no_process_group() -> None:
    world = join(rank=0, size=1, local_rank=0, local_size=1)
    assert (world.rank, world.size, world.owns_group) == (0, 1, False)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("error", ["DataError", "ValueError"])
def test_an_error_after_it_is_told_whoever_made_the_process_group(error: str) -> None:
    """Torch's own hook, put in with the group, prints what the hooks before it say only where they
    return."""
    script = (
        "import torch.distributed as dist, lockstep.base.errors\n"
        "from lockstep.comm.world import join\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "for _ in range(2): join(rank=0, size=1, local_rank=0, local_size=1)\n"
        f"raise getattr(lockstep.base.errors, '{error}', ValueError)('what was given')\n"
    )
    done = ran([sys.executable, "-c", script])
    told, status = (
        ("lockstep: DataError: what was given", 2)
        if error == "DataError"
        else ("[rank0]: ValueError: what was given", 1)
    )
    assert done.returncode == status
    assert [
        line
        for line in done.stderr.splitlines()
        if "what was given" in line and "raise" not in line
    ] == [told]
