"""One machine: what is known of it, and what to say of that. Pure: from facts to lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.doctor.line import Line, Verdict, duration, size
from lockstep.launch.environment import threads_per_process

SHARED_MEMORY_BYTES = 128 << 20
"""Of /dev/shm, for each process: batches on their way from loader workers (torch's DataLoader), and NCCL's buffers."""
MEMORY_BYTES = 1 << 30
"""For each process: torch alone takes a third of it, before there is a model."""
DESCRIPTORS = 1024
"""Open files for each process: a socket or two for each other rank, and one for each tensor that comes from a loader worker."""
TASKS_BESIDE_THREADS = 32
"""Threads of a process that do not compute: Gloo's, NCCL's, the store's, loader workers."""
CLOCK_SECONDS = 2.0
"""How far clocks may be apart: heartbeats are compared by them, and are missed after 10 s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What `lockstep.doctor.facts` read."""

    host: str
    address: str
    """By which other machines see it; empty on one machine."""
    interface: str | None
    """The network interface that has this address."""
    interfaces: tuple[str, ...]
    """All there are."""
    link: str
    """What is known of that interface: its speed and MTU."""
    versions: Mapping[str, str]
    """Of what must be the same on all machines, in the order in which to show them."""
    gpus: int
    """As torch counts them."""
    gpu_names: tuple[str, ...]
    """As the driver names them; empty where there is no driver."""
    topology: Mapping[str, str]
    """How two GPUs are linked, such as {"0-1": "NV18"}."""
    cores: int
    """That this process may use."""
    quota: float | None
    """Of processor time, in cores, by the control group."""
    shared_bytes: int | None
    """Free in /dev/shm. None: it is not there."""
    memory_bytes: int
    """Available, of the machine's and of the control group's the less."""
    descriptors: int
    """Soft limit of open files."""
    hard_descriptors: int
    locked_bytes: int | None
    """Soft limit of locked memory. None: none."""
    infiniband: tuple[str, ...]
    tasks: int | None
    """Processes and threads that may still be started. None: no limit."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment, those that `lockstep.doctor.environment.relevant` names."""


def lines_of(facts: Facts, environ: Mapping[str, str], *, nproc: int, world_size: int) -> list[Line]:
    """All that is said of one machine but its environment and its directories. `environ`: as the launcher was started with."""
    return [
        _versions(facts),
        *_devices(facts, environ, nproc),
        _shared_memory(facts, nproc),
        *_threads(facts, environ, nproc),
        *_limits(facts, environ, nproc, world_size),
        *_interface(facts, environ),
    ]


def _say(check: str, verdict: Verdict, found: str, remedy: str = "") -> Line:
    return Line(section="machine", check=check, verdict=verdict, found=found, remedy="" if verdict == "ok" else remedy)


def _versions(facts: Facts) -> Line:
    return _say("versions", "ok", ", ".join(f"{name} {value}" for name, value in facts.versions.items()))


def _devices(facts: Facts, environ: Mapping[str, str], nproc: int) -> list[Line]:
    if not facts.gpus:
        if not facts.gpu_names:
            return [_say("devices", "ok", f"no GPU; {facts.cores} CPU core{'s' if facts.cores != 1 else ''}")]
        hidden = environ.get("CUDA_VISIBLE_DEVICES")
        seen = f"the driver has {len(facts.gpu_names)} GPUs ({facts.gpu_names[0]}) and torch sees none"
        if hidden is not None:
            return [_say("devices", "wrong", f"{seen}: CUDA_VISIBLE_DEVICES={hidden}", "unset CUDA_VISIBLE_DEVICES, unless CPUs are meant")]
        return [_say("devices", "wrong", seen, "install a torch that is built for CUDA, and a driver that is new enough for it")]
    names = sorted(set(facts.gpu_names))
    found = f"{facts.gpus} GPU{'s' if facts.gpus > 1 else ''}: {', '.join(names) or 'the driver gives no name'}"
    lines = [_say("devices", "ok", found)]
    if len(names) > 1:
        lines = [_say("devices", "slow", found, "all wait for the slowest: choose those that are alike with CUDA_VISIBLE_DEVICES")]
    if nproc > facts.gpus:
        lines.append(_say("processes", "wrong", f"{nproc} processes for {facts.gpus} GPUs", f"--nproc {facts.gpus}: each takes one"))
    if facts.topology:
        kinds = sorted(set(facts.topology.values()))
        counted = ", ".join(f"{kind} × {list(facts.topology.values()).count(kind)}" for kind in kinds)
        lines.append(_say("GPU links", "ok", f"{counted} (nvidia-smi topo -m)"))
    elif facts.gpus > 1:
        lines.append(_say("GPU links", "absent", "nvidia-smi does not tell", "install nvidia-smi to see how GPUs are linked"))
    return lines


def _shared_memory(facts: Facts, nproc: int) -> Line:
    need = nproc * SHARED_MEMORY_BYTES
    if facts.shared_bytes is None:
        return _say("/dev/shm", "wrong", "is not there: loader workers and NCCL fail", "mount a tmpfs on /dev/shm")
    found = f"{size(facts.shared_bytes)} free; {size(need)} is enough for {nproc} process{'es' if nproc > 1 else ''} in most cases"
    enough = facts.shared_bytes >= need
    remedy = (
        "make it larger (docker run --shm-size=8g or --ipc=host; Kubernetes: an emptyDir in memory; mount -o remount,size=8g /dev/shm): "
        "loader workers and NCCL die of a bus error where it is full"
    )
    return _say("/dev/shm", "ok" if enough else "wrong", found, remedy)


def _threads(facts: Facts, environ: Mapping[str, str], nproc: int) -> list[Line]:
    usable = min(facts.cores, facts.quota or facts.cores)
    set_to = environ.get("OMP_NUM_THREADS")
    if set_to is not None and not (set_to.isdecimal() and int(set_to)):
        return [_say("threads", "wrong", f"OMP_NUM_THREADS is {set_to!r}, which is no number of threads", "unset it: lockstep chooses")]
    threads = int(set_to) if set_to is not None else threads_per_process(nproc)
    cores = f"{usable:g} core{'' if usable == 1 else 's'}"
    if facts.quota is not None and facts.quota < facts.cores:
        cores += f" (of {facts.cores}, by the control group's quota)"
    found = f"{nproc} process{'es' if nproc > 1 else ''} × {threads} thread{'s' if threads > 1 else ''} on {cores}"
    best = max(1, int(usable // nproc))
    if nproc > usable and threads == 1:
        why = f"{found}: processes take turns, and each waits for all"
        return [_say("threads", "slow" if not facts.gpus else "ok", why, f"--nproc {max(1, int(usable))}, or more cores")]
    if threads * nproc > usable:
        remedy = f"OMP_NUM_THREADS={best}" + ("" if set_to is None else ", or unset it: lockstep shares the cores out")
        return [_say("threads", "slow", f"{found}: they hinder one another", remedy)]
    if not facts.gpus and threads * nproc * 2 <= usable:
        return [_say("threads", "slow", f"{found}: the other cores stand idle", f"OMP_NUM_THREADS={best}, or more processes")]
    return [_say("threads", "ok", found)]


def _limits(facts: Facts, environ: Mapping[str, str], nproc: int, world_size: int) -> list[Line]:
    need = max(DESCRIPTORS, 4 * world_size + 256)
    found = f"{facts.descriptors} a process"
    raised = f"ulimit -n {max(need, 65536)}" if facts.hard_descriptors >= need else f"have the hard limit, {facts.hard_descriptors}, raised"
    lines = [_say("open files", "ok" if facts.descriptors >= need else "wrong", found, f"{raised}; {need} are needed")]
    if facts.infiniband:
        limit = "no limit" if facts.locked_bytes is None else size(facts.locked_bytes)
        found = f"{limit}, with {', '.join(facts.infiniband)}"
        remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1; Slurm: PropagateResourceLimits): RDMA locks its buffers"
        lines.append(_say("locked memory", "ok" if facts.locked_bytes is None else "wrong", found, remedy))
    threads = environ.get("OMP_NUM_THREADS", "")
    each = (int(threads) if threads.isdecimal() else threads_per_process(nproc)) + TASKS_BESIDE_THREADS
    if facts.tasks is not None:
        enough = facts.tasks >= each * nproc
        text = f"{facts.tasks} more may be started; {each * nproc} are enough"
        lines.append(_say("processes and threads", "ok" if enough else "wrong", text, "ulimit -u, or docker run --pids-limit: raise it"))
    enough = facts.memory_bytes >= nproc * MEMORY_BYTES
    remedy = f"less than {size(MEMORY_BYTES)} a process: fewer processes, end what else takes it, or raise the control group's limit"
    lines.append(_say("memory", "ok" if enough else "wrong", f"{size(facts.memory_bytes)} available", remedy))
    return lines


def _interface(facts: Facts, environ: Mapping[str, str]) -> list[Line]:
    """GLOO_SOCKET_IFNAME is a list of names; NCCL_SOCKET_IFNAME one of prefixes, or after = of names; ^ excludes them."""
    there = ", ".join(facts.interfaces)
    lines = []
    gloo = environ.get("GLOO_SOCKET_IFNAME")
    for name in gloo.split(",") if gloo else ():
        if name not in facts.interfaces:
            found = f"GLOO_SOCKET_IFNAME names {name!r}; there are {there}"
            lines.append(_say("interface", "wrong", found, "unset it: lockstep takes the one by which the machines reach each other"))
    nccl = environ.get("NCCL_SOCKET_IFNAME")
    if nccl and not _nccl_finds(nccl, facts.interfaces):
        found = f"NCCL_SOCKET_IFNAME={nccl} fits none of {there}"
        lines.append(_say("interface", "wrong", found, "unset it: lockstep takes the one by which the machines reach each other"))
    if lines:
        return lines
    if gloo:
        return [_say("interface", "ok", f"{gloo}, by GLOO_SOCKET_IFNAME")]
    if not facts.address:
        return [_say("interface", "ok", "loopback: the processes of one machine need no other")]
    named = facts.interface or "not found"
    return [_say("interface", "ok", f"{named}, {facts.address}{facts.link}: the way to the rendezvous")]


def _nccl_finds(pattern: str, interfaces: Sequence[str]) -> bool:
    excludes = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    exact = pattern.startswith("=")
    names = pattern.removeprefix("=").split(",")

    def fits(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in names)

    return any(fits(interface) != excludes for interface in interfaces)


def clock_line(machine: str, offset_seconds: float, error_seconds: float, reference: str) -> Line:
    """`offset_seconds`: how far the clock of `machine` is ahead of that of `reference`, to `error_seconds` either way."""
    way = "ahead of" if offset_seconds > 0 else "behind"
    text = f"{duration(abs(offset_seconds))} {way} {reference} (± {duration(error_seconds)})"
    skewed = abs(offset_seconds) - error_seconds > CLOCK_SECONDS
    remedy = "set the clocks by NTP (chronyc tracking, timedatectl): beyond a few seconds a machine is taken for lost"
    return Line(
        section="machine", check="clock", verdict="wrong" if skewed else "ok", found=text, remedy=remedy if skewed else "", machine=machine
    )


def differences(machines: Sequence[str], facts: Sequence[Mapping[str, str]]) -> list[Line]:
    """A line for each version that is not the same on all machines."""
    lines = []
    for name in facts[0]:
        values = [versions.get(name, "absent") for versions in facts]
        other = next((number for number, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            text = f"{name} is {values[0]} on {machines[0]} and {values[other]} on {machines[other]}"
            lines.append(_say("versions", "wrong", text, "install the same on all machines"))
    return lines


def parse_topology(text: str) -> dict[str, str]:
    """How GPUs are linked, from what `nvidia-smi topo -m` prints: {"0-1": "NV18"}, each pair once."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split("\t") for line in text.splitlines()]
    header = next((row for row in rows if "GPU0" in (cell.strip() for cell in row) and row[0].strip() != "GPU0"), None)
    if header is None:
        return {}
    columns = {number: cell.strip().removeprefix("GPU") for number, cell in enumerate(header) if re.fullmatch(r"GPU\d+", cell.strip())}
    found = {}
    for row in rows:
        if (name := re.fullmatch(r"GPU(\d+)", row[0].strip())) is not None:
            for number, other in columns.items():
                if number < len(row) and int(name[1]) < int(other):
                    found[f"{name[1]}-{other}"] = row[number].strip()
    return found
