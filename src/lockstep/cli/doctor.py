"""`lockstep doctor`: is this machine, or are these machines, fit to train?"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.arguments import launch_option, options_from
from lockstep.launch.count import count_processes
from lockstep.launch.machines import Machines

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.doctor.examine import Examination
    from lockstep.doctor.line import Line

_STYLES = {"ok": "green", "absent": "dim", "slow": "yellow", "wrong": "bold red"}
_MOST_IN_A_MATRIX = 8
"""Ranks whose links are shown one by one."""
_WIDTH = 100
"""Where the output is no terminal, and at most where it is one."""


@click.command("doctor")
@launch_option("nproc", metavar="N|auto", help="Processes, as for lockstep run. auto (default): one per GPU, or 2.")
@launch_option("nnodes", help="Machines, as for lockstep run. Give the same command on each. Default: 1.")
@launch_option("rdzv")
@launch_option("run_dir", help="The directory that runs will write to. Default: the working directory.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of tables.")
def command(as_json: bool, **given: Any) -> int:
    """Say whether this machine, or these machines, are fit to train.

    Looks at versions, devices, shared memory, threads, limits, clocks, the network interface, variables that bite, and the file system of
    the run directory. Then starts processes, checks every collective in every data type against its definition, and times them and the
    links between all pairs. Each line has a verdict: ok, slow, wrong, or absent (not there, which is no fault), and a remedy.

    \b
    Examples:
      lockstep doctor
      lockstep doctor --nproc 8 --run-dir /shared/runs
      lockstep doctor --nnodes 2 --rdzv node1:29400 --run-dir /shared/runs

    Exit status: 0 where all is well, 1 where something is wrong or slow, 2 for a mistake in what lockstep was given.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what torch's sockets would say in 20 lines, a line of ours says
    options = options_from(given)
    options.validate()
    machines = Machines.parse(options)
    automatic = options.nproc == "auto"
    count = (_count_gpus() or 2) if automatic else count_processes(options.nproc, None, _count_gpus, name="--nproc ")

    from lockstep.doctor.examine import examine  # imports torch: after all that can be checked without it

    found = examine(nproc=count, machines=machines, run_dir=Path(options.run_dir) if options.run_dir is not None else None)
    if found.ending.signal is not None:
        print(f"lockstep: {found.ending.report()}", file=sys.stderr)
        return found.ending.status
    if as_json:
        print(json.dumps(_as_json(found), indent=2, allow_nan=False))
    elif found.is_first:
        _show(found)
    else:
        print(f"lockstep: {found.verdict}; the first machine shows the report", file=sys.stderr)
    if found.ending.first is not None and not found.results.get("notes"):
        print(f"lockstep: {found.ending.report()}", file=sys.stderr)
    return found.status


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _as_json(found: Examination) -> dict[str, Any]:
    results = found.results
    known = {name: results.get(name) for name in ("world_size", "backend", "ranks", "checked", "timed", "links")}
    return {"verdict": found.verdict, "lines": [asdict(line) for line in found.lines], **known}


def _show(found: Examination) -> None:
    """All lines, then the times and the links, then the verdict."""
    from rich.console import Console
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH, highlight=False)
    console.width = min(console.width, _WIDTH)
    console.print(_checks(found.lines))
    if found.results.get("timed"):
        _times(console, found.results)
    if found.results.get("links") and found.results["world_size"] <= _MOST_IN_A_MATRIX:
        _links(console, found.results)
    bad = [line.check for line in found.lines if line.is_bad]
    if bad:
        console.print(Text(f"{len(bad)} to mend: {', '.join(dict.fromkeys(bad))}", style="red"))
    else:
        console.print(Text("all is well", style="green"))


def _checks(lines: Sequence[Line]) -> Any:
    from rich.padding import Padding
    from rich.text import Text

    table = _table()
    table.add_column(min_width=14, max_width=22)
    table.add_column(width=7)
    table.add_column(ratio=1)
    several = len({line.machine for line in lines if line.machine}) > 1
    for section in dict.fromkeys(line.section for line in lines):
        table.add_row(Text(section, style="bold"))
        for line in _shown([line for line in lines if line.section == section]):
            text = Text(line.found)
            if several and line.machine:
                text = Text.assemble((f"{line.machine}: ", "dim"), text)
            if line.verdict != "ok":
                text.append(f"\n→ {line.remedy}", style="italic" if line.is_bad else "dim")
            table.add_row(Padding(line.check, (0, 0, 0, 2)), Text(line.verdict, style=_STYLES[line.verdict]), text)
    return table


def _shown(lines: Sequence[Line]) -> list[Line]:
    """All that is not ok, with all machines of which it is said; of what is ok on several, the first's."""
    shown: list[Line] = []
    for line in lines:
        same = next((number for number, each in enumerate(shown) if replace(each, machine="") == replace(line, machine="")), None)
        if line.verdict == "ok":
            if not any((each.check, each.verdict) == (line.check, "ok") for each in shown):
                shown.append(line)
        elif same is None:
            shown.append(line)
        else:
            shown[same] = replace(line, machine=f"{shown[same].machine}, {line.machine}")
    return shown


def _table() -> Any:
    from rich.table import Table

    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)


def _columns(names: Sequence[str]) -> Any:
    """A table of numbers, with a name before each row."""
    table = _table()
    table.show_header = True
    table.header_style = "dim"
    table.add_column("", min_width=14)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _times(console: Console, results: Mapping[str, Any]) -> None:
    from rich.text import Text

    from lockstep.doctor.definitions import COLLECTIVES
    from lockstep.doctor.line import duration, size
    from lockstep.doctor.links import rate

    rows = results["timed"]
    sizes = sorted({row["size_bytes"] for row in rows if row["size_bytes"]})
    table = _columns((*map(size, sizes), "algorithm", "bus"))
    for collective in COLLECTIVES:
        mine = {row["size_bytes"]: row for row in rows if row["collective"] == collective}
        if collective == "barrier" and mine:
            table.add_row(f"  {collective}", duration(mine[0]["seconds"]))
        elif mine:
            last = mine[max(mine)]
            times = [duration(mine[each]["seconds"]) if each in mine else "" for each in sizes]
            table.add_row(f"  {collective}", *times, rate(last["algorithm_bandwidth"]), rate(last["bus_bandwidth"]))
    console.print(Text(f"\ntimes on {results['world_size']} ranks by size, and bandwidths at the largest", style="bold"))
    console.print(table)


def _links(console: Console, results: Mapping[str, Any]) -> None:
    from rich.text import Text

    from lockstep.doctor.line import names_of_machines
    from lockstep.doctor.links import rate

    ranks = range(results["world_size"])
    about = results["machines"]
    names = names_of_machines([(machine["facts"]["host"], machine["facts"]["address"]) for machine in about])
    places = [f", {names[place]}" if len(names) > 1 else "" for place in results["ranks"]]
    table = _columns([f"to {rank}" for rank in ranks])
    known = {(link["sender"], link["receiver"]): rate(link["bytes_per_second"]) for link in results["links"]}
    for sender in ranks:
        table.add_row(f"  from rank {sender}{places[sender]}", *(known.get((sender, receiver), "") for receiver in ranks))
    console.print(Text("\nlinks, by rank", style="bold"))
    console.print(table)
    console.print()
