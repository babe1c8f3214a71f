"""Checks of one machine's versions, devices, memory, threads, limits and network interface.
Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lockstep.base.container import LARGER_SHARED_MEMORY, ONE_CONTAINER
from lockstep.base.control_group import whole_cpus
from lockstep.doctor.check_result import CheckResult, check_result, format_bytes, format_duration

_MORE_CPUS = " (docker run --cpus; Kubernetes: resources.limits.cpu)"
_check = partial(check_result, "machine")
SHARED_MEMORY_BYTES = 128 << 20
"""Space in /dev/shm for each process: batches of loader workers, and NCCL's buffers."""
MEMORY_BYTES = 1 << 30
"""Memory of each process; torch alone takes a third of it."""
OPEN_FILES = 1024
"""Open files of each process: sockets of other ranks, tensors of loader workers."""
CONTAINER_BRIDGE = re.compile(
    r"docker\d+|br-[0-9a-f]{12}|podman\d+|cni-podman\d+|lxcbr\d+|lxdbr\d+|virbr\d+"
)
"""Bridges of Docker, Podman, LXC and libvirt. Every host's bridge may have the same address."""
OTHER_THREADS = 32
"""Threads of a process beside its compute threads."""
MAX_CLOCK_OFFSET_SECONDS = 0.5
"""Heartbeats compare clocks: a machine that is 2 s late is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineInfo:
    host: str
    address: str
    """The address for other machines; empty if there are none."""
    interface: str | None
    interfaces: tuple[str, ...]
    interface_details: str
    """Text to append; empty if unknown."""
    versions: Mapping[str, str]
    """They must be the same on all machines."""
    gpus: int
    gpu_names: tuple[str, ...]
    """Those that the driver sees; empty without a driver."""
    topology: Mapping[str, str]
    """{"0-1": "NV18"}."""
    container: str | None
    """The doctor's container engine; None: it is in no container."""
    process_ids: tuple[str | int, ...]
    """From `process_id_space`."""
    cores: int
    cpu_quota: float | None
    """In cores; None: no quota."""
    shared_memory_bytes: int | None
    available_memory_bytes: int
    """The lesser of the machine's and the control group's."""
    memory_limit_bytes: int | None
    """The control group's; None if it is not below the machine's memory."""
    open_files_limit: int
    open_files_hard_limit: int
    locked_memory_bytes: int | None
    """None: no limit."""
    infiniband: tuple[str, ...]
    free_tasks: int | None
    """Processes and threads that may still start. None: no limit."""
    variables: Mapping[str, str] = field(default_factory=dict)


def machine_checks(
    info: MachineInfo, environ: Mapping[str, str], *, nproc: int, world_size: int
) -> list[CheckResult]:
    """Return the results for one machine. `environ`: the launcher's."""
    return [
        _versions(info),
        *_container(info),
        *_devices(info, environ, nproc),
        _shared_memory(info, nproc),
        *_threads(info, environ, nproc),
        *_limits(info, environ, nproc, world_size),
        *_interface(info, environ),
    ]


def _versions(info: MachineInfo) -> CheckResult:
    return _check(
        "versions", "ok", ", ".join(f"{name} {value}" for name, value in info.versions.items())
    )


def _container(info: MachineInfo) -> list[CheckResult]:
    if info.container is None:
        return []
    quota = (
        "no CPU quota"
        if info.cpu_quota is None
        else f"a quota of {info.cpu_quota:.3g} of {info.cores} CPUs"
    )
    memory = (
        "no limit of memory"
        if info.memory_limit_bytes is None
        else f"{format_bytes(info.memory_limit_bytes)} of memory"
    )
    return [_check("container", "ok", f"{info.container}: {quota}, {memory}")]


