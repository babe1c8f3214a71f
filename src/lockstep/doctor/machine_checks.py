"""Checks one machine: versions, devices, memory, threads, limits, network interface and environment
variables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lockstep.base.container import LARGER_SHARED_MEMORY, ONE_CONTAINER, whole_cpus
from lockstep.base.words import counted
from lockstep.doctor.check_result import (
    CheckResult,
    Verdict,
    check_result,
    format_bytes,
    format_seconds,
)
from lockstep.options import LAUNCHER_VARIABLES

_check = partial(check_result, "machine")
SHARED_MEMORY_BYTES = 128 << 20
MEMORY_BYTES = 1 << 30
OPEN_FILES = 1024
CONTAINER_BRIDGE = re.compile(
    r"docker\d+|br-[0-9a-f]{12}|podman\d+|cni-podman\d+|lxcbr\d+|lxdbr\d+|virbr\d+"
)
"""Network bridges of Docker, Podman, LXC and libvirt. A bridge may have the same address on all
hosts."""
OTHER_THREADS = 32
MAX_CLOCK_OFFSET_SECONDS = 0.5
"""A recovery waits 0.5 s for all machines, so larger clock offsets are faults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineInfo:
    host: str
    address: str
    interface: str | None
    interfaces: tuple[str, ...]
    interface_details: str
    versions: Mapping[str, str]
    """Versions of Python, torch and other packages, which must agree on all machines."""
    gpus: int
    gpu_names: tuple[str, ...]
    topology: Mapping[str, str]
    """The link between each pair of GPUs, named as in `nvidia-smi topo`, such as {"0-1":
    "NV18"}."""
    container: str | None
    process_ids: tuple[str | int, ...]
    """Equal in containers that share a process id namespace."""
    cores: int
    cpu_quota: float | None
    shared_memory_bytes: int | None
    available_memory_bytes: int
    """Available memory of the machine or of the cgroup, whichever is less."""
    memory_limit_bytes: int | None
    """Memory limit of the cgroup; None without a limit."""
    open_files_limit: int
    open_files_hard_limit: int
    locked_memory_bytes: int | None
    infiniband: tuple[str, ...]
    free_tasks: int | None
    """Number of processes and threads that may still be started; None without a limit."""
    variables: Mapping[str, str] = field(default_factory=dict)


def machine_checks(
    info: MachineInfo, environ: Mapping[str, str], *, nproc: int, world_size: int
) -> list[CheckResult]:
    versions = ", ".join(f"{name} {value}" for name, value in info.versions.items())
    return [
        _check("versions", "ok", versions),
        *_container(info),
        *_devices(info, environ, nproc),
        _shared_memory(info, nproc),
        _threads(info, environ, nproc),
        *_limits(info, environ, nproc, world_size),
        *_interface(info, environ),
    ]


def _container(info: MachineInfo) -> list[CheckResult]:
    if info.container is None:
        return []
    quota, memory = "no CPU quota", "no limit of memory"
    if info.cpu_quota is not None:
        quota = f"a quota of {info.cpu_quota:.3g} of {info.cores} CPUs"
    if info.memory_limit_bytes is not None:
        memory = f"{format_bytes(info.memory_limit_bytes)} of memory"
    return [_check("container", "ok", f"{info.container}: {quota}, {memory}")]


def _devices(info: MachineInfo, environ: Mapping[str, str], nproc: int) -> list[CheckResult]:
    if not info.gpus and not info.gpu_names:
        return [_check("devices", "ok", f"no GPU; {counted(info.cores, 'CPU core')}")]
    if not info.gpus:
        hidden, count = environ.get("CUDA_VISIBLE_DEVICES"), len(info.gpu_names)
        text = f"the driver has {count} GPUs ({info.gpu_names[0]}) and torch sees none"
        remedy = "install a torch build for CUDA, and a driver that is new enough for it"
        if hidden is not None:
            text = f"{text}: CUDA_VISIBLE_DEVICES={hidden}"
            remedy = "unset CUDA_VISIBLE_DEVICES, unless you want CPUs"
        return [_check("devices", "failed", text, remedy)]
    names = sorted(set(info.gpu_names))
    text = f"{counted(info.gpus, 'GPU')}: {', '.join(names) or 'the driver gives no name'}"
    remedy = "all GPUs wait for the slowest: choose equal ones with CUDA_VISIBLE_DEVICES"
    checks = [_check("devices", "slow" if len(names) > 1 else "ok", text, remedy)]
    if nproc > info.gpus and environ.get("LOCKSTEP_SHARE_DEVICES") != "1":
        text = f"{nproc} processes for {info.gpus} GPUs"
        remedy = f"--nproc {info.gpus}: one process per GPU; or --share-devices, to try a plan"
        checks.append(_check("processes", "failed", text, remedy))
    if info.topology:
        kinds = sorted(Counter(info.topology.values()).items())
        links = ", ".join(f"{kind} × {count}" for kind, count in kinds)
        checks.append(_check("GPU links", "ok", f"{links} (nvidia-smi topo -m)"))
    elif info.gpus > 1:
        remedy = "install nvidia-smi to see how the GPUs are linked"
        checks.append(_check("GPU links", "skipped", "nvidia-smi shows no topology", remedy))
    return checks


