"""`lockstep doctor`: are these machines fit to train?"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.base import foreign_text
from lockstep.base.errors import LaunchError, say
from lockstep.base.foreign_text import show
from lockstep.base.system import require_linux
from lockstep.cli.arguments.launch import launch_option, options_from
from lockstep.cli.arguments.outputs import NewFile, json_option
from lockstep.launch.count import count_processes
from lockstep.launch.machines import Machines
from lockstep.options import RunOptions
from lockstep.scripts.launch import count_gpus

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.doctor.check_result import CheckResult
    from lockstep.doctor.diagnose import Diagnosis

_STYLES = {"ok": "green", "skipped": "dim", "slow": "yellow", "failed": "bold red"}
_MOST_IN_A_MATRIX = 8
"""Most ranks for which links are shown one by one."""
_WIDTH = 100
"""Columns without a terminal; the most columns with one."""


@click.command("doctor")
@launch_option(
    "nproc",
    metavar="N|auto",
    help="Processes, as for lockstep run. auto (default): one per GPU, or 2.",
)
@launch_option(
    "nnodes", help="Machines, as for lockstep run. Give the same command on each. Default: 1."
)
@launch_option("rdzv")
@launch_option("share_devices")
@launch_option(
    "run_dir", help="The directory that runs will write to. Default: the working directory."
)
@click.option(
    "--write",
    type=NewFile(),
    metavar="FILE",
    help="Only measure this machine's accelerators, for lockstep plan --on FILE.",
)
@json_option
def command(write: Path | None, as_json: bool, **given: Any) -> int:
    """Check if this machine, or these machines, are fit to train.

    Looks at versions, devices, shared memory, threads, limits, clocks, the network interface,
    environment variables that cause trouble, and the file system of the run directory. Then starts
    processes, checks every collective in every dtype against its definition, and times collectives
    and the links between all pairs of ranks. Each check has a verdict (ok, slow, failed or skipped)
    and a remedy.

    \b
    Examples:
      lockstep doctor
      lockstep doctor --nproc 8 --run-dir /shared/runs
      lockstep doctor --write my-machine.toml
      lockstep doctor --nnodes 2 --rdzv node1:29400 --run-dir /shared/runs

    Exit status: 0 if all is well, 1 if something is wrong or slow, 2 for a mistake in the command.
    """
    require_linux("lockstep doctor")
    # one line of ours replaces 20 lines of torch's sockets
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    options = options_from(given)
    options.validate()
    machines = Machines.parse(options)
    automatic = options.nproc == "auto"
    count = (
        (count_gpus() or 2)
        if automatic
        else count_processes(options.nproc, None, count_gpus, name="--nproc ")
    )

    if write is not None:
        _write(write, count)
        return 0

    # imports torch: after all checks that do not need it
    from lockstep.doctor.diagnose import diagnose

    diagnosis = diagnose(
        nproc=count,
        machines=machines,
        run_dir=Path(options.run_dir) if options.run_dir is not None else None,
        environ={**os.environ, **RunOptions(share_devices=options.share_devices).to_environment()},
    )
    if diagnosis.ending.signal is not None:
        say(f"lockstep: {diagnosis.ending.report()}")
        return diagnosis.ending.status
    if as_json:
        print(json.dumps(_as_json(diagnosis), indent=2, allow_nan=False))
    elif diagnosis.is_first_machine:
        _show(diagnosis)
    else:
        say(f"lockstep: {diagnosis.verdict}; the first machine shows the report")
    if diagnosis.ending.first is not None and not diagnosis.results.get("statuses"):
        say(f"lockstep: {diagnosis.ending.report()}")
    return diagnosis.status


def _write(path: Path, processes: int) -> None:
    """Measure so many accelerators, and write their sheets. Raises `LaunchError`."""
    if path.suffix != ".toml":
        raise LaunchError(
            f"--write {path}; lockstep plan recognises a machine's file by its suffix; name it "
            f"{path.stem}.toml"
        )
    if not (gpus := count_gpus()):
        raise LaunchError(
            f"--write {path} measures accelerators, and this machine has none; plan with a data"
            " sheet: lockstep plan --on '1 x H100' SCRIPT"
        )
    if processes > gpus:
        raise LaunchError(
            f"--write with --nproc {processes} on {gpus} GPUs; each process needs its own GPU; "
            f"give --nproc {gpus}"
        )
    from lockstep.planner.machines.measuring_gpu import write_gpu_sheets

    files = write_gpu_sheets(path, processes)
    show(
        f"{' and '.join(map(str, files))}: the GPUs of this machine; lockstep plan --on"
        f" '{processes} x {path}' SCRIPT"
    )


def _as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    results = diagnosis.results
    known = {
        name: results.get(name)
        for name in ("world_size", "backend", "ranks", "checked", "timed", "point_to_point")
    }
    return {
        "verdict": diagnosis.verdict,
        "checks": [asdict(check) for check in diagnosis.checks],
        **known,
    }


def _show(diagnosis: Diagnosis) -> None:
    """The report as text: all checks, then times and links, then the verdict."""
    from rich.text import Text

    console = foreign_text.console(
        None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH
    )
    console.width = min(console.width, _WIDTH)
    console.print(_checks(diagnosis.checks))
    if diagnosis.results.get("timed"):
        _times(console, diagnosis.results)
    if (
        diagnosis.results.get("point_to_point")
        and diagnosis.results["world_size"] <= _MOST_IN_A_MATRIX
    ):
        _links(console, diagnosis.results)
    bad = [check.check for check in diagnosis.checks if check.is_bad]
    if bad:
        console.print(Text(f"{len(bad)} to fix: {', '.join(dict.fromkeys(bad))}", style="red"))
    else:
        console.print(Text("all is well", style="green"))


def _checks(checks: Sequence[CheckResult]) -> Any:
    from rich.padding import Padding
    from rich.text import Text

    table, several = _table(), len({check.machine for check in checks if check.machine}) > 1
    table.add_column(min_width=14, max_width=22)
    table.add_column(width=7)
    table.add_column(ratio=1)
    for section in dict.fromkeys(check.section for check in checks):
        table.add_row(Text(section, style="bold"))
        for check in _shown([check for check in checks if check.section == section]):
            text = Text(check.found)
            if several and check.machine:
                text = Text.assemble((f"{check.machine}: ", "dim"), text)
            if check.verdict != "ok":
                text.append(f"\n→ {check.remedy}", style="italic" if check.is_bad else "dim")
            table.add_row(
                Padding(check.check, (0, 0, 0, 2)),
                Text(check.verdict, style=_STYLES[check.verdict]),
                text,
            )
    return table


def _shown(checks: Sequence[CheckResult]) -> list[CheckResult]:
    """Rows of checks: one for each machine where a check is not ok, and one for a check that is ok
    everywhere."""
    shown: list[CheckResult] = []
    for check in checks:
        same = next(
            (
                number
                for number, each in enumerate(shown)
                if replace(each, machine="") == replace(check, machine="")
            ),
            None,
        )
        if check.verdict == "ok":
            if not any((each.check, each.verdict) == (check.check, "ok") for each in shown):
                shown.append(check)
        elif same is None:
            shown.append(check)
        else:
            shown[same] = replace(check, machine=f"{shown[same].machine}, {check.machine}")
    return shown


def _table() -> Any:
    from rich.table import Table

    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)


def _columns(names: Sequence[str]) -> Any:
    """A table of numbers with named rows."""
    table = _table()
    table.show_header = True
    table.header_style = "dim"
    table.add_column("", min_width=14)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _times(console: Console, results: Mapping[str, Any]) -> None:
    from rich.text import Text

    from lockstep.doctor.check_result import format_bandwidth, format_bytes, format_duration
    from lockstep.doctor.expected_results import COLLECTIVES

    rows = results["timed"]
    sizes = sorted({row["size_bytes"] for row in rows if row["size_bytes"]})
    table = _columns((*map(format_bytes, sizes), "algorithm", "bus"))
    for collective in COLLECTIVES:
        mine = {row["size_bytes"]: row for row in rows if row["collective"] == collective}
        if collective == "barrier" and mine:
            table.add_row(f"  {collective}", format_duration(mine[0]["seconds"]))
        elif mine:
            last = mine[max(mine)]
            times = [
                format_duration(mine[each]["seconds"]) if each in mine else "" for each in sizes
            ]
            table.add_row(
                f"  {collective}",
                *times,
                format_bandwidth(last["algorithm_bandwidth"]),
                format_bandwidth(last["bus_bandwidth"]),
            )
    console.print(
        Text(
            f"\ntimes on {results['world_size']} ranks by size, and bandwidths at the largest",
            style="bold",
        )
    )
    console.print(table)


def _links(console: Console, results: Mapping[str, Any]) -> None:
    from rich.text import Text

    from lockstep.doctor.check_result import format_bandwidth, machine_names

    ranks = range(results["world_size"])
    about = results["machines"]
    names = machine_names(
        [(machine["info"]["host"], machine["info"]["address"]) for machine in about]
    )
    places = [f", {names[place]}" if len(names) > 1 else "" for place in results["ranks"]]
    table = _columns([f"to {rank}" for rank in ranks])
    known = {
        (link["sender"], link["receiver"]): format_bandwidth(link["bytes_per_second"])
        for link in results["point_to_point"]
    }
    for sender in ranks:
        table.add_row(
            f"  from rank {sender}{places[sender]}",
            *(known.get((sender, receiver), "") for receiver in ranks),
        )
    console.print(Text("\nlinks, by rank", style="bold"))
    console.print(table)
    console.print()
