"""`lockstep run`: a script on several processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import click

from lockstep.launch.count import count_processes
from lockstep.launch.environment import check_run_dir
from lockstep.launch.script import check_module, check_script
from lockstep.plan import Plan


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--nproc", default="auto", metavar="N|auto|gpu", help="Processes to start. auto: what the plan says, or one a GPU, or 1.")
@click.option("--plan", metavar="PLAN", envvar="LOCKSTEP_PLAN", help='How it is executed, such as "replicate=2,numerics=bitwise".')
@click.option("--run-dir", metavar="DIR", envvar="LOCKSTEP_RUN_DIR", help="Where the run writes its results.")
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@click.argument("script")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(nproc: str, plan: str | None, run_dir: str | None, is_module: bool, script: str, arguments: tuple[str, ...]) -> int:
    """Run SCRIPT on several processes of this machine.

    SCRIPT may be written for lockstep, or for torchrun, and runs unchanged. What follows it goes to the script untouched. When one process
    fails, all stop, and the first failing one's traceback is shown.

    \b
    Examples:
      lockstep run --nproc 2 train.py --lr 0.1
      lockstep run --plan "replicate=2,numerics=bitwise" --run-dir runs/a train.py
      lockstep run --nproc gpu -m package.train

    Exit status: 0, or that of the process that failed first (2 for a mistake in what lockstep was given, 128 + the signal's number for a
    death by signal), or 130 or 143 where lockstep itself got SIGINT or SIGTERM.
    """
    parsed = Plan.parse(plan) if plan is not None else None
    check_run_dir(run_dir, "--run-dir")
    if is_module:
        check_module(script)
    else:
        check_script(script)
    count = count_processes(nproc, parsed, _count_gpus, name="--nproc ")

    from lockstep.launch.local import run_workers  # imports torch: after all that can be checked without it

    line = [sys.executable, "-P", "-m", "lockstep.launch.worker", *(["-m"] if is_module else []), script, *arguments]

    def start(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(line, env={**os.environ, **environment}, start_new_session=True)

    ending = run_workers(
        start, count=count, launcher="lockstep", plan=plan, run_dir=os.path.abspath(run_dir) if run_dir is not None else None
    )
    report = ending.report()
    if report:
        print(f"lockstep: {report}", file=sys.stderr)
    return ending.status


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
