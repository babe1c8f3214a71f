"""`lockstep search`: finds good values of a script's hyper-parameters."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from lockstep.base.container import usable_cpus
from lockstep.base.errors import LaunchError, say
from lockstep.base.foreign_text import show
from lockstep.base.system import refuse_on_windows, shell_words
from lockstep.base.units import seconds
from lockstep.cli.arguments import (
    NewFile,
    ScriptCommand,
    count_option,
    json_option,
    launch_option,
    mode_option,
    options_from,
    print_json,
    script_arguments,
    together,
    write_file,
)
from lockstep.launch.environment import count_processes
from lockstep.launch.termination import PREEMPTED_STATUS
from lockstep.options import check_run_dir
from lockstep.plan import Plan
from lockstep.scripts.line import ScriptLine
from lockstep.search.request import (
    PrunerName,
    SamplerName,
    SearchRequest,
    check_storage,
    direction_of,
)

if TYPE_CHECKING:
    from lockstep.search.results import SearchResults

LAUNCH = (
    "nproc",
    "plan",
    "save_every",
    "hang_after",
    "on_hang",
    "out_of_memory",
    "max_restarts",
    "compare_every",
    "backend",
    "share_devices",
)
"""Options of `lockstep run` that a search passes to each trial."""


search_options = together(
    click.option(
        "--metric",
        default="loss",
        show_default=True,
        help="Metric of the recipe's evaluations that compares trials.",
    ),
    mode_option,
    count_option(
        "--parallel",
        "parallel",
        None,
        "P",
        "Trials at a time. Default: as many as fit the machine.",
    ),
    click.option(
        "--run-dir",
        metavar="DIR",
        help="Folder of the search; an existing one is continued. Default: runs/search-SCRIPT, or"
        " runs/sweep-SCRIPT.",
    ),
    click.option(
        "--storage",
        metavar="URL",
        help="Optuna's storage, such as postgresql://user@host/name. Default: SQLite in DIR.",
    ),
    click.option("--name", metavar="NAME", help="Name of the study. Default: SCRIPT."),
    click.option(
        "--timeout", metavar="TIME", help="Save the trials and end after this time, such as 8h."
    ),
    click.option(
        "--slurm",
        metavar="OPTIONS",
        help="Submit P jobs to Slurm, each for one trial at a time, with these options of lockstep"
        ' slurm: "--time 8:00:00".',
    ),
    json_option,
    click.option("--csv", type=NewFile(), metavar="FILE", help="Write the results as a table."),
    *map(launch_option, LAUNCH),
)


@click.command("search", cls=ScriptCommand)
@count_option("--trials", "trials", None, "N", "All trials of the search, finished ones included.")
@click.option(
    "--sampler",
    type=click.Choice(get_args(SamplerName)),
    default="tpe",
    show_default=True,
    help="How the next values are proposed.",
)
@click.option(
    "--pruner",
    type=click.Choice(get_args(PrunerName)),
    default="none",
    show_default=True,
    help="How bad trials end early.",
)
@count_option("--population", "population", 8, "M", "Members, for --sampler pbt.", least=2)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sampler.")
@launch_option("set", help="Fix a parameter instead of searching it. May be repeated.")
@search_options
@script_arguments()
def command(
    trials: int | None,
    sampler: SamplerName,
    pruner: PrunerName,
    population: int,
    seed: int,
    line: ScriptLine,
    **given: Any,
) -> int:
    """Train SCRIPT many times, and find the best values of its hyper-parameters.

    The script declares parameters: lr = ls.param("lr", 3e-4, low=1e-5, high=1e-2, log=True). Each
    trial is an ordinary run in its own directory, DIR/trial-0007, on the processes of the plan. The
    first trial has the defaults; the sampler proposes the values of all later trials. Samplers,
    pruners and the storage are Optuna's.

    A trial that crashes, hangs, runs out of memory or diverges is a failed trial; the search goes
    on. After a kill at any moment, the same command continues the search: completed trials are not
    repeated, and interrupted ones resume from their checkpoints. Searches with the same storage
    share the trials.

    With --sampler pbt a population of M members is trained in generations of M trials. After each
    generation, members with a bad metric continue from the checkpoints of members with a good one,
    with changed values (population-based training).

    \b
    Examples:
      lockstep search --trials 50 train.py
      lockstep search --metric accuracy --mode max --trials 50 --parallel 4 --pruner asha train.py
      lockstep search --trials 200 --storage postgresql://me@db/s --run-dir /shared/s train.py

    Exit status: 0; 1 if no trial has succeeded; 2 for a mistake, or a script that fails in the same
    way in three trials; 75 after a request to end: the same command continues the search.
    """
    if trials is None and sampler != "grid":
        raise LaunchError(
            f"a search by {sampler} without --trials; only a grid ends by itself; give --trials"
            " 50, say"
        )
    fields: dict[str, Any] = {"trials": trials, "sampler": sampler, "pruner": pruner}
    return run_search(line, given, population=population, seed=seed, **fields)


def run_search(line: ScriptLine, given: dict[str, Any], **fields: Any) -> int:
    refuse_on_windows("lockstep search")
    check_storage(given["storage"])
    check_run_dir(given["run_dir"], "--run-dir")
    if given["slurm"] is not None:
        return _send_to_slurm(given["slurm"], given["parallel"], line)
    timeout = given["timeout"]
    launch = options_from({name: given[name] for name in (*LAUNCH, "set") if name in given})
    plan = launch.validate()
    command = click.get_current_context().info_name
    request = SearchRequest(
        line=line,
        metric=given["metric"],
        direction=direction_of(given["metric"], given["mode"]),
        parallel=given["parallel"],
        folder=Path(given["run_dir"] or f"runs/{command}-{line.name}"),
        storage=given["storage"],
        name=given["name"] or line.name,
        timeout_seconds=None if timeout is None else seconds(timeout, "--timeout", LaunchError),
        launch=launch,
        **fields,
    )
    results, ended_by = _run(request, plan)
    _print(results, request, as_json=given["as_json"], csv=given["csv"])
    if ended_by is not None:
        say(f"lockstep: stopped by {ended_by}; the same command continues")
        return PREEMPTED_STATUS
    return 0 if results.best is not None else 1


def _send_to_slurm(options: str, jobs: int | None, line: ScriptLine) -> int:
    """Submit a job array. Each job runs this search command, with one trial at a time."""
    from lockstep.cli.slurm import array_of
    from lockstep.launch.slurm import submit

    if jobs is None:
        raise LaunchError(
            "--slurm without --parallel, the number of jobs to submit; give --parallel 4, say"
        )
    context = click.get_current_context()
    words = given_options(context, without=("slurm", "parallel"))
    command = ["lockstep", str(context.info_name), *words, "--parallel", "1", *line.words]
    text = array_of(command, shell_words("--slurm", options), jobs=jobs, name=line.name)
    say(
        f"lockstep: job {submit(text)}, an array of {jobs}: squeue shows them; their trials are in"
        " the folder of the search"
    )
    if "--storage" not in words:
        say(
            "lockstep: the nodes share an SQLite file, which needs a file system with locks; a"
            " database is safer (--storage postgresql://...)"
        )
    return 0


def given_options(context: click.Context, *, without: Sequence[str]) -> list[str]:
    words: list[str] = []
    for option in context.command.params:
        name = str(option.name)
        is_given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if not isinstance(option, click.Option) or name in (*without, "is_module") or not is_given:
            continue
        value = context.params[name]
        if option.is_flag:
            words.append(option.opts[-1])
        else:
            words += [
                word
                for each in (value if option.multiple else [value])
                for word in (option.opts[-1], str(each))
            ]
    return words


def _run(request: SearchRequest, plan: Plan | None) -> tuple[SearchResults, str | None]:
    from lockstep.search.fork_server import ForkServer

    server = ForkServer()  # imports torch while Optuna is imported here
    try:
        try:
            from lockstep.search.coordinator import Search
            from lockstep.search.slots import slots
            from lockstep.search.study import TrialStorage
        except ModuleNotFoundError as error:
            if error.name not in ("optuna", "sqlalchemy"):
                raise
            raise LaunchError(
                "lockstep search needs Optuna, which is not installed; install it: pip install"
                " 'lockstep-train[search]'"
            ) from None
        storage = TrialStorage(request)
        gpus = server.gpus()
        count = count_processes(request.launch.nproc, plan, lambda: min(gpus, 1), name="--nproc ")
        free = slots(
            request.parallel,
            count,
            cpus=usable_cpus(),
            gpus=gpus,
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
            share_devices=request.launch.share_devices,
        )

        def on_end(number: int) -> None:
            _show(number, storage.results(), request, len(free))

        search = Search(request, storage, server, free, count, on_end)
        ended = storage.results().ended
        goes_on = f" goes on: {ended} trials have ended" if ended else ""
        say(f"lockstep: search {request.name} in {request.folder}{goes_on}")
        ended_by = search.run()
        return storage.results(), ended_by
    finally:
        server.close()


def _show(number: int, results: SearchResults, request: SearchRequest, parallel: int) -> None:
    from lockstep.search.summary import progress_line, seconds_left

    trial = results.trials[number]
    value = "" if trial.value is None else f", {results.metric} {trial.value:.6g}"
    names = [name for name, _ in request.sweep] or results.searched
    values = {name: trial.parameters[name] for name in names if name in trial.parameters}
    given = ", ".join(
        f"{name}={f'{each:.5g}' if isinstance(each, float) else each}"
        for name, each in values.items()
    )
    say(
        f"trial {number} {trial.state}{value}"
        + (f" ({given})" if given else "")
        + (f": {trial.reason}" if trial.state == "failed" else "")
    )
    say(f"  {progress_line(results, seconds_left(results, parallel=parallel, now=time.time()))}")


def _print(
    results: SearchResults, request: SearchRequest, *, as_json: bool, csv: Path | None
) -> None:
    from lockstep.search.summary import summary_lines

    if csv is not None:
        write_file("--csv", csv, results.as_csv())
    if as_json:
        print_json(results.as_json())
    else:
        show("\n".join(summary_lines(results)))
        at = [] if request.storage is None else ["--storage", request.storage]
        say(f"{shlex.join(['lockstep', 'report', *at, str(request.folder)])} makes a page of it")
