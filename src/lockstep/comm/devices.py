"""Chooses the device and the backend of each process, and compares the devices of all ranks. The
ranks compare their devices through torch's store before they make the process group. NCCL detects
two ranks on one GPU only while it connects. Ranks with different backends would wait forever."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.base import accelerator
from lockstep.base.errors import LaunchError, PlanError
from lockstep.base.torch_private import Store
from lockstep.options import MPI_SIZES
from lockstep.plan import Plan

TIMEOUT = timedelta(minutes=10)
ONE_HOST_EACH = {
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
}
"""Environment variables that make NCCL communicate through sockets only."""
_SHARE = "--share-devices (LOCKSTEP_SHARE_DEVICES=1)"
_NOT_FOR_TRAINING = ("undefined", "fake")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDevice:
    """The device of one rank."""

    host: str
    type: str
    """Empty if the rank cannot use its device."""
    id: str = ""
    """Equal for two ranks if and only if they use the same device. Empty for the CPU."""
    visible: int = 0
    why: str = ""
    """The environment variable that hides devices from the process, or an error."""
    shares: bool = False
    refusal: str = ""


def find_device(local_rank: int, *, shares: bool) -> tuple[torch.device, RankDevice]:
    """Return the device of this process, and its description. A process that sees fewer
    accelerators than the machine has ranks takes one of them."""
    host, cpu = socket.gethostname(), torch.device("cpu")
    visible, hidden = accelerator.count(), accelerator.hiding(os.environ)
    if not visible:
        unseen = accelerator.unseen(os.environ)
        selected = unseen and os.environ.get("CUDA_VISIBLE_DEVICES")
        return cpu, RankDevice(
            host=host, type="" if selected else "cpu", why=unseen or hidden, shares=shares
        )
    try:
        device = accelerator.device(local_rank % visible)
        identity = f"{host}/{_boot_id()}/{accelerator.identity(device, os.environ)}"
    except RuntimeError as error:
        why = (
            f"it sees {visible} GPU{'s' if visible > 1 else ''}, and its own fails: "
            f"{str(error).strip().partition(chr(10))[0]}; a process needs a working GPU that no "
            "other program holds exclusively; see nvidia-smi"
        )
        return cpu, RankDevice(host=host, type="", visible=visible, why=why, shares=shares)
    return device, RankDevice(
        host=host, type=device.type, id=identity, visible=visible, why=hidden, shares=shares
    )


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def gather_devices(store: Store, rank: int, size: int, mine: RankDevice) -> list[RankDevice]:
    """All-gather the descriptions of the ranks' devices through the store. Rank 0 returns last,
    because its process may host the store."""
    # a script may continue after the devices were refused, with another group and store
    turn = store.add(f"lockstep/devices/{rank}", 1)
    key = f"lockstep/devices/{turn}"
    store.set(f"{key}/{rank}", json.dumps(asdict(mine)))
    texts = store.multi_get([f"{key}/{each}" for each in range(size)])
    if store.add(f"{key}/read", 1) == size:
        store.set(f"{key}/all-read", "")
    if rank == 0:
        store.wait([f"{key}/all-read"])
    return [RankDevice(**json.loads(text)) for text in texts]


def check_devices(everyone: Sequence[RankDevice]) -> int:
    """Raise an error if two ranks cannot use their devices together. Returns the number of ranks on
    the busiest device."""
    for rank, each in enumerate(everyone):
        who = f"rank {rank} on {each.host}"
        if not each.type:
            raise LaunchError(unusable(each, who))
        if each.refusal:
            alone = any(not other.refusal for other in everyone)
            raise LaunchError(f"{who}: {each.refusal}" if alone else each.refusal)
    first = everyone[0]
    for rank, each in enumerate(everyone):
        if each.type != first.type:
            one, other = (
                f"{device.type}{f' ({device.why})' if device.why else ''}"
                for device in (first, each)
            )
            raise LaunchError(
                f"rank 0 on {first.host} computes on {one}, and rank {rank} on {each.host} on"
                f" {other}; all ranks of a run compute on one kind of device; let each process see"
                " a device, or hide them from all"
            )
    ranks = sorted(
        (rank for rank, each in enumerate(everyone) if each.id), key=lambda rank: everyone[rank].id
    )
    by_device = [list(group) for _, group in groupby(ranks, key=lambda rank: everyone[rank].id)]
    for several in sorted(group for group in by_device if len(group) > 1):
        if not all(everyone[rank].shares for rank in several):
            raise LaunchError(_several_on_one(everyone, several))
    return max(map(len, by_device), default=1)


def _several_on_one(everyone: Sequence[RankDevice], ranks: Sequence[int]) -> str:
    each = everyone[ranks[0]]
    on_host = [other for other in everyone if other.host == each.host]
    gpus = len({other.id for other in on_host})
    sees = f"; each process sees {each.visible} ({each.why})" if each.why else ""
    if each.id.endswith(accelerator.MIG):
        sees += " and to NCCL all MIG instances of a machine's GPU are one"
    return (
        f"{len(on_host)} processes on {each.host} and {gpus} GPU{'s' if gpus > 1 else ''}: ranks"
        f" {', '.join(map(str, ranks))} share one GPU{sees}; each process needs its own GPU; start"
        f" {gpus} process{'es' if gpus > 1 else ''} there, or hide the GPUs"
        f" ({accelerator.how_to_hide()}) to compute on the CPU, or give {_SHARE} to try a plan on"
        " fewer GPUs than it needs"
    )


def unusable(device: RankDevice, who: str) -> str:
    return (
        f"{who}: {device.why}, or hide the GPUs ({accelerator.how_to_hide()}) to compute on the CPU"
    )


def be_a_host_of_its_own(everyone: Sequence[RankDevice], environ: MutableMapping[str, str]) -> None:
    """Make NCCL treat this process as a separate host. NCCL refuses two ranks of one host on one
    GPU. Call this function before the process group is made."""
    environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-{os.getpid()}")
    if len({each.host for each in everyone}) == 1:
        environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    for name, value in ONE_HOST_EACH.items():
        environ.setdefault(name, value)


def chosen_backend(
    asked: str | None, device: torch.device, rank: int, size: int, environ: Mapping[str, str]
) -> str:
    usual = accelerator.process_group_backend(device)
    known = dist.Backend.backend_capability
    available = {
        name: devices
        for name, devices in known.items()
        if name not in _NOT_FOR_TRAINING and dist.is_backend_available(name)
    }
    if asked is None:
        if size > 1 and usual in known and usual not in available:
            raise LaunchError(
                f"{size} processes on {device.type} need {usual} for collectives, and this"
                f" torch ({torch.__version__}) has no {usual}; install one that has it, start one"
                " process, or give --backend gloo, which is slow, and carries replicate only"
            )
        return usual
    asked = asked.lower()  # torch ignores case
    fitting = sorted(name for name, devices in available.items() if device.type in devices)
    remedy = f"give one of {', '.join(fitting)}, or leave --backend out for {usual}"
    if asked not in available:
        raise LaunchError(
            f"--backend {asked!r}, which this torch ({torch.__version__}) does not have; it has"
            f" {', '.join(sorted(available))}, and what a package registers when the script imports"
            f" it; {remedy}"
        )
    if asked not in fitting:
        raise LaunchError(
            f"--backend {asked!r} on {device.type}; it sends tensors only on"
            f" {', '.join(available[asked])}; {remedy}"
        )
    if asked == "mpi" and size > 1:
        variable = next((name for name in MPI_SIZES if name in environ), None)
        theirs = "mpirun has not started it"
        if variable is not None:
            given = environ.get(variable.removesuffix("SIZE") + "RANK"), environ[variable]
            if given == (str(rank), str(size)):
                return asked
            theirs = f"for mpirun it is rank {given[0]} of {given[1]}"
        raise LaunchError(
            f"--backend 'mpi' on rank {rank} of {size}, and {theirs}; MPI has its own ranks, for"
            f" the processes that mpirun has started, and these must be the same; {remedy}"
        )
    return asked


def check_own_group(asked: str | None, device: torch.device) -> None:
    """Refuse a process group of the user that cannot send CPU tensors. Refuse `--backend` with a
    process group of the user."""
    if asked is not None:
        raise LaunchError(
            f"--backend {asked!r}; the script has made a process group, and lockstep uses it"
            " unchanged; make it with that backend and leave --backend out, or leave"
            " init_process_group to lockstep"
        )
    config = dist.get_backend_config()  # DEVICE:BACKEND,...
    if "cpu" not in [part.partition(":")[0] for part in config.split(",")]:
        backends = group_backends(accelerator.process_group_backend(device), device)
        raise LaunchError(
            f"the script has made a process group of {config!r} only, and lockstep's ranks also"
            f" exchange tensors on the CPU; write init_process_group({backends!r}), or leave it to"
            " lockstep"
        )


def check_carries(plan: Plan, device: torch.device) -> None:
    """Refuse a plan with sharded state if Gloo is the backend of GPU tensors. Torch's documentation
    does not list send and receive of GPU tensors for Gloo."""
    beyond = plan.state_divided
    if not beyond or not accelerator.is_accelerator(device):
        return
    config = dist.get_backend_config()
    if f"{device.type}:gloo" in config.split(","):
        usual = accelerator.process_group_backend(device)
        raise PlanError(
            f"{', '.join(beyond)} through {config!r}; Gloo carries the tensors of {device.type}"
            f" for replicate only; leave --backend (LOCKSTEP_BACKEND) out for {usual}, or, where"
            " the script makes the process group, write"
            f" init_process_group({group_backends(usual, device)!r}); or use replicate only"
        )


def group_backends(backend: str, device: torch.device) -> str:
    if device.type == "cpu":
        # torch makes no store for a plain mpi
        return backend if backend == "gloo" else f"cpu:{backend}"
    return f"cpu:gloo,{device.type}:{backend}"
