"""`lockstep run`: a script on several processes, of this machine or of several."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import Any

import click

from lockstep.base.errors import say
from lockstep.base.garbage import collector_paused
from lockstep.cli.arguments import check_target, launch_options, options_from, script_arguments
from lockstep.hooks.timeline import steps_of
from lockstep.launch.count import count_processes
from lockstep.launch.machines import Machines, rendezvous_options
from lockstep.launch.slurm.batch_script import SlurmStep
from lockstep.launch.slurm.commands import machines_of
from lockstep.options import LaunchOptions


@click.command("run", context_settings={"allow_interspersed_args": False})
@launch_options
@script_arguments
def command(is_module: bool, script: str, arguments: tuple[str, ...], **given: Any) -> int:
    """Run SCRIPT on several processes, of this machine or of several.

    SCRIPT may be written for lockstep, or for torchrun, and runs unchanged. What follows it goes to the script untouched. When one process
    fails, all stop, and the first failing one's traceback is shown.

    With --max-restarts R they then start again, and a script of lockstep's goes on from the last step that one of them could save: R times
    in all, however far they came. A mistake in what lockstep was given is not tried again, and a run that was asked to end stays ended.

    Where memory runs out, they start again under a plan that needs less, as far as --out-of-memory allows; that is none of those R times.

    With --nnodes the run is on several machines, each given this command and the same files. It begins when A are there. One that comes
    later joins: all save, and start again with it. Where one is lost, that is a failure, after which the rest start again, if they are A.
    The machine HOST keeps the rendezvous: without it the others save and end. Let no one else reach that port: who can may run code as
    you. --nproc is for each machine: auto is one a GPU, or 1; it may differ. With --node-rank, --master-addr and --master-port instead of
    --rdzv, ranks are in the order of those numbers, and the number of machines is fixed. srun lockstep run, with one task a node, needs
    none of these: the machines are the nodes of the job, and auto is one process for each GPU that the job has on its node, or 1.

    \b
    Examples:
      lockstep run --nproc 2 train.py --lr 0.1
      lockstep run --plan "replicate=2,numerics=bitwise" --run-dir runs/a train.py
      lockstep run --nproc gpu -m package.train
      lockstep run --nproc 2 --run-dir runs/a --save-every 500 --stop-after 55m train.py
      lockstep run --nproc 8 --max-restarts 3 train.py
      lockstep run --nnodes 2:4 --rdzv node1:29400 --max-restarts 10 --run-dir /shared/runs/a train.py
      lockstep run --nnodes 2 --node-rank 1 --master-addr node0 --master-port 29400 --run-dir /shared/runs/a train.py

    Exit status: 0, or that of the process that failed first (2 for a mistake in what lockstep was given, 128 + the signal's number for a
    death by signal). 75 where the run was asked to end (SIGTERM, SIGUSR1, --stop-after) and has saved: the same command goes on with it.
    76 where it stood still for longer than --hang-after allows. 130 or 143 where lockstep itself got SIGINT or SIGTERM, and the script is
    none that saves.
    """
    began = time.time()
    options = options_from(given)
    plan = options.validate()
    if options.profile is not None:
        steps_of(options.profile)
    check_target(script, is_module=is_module)
    step = SlurmStep.read(os.environ) if options.nnodes is None and not rendezvous_options(options) else None
    machines = machines_of(step, options) if step is not None else Machines.parse(options)
    gpus = step.gpus if step is not None else None
    count_gpus = _count_gpus if gpus is None else lambda: gpus
    count = count_processes(options.nproc, plan if machines is None else None, count_gpus, name="--nproc ")
    return _run([*(["-m"] if is_module else []), script], arguments, options, count=count, machines=machines, began=began)


def _run(
    script: Sequence[str], arguments: Sequence[str], options: LaunchOptions, *, count: int, machines: Machines | None, began: float
) -> int:
    """Run `count` workers on this machine to their end. Returns the exit status. `script`: `[-m] SCRIPT`. `began`: when, since 1970."""
    with collector_paused(), _without_warnings_of_stores() if machines is not None else nullcontext():
        from lockstep.launch.local import run_workers  # imports torch: after all that can be checked without it
        from lockstep.logging.run_directory import default_run_path

    def start(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        local_rank = [f"--local_rank={environment['LOCAL_RANK']}"] if options.local_rank_argument else []
        line = [sys.executable, "-P", "-m", "lockstep.launch.worker", *script, *local_rank, *arguments]
        return subprocess.Popen(line, env={**os.environ, **environment}, start_new_session=True)

    default_run_dir = str(default_run_path(script[-1], datetime.now()).absolute())
    on_all_machines = [f"nnodes={machines.count}"] if machines is not None else []
    ending = run_workers(
        start,
        count=count,
        launcher="lockstep",
        options=options.for_workers(default_run_dir=default_run_dir, now_seconds=began),
        max_restarts=options.max_restarts,
        machines=machines,
        command=shlex.join([*on_all_machines, *options.same_on_all_machines(), *script, *arguments]),
    )
    report = ending.report()
    if report:
        say(f"lockstep: {report}")
    return ending.status


@contextmanager
def _without_warnings_of_stores() -> Iterator[None]:
    """Where torch is imported in it: what its store would say in 20 lines when its host is gone, we say in one. Not for the workers."""
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "ERROR"
    try:
        yield
    finally:
        del os.environ[name]


def _count_gpus() -> int:
    with collector_paused():
        import torch

    return torch.cuda.device_count()
