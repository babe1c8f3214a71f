"""`lockstep slurm`: writes the batch script of a run, and submits it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from lockstep.base.errors import LaunchError
from lockstep.base.system import shell_words
from lockstep.base.units import seconds
from lockstep.cli import run as run_command
from lockstep.cli.arguments import check_output, count_option, write_file
from lockstep.launch.slurm import BatchScript, follow, submit
from lockstep.scripts.line import check_script

_BEGINS = b"#!/bin/bash\n#SBATCH "


@click.command("slurm")
@count_option("--nodes", "nodes", 1, "N", "Nodes of the job.")
@count_option("--gpus-per-node", "gpus_per_node", None, "N", "GPUs on each node, one per process.")
@count_option(
    "--cpus-per-task",
    "cpus_per_task",
    None,
    "N",
    "CPUs on each node, for all its processes. Default: all.",
)
@click.option(
    "--time",
    required=True,
    metavar="LIMIT",
    help="The time limit of the job, as Slurm writes times: 2:00:00.",
)
@click.option(
    "--signal-before",
    default="2m",
    show_default=True,
    metavar="TIME",
    help="Time before the limit at which the run saves and ends.",
)
@click.option("--name", metavar="NAME", help="The name of the job. Default: that of SCRIPT.")
@click.option(
    "--run",
    "run_options",
    default="",
    metavar="OPTIONS",
    help='Options of lockstep run: "--plan shard=8 --max-restarts 3".',
)
@click.option(
    "--setup",
    multiple=True,
    metavar="LINE",
    help='A line of shell before the run: "module load python". May be repeated.',
)
@click.option(
    "--sbatch",
    multiple=True,
    metavar="OPTION",
    help='An option of sbatch: "--partition=gpu". May be repeated.',
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write the batch script to FILE, not to the terminal.",
)
@click.option("--submit", "is_sent", is_flag=True, help="Submit the job, and follow it to its end.")
@click.argument("script")
@click.argument("arguments", metavar="[-- ARGS...]", nargs=-1, type=click.UNPROCESSED)
def command(
    name: str | None,
    run_options: str,
    output: str | None,
    is_sent: bool,
    script: str,
    arguments: tuple[str, ...],
    **job: Any,
) -> int:
    """Write a batch script that runs SCRIPT on the nodes of a Slurm job.

    Before the time limit, and if the job is preempted, the run saves and ends, and the job is
    requeued and continues. The output of each node is written to NAME-JOB-NODE.txt. The run
    directory is runs/NAME-JOB, unless --run names another.

    --submit submits the script, and follows the job's states and output to its end. Ctrl-C stops
    this command, not the job.

    \b
    Examples:
      lockstep slurm train.py --nodes 4 --gpus-per-node 8 --time 2:00:00 -o train.sh
      lockstep slurm gpt.py --nodes 2 --gpus-per-node 8 --time 30 --run "--plan shard=16" -- --lr .1
      lockstep slurm train.py --time 1-0 --sbatch "--partition=long" --setup "module load python"

    Exit status: 0; 2 for a mistake; with --submit, 0 if the job completed, else its script's
    status, or 1.
    """
    given = shell_words("--run", run_options)
    # parsed only to check them: an unknown option is a usage error
    options = run_command.command.make_context("lockstep run", [*given, script, *arguments]).params
    if options["script"] != script:
        raise LaunchError(
            f"--run {run_options!r} has {options['script']!r}, which is not an option; --run takes"
            " options of lockstep run; give the script and its arguments after the options of"
            " lockstep slurm"
        )
    if is_sent and not options["is_module"]:
        check_script(script)
    name = Path(script).stem if name is None else name
    text = _job(name=name, script=script, arguments=arguments, run=given, **job).text()
    if output is not None:
        check_output(Path(output), "batch script", lambda old: old.startswith(_BEGINS))
        write_file("-o", Path(output), text)
    elif not is_sent:
        click.echo(text, nl=False)
    return _send(text, name) if is_sent else 0


def array_of(line: Sequence[str], options: Sequence[str], *, jobs: int, name: str) -> str:
    given = command.make_context("lockstep search --slurm", [*options, name]).params
    if given["nodes"] != 1 or given["run_options"] or given["output"] or given["is_sent"]:
        raise LaunchError(
            f"--slurm {shlex.join(options)!r}; it takes options of lockstep slurm for a one-node"
            " job; leave out --nodes, --run, -o and --submit"
        )
    for other in ("run_options", "output", "is_sent", "script", "arguments"):
        del given[other]
    given["name"] = given["name"] or name
    given["sbatch"] = (*given["sbatch"], f"--array=1-{jobs}")
    return _job(command=line, **given).text()


def _job(*, name: str, signal_before: str, sbatch: Sequence[str], **given: Any) -> BatchScript:
    for option in sbatch:
        if not option.startswith("-") or "\n" in option:
            raise LaunchError(
                f"--sbatch {option!r}; it takes one option of sbatch; repeat it for each, as in"
                ' --sbatch "--partition=gpu"'
            )
    if not re.fullmatch(r"[\w.-]+", name):
        raise LaunchError(f"--name {name}; it names files; use letters, digits, dots, - and _")
    return BatchScript(
        name=name,
        signal_seconds=int(seconds(signal_before, "--signal-before", LaunchError)),
        path=os.path.dirname(sys.executable),
        sbatch=sbatch,
        **given,
    )


def _send(text: str, name: str) -> int:
    job = submit(text)
    try:
        return follow(job, name, lambda said: click.echo(f"lockstep: {said}", err=True), click.echo)
    except KeyboardInterrupt:
        click.echo(
            f"lockstep: job {job} is no longer followed, and goes on; scancel {job} ends it",
            err=True,
        )
        return 130
