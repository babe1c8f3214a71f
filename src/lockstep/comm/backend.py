"""The backend of torch.distributed for a run's tensors: torch's own for the device, or another, by
name."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.base import accelerator
from lockstep.base.errors import LaunchError, PlanError
from lockstep.options import MPI_SIZES
from lockstep.plan import Plan

TIMEOUT = timedelta(minutes=10)
"""Timeout of the collectives of every process group."""
_NOT_FOR_TRAINING = ("undefined", "fake")


def chosen_backend(
    asked: str | None, device: torch.device, rank: int, size: int, environ: Mapping[str, str]
) -> str:
    """Return the backend for tensors on `device`. `asked`: the name in `--backend`; None: torch's
    for the device. `rank`, `size`: this process's, and the processes in the run.

    Raises `LaunchError` for a backend that this torch lacks, that cannot send the device's tensors,
    or whose processes must be started in another way.
    """
    usual = accelerator.process_group_backend(device)
    if asked is None:
        if size > 1 and usual in dist.Backend.backend_capability and not _is_available(usual):
            raise LaunchError(
                f"{size} processes on {device.type}, whose collectives are {usual}'s, and this"
                f" torch ({torch.__version__}) has no {usual}; install one that has it, start one"
                " process, or give --backend gloo, which is slow, and carries replicate alone"
            )
        return usual
    asked = asked.lower()  # as torch takes it
    there = {
        name: devices
        for name, devices in dist.Backend.backend_capability.items()
        if _is_available(name)
    }
    fitting = [name for name, devices in there.items() if device.type in devices]
    remedy = f"give one of {', '.join(sorted(fitting))}, or leave --backend out for {usual}"
    if asked not in there:
        raise LaunchError(
            f"--backend {asked!r}, which this torch ({torch.__version__}) does not have; it has"
            f" {', '.join(sorted(there))}, and what a package registers when the script imports it;"
            f" {remedy}"
        )
    if asked not in fitting:
        raise LaunchError(
            f"--backend {asked!r} on {device.type}; it sends tensors on {', '.join(there[asked])}"
            f" alone; {remedy}"
        )
    if asked == "mpi" and size > 1:
        name = next((name for name in MPI_SIZES if name in environ), None)
        given = (
            None
            if name is None
            else (environ.get(name.removesuffix("SIZE") + "RANK"), environ[name])
        )
        if given != (str(rank), str(size)):
            theirs = (
                "mpirun has not started it"
                if given is None
                else f"for mpirun it is rank {given[0]} of {given[1]}"
            )
            raise LaunchError(
                f"--backend 'mpi' on rank {rank} of {size}, and {theirs}; MPI has ranks of its own,"
                f" of the processes that mpirun has started, which must be the same; {remedy}"
            )
    return asked


def check_own_group(asked: str | None, device: torch.device) -> None:
    """Raise `LaunchError` if `--backend` is given although the script has made the process group,
    or if this group cannot send CPU tensors, by which the ranks agree."""
    if asked is not None:
        raise LaunchError(
            f"--backend {asked!r}, and the script has made a process group, which lockstep uses as"
            " it is; make it with that backend and leave --backend out, or leave"
            " init_process_group to lockstep"
        )
    config = dist.get_backend_config()  # DEVICE:BACKEND,...
    devices = [part.partition(":")[0] for part in config.split(",")]
    if "cpu" not in devices:
        backends = group_backends(accelerator.process_group_backend(device), device)
        raise LaunchError(
            f"the script has made a process group of {config!r} alone, and lockstep's ranks also"
            " exchange tensors on the CPU; write"
            f" init_process_group({backends!r}),"
            " or leave it to lockstep"
        )


def check_carries(plan: Plan, device: torch.device) -> None:
    """Raise `PlanError` if the process group has Gloo for an accelerator's tensors, and the plan an
    axis other than `replicate`. Every rank calls it, after the group is made.

    On a GPU, a thread of Gloo's crashed at the end of a run with `shard` (torch 2.11), and torch's
    documentation lists no send and receive of Gloo's for a GPU's tensors.
    """
    beyond = plan.state_divided
    if not beyond or not accelerator.is_accelerator(device):
        return
    config = dist.get_backend_config()
    if f"{device.type}:gloo" in config.split(","):
        usual = accelerator.process_group_backend(device)
        raise PlanError(
            f"{', '.join(beyond)} through {config!r}; Gloo carries the tensors of {device.type} for"
            f" replicate alone; leave --backend (LOCKSTEP_BACKEND) out for {usual}, or, where the"
            " script makes the process group, write"
            f" init_process_group({group_backends(usual, device)!r}); or use replicate alone"
        )


def _is_available(name: str) -> bool:
    return name not in _NOT_FOR_TRAINING and dist.is_backend_available(name)


def group_backends(backend: str, device: torch.device) -> str:
    """Return the backends of a process group for torch: beside an accelerator's, Gloo carries CPU
    tensors."""
    if device.type == "cpu":
        # torch makes no store for a plain mpi
        return backend if backend == "gloo" else f"cpu:{backend}"
    return f"cpu:gloo,{device.type}:{backend}"