def _devices(info: MachineInfo, environ: Mapping[str, str], nproc: int) -> list[CheckResult]:
    if not info.gpus:
        if not info.gpu_names:
            return [
                _check(
                    "devices",
                    "ok",
                    f"no GPU; {info.cores} CPU core{'s' if info.cores != 1 else ''}",
                )
            ]
        hidden = environ.get("CUDA_VISIBLE_DEVICES")
        seen = (
            f"the driver has {len(info.gpu_names)} GPUs ({info.gpu_names[0]}) and torch sees none"
        )
        if hidden is not None:
            remedy = "unset CUDA_VISIBLE_DEVICES, unless you want CPUs"
            return [_check("devices", "failed", f"{seen}: CUDA_VISIBLE_DEVICES={hidden}", remedy)]
        return [
            _check(
                "devices",
                "failed",
                seen,
                "install a torch build for CUDA, and a driver that is new enough for it",
            )
        ]
    names = sorted(set(info.gpu_names))
    found = (
        f"{info.gpus} GPU{'s' if info.gpus > 1 else ''}:"
        f" {', '.join(names) or 'the driver gives no name'}"
    )
    checks = [_check("devices", "ok", found)]
    if len(names) > 1:
        checks = [
            _check(
                "devices",
                "slow",
                found,
                "all GPUs wait for the slowest: choose equal ones with CUDA_VISIBLE_DEVICES",
            )
        ]
    if nproc > info.gpus and environ.get("LOCKSTEP_SHARE_DEVICES") != "1":
        remedy = f"--nproc {info.gpus}: one process per GPU; or --share-devices, to try a plan"
        checks.append(
            _check("processes", "failed", f"{nproc} processes for {info.gpus} GPUs", remedy)
        )
    if info.topology:
        kinds = sorted(set(info.topology.values()))
        counted = ", ".join(
            f"{kind} × {list(info.topology.values()).count(kind)}" for kind in kinds
        )
        checks.append(_check("GPU links", "ok", f"{counted} (nvidia-smi topo -m)"))
    elif info.gpus > 1:
        checks.append(
            _check(
                "GPU links",
                "skipped",
                "nvidia-smi shows no topology",
                "install nvidia-smi to see how the GPUs are linked",
            )
        )
    return checks


def _shared_memory(info: MachineInfo, nproc: int) -> CheckResult:
    needed = nproc * SHARED_MEMORY_BYTES
    if info.shared_memory_bytes is None:
        return _check(
            "/dev/shm",
            "failed",
            "does not exist: loader workers and NCCL fail",
            "mount a tmpfs on /dev/shm",
        )
    found = (
        f"{format_bytes(info.shared_memory_bytes)} free; up to {format_bytes(needed)} needed for"
        f" {nproc} process{'es' if nproc > 1 else ''}"
    )
    enough = info.shared_memory_bytes >= needed
    remedy = (
        f"{LARGER_SHARED_MEMORY}: loader workers and NCCL fail, or die of a bus error, when it is"
        " full"
    )
    return _check("/dev/shm", "ok" if enough else "failed", found, remedy)


