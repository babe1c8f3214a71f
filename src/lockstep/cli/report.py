"""`lockstep report`: makes an HTML page about runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from lockstep.base.errors import LaunchError, say
from lockstep.base.files import write_atomically
from lockstep.base.foreign_text import show
from lockstep.cli.arguments import check_output, print_json, unwritable
from lockstep.logging.run_files import is_there
from lockstep.search.request import SEARCH, check_storage


@click.command("report")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="The page. Default: report.html in RUN_DIR, or here for several runs.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for programs; writes a page only with -o."
)
@click.option("--storage", metavar="URL", help="The --storage of lockstep search, for its report.")
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True)
def command(
    output: str | None, as_json: bool, storage: str | None, run_dirs: tuple[str, ...]
) -> int:
    """Make a page of a run, or of several side by side.

    Writes one HTML file that needs no network and no other file: loss, evaluation metrics, learning
    rate, gradient norm, throughput, memory, step time by rank, events, recipe, plan and
    environment. The page of several runs also has their differences. The runs may be running, ended
    or failed. The page of a search's folder has its trials, the best value over time, and the
    effect of each parameter.

    \b
    Examples:
      lockstep report runs/a
      lockstep report runs/a runs/b -o compared.html
      lockstep report runs/search-train
      lockstep report --storage postgresql://me@db/searches runs/search-train
      lockstep report --json runs/a

    Exit status: 0, or 2 for a mistake (no run directory, a file that cannot be written).
    """
    from lockstep.report.page import GENERATOR

    check_storage(storage)
    searches = [folder for folder in run_dirs if is_there(Path(folder), SEARCH)]
    if storage is not None and not searches:
        raise LaunchError(
            "--storage without the folder of a search; a run has no database; leave it out"
        )
    if searches and len(run_dirs) > 1:
        raise LaunchError(
            f"{searches[0]} is the folder of a search, which has its own report; give no other"
            " folder with it"
        )
    path = Path("report.html" if len(run_dirs) > 1 else Path(run_dirs[0]) / "report.html")
    path = path if output is None else Path(output)
    makes_page = output is not None or not as_json
    data, lines, make = _of_search(Path(searches[0]), storage) if searches else _of_runs(run_dirs)
    if makes_page:
        check_output(path, "report", lambda old: GENERATOR.encode() in old)
    if as_json:
        print_json(data)
    else:
        show("\n".join(lines))
    if makes_page:
        # names of folders may contain any bytes
        text = make(time.time()).encode(errors="backslashreplace")
        try:
            write_atomically(path, text)
        except OSError as error:
            raise unwritable("-o", path, error) from error
        (say if as_json else show)(f"{path} ({len(text) / 1000:,.0f} kB)")
    return 0


Report = tuple[Any, Sequence[str], Callable[[float], str]]


def _of_runs(run_dirs: Sequence[str]) -> Report:
    from lockstep.report.page import report_page
    from lockstep.report.reader import read_runs
    from lockstep.report.tables import report_json, report_lines

    runs = read_runs(run_dirs)
    return report_json(runs), report_lines(runs), lambda made: report_page(runs, made=made)


def _of_search(folder: Path, storage: str | None) -> Report:
    from lockstep.search.page import search_page
    from lockstep.search.study import results_in
    from lockstep.search.summary import summary_lines

    results, importance = results_in(folder, storage)
    lines = summary_lines(results)
    return (
        {**results.as_json(), "importance": importance},
        lines,
        lambda made: search_page(results, importance, made),
    )