def _shared_memory(info: MachineInfo, nproc: int) -> CheckResult:
    free, needed = info.shared_memory_bytes, nproc * SHARED_MEMORY_BYTES
    if free is None:
        text = "does not exist: loader workers and NCCL fail"
        return _check("/dev/shm", "failed", text, "mount a tmpfs on /dev/shm")
    text = f"{format_bytes(free)} free; up to {format_bytes(needed)} needed for"
    remedy = "loader workers and NCCL fail, or die of a bus error, when it is full"
    return _check(
        "/dev/shm",
        "ok" if free >= needed else "failed",
        f"{text} {counted(nproc, 'process')}",
        f"{LARGER_SHARED_MEMORY}: {remedy}",
    )


def _threads(info: MachineInfo, environ: Mapping[str, str], nproc: int) -> CheckResult:
    usable = whole_cpus(info.cores, info.cpu_quota)
    given, best = environ.get("OMP_NUM_THREADS"), max(1, usable // nproc)
    if given is not None and not (given.isdecimal() and int(given)):
        text = f"OMP_NUM_THREADS is {given!r}, which is not a number of threads"
        return _check("threads", "failed", text, "unset it: lockstep chooses the number")
    threads = int(given) if given is not None else best
    text = f"{counted(nproc, 'process')} × {counted(threads, 'thread')}"
    text += f" on {counted(usable, 'core')}"
    more_cores = "or more cores"
    if info.cpu_quota is not None and info.cpu_quota < info.cores:
        text += f" (of {info.cores}, by the control group's CPU quota of {info.cpu_quota:.3g})"
        more_cores += " (docker run --cpus; Kubernetes: resources.limits.cpu)"
    verdict: Verdict = "slow"
    if nproc > usable and threads == 1:
        verdict = "ok" if info.gpus else "slow"
        text += ": processes share cores, and each waits for the slowest"
        remedy = f"--nproc {usable}, {more_cores}"
    elif threads * nproc > usable:
        text += ": the cores are oversubscribed"
        remedy = f"OMP_NUM_THREADS={best}"
        if given is not None:
            remedy += ", or unset it: lockstep divides the cores among the processes"
    elif not info.gpus and threads * nproc * 2 <= usable:
        text += ": the other cores are idle"
        remedy = f"OMP_NUM_THREADS={best}, or more processes"
    else:
        verdict, remedy = "ok", ""
    return _check("threads", verdict, text, remedy)


def _limits(
    info: MachineInfo, environ: Mapping[str, str], nproc: int, world_size: int
) -> Iterator[CheckResult]:
    def at_least(name: str, enough: bool, found: str, remedy: str) -> CheckResult:
        return _check(name, "ok" if enough else "failed", found, remedy)

    files = max(OPEN_FILES, 4 * world_size + 256)
    remedy = f"ask the administrator to raise the hard limit of {info.open_files_hard_limit}"
    if info.open_files_hard_limit >= files:
        remedy = f"ulimit -n {max(files, 65536)}"
    found, limit = f"{info.open_files_limit} per process", info.open_files_limit
    yield at_least("open files", limit >= files, found, f"{remedy}; {files} are needed")
    if info.infiniband:
        locked = info.locked_memory_bytes
        found = f"{'no limit' if locked is None else format_bytes(locked)}, with"
        remedy = (
            "ulimit -l unlimited (docker run --ulimit memlock=-1; Slurm: PropagateResourceLimits):"
            " RDMA locks its buffers"
        )
        found = f"{found} {', '.join(info.infiniband)}"
        yield at_least("locked memory", locked is None, found, remedy)
    if info.free_tasks is not None:
        given = environ.get("OMP_NUM_THREADS", "")
        best = max(1, whole_cpus(info.cores, info.cpu_quota) // nproc)
        tasks = nproc * ((int(given) if given.isdecimal() else best) + OTHER_THREADS)
        found = f"{info.free_tasks} more may be started; {tasks} are needed"
        remedy = "raise ulimit -u or docker run --pids-limit"
        yield at_least("processes and threads", info.free_tasks >= tasks, found, remedy)
    memory = info.available_memory_bytes
    remedy = (
        f"less than {format_bytes(MEMORY_BYTES)} per process: use fewer processes, end others, or"
        " raise the control group's limit (docker run --memory; Kubernetes:"
        " resources.limits.memory)"
    )
    found = f"{format_bytes(memory)} available"
    yield at_least("memory", memory >= nproc * MEMORY_BYTES, found, remedy)


def _interface(info: MachineInfo, environ: Mapping[str, str]) -> list[CheckResult]:
    """Check the variables GLOO_SOCKET_IFNAME (a list of names) and NCCL_SOCKET_IFNAME (prefixes,
    `=` names, `^` exclusions)."""
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
    named = f"{info.interface or 'not found'}, {info.address}{info.interface_details}"
    return [_check("interface", "ok", f"{named}: on the route to the rendezvous")]


def _nccl_finds(pattern: str, interfaces: Sequence[str]) -> bool:
    excludes, pattern = pattern.startswith("^"), pattern.removeprefix("^")
    names = tuple(pattern.removeprefix("=").split(","))
    if pattern.startswith("="):
        return any((interface in names) != excludes for interface in interfaces)
    return any(interface.startswith(names) != excludes for interface in interfaces)


def clock_check(
    machine: str, offset_seconds: float, error_seconds: float, reference: str
) -> CheckResult:
    relation = "ahead of" if offset_seconds > 0 else "behind"
    text = f"{format_seconds(abs(offset_seconds))} {relation} {reference}"
    is_skewed = abs(offset_seconds) - error_seconds > MAX_CLOCK_OFFSET_SECONDS
    remedy = (
        "synchronize the clocks by NTP (chronyc tracking, timedatectl): a machine that is two"
        " seconds off is taken for dead"
    )
    check = _check(
        "clock",
        "failed" if is_skewed else "ok",
        f"{text} (± {format_seconds(error_seconds)})",
        remedy,
    )
    return replace(check, machine=machine)


def shared_memory_differences(
    machines: Sequence[str], info: Sequence[Mapping[str, Any]]
) -> list[CheckResult]:
    """Find containers on one host that do not share memory."""
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
        if found := difference(machines, values):
            checks.append(
                _check("versions", "failed", f"{name} {found}", "install the same on all machines")
            )
    return checks


def difference(machines: Sequence[str], values: Sequence[str]) -> str:
    for machine, value in zip(machines, values, strict=True):
        if value != values[0]:
            return f"is {values[0]} on {machines[0]} and {value} on {machine}"
    return ""


def parse_topology(text: str) -> dict[str, str]:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [[cell.strip() for cell in line.split("\t")] for line in plain.splitlines()]
    header = next((row for row in rows if "GPU0" in row[1:] and row[0] != "GPU0"), [])
    links = {}
    for row in rows:
        for name, cell in zip(header, row, strict=False):
            pair = re.fullmatch(r"GPU(\d+) GPU(\d+)", f"{row[0]} {name}")
            if pair is not None and int(pair[1]) < int(pair[2]):
                links[f"{pair[1]}-{pair[2]}"] = cell
    return links


_ON = ("1", "true", "yes", "on", "y", "t")
_DEBUGGING = "unset it, unless you are debugging"
_BEST = "NCCL no longer chooses the best one for each size and topology"
_BUSY = "waiting threads keep the cores of other processes busy"
_COSTLY_VARIABLES: Sequence[tuple[str, Sequence[str], str, str]] = (
    # name, harmful values in lower case (none: any value), reason, remedy
    (
        "CUDA_LAUNCH_BLOCKING",
        _ON,
        "every kernel waits for the one before: nothing overlaps",
        _DEBUGGING,
    ),
    (
        "NCCL_DEBUG",
        ("info", "trace"),
        "NCCL logs every communicator, and with TRACE every call",
        "NCCL_DEBUG=WARN",
    ),
    (
        "NCCL_P2P_DISABLE",
        _ON,
        "GPUs of one machine exchange through host memory, not directly by NVLink or PCIe",
        _DEBUGGING,
    ),
    (
        "NCCL_SHM_DISABLE",
        _ON,
        "GPUs without peer-to-peer access exchange through the network stack",
        _DEBUGGING,
    ),
    (
        "NCCL_IB_DISABLE",
        _ON,
        "NCCL uses TCP instead of InfiniBand or RoCE",
        "unset it, unless the machine has neither",
    ),
    ("NCCL_ALGO", (), _BEST, _DEBUGGING),
    ("NCCL_PROTO", (), _BEST, _DEBUGGING),
    ("TORCH_NCCL_BLOCKING_WAIT", _ON, "the CPU blocks on every collective", _DEBUGGING),
    (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        ("0",),
        "a rank whose peer has died waits for ever",
        "unset it",
    ),
    (
        "TORCH_DISTRIBUTED_DEBUG",
        ("detail",),
        "an extra collective before each one compares what the ranks call",
        _DEBUGGING,
    ),
    (
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _ON,
        "every tensor is allocated by the driver, which waits for the GPU",
        _DEBUGGING,
    ),
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        ("1",),
        "communication waits for computation: FSDP2 cannot overlap the two",
        "unset it",
    ),
    ("OMP_WAIT_POLICY", ("active",), _BUSY, "unset it"),
    ("KMP_BLOCKTIME", ("infinite",), _BUSY, "unset it"),
    (
        "PYTHONDEVMODE",
        ("1",),
        "Python runs its debug checks, also on every memory allocation",
        _DEBUGGING,
    ),
)
_FAILING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING",)
_PINNING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")
"""Environment variables that bind the threads of all processes to the same cores."""
_PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy")
_RELEVANT_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "OMP_",
    "MKL_",
    "CUDA_DEVICE",
    "PYTHONHASHSEED",
    "PYTORCH_",
    "FI_",
    "UCX_",
)


