"""The device of each process, compared over all ranks before their process group is made. NCCL
notices two ranks on one GPU only while it connects, and all would wait for a rank with another
backend. So the ranks exchange their devices first, over the store, and all refuse in the same
words.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch

from lockstep.base import accelerator
from lockstep.base.errors import LaunchError
from lockstep.base.torch_private import Store

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
"""Variables with which NCCL exchanges through sockets alone."""
_SHARE = "--share-devices (LOCKSTEP_SHARE_DEVICES=1)"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDevice:
    """The device of a rank, for the other ranks."""

    host: str
    type: str
    """Torch's name for the kind of device; empty if the device cannot be used."""
    id: str = ""
    """Equal for two ranks on one device. Empty for the CPU."""
    visible: int = 0
    """The devices that the process sees."""
    why: str = ""
    """Why it sees only these: the variable that hides others, or the error."""
    shares: bool = False
    """True if the rank was given --share-devices."""
    refusal: str = ""
    """Why the rank cannot join: its backend's error. Empty if it can."""


def find_device(local_rank: int, *, shares: bool) -> tuple[torch.device, RankDevice]:
    """Return the accelerator of this process, or the CPU, and its description for the other ranks.
    A process that sees fewer accelerators than local ranks takes one of them: each process may see
    another."""
    host, visible, hidden = (
        socket.gethostname(),
        accelerator.count(),
        accelerator.hiding(os.environ),
    )
    if not visible:
        unseen = accelerator.unseen(os.environ)
        asked = unseen and os.environ.get("CUDA_VISIBLE_DEVICES")
        return torch.device("cpu"), RankDevice(
            host=host, type="" if asked else "cpu", why=unseen or hidden, shares=shares
        )
    try:
        device = accelerator.device(local_rank % visible)
        found = f"{host}/{_boot_id()}/{accelerator.identity(device, os.environ)}"
    except RuntimeError as error:
        why = (
            f"it sees {visible} GPU{'s' if visible > 1 else ''}, and its own fails: "
            f"{str(error).strip().partition(chr(10))[0]}; a process needs a working GPU that no "
            "other program holds exclusively; see nvidia-smi"
        )
        return torch.device("cpu"), RankDevice(
            host=host, type="", visible=visible, why=why, shares=shares
        )
    return device, RankDevice(
        host=host, type=device.type, id=found, visible=visible, why=hidden, shares=shares
    )


def _boot_id() -> str:
    """Return text that distinguishes this machine from another of the same name, as for NCCL; may
    be empty."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def exchange(store: Store, rank: int, size: int, mine: RankDevice) -> list[RankDevice]:
    """Return the device of every rank. Every rank calls it equally often. Rank 0, which may hold
    the store, returns last, because a refusal would end it."""
    # a script may go on after a refusal, with its own group and store
    turn = store.add(f"lockstep/devices/{rank}", 1)
    place = f"lockstep/devices/{turn}"
    store.set(f"{place}/{rank}", json.dumps(asdict(mine)))
    texts = store.multi_get([f"{place}/{each}" for each in range(size)])
    if store.add(f"{place}/read", 1) == size:
        store.set(f"{place}/all-read", "")
    if rank == 0:
        store.wait([f"{place}/all-read"])
    return [RankDevice(**json.loads(text)) for text in texts]


def check_devices(everyone: Sequence[RankDevice]) -> int:
    """Return the number of ranks on the busiest device. Every rank calls it with the same devices.
    Raises `LaunchError` if a device or a backend cannot be used, if only some ranks have a device,
    or if two share one without --share-devices."""
    for rank, each in enumerate(everyone):
        if not each.type:
            raise LaunchError(unusable(each, f"rank {rank} on {each.host}"))
        if each.refusal:
            alone = any(not other.refusal for other in everyone)
            raise LaunchError(
                f"rank {rank} on {each.host}: {each.refusal}" if alone else each.refusal
            )
    first = everyone[0]
    for rank, each in enumerate(everyone):
        if each.type != first.type:
            one, other = (
                f"{there.type}{f' ({there.why})' if there.why else ''}" for there in (first, each)
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
    there = [other for other in everyone if other.host == each.host]
    gpus = len({other.id for other in there})
    several = f"ranks {', '.join(map(str, ranks))} have one between them"
    sees = f"; each process sees {each.visible} ({each.why})" if each.why else ""
    if each.id.endswith(accelerator.MIG):
        sees += " and to NCCL all MIG instances of a machine's GPU are one"
    return (
        f"{len(there)} processes on {each.host} and {gpus} GPU{'s' if gpus > 1 else ''}:"
        f" {several}{sees}; each process takes a GPU of its own; start {gpus}"
        f" process{'es' if gpus > 1 else ''} there, or hide the GPUs ({accelerator.how_to_hide()})"
        f" to compute on the CPU, or give {_SHARE} to try a plan on fewer GPUs than it needs"
    )


def unusable(device: RankDevice, who: str) -> str:
    """Return the error for a process whose device does not work. `who`: the process."""
    return (
        f"{who}: {device.why}, or hide the GPUs ({accelerator.how_to_hide()}) to compute on the CPU"
    )


def be_a_host_of_its_own(everyone: Sequence[RankDevice], environ: MutableMapping[str, str]) -> None:
    """Make NCCL treat this process as a separate host and exchange through sockets, because it
    refuses two ranks of one host on one GPU. Call it before the process group is made."""
    environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-{os.getpid()}")
    if len({each.host for each in everyone}) == 1:
        environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    for name, value in ONE_HOST_EACH.items():
        environ.setdefault(name, value)