def _threads(info: MachineInfo, environ: Mapping[str, str], nproc: int) -> list[CheckResult]:
    usable = whole_cpus(info.cores, info.cpu_quota)
    set_to = environ.get("OMP_NUM_THREADS")
    if set_to is not None and not (set_to.isdecimal() and int(set_to)):
        found = f"OMP_NUM_THREADS is {set_to!r}, which is not a number of threads"
        return [_check("threads", "failed", found, "unset it: lockstep chooses the number")]
    threads = int(set_to) if set_to is not None else max(1, usable // nproc)
    cores = f"{usable} core{'' if usable == 1 else 's'}"
    has_quota = info.cpu_quota is not None and info.cpu_quota < info.cores
    if has_quota:
        cores += f" (of {info.cores}, by the control group's CPU quota of {info.cpu_quota:.3g})"
    found = (
        f"{nproc} process{'es' if nproc > 1 else ''} × {threads} thread{'s' if threads > 1 else ''}"
        f" on {cores}"
    )
    best = max(1, usable // nproc)
    if nproc > usable and threads == 1:
        why = f"{found}: processes share cores, and each waits for the slowest"
        return [
            _check(
                "threads",
                "slow" if not info.gpus else "ok",
                why,
                f"--nproc {usable}, or more cores{_MORE_CPUS if has_quota else ''}",
            )
        ]
    if threads * nproc > usable:
        remedy = f"OMP_NUM_THREADS={best}" + (
            ""
            if set_to is None
            else ", or unset it: lockstep divides the cores among the processes"
        )
        return [_check("threads", "slow", f"{found}: the cores are oversubscribed", remedy)]
    if not info.gpus and threads * nproc * 2 <= usable:
        return [
            _check(
                "threads",
                "slow",
                f"{found}: the other cores are idle",
                f"OMP_NUM_THREADS={best}, or more processes",
            )
        ]
    return [_check("threads", "ok", found)]


def _limits(
    info: MachineInfo, environ: Mapping[str, str], nproc: int, world_size: int
) -> list[CheckResult]:
    needed = max(OPEN_FILES, 4 * world_size + 256)
    found = f"{info.open_files_limit} per process"
    raised = (
        f"ulimit -n {max(needed, 65536)}"
        if info.open_files_hard_limit >= needed
        else f"ask the administrator to raise the hard limit of {info.open_files_hard_limit}"
    )
    checks = [
        _check(
            "open files",
            "ok" if info.open_files_limit >= needed else "failed",
            found,
            f"{raised}; {needed} are needed",
        )
    ]
    if info.infiniband:
        limit = (
            "no limit"
            if info.locked_memory_bytes is None
            else format_bytes(info.locked_memory_bytes)
        )
        found = f"{limit}, with {', '.join(info.infiniband)}"
        remedy = (
            "ulimit -l unlimited (docker run --ulimit memlock=-1; Slurm: PropagateResourceLimits):"
            " RDMA locks its buffers"
        )
        checks.append(
            _check(
                "locked memory",
                "ok" if info.locked_memory_bytes is None else "failed",
                found,
                remedy,
            )
        )
    threads = environ.get("OMP_NUM_THREADS", "")
    each = (
        int(threads)
        if threads.isdecimal()
        else max(1, whole_cpus(info.cores, info.cpu_quota) // nproc)
    ) + OTHER_THREADS
    if info.free_tasks is not None:
        enough = info.free_tasks >= each * nproc
        text = f"{info.free_tasks} more may be started; {each * nproc} are needed"
        checks.append(
            _check(
                "processes and threads",
                "ok" if enough else "failed",
                text,
                "raise ulimit -u or docker run --pids-limit",
            )
        )
    enough = info.available_memory_bytes >= nproc * MEMORY_BYTES
    remedy = (
        f"less than {format_bytes(MEMORY_BYTES)} per process: use fewer processes, end others, or"
        " raise the control group's limit (docker run --memory; Kubernetes:"
        " resources.limits.memory)"
    )
    checks.append(
        _check(
            "memory",
            "ok" if enough else "failed",
            f"{format_bytes(info.available_memory_bytes)} available",
            remedy,
        )
    )
    return checks


def _interface(info: MachineInfo, environ: Mapping[str, str]) -> list[CheckResult]:
    """Check GLOO_SOCKET_IFNAME (names) and NCCL_SOCKET_IFNAME (prefixes; names after `=`; `^`
    excludes)."""
    interfaces = ", ".join(info.interfaces)
    gloo, nccl = environ.get("GLOO_SOCKET_IFNAME"), environ.get("NCCL_SOCKET_IFNAME")
    wrong = [name for name in gloo.split(",") if name not in info.interfaces] if gloo else []
    found = [
        f"GLOO_SOCKET_IFNAME names {name!r}; the interfaces are {interfaces}" for name in wrong
    ]
    if info.address:
        found += [
            f"{variable}={value} is the bridge of this host's containers, which has no way to other"
            " hosts"
            for variable, value in (("GLOO_SOCKET_IFNAME", gloo), ("NCCL_SOCKET_IFNAME", nccl))
            if value and CONTAINER_BRIDGE.fullmatch(value.removeprefix("="))
        ]
    if nccl and not _nccl_finds(nccl, info.interfaces):
        found.append(f"NCCL_SOCKET_IFNAME={nccl} matches none of {interfaces}")
    if found:
        remedy = "unset it: lockstep chooses the one through which the machines reach each other"
        return [_check("interface", "failed", each, remedy) for each in found]
    if gloo:
        return [_check("interface", "ok", f"{gloo}, by GLOO_SOCKET_IFNAME")]
    if not info.address:
        return [_check("interface", "ok", "loopback: one machine needs no other")]
    named = info.interface or "not found"
    return [
        _check(
            "interface",
            "ok",
            f"{named}, {info.address}{info.interface_details}: on the route to the rendezvous",
        )
    ]


def _nccl_finds(pattern: str, interfaces: Sequence[str]) -> bool:
    excludes = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    exact = pattern.startswith("=")
    names = pattern.removeprefix("=").split(",")

    def fits(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in names)

    return any(fits(interface) != excludes for interface in interfaces)


def clock_check(
    machine: str, offset_seconds: float, error_seconds: float, reference: str
) -> CheckResult:
    relation = "ahead of" if offset_seconds > 0 else "behind"
    text = (
        f"{format_duration(abs(offset_seconds))} {relation} {reference} (±"
        f" {format_duration(error_seconds)})"
    )
    skewed = abs(offset_seconds) - error_seconds > MAX_CLOCK_OFFSET_SECONDS
    remedy = (
        "synchronize the clocks by NTP (chronyc tracking, timedatectl): a machine that is two"
        " seconds off is taken for dead"
    )
    return replace(_check("clock", "failed" if skewed else "ok", text, remedy), machine=machine)


def shared_memory_differences(
    machines: Sequence[str], info: Sequence[Mapping[str, Any]]
) -> list[CheckResult]:
    """Return a result if machines are containers of one host without common memory. `info`: each
    `MachineInfo` as JSON."""
    by_host: dict[str, dict[int, str]] = {}
    for name, each in zip(machines, info, strict=True):
        host, space = each["process_ids"]
        by_host.setdefault(host, {}).setdefault(space, name)
    found = (
        "are containers of one host, and do not see each other's processes: they exchange through"
        " the network, not through memory"
    )
    return [
        _check("one host", "slow", f"{', '.join(each.values())} {found}", ONE_CONTAINER)
        for each in by_host.values()
        if len(each) > 1
    ]


def version_differences(
    machines: Sequence[str], info: Sequence[Mapping[str, str]]
) -> list[CheckResult]:
    checks = []
    for name in info[0]:
        values = [versions.get(name, "skipped") for versions in info]
        other = next((number for number, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            text = (
                f"{name} is {values[0]} on {machines[0]} and {values[other]} on {machines[other]}"
            )
            checks.append(_check("versions", "failed", text, "install the same on all machines"))
    return checks


def parse_topology(text: str) -> dict[str, str]:
    """Return the link of each pair of GPUs, {"0-1": "NV18"}, from `nvidia-smi topo -m`."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split("\t") for line in text.splitlines()]
    header = next(
        (
            row
            for row in rows
            if "GPU0" in (cell.strip() for cell in row) and row[0].strip() != "GPU0"
        ),
        None,
    )
    if header is None:
        return {}
    columns = {
        number: cell.strip().removeprefix("GPU")
        for number, cell in enumerate(header)
        if re.fullmatch(r"GPU\d+", cell.strip())
    }
    found = {}
    for row in rows:
        if (name := re.fullmatch(r"GPU(\d+)", row[0].strip())) is not None:
            for number, other in columns.items():
                if number < len(row) and int(name[1]) < int(other):
                    found[f"{name[1]}-{other}"] = row[number].strip()
    return found
