"""The command that starts each contender, with equal launchers or with its own."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from workloads import Task

SCRIPT = str(Path(__file__).resolve().parent / "contend.py")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
BASELINE = "by_hand"


@dataclass(frozen=True)
class Contender:
    label: str
    imports: str
    """The import statement at the head of a user's script."""
    launcher: str = "torchrun"
    """The launcher that its documentation uses for several processes on CPUs."""


CONTENDERS = {
    "by_hand": Contender("by hand, careful", "import torch, torch.distributed"),
    "tutorial": Contender("tutorials' loop", "import torch, torch.distributed"),
    # `accelerate launch` starts several processes on GPUs, or on CPUs by MPI; otherwise its
    # documentation uses torchrun.
    "with_accelerate": Contender("Accelerate", "from accelerate import Accelerator"),
    "with_fabric": Contender("Fabric", "from lightning.fabric import Fabric", "itself"),
    "with_lightning": Contender("Lightning Trainer", "import lightning", "itself"),
    "with_hugging_face": Contender(
        "HF Trainer", "from transformers import Trainer, TrainingArguments"
    ),
    "with_ignite": Contender("Ignite", "import ignite.distributed, ignite.engine", "itself"),
    # Names `train`, because lockstep imports names when they are first used.
    "with_lockstep": Contender("lockstep", "import lockstep; lockstep.train", "lockstep"),
}


def equal_threads(processes: int) -> int:
    return max(1, (os.cpu_count() or 1) // processes)


def command(name: str, address: str, task: Task) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a contender, and its environment.

    Equal: one process starts with python, several with torchrun, each with cores ÷ processes
    threads. Own: its own launcher, which sets the threads.
    """
    size = task.processes
    environment = {key: value for key, value in os.environ.items() if key not in THREADS}
    launcher = CONTENDERS[name].launcher if task.own_launcher else "torchrun"
    if not task.own_launcher:
        environment["OMP_NUM_THREADS"] = str(equal_threads(size))
    if launcher == "lockstep":
        start = ["-m", "lockstep", "run", "--nproc", str(size), "--run-dir", f"{task.scratch}/run"]
    elif launcher == "torchrun" and size > 1:
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    else:
        start = []
    return [sys.executable, *start, SCRIPT, name, address, json.dumps(asdict(task))], environment
