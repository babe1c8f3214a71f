"""Checks this machine, starts the ranks that check collectives, and combines all results."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.base import accelerator
from lockstep.base.container import (
    available_memory_bytes,
    container_engine,
    cpu_quota,
    free_tasks,
    memory_limit_bytes,
    number_in,
    process_id_space,
    scheduled_cpus,
)
from lockstep.base.processes import own_python
from lockstep.base.temporary_folder import locked_folder
from lockstep.base.version import __version__
from lockstep.doctor import file_system
from lockstep.doctor.check_result import CheckResult, Verdict, worst
from lockstep.doctor.machine_checks import (
    MachineInfo,
    environment_checks,
    machine_checks,
    parse_topology,
    relevant_variables,
)
from lockstep.doctor.summary import summarize
from lockstep.launch.failures import Ending
from lockstep.launch.machines import Machines, address_towards, interface_of
from lockstep.launch.run_workers import run_workers
from lockstep.options import RunOptions

DEADLINE_SECONDS = 20.0
WORKER = ("-m", "lockstep.doctor")
"""The command that starts a rank. Tests replace this command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    checks: list[CheckResult]
    results: Mapping[str, Any]
    ending: Ending

    @property
    def verdict(self) -> Verdict:
        return worst(self.checks)

    @property
    def is_first_machine(self) -> bool:
        return int(self.results.get("machine", 0)) == 0

    @property
    def status(self) -> int:
        return 0 if self.verdict == "ok" else 1


def diagnose(
    *,
    nproc: int,
    machines: Machines | None = None,
    run_dir: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    worker: Sequence[str] = WORKER,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Diagnosis:
    """Check this machine, together with the machines that make the same call. `deadline_seconds`
    limits each step that all ranks take together."""
    world_size = nproc * (machines.least if machines is not None else 1)
    info = read_machine_info(machines, environ)
    path = file_system.existing(run_dir or Path())
    own = [
        *machine_checks(info, environ, nproc=nproc, world_size=world_size),
        *environment_checks(environ, nproc=nproc),
        *file_system.check_folder(path),
    ]
    with locked_folder("lockstep-doctor-") as folder:
        machine = {
            "info": asdict(info),
            "checks": [asdict(check) for check in own],
            "path": None if run_dir is None else str(path),
        }
        (folder / "machine.json").write_text(json.dumps(machine), encoding="utf-8")

        def start(variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
            command = own_python(*worker, str(folder), str(deadline_seconds))
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                return subprocess.Popen(
                    command, env={**environ, **variables}, stdout=sys.stderr, start_new_session=True
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

        ending = run_workers(
            start,
            count=nproc,
            launcher="lockstep",
            options=RunOptions(),
            machines=machines,
            command="lockstep doctor",
        )
        results = _read_results(folder)
    results.setdefault("machines", [machine])
    return Diagnosis(checks=summarize(results, ending), results=results, ending=ending)


def _read_results(folder: Path) -> dict[str, Any]:
    found: list[dict[str, Any]] = [
        json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(folder.glob("results-*.json"))
    ]
    return max(found, key=lambda values: (len(values.get("statuses", ())), len(values)), default={})


_NVIDIA_SECONDS = 10.0


def read_machine_info(machines: Machines | None, environ: Mapping[str, str]) -> MachineInfo:
    address = address_towards(machines.resolve(), machines.port) if machines is not None else ""
    interface = interface_of(address) if address else None
    descriptors, hard_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    names, driver = _gpus()
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lockstep": __version__,
    }
    return MachineInfo(
        host=socket.gethostname(),
        address=address,
        interface=interface,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        interface_details=_interface_details(interface) if interface is not None else "",
        versions=versions | accelerator.library_versions() | ({"driver": driver} if driver else {}),
        gpus=accelerator.count(),
        gpu_names=names,
        # If some GPUs are hidden, torch and the driver number them differently.
        topology=(
            parse_topology(_nvidia_smi("topo", "-m"))
            if names and "CUDA_VISIBLE_DEVICES" not in environ
            else {}
        ),
        container=container_engine(environ),
        process_ids=tuple(process_id_space()),
        cores=scheduled_cpus(),
        cpu_quota=cpu_quota(),
        shared_memory_bytes=_free("/dev/shm"),
        available_memory_bytes=available_memory_bytes(),
        memory_limit_bytes=memory_limit_bytes(),
        open_files_limit=_finite(descriptors),
        open_files_hard_limit=_finite(hard_descriptors),
        locked_memory_bytes=None if locked == resource.RLIM_INFINITY else locked,
        infiniband=(
            tuple(sorted(os.listdir("/sys/class/infiniband")))
            if os.path.isdir("/sys/class/infiniband")
            else ()
        ),
        free_tasks=_free_tasks(),
        variables=relevant_variables(environ),
    )


def _finite(limit: int) -> int:
    return 2**31 if limit == resource.RLIM_INFINITY else limit


def _free(path: str) -> int | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _gpus() -> tuple[tuple[str, ...], str]:
    rows = [
        line.split(", ")
        for line in _nvidia_smi(
            "--query-gpu=name,driver_version", "--format=csv,noheader"
        ).splitlines()
    ]
    return tuple(row[0] for row in rows), rows[0][-1] if rows else ""


def _nvidia_smi(*arguments: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    with suppress(subprocess.SubprocessError, OSError):
        return subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SECONDS,
            check=True,
        ).stdout
    return ""


def _interface_details(interface: str) -> str:
    folder = Path("/sys/class/net", interface)
    speed, mtu = number_in(folder / "speed"), number_in(folder / "mtu")
    return (f", {speed:g} Mbit/s" if speed is not None and speed > 0 else "") + (
        f", MTU {mtu:g}" if mtu is not None else ""
    )


def _free_tasks() -> int | None:
    free = [] if (allowed := free_tasks()) is None else [allowed]
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        free.append(soft - _threads_of_this_user())
    return min(free, default=None)


def _threads_of_this_user() -> int:
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.geteuid():
                count += len(os.listdir(folder / "task"))
    return count
