"""`lockstep run`: runs a script on several processes, on one machine or several."""

from __future__ import annotations

import os
import time
from typing import Any

import click

from lockstep.cli.arguments import ScriptCommand, launch_options, options_from, script_arguments
from lockstep.launch.environment import count_processes
from lockstep.launch.machines import Machines, rendezvous_options
from lockstep.launch.slurm import SlurmStep, machines_of
from lockstep.scripts.launch import count_gpus, launch_script
from lockstep.scripts.line import ScriptLine


@click.command("run", cls=ScriptCommand)
@launch_options
@script_arguments()
def command(line: ScriptLine, **given: Any) -> int:
    """Run SCRIPT on several processes, on one machine or several.

    SCRIPT is written for lockstep or for torchrun, and runs unchanged. All arguments after SCRIPT
    are the script's. If one process fails, all processes are stopped, and the traceback of the
    process that failed first is shown.

    With --max-restarts R, all processes are started again after a failure, at most R times in the
    whole run. A script that uses lockstep continues from the last saved step. The run is not
    restarted after a user's mistake or a request to end.

    If memory runs out, the processes are started again under a plan that needs less memory, as far
    as --out-of-memory allows. Restarts for lack of memory do not count for --max-restarts.

    --nnodes A:B runs on several machines. Run this command on each machine, with the same files.
    The run begins when A machines have joined. When another machine joins later, all processes save
    and start again with the new machine. When a machine is lost, the remaining machines start again
    if at least A machines are left. The machine HOST hosts the rendezvous: if HOST is lost, the
    remaining machines save and end. Anyone who can connect to PORT can run code as you: let only
    the machines of the run reach it. --nproc is the number of processes on a machine, and may
    differ between machines. --nproc auto is one process per GPU, or 1 process without GPUs. With
    --node-rank, --master-addr and --master-port instead of --rdzv, ranks follow the machines'
    numbers, and the number of machines is fixed. Under srun with one task per node, lockstep run
    needs no options for the machines: it uses the nodes and the GPUs of the job.

    SIGTERM, SIGUSR1 and Ctrl-C ask the run to save and end. A second signal ends the run at once.
    Signals that were ignored at the start (SIGHUP under nohup) stay ignored.

    \b
    Examples:
      lockstep run --nproc 2 train.py --lr 0.1
      lockstep run --plan "replicate=2,numerics=bitwise" --run-dir runs/a train.py
      lockstep run --nproc gpu -m package.train
      lockstep run --nproc 2 --run-dir runs/a --save-every 500 --stop-after 55m train.py
      lockstep run --nproc 8 --max-restarts 3 train.py
      lockstep run --nnodes 2:4 --rdzv node1:29400 --max-restarts 10 --run-dir /shared/a train.py
      lockstep run --nnodes 2 --node-rank 1 --master-addr n0 --master-port 29400 train.py

    Exit status: 0, or the status of the process that failed first (2 for a user's mistake, 128 +
    the signal's number if a signal killed it). 75 if the run was asked to end (SIGTERM, SIGUSR1,
    --stop-after) and has saved: the same command with the same --run-dir continues the run. 76 if
    the run hung for longer than --hang-after allows. 130 after Ctrl-C. 143 if lockstep itself got
    SIGTERM and the script does not save.
    """
    began = time.time()
    options = options_from(given)
    plan = options.validate()
    if options.profile is not None:
        from lockstep.hooks.profiling.trace import profiled_steps

        profiled_steps(options.profile)
    is_told = options.nnodes is not None or rendezvous_options(options)
    step = None if is_told else SlurmStep.read(os.environ)
    machines = Machines.parse(options) if step is None else machines_of(step, options)
    gpus = None if step is None else step.gpus
    gpus_here = count_gpus if gpus is None else lambda: gpus
    plan_here = plan if machines is None else None
    count = count_processes(options.nproc, plan_here, gpus_here, name="--nproc ")
    return launch_script(
        line, options, count=count, machines=machines, began=began, spare_imports=["lockstep.run"]
    )
