"""`lockstep doctor`: checks if machines can train."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.base import foreign_text
from lockstep.base.errors import LaunchError, say
from lockstep.base.foreign_text import show
from lockstep.base.system import require_linux
from lockstep.base.torch_import import importing_torch
from lockstep.cli.arguments import NewFile, json_option, launch_option, options_from, print_json
from lockstep.launch.environment import count_processes
from lockstep.launch.machines import Machines
from lockstep.options import RunOptions
from lockstep.scripts.launch import count_gpus

if TYPE_CHECKING:
    from rich.table import Table

    from lockstep.doctor.check_result import CheckResult
    from lockstep.doctor.diagnose import Diagnosis

_STYLES = {"ok": "green", "skipped": "dim", "slow": "yellow", "failed": "bold red"}
_MOST_IN_A_MATRIX = 8
_WIDTH = 100


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
    """Check whether this machine, or several machines, can train.

    Looks at versions, devices, shared memory, threads, limits, clocks, the network interface,
    environment variables that cause trouble, and the file system of the run directory. Starts
    processes, checks the results of every collective in every dtype, and times the collectives and
    the links between all pairs of ranks. Each check has a verdict (ok, slow, failed or skipped) and
    a remedy.

    \b
    Examples:
      lockstep doctor
      lockstep doctor --nproc 8 --run-dir /shared/runs
      lockstep doctor --write my-machine.toml
      lockstep doctor --nnodes 2 --rdzv node1:29400 --run-dir /shared/runs

    Exit status: 0 if all is well, 1 if something is wrong or slow, 2 for a mistake in the command.
    """
    require_linux("lockstep doctor")
    # lockstep prints one line instead of torch's 20 lines about sockets
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

    # after all checks that do not need torch, because it imports torch
    with importing_torch():
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
        print_json(_as_json(diagnosis))
    elif diagnosis.is_first_machine:
        _show(diagnosis)
    else:
        say(f"lockstep: {diagnosis.verdict}; the first machine shows the report")
    if diagnosis.ending.first is not None and not diagnosis.results.get("statuses"):
        say(f"lockstep: {diagnosis.ending.report()}")
    return diagnosis.status


def _write(path: Path, processes: int) -> None:
    if path.suffix != ".toml":
        raise LaunchError(
            f"--write {path}; lockstep plan recognises a machine's file by its suffix; name it"
            f" {path.stem}.toml"
        )
    if not (gpus := count_gpus()):
        raise LaunchError(
            f"--write {path} measures accelerators, and this machine has none; plan with a data"
            " sheet: lockstep plan --on '1 x H100' SCRIPT"
        )
    if processes > gpus:
        raise LaunchError(
            f"--write with --nproc {processes} on {gpus} GPUs; each process needs its own GPU;"
            f" give --nproc {gpus}"
        )
    from lockstep.planner.machines.measuring_gpu import write_gpu_sheets

    files = write_gpu_sheets(path, processes)
    show(
        f"{' and '.join(map(str, files))}: the GPUs of this machine; lockstep plan --on"
        f" '{processes} x {path}' SCRIPT"
    )


def _as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    names = ("world_size", "backend", "ranks", "checked", "timed", "point_to_point")
    return {
        "verdict": diagnosis.verdict,
        "checks": [asdict(check) for check in diagnosis.checks],
        **{name: diagnosis.results.get(name) for name in names},
    }


def _show(diagnosis: Diagnosis) -> None:
    from rich.text import Text

    results = diagnosis.results
    columns = os.environ.get("COLUMNS", "")
    console = foreign_text.console(int(columns) if columns.isdecimal() else _WIDTH)
    console.width = min(console.width, _WIDTH)
    console.print(_checks(diagnosis.checks))
    if results.get("timed"):
        title = f"times on {results['world_size']} ranks by size, and bandwidths at the largest"
        console.print(Text(f"\n{title}", style="bold"))
        console.print(_times(results["timed"]))
    if results.get("point_to_point") and results["world_size"] <= _MOST_IN_A_MATRIX:
        console.print(Text("\nlinks, by rank", style="bold"))
        console.print(_links(results))
        console.print()
    if bad := [check.check for check in diagnosis.checks if check.is_bad]:
        console.print(Text(f"{len(bad)} to fix: {', '.join(dict.fromkeys(bad))}", style="red"))
    else:
        console.print(Text("all is well", style="green"))


def _table(columns: Sequence[str] = ()) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=bool(columns))
    if columns:
        table.header_style = "dim"
        table.add_column("", min_width=14)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _checks(checks: Sequence[CheckResult]) -> Table:
    from rich.padding import Padding
    from rich.text import Text

    table, several = _table(), len({check.machine for check in checks if check.machine}) > 1
    table.add_column(min_width=14, max_width=22)
    table.add_column(width=7)
    table.add_column(ratio=1)
    for section in dict.fromkeys(check.section for check in checks):
        table.add_row(Text(section, style="bold"))
        for check in _rows_of([check for check in checks if check.section == section]):
            text = Text(check.found)
            if several and check.machine:
                text = Text.assemble((f"{check.machine}: ", "dim"), text)
            if check.verdict != "ok":
                text.append(f"\n→ {check.remedy}", style="italic" if check.is_bad else "dim")
            name, verdict = Padding(check.check, (0, 0, 0, 2)), check.verdict
            table.add_row(name, Text(verdict, style=_STYLES[verdict]), text)
    return table


def _rows_of(checks: Sequence[CheckResult]) -> list[CheckResult]:
    shown: dict[object, CheckResult] = {}
    for check in checks:
        is_ok = check.verdict == "ok"
        key = (check.check, "ok") if is_ok else replace(check, machine="")
        if key not in shown:
            shown[key] = check
        elif not is_ok:
            shown[key] = replace(check, machine=f"{shown[key].machine}, {check.machine}")
    return list(shown.values())


def _times(rows: Sequence[Mapping[str, Any]]) -> Table:
    from lockstep.doctor.check_result import format_bandwidth, format_bytes, format_seconds
    from lockstep.doctor.expected_results import COLLECTIVES

    sizes = sorted({row["size_bytes"] for row in rows if row["size_bytes"]})
    table = _table([*map(format_bytes, sizes), "algorithm", "bus"])
    for collective in COLLECTIVES:
        mine = {row["size_bytes"]: row for row in rows if row["collective"] == collective}
        times = {size: format_seconds(row["seconds"]) for size, row in mine.items()}
        if collective == "barrier" and mine:
            table.add_row(f"  {collective}", times[0])
        elif mine:
            last = mine[max(mine)]
            bandwidths = (last["algorithm_bandwidth"], last["bus_bandwidth"])
            cells = [times.get(size, "") for size in sizes]
            table.add_row(f"  {collective}", *cells, *map(format_bandwidth, bandwidths))
    return table


def _links(results: Mapping[str, Any]) -> Table:
    from lockstep.doctor.check_result import format_bandwidth, machine_names

    ranks = range(results["world_size"])
    names = machine_names(results["machines"])
    table = _table([f"to {rank}" for rank in ranks])
    known = {
        (link["sender"], link["receiver"]): format_bandwidth(link["bytes_per_second"])
        for link in results["point_to_point"]
    }
    for sender in ranks:
        machine = f", {names[results['ranks'][sender]]}" if len(names) > 1 else ""
        cells = [known.get((sender, receiver), "") for receiver in ranks]
        table.add_row(f"  from rank {sender}{machine}", *cells)
    return table
