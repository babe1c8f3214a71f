"""`lockstep run`: a script on several processes, of this machine or of several."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import Any, TextIO

import click

from lockstep.base.errors import say
from lockstep.base.garbage import collector_paused
from lockstep.base.python_process import own_python
from lockstep.base.system import refuse_on_windows
from lockstep.cli.arguments.launch import (
    check_target,
    launch_options,
    options_from,
    script_arguments,
)
from lockstep.cli.arguments.script_command import ScriptCommand
from lockstep.hooks.profiling.timeline import steps_of
from lockstep.launch.count import count_processes
from lockstep.launch.machines import Machines, rendezvous_options
from lockstep.launch.recovery.channel import inherited
from lockstep.launch.slurm.batch_script import SlurmStep
from lockstep.launch.slurm.commands import machines_of
from lockstep.logging.run_path import default_run_path
from lockstep.options import LaunchOptions


@click.command("run", cls=ScriptCommand, context_settings={"allow_interspersed_args": False})
@launch_options
@script_arguments()
def command(is_module: bool, script: str, arguments: tuple[str, ...], **given: Any) -> int:
    """Run SCRIPT on several processes, of this machine or of several.

    SCRIPT is written for lockstep or for torchrun, and runs unchanged. All arguments after it are
    the script's. If one process fails, all are stopped, and the traceback of the process that
    failed first is shown.

    With --max-restarts R they are then started again, at most R times in the whole run. A script
    that uses lockstep continues from the last step that one of its processes could save. The run is
    not started again after a mistake in what lockstep was given, nor after a request to end.

    If memory runs out, the processes are started again under a plan that needs less of it, as far
    as --out-of-memory allows. These restarts do not count.

    With --nnodes the run is on several machines. Give each machine this command and the same files.
    The run begins when A machines are there. A machine that comes later joins: all save, and start
    again with it. A lost machine is a failure, after which the others start again if at least A are
    left. The machine HOST hosts the rendezvous: if it is lost, the others save and end. Whoever can
    connect to that port can run code as you, so let only the machines of the run reach it. --nproc
    is for each machine, auto is one per GPU, or 1; machines may have different numbers. With
    --node-rank, --master-addr and --master-port instead of --rdzv, ranks are in the order of the
    machines' numbers, and the number of machines is fixed. srun lockstep run, with one task per
    node, needs none of these: the machines are the nodes of the job, and auto is one process for
    each GPU that the job has on its node, or 1.

    SIGTERM, SIGUSR1 and Ctrl-C ask the run to save and end; a second one ends it at once. Signals
    that are ignored when lockstep starts, as SIGHUP under nohup, stay ignored.

    \b
    Examples:
      lockstep run --nproc 2 train.py --lr 0.1
      lockstep run --plan "replicate=2,numerics=bitwise" --run-dir runs/a train.py
      lockstep run --nproc gpu -m package.train
      lockstep run --nproc 2 --run-dir runs/a --save-every 500 --stop-after 55m train.py
      lockstep run --nproc 8 --max-restarts 3 train.py
      lockstep run --nnodes 2:4 --rdzv node1:29400 --max-restarts 10 --run-dir /shared/a train.py
      lockstep run --nnodes 2 --node-rank 1 --master-addr node0 --run-dir /shared/a train.py

    Exit status: 0, or that of the process that failed first (2 for a mistake in what lockstep was
    given, 128 + the signal's number if a signal killed it). 75 if the run was asked to end
    (SIGTERM, SIGUSR1, --stop-after) and has saved: the same command with the same --run-dir
    continues it. 76 if it hung for longer than --hang-after allows. 130 after Ctrl-C. 143 if
    lockstep itself got SIGTERM and the script does not save.
    """
    began = time.time()
    options = options_from(given)
    plan = options.validate()
    if options.profile is not None:
        steps_of(options.profile)
    check_target(script, is_module=is_module)
    step = (
        SlurmStep.read(os.environ)
        if options.nnodes is None and not rendezvous_options(options)
        else None
    )
    machines = machines_of(step, options) if step is not None else Machines.parse(options)
    gpus = step.gpus if step is not None else None
    gpus_here = count_gpus if gpus is None else lambda: gpus
    count = count_processes(
        options.nproc, plan if machines is None else None, gpus_here, name="--nproc "
    )
    return run(
        [*(["-m"] if is_module else []), script],
        arguments,
        options,
        count=count,
        machines=machines,
        began=began,
    )


def run(
    script: Sequence[str],
    arguments: Sequence[str],
    options: LaunchOptions,
    *,
    count: int,
    machines: Machines | None,
    began: float,
    stdout: TextIO | None = None,
) -> int:
    """Run `count` workers to their end; return the exit status. `script`: `[-m] SCRIPT`. `began`: a
    Unix time. `stdout`: that of the workers; None: this process's."""
    refuse_on_windows("lockstep run")
    with (
        collector_paused(),
        _without_warnings_of_stores() if machines is not None else nullcontext(),
    ):
        # imports torch: after all checks that do not need it
        from lockstep.launch.agent.run_workers import run_workers

    def start(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        local_rank = (
            [f"--local_rank={environment['LOCAL_RANK']}"] if options.local_rank_argument else []
        )
        line = own_python("-m", "lockstep.launch.worker", *script, *local_rank, *arguments)
        variables = {**os.environ, **environment}
        return subprocess.Popen(
            line,
            env=variables,
            start_new_session=True,
            stdout=stdout,
            pass_fds=inherited(environment),
        )

    default_run_dir = str(default_run_path(script[-1], datetime.now()).absolute())
    on_all_machines = [f"nnodes={machines.count}"] if machines is not None else []
    ending = run_workers(
        start,
        count=count,
        launcher="lockstep",
        options=options.for_workers(default_run_dir=default_run_dir, now_seconds=began),
        max_restarts=options.max_restarts,
        machines=machines,
        recovery=options.recovery,
        command=shlex.join(
            [*on_all_machines, *options.same_on_all_machines(), *script, *arguments]
        ),
    )
    report = ending.report()
    if report:
        say(f"lockstep: {report}")
    unread = options.flags_for_script() if ending.status == 0 and not ending.options_read else []
    if unread:
        say(
            f"lockstep: {'error' if options.strict else 'warning'}: {', '.join(unread)} had no"
            " effect, because the script has not trained with lockstep; these options are for a"
            " script that calls ls.train or enters an ls.Session; call one of them, or leave"
            " them out"
        )
    return 2 if unread and options.strict else ending.status


@contextmanager
def _without_warnings_of_stores() -> Iterator[None]:
    """Silence torch's store, if torch is imported within: it prints 20 lines when its host is gone.
    Not for workers."""
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "ERROR"
    try:
        yield
    finally:
        del os.environ[name]


def count_gpus() -> int:
    with collector_paused():
        from lockstep.base import accelerator

    return accelerator.count()