def environment_checks(environ: Mapping[str, str], *, nproc: int) -> list[CheckResult]:
    def check(name: str, why: str, remedy: str) -> CheckResult:
        verdict: Verdict = "failed" if name in _FAILING else "slow"
        return CheckResult("environment", name, verdict, f"is {environ[name]}: {why}", remedy)

    checks = [
        check(name, why, remedy)
        for name, values, why, remedy in _COSTLY_VARIABLES
        if (value := environ.get(name, "")) and (not values or value.lower() in values)
    ]
    if nproc > 1:
        why = f"all {nproc} processes of this machine bind their threads to the same cores"
        checks += [check(name, why, "unset it") for name in _PINNING if environ.get(name)]
    if left := [name for name in LAUNCHER_VARIABLES if name in environ]:
        found = (
            f"is {', '.join(environ[name] for name in left)}: left by a launcher: a script started"
            " with python would wait for other ranks, which do not exist"
        )
        remedy = f"unset {' '.join(left)}"
        checks.append(CheckResult("environment", ", ".join(left), "failed", found, remedy))
    if proxies := [name for name in _PROXIES if environ.get(name)]:
        why = "checkpoints on object stores go through this proxy, unless NO_PROXY names their"
        found = f"{environ[proxies[0]]}: {why} server"
        checks.append(CheckResult("environment", proxies[0], "ok", found))
    if not checks:
        found = "none is set that slows training down or breaks it"
        checks.append(CheckResult("environment", "variables", "ok", found))
    return checks


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_RELEVANT_PREFIXES) and not name.endswith("_SOCKET_IFNAME")
    }


def variable_differences(
    machines: Sequence[str], environments: Sequence[Mapping[str, str]]
) -> list[CheckResult]:
    checks = []
    for name in sorted({name for environ in environments for name in environ}):
        values = [environ.get(name, "(unset)") for environ in environments]
        if found := difference(machines, values):
            found = f"{found}: ranks may choose different transports"
            remedy = "set it to the same value on all machines"
            checks.append(CheckResult("environment", name, "failed", found, remedy))
    return checks
