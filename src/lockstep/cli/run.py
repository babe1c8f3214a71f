"""`lockstep run`: a script on several processes, of this machine or of several."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import get_args

import click

from lockstep.base.errors import LaunchError, say
from lockstep.base.garbage import collector_paused
from lockstep.base.units import seconds
from lockstep.hooks.timeline import steps_of
from lockstep.launch.count import count_processes
from lockstep.launch.environment import check_run_dir
from lockstep.launch.machines import Machines, Place
from lockstep.launch.script import check_module, check_script
from lockstep.launch.slurm.batch_script import Step
from lockstep.launch.slurm.commands import machines_of
from lockstep.plan import Plan
from lockstep.saving import OutOfMemory, Resume, interval
from lockstep.timeouts import OnHang, Patience


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--nproc", default="auto", metavar="N|auto|gpu", help="Processes to start. auto: what the plan says, or one a GPU, or 1.")
@click.option("--plan", metavar="PLAN", envvar="LOCKSTEP_PLAN", help='How it is executed, such as "replicate=2,numerics=bitwise".')
@click.option("--run-dir", metavar="DIR", envvar="LOCKSTEP_RUN_DIR", help="Where the run writes its results.")
@click.option(
    "--resume", type=click.Choice(get_args(Resume)), help="An unfinished run in DIR: go on (auto), or refuse (never; must: none)."
)
@click.option("--save-every", metavar="STEPS|TIME", help="Between checkpoints: 500, or 10m, which it is unless the script says.")
@click.option("--stop-after", metavar="TIME", help="Save and end after 55m, say, with exit status 75.")
@click.option(
    "--out-of-memory",
    type=click.Choice(get_args(OutOfMemory)),
    envvar="LOCKSTEP_OUT_OF_MEMORY",
    help="What is changed in the plan then. retry, if nothing is said: in bitwise numerics nothing that changes bits.",
)
@click.option(
    "--hang-after", metavar="TIME|auto|off", envvar="LOCKSTEP_HANG_AFTER", help="A process may stand still so long; auto: by its pace."
)
@click.option(
    "--on-hang", type=click.Choice(get_args(OnHang)), envvar="LOCKSTEP_ON_HANG", help="Report it, and end (which it is) or wait on."
)
@click.option("--compare-every", type=click.IntRange(min=0), metavar="STEPS", help="Compare replicas. 0: never. 100, if not said.")
@click.option("--profile", metavar="steps=A:B", help="Trace steps A to B - 1 of every rank, on one clock, and say what their time went to.")
@click.option("--check", is_flag=True, help="Compare every collective across ranks before it is made. Slow; for looking for a hang.")
@click.option("--may-differ", metavar="FIELDS", help="Fields of the recipe that may be others than they were: steps,schedule.")
@click.option("--max-restarts", type=click.IntRange(min=0), default=0, metavar="R", help="Start again after a failure, R times in all.")
@click.option("--nnodes", metavar="N|A:B", help="Machines: N, or at least A and at most B. On each, the same command. 1, or as Slurm says.")
@click.option("--rdzv", metavar="HOST:PORT", help="Where they meet: one of them, and a free port there.")
@click.option("--node-rank", type=click.IntRange(min=0), metavar="R", help="The older way: this machine's number, from 0,")
@click.option("--master-addr", metavar="HOST", help="the address of number 0,")
@click.option("--master-port", type=click.IntRange(1, 65535), metavar="PORT", help="and a free port there.")
@click.option("--interface", metavar="NAME", help="The network interface to use. That of the way to the others, if none is given.")
@click.option("--local-rank-argument", is_flag=True, help="Give SCRIPT --local_rank=N, as torch.distributed.launch does.")
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@click.argument("script")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    nproc: str,
    plan: str | None,
    run_dir: str | None,
    resume: str | None,
    save_every: str | None,
    stop_after: str | None,
    out_of_memory: str | None,
    hang_after: str | None,
    on_hang: str | None,
    compare_every: int | None,
    profile: str | None,
    check: bool,
    allow_change: str | None,
    max_restarts: int,
    nnodes: str | None,
    rdzv: str | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    interface: str | None,
    local_rank_argument: bool,
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
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
    parsed = Plan.parse(plan) if plan is not None else None
    check_run_dir(run_dir, "--run-dir")
    if save_every is not None:
        interval(save_every, "--save-every")
    stop_at = time.time() + seconds(stop_after, "--stop-after", LaunchError) if stop_after is not None else None
    Patience.parse(hang_after, on_hang)
    if profile is not None:
        steps_of(profile)
    if is_module:
        check_module(script)
    else:
        check_script(script)
    place = Place(rdzv, node_rank, master_addr, master_port)
    step = Step.read(os.environ) if nnodes is None and not place.given else None
    machines = machines_of(step, interface) if step is not None else Machines.parse(nnodes or "1", place, interface)
    gpus = step.gpus if step is not None else None
    count_gpus = _count_gpus if gpus is None else lambda: gpus
    count = count_processes(nproc, parsed if machines is None else None, count_gpus, name="--nproc ")

    with collector_paused(), _without_warnings_of_stores() if machines is not None else nullcontext():
        from lockstep.launch.local import run_workers  # imports torch: after all that can be checked without it
        from lockstep.logging.run_directory import default_run_path

    worker = [sys.executable, "-P", "-m", "lockstep.launch.worker"]
    asked = [*(["-m"] if is_module else []), script]

    def start(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        local_rank = [f"--local_rank={environment['LOCAL_RANK']}"] if local_rank_argument else []
        line = [*worker, *asked, *local_rank, *arguments]
        return subprocess.Popen(line, env={**os.environ, **environment}, start_new_session=True)

    given: dict[str, str | None] = {
        "plan": plan,
        "run_dir": os.path.abspath(run_dir) if run_dir is not None else None,
        "resume": resume,
        "save_every": save_every,
        "stop_at": str(stop_at) if stop_at is not None else None,
        "out_of_memory": out_of_memory,
        "hang_after": hang_after,
        "on_hang": on_hang,
        "compare_every": str(compare_every) if compare_every is not None else None,
        "profile": profile,
        "check": "1" if check else None,
        "allow_change": allow_change,
        "default_run_dir": str(default_run_path(script, datetime.now()).absolute()),
    }
    number = machines.number if machines is not None else None
    alike = {"nnodes": number, **given, "stop_at": None, "stop_after": stop_after, "default_run_dir": None}
    ending = run_workers(
        start,
        count=count,
        launcher="lockstep",
        given=given,
        max_restarts=max_restarts,
        machines=machines,
        command=shlex.join([*(f"{name}={value}" for name, value in alike.items() if value), *asked, *arguments]),
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
