"""`lockstep sweep`: trains a script with each combination of hyper-parameter values."""

from __future__ import annotations

from typing import Any

import click

from lockstep.cli.arguments import ScriptCommand, script_arguments
from lockstep.cli.search import run_search, search_options
from lockstep.scripts.line import ScriptLine
from lockstep.search.request import sweep_of


@click.command("sweep", cls=ScriptCommand)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=A,B,...",
    help="The values of a parameter. May be repeated.",
)
@search_options
@script_arguments()
def command(assignments: tuple[str, ...], line: ScriptLine, **given: Any) -> int:
    """Train SCRIPT with each combination of values of its hyper-parameters.

    Works like lockstep search without a sampler: each combination is an ordinary run in its own
    directory, and after a kill the same command continues the sweep. The script declares its
    hyper-parameters with ls.param.

    \b
    Examples:
      lockstep sweep --set lr=1e-3,3e-3 --set seed=0,1,2 train.py
      lockstep sweep --set width=64,128 --metric accuracy --mode max --csv widths.csv train.py

    Exit status: see lockstep search.
    """
    fixed = {"trials": None, "sampler": "random", "pruner": "none", "seed": 0}
    return run_search(line, given, sweep=sweep_of(assignments), **fixed)
