"""A real Slurm on this machine, for tests: munged, slurmctld and some slurmd, all on loopback."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from processes import ran, reserved_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
GRACE_SECONDS = 40
"""From the signal to a job that has to make room, to its end."""

_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=1:00:00 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=urgent Nodes=ALL MaxTime=1:00:00 State=UP PriorityTier=10 PreemptMode=OFF
"""


@contextmanager
def cluster(folder: Path, nodes: int) -> Iterator[None]:
    """Within it, Slurm's programs speak to a cluster of nodes n1, n2, ..., each with two CPUs and,
    it is told, two GPUs.

    Skips the test where the programs are not there.
    """
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(
            "a Slurm of the tests' own needs root, and Debian's slurm-wlm and munge; missing:"
            f" {', '.join(missing) or 'root'}"
        )
    before = os.environ.get("SLURM_CONF")
    try:
        with ExitStack() as stack:
            port, *ports = [stack.enter_context(reserved_port()) for _ in range(1 + nodes)]
            os.environ["SLURM_CONF"] = str(_configure(folder, port, ports))
            _start(stack, "munged", "--foreground", "--force", *_munge(folder))
            _start(stack, "slurmctld", "-D")
            for number in range(1, nodes + 1):
                _start(stack, "slurmd", "-D", "-N", f"n{number}")
            _wait(
                lambda: (
                    asked("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N").count("n")
                    == nodes
                )
            )
            yield
            subprocess.run(["scancel", "--full", "--user=root"], check=True)
            _wait(lambda: not asked("squeue", "-h"))
    finally:
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before


def asked(*line: str) -> str:
    """What one of Slurm's programs says; empty where it fails."""
    return ran(line).stdout


def _configure(folder: Path, port: int, ports: Sequence[int]) -> Path:
    host = socket.gethostname().partition(".")[0]
    lines = [
        f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={each} CPUs=2"
        " RealMemory=1000 Gres=gpu:2 State=UNKNOWN"
        for number, each in enumerate(ports, 1)
    ]
    for name in ("state", *(f"spool.n{number}" for number in range(1, len(ports) + 1))):
        (folder / name).mkdir()
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "key").write_bytes(secrets.token_bytes(1024))
    (folder / "key").chmod(0o600)
    path = folder / "slurm.conf"
    path.write_text(
        _CONFIGURATION.format(
            host=host, port=port, folder=folder, nodes="\n".join(lines), grace=GRACE_SECONDS
        )
    )
    return path


def _munge(folder: Path) -> list[str]:
    names = {
        "socket": "munge.socket",
        "key-file": "key",
        "log-file": "munged.log",
        "pid-file": "munged.pid",
        "seed-file": "munge.seed",
    }
    return [f"--{option}={folder / name}" for option, name in names.items()]


def _start(stack: ExitStack, *line: str) -> None:
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)


def _wait(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
