"""The backend of torch.distributed, by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import ran

from lockstep.base import accelerator
from lockstep.base.errors import LaunchError, PlanError
from lockstep.comm.devices import check_carries, chosen_backend, group_backends
from lockstep.comm.world import join
from lockstep.plan import Plan
from lockstep.testing.pool import WorkerPool

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nccl", "xccl", "ucc", "mpi"):
        monkeypatch.setattr(dist, f"is_{name}_available", lambda: False)


def test_without_an_option_it_is_torchs_own_for_the_device() -> None:
    assert (
        chosen_backend(None, CPU, 0, 2, {})
        == chosen_backend("gloo", CPU, 0, 2, {})
        == chosen_backend("GLOO", CPU, 0, 2, {})
        == "gloo"
    )
    assert chosen_backend(None, CUDA, 0, 1, {}) == "nccl"


def test_several_processes_on_gpus_need_a_torch_with_nccl_or_gloo_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        LaunchError,
        match=(
            r"^2 processes on cuda need nccl for collectives, and this torch \(.*\) has no"
            r" nccl; install"
        ),
    ):
        chosen_backend(None, CUDA, 0, 2, {})
    assert chosen_backend("gloo", CUDA, 0, 2, {}) == "gloo"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert chosen_backend(None, CUDA, 0, 2, {}) == "nccl"


@pytest.mark.parametrize("name", ["mpi", "ucc", "telegraph", "fake", "undefined", ""])
def test_one_that_this_torch_does_not_have_is_refused_with_what_it_has(name: str) -> None:
    with pytest.raises(LaunchError) as refused:
        chosen_backend(name, CPU, 0, 2, {})
    assert (
        str(refused.value)
        == f"--backend {name!r}, which this torch ({torch.__version__}) does not have; it has gloo,"
        " and what a package registers when the script imports it; give one of gloo, or leave"
        " --backend out for gloo"
    )


def test_one_that_cannot_send_the_devices_tensors_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "is_ucc_available", lambda: True)
    with pytest.raises(
        LaunchError,
        match=(
            r"--backend 'nccl' on cpu; it sends tensors only on cuda; give one of gloo, ucc, or"
            r" leave --back"
        ),
    ):
        chosen_backend("nccl", CPU, 0, 2, {})
    assert chosen_backend("ucc", CPU, 0, 2, {}) == chosen_backend("ucc", CUDA, 0, 2, {}) == "ucc"


def test_mpi_carries_only_processes_that_mpirun_has_started_with_the_same_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    with pytest.raises(
        LaunchError,
        match=(
            r"--backend 'mpi' on rank 3 of 4, and mpirun has not started it; MPI has its"
            r" own ranks"
        ),
    ):
        chosen_backend("mpi", CPU, 3, 4, {})
    with pytest.raises(LaunchError, match=r"on rank 1 of 4, and for mpirun it is rank 1 of 2;"):
        chosen_backend("mpi", CPU, 1, 4, {"PMI_SIZE": "2", "PMI_RANK": "1"})
    with pytest.raises(LaunchError, match=r"on rank 1 of 2, and for mpirun it is rank 0 of 2;"):
        chosen_backend("mpi", CPU, 1, 2, {"PMI_SIZE": "2", "PMI_RANK": "0"})
    assert (
        chosen_backend("mpi", CPU, 3, 4, {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"})
        == "mpi"
    )
    assert chosen_backend("mpi", CPU, 0, 1, {}) == "mpi"


def test_gloo_carries_the_tensors_on_the_cpu_beside_an_accelerator() -> None:
    assert [
        group_backends("ucc", CPU),
        group_backends("gloo", CPU),
        group_backends("ucc", CUDA),
    ] == ["cpu:ucc", "gloo", "cpu:gloo,cuda:ucc"]
    assert accelerator.process_group_device(CUDA, "nccl") == CUDA
    assert accelerator.process_group_device(CUDA, "ucc") is None


def test_gloo_carries_replicate_alone_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    for plan in ("shard=2", "tensor=2", "pipeline=2", "replicate=2,shard=2"):
        with pytest.raises(
            PlanError,
            match=(
                r"=2 through 'cpu:gloo,cuda:gloo'; Gloo carries the tensors of cuda for replicate"
                r" only;"
            ),
        ):
            check_carries(Plan.parse(plan), CUDA)
        check_carries(Plan.parse(plan), CPU)
    check_carries(Plan.parse("replicate=2"), CUDA)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    check_carries(Plan.parse("shard=2"), CUDA)


def test_it_is_refused_before_the_processes_meet() -> None:
    with pytest.raises(LaunchError, match="--backend 'mpi'"):
        join(rank=0, size=2, local_rank=0, local_size=2, backend="mpi")
    assert not dist.is_initialized()


def joined(backend: str | None) -> str:
    try:
        return str(join(rank=0, size=2, local_rank=0, local_size=2, backend=backend).size)
    except LaunchError as error:
        return str(error)


def test_it_is_refused_for_a_process_group_that_the_script_has_made(pool: WorkerPool) -> None:
    assert pool.run(2, joined, None) == ["2", "2"]
    for said in pool.run(2, joined, "gloo"):
        assert said.startswith(
            "--backend 'gloo'; the script has made a process group, and lockstep uses it "
            "unchanged; "
        )


SCRIPT = """
import sys
from pathlib import Path
import torch.distributed as dist
import lockstep as ls
from training.subjects import recipe

made = []

def make(store, rank, size, timeout):
    made.append(size)
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

dist.Backend.register_backend("telegraph", make, devices=["cpu"])
if __name__ == "__main__":
    result = ls.train(recipe(steps=3))
    print("made", bool(made), dist.get_backend(), result.fingerprint)
"""


@pytest.mark.command
@pytest.mark.forks
@pytest.mark.parametrize(
    "plan",
    [
        "shard=2,transport=torch",
        pytest.param("replicate=2,numerics=bitwise", marks=pytest.mark.slow),
    ],
)
def test_a_run_trains_through_a_backend_that_the_script_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    command = [sys.executable, "-m", "lockstep", "run", "--nproc", "2", "--plan", plan]
    lines = []
    for backend in (["--backend", "telegraph"], []):
        run_dir = ["--run-dir", str(tmp_path / f"run-{len(backend)}")]
        done = ran([*command, *run_dir, *backend, str(script)])
        assert done.returncode == 0, done.stderr
        lines.append(sorted(line for line in done.stdout.splitlines() if "made" in line))
    (through,) = {line.partition("made ")[2] for line in lines[0]}
    (usual,) = {line.partition("made ")[2] for line in lines[1]}
    assert through.startswith("True ")
    assert usual.startswith("False gloo ")
    assert through.split()[-1] == usual.split()[-1], "the same weights"
