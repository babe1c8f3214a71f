"""Which ranks may compute on which devices."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from lockstep.base import accelerator
from lockstep.base.errors import LaunchError
from lockstep.comm.devices import (
    RankDevice,
    be_a_host_of_its_own,
    check_devices,
    find_device,
    gather_devices,
)
from lockstep.comm.world import join


def gpus(*ids: str, host: str = "node1", **changes: Any) -> list[RankDevice]:
    return [
        RankDevice(
            **{"host": host, "type": "cuda", "id": f"{host}/{each}", "visible": 1, **changes}
        )
        for each in ids
    ]


def test_each_rank_may_see_a_gpu_of_its_own_as_the_first() -> None:
    assert check_devices(gpus("GPU-a/0", "GPU-b/0")) == 1
    assert check_devices([*gpus("GPU-a/0", "GPU-b/0"), *gpus("GPU-a/0", host="node2")]) == 1
    assert check_devices([RankDevice(host="node1", type="cpu")] * 3) == 1


def test_two_ranks_on_one_gpu_are_refused_unless_both_are_to_share_it() -> None:
    one, several = "'0'", gpus("GPU-a/0", "GPU-a/0", "GPU-b/0", why="CUDA_VISIBLE_DEVICES='0'")
    with pytest.raises(LaunchError) as refused:
        check_devices([*gpus("GPU-c/0", host="node2"), *several])
    assert (
        str(refused.value)
        == "3 processes on node1 and 2 GPUs: ranks 1, 2 share one GPU; each process sees 1"
        f" (CUDA_VISIBLE_DEVICES={one}); each process needs its own GPU; start 2 processes"
        " there, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on the CPU, or give"
        " --share-devices (LOCKSTEP_SHARE_DEVICES=1) to try a plan on fewer GPUs than it needs"
    )
    with pytest.raises(
        LaunchError,
        match=r"^2 processes on node1 and 1 GPU: ranks 0, 1 share one GPU.* start 1 process there",
    ):
        check_devices([*gpus("GPU-a/0", shares=True), *gpus("GPU-a/0")])
    assert check_devices(gpus("GPU-a/0", "GPU-a/0", "GPU-b/0", shares=True)) == 2


def test_a_rank_without_the_backend_is_named_to_the_others() -> None:
    lacking = gpus(
        "GPU-b/0", host="node2", refusal="this torch has no nccl; install one that has it"
    )
    with pytest.raises(LaunchError, match=r"^rank 1 on node2: this torch has no nccl; install"):
        check_devices([*gpus("GPU-a/0"), *lacking])
    with pytest.raises(LaunchError, match=r"^this torch has no nccl; install"):
        check_devices(lacking * 2)


class Slow:
    """A store whose answers take a while."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self.answers = 0

    def multi_get(self, keys: list[str]) -> list[bytes]:
        time.sleep(0.2)
        found = self._store.multi_get(keys)
        self.answers += 1
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_the_process_that_holds_the_store_learns_of_the_devices_last() -> None:
    """A refusal ends it, and the others would lose their connection in place of being told."""
    store = HashStore()
    slow = Slow(store)

    def tell(rank: int) -> int:
        mine = RankDevice(host="node1", type="cpu", why=str(rank))
        found = gather_devices(slow if rank == 1 else store, rank, 3, mine)  # type: ignore[arg-type]
        assert [each.why for each in found] == ["0", "1", "2"]
        return slow.answers

    for turn in (1, 2):
        with ThreadPoolExecutor(3) as pool:
            assert next(pool.map(tell, range(3))) == turn


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (
            RankDevice(
                host="node2",
                type="cpu",
                why="torch 2.13.0 for CUDA 13.0 sees none of 8 NVIDIA GPUs",
            ),
            (
                r"^rank 0 on node1 computes on cuda, and rank 1 on node2 on cpu \(torch .* sees"
                r" none of 8 NVIDIA GPUs\); all ranks of a run"
            ),
        ),
        (
            RankDevice(host="node2", type="", why="its own fails; see nvidia-smi"),
            (
                r"^rank 1 on node2: its own fails; see nvidia-smi, or hide the GPUs"
                r" \(CUDA_VISIBLE_DEVICES=\) to compute on the CPU$"
            ),
        ),
    ],
)
def test_a_rank_without_a_device_that_works_is_named(odd: RankDevice, says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        check_devices([*gpus("GPU-a/0"), odd])


def test_a_device_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(index: int) -> torch.device:
        raise RuntimeError("CUDA error: devices are busy\nCUDA kernel errors might be ...")

    monkeypatch.setattr(accelerator, "count", lambda: 2)
    monkeypatch.setattr(accelerator, "device", busy)
    with pytest.raises(
        LaunchError,
        match=(
            r"^this process: it sees 2 GPUs, and its own fails: CUDA error: devices are busy; a"
            r" process"
        ),
    ):
        join(rank=0, size=1, local_rank=0, local_size=1)


def test_a_process_that_sees_fewer_devices_than_there_are_local_ranks_takes_one_of_those(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accelerator, "device", lambda index: torch.device("cuda", index))
    monkeypatch.setattr(accelerator, "identity", lambda device, _: f"GPU-{device.index}")
    for visible, indices in ((8, [0, 1, 2, 3]), (1, [0, 0, 0, 0]), (2, [0, 1, 0, 1])):
        monkeypatch.setattr(accelerator, "count", lambda visible=visible: visible)
        assert [find_device(rank, shares=False)[0].index for rank in range(4)] == indices


def test_mig_instances_are_counted_by_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver that counts them cannot be used by forks of the process that has asked it."""
    asked_by = []

    class Cuda:
        @staticmethod
        def is_initialized() -> bool:
            return False

        @staticmethod
        def device_count() -> int:
            asked_by.append(os.getpid())
            return 3

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: Cuda)
    accelerator._counted_by_fork.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1c2d")
    assert (accelerator.count(), asked_by) == (3, [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert (accelerator.count(), asked_by) == (3, [os.getpid()])
    accelerator._counted_by_fork.cache_clear()


def test_a_gpu_that_torch_does_not_see_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(accelerator, "count", lambda: 0)
    assert accelerator.unseen({}, tmp_path) == ""
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert accelerator.unseen({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ""
    seen = []
    for cuda, environ in ((None, {}), ("13.0", {"CUDA_VISIBLE_DEVICES": "7"}), ("13.0", {})):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        seen.append(accelerator.unseen(environ, tmp_path).replace(torch.__version__, "2.13.0"))
    assert seen == [
        (
            "torch 2.13.0 is built without CUDA and sees none of 2 NVIDIA GPUs (/dev/nvidia0, ...);"
            " install a torch for CUDA"
        ),
        (
            "CUDA_VISIBLE_DEVICES='7' names none of 2 NVIDIA GPUs (/dev/nvidia0, ...) that torch"
            " can use; correct it, or unset it"
        ),
        (
            "torch 2.13.0 for CUDA 13.0 sees none of 2 NVIDIA GPUs (/dev/nvidia0, ...); nvidia-smi"
            " shows whether the driver works"
        ),
    ]
    monkeypatch.setattr(accelerator, "unseen", lambda _: seen[1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(
        LaunchError,
        match=r"^this process: CUDA_VISIBLE_DEVICES='7' names none of .* or hide the GPUs",
    ):
        join(rank=0, size=1, local_rank=0, local_size=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert join(rank=0, size=1, local_rank=0, local_size=1).device.type == "cpu"


def test_ranks_that_share_a_gpu_are_hosts_of_their_own_to_nccl() -> None:
    environ = {"NCCL_IB_DISABLE": "0"}
    be_a_host_of_its_own(gpus("GPU-a/0", "GPU-a/0"), environ)
    assert environ["NCCL_HOSTID"]
    assert (environ["NCCL_SOCKET_IFNAME"], environ["NCCL_NET"], environ["NCCL_IB_DISABLE"]) == (
        "lo",
        "Socket",
        "0",
    )
    several: dict[str, str] = {}
    be_a_host_of_its_own([*gpus("GPU-a/0", "GPU-a/0"), *gpus("GPU-b/0", host="node2")], several)
    assert "NCCL_SOCKET_IFNAME" not in several
