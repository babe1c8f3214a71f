"""`lockstep plan`: predicts memory and speed, and finds the best plan."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from lockstep.base import foreign_text
from lockstep.base.container import usable_cpus
from lockstep.base.errors import PlanError, say
from lockstep.base.system import refuse_on_windows
from lockstep.base.units import size
from lockstep.cli.arguments import (
    PlansCommand,
    html_option,
    json_option,
    print_json,
    script_arguments,
    work_folder,
    write_file,
)
from lockstep.plan import Plan
from lockstep.planner.prediction import OUTCOMES, Ended, Outcome, PlanRequest
from lockstep.scripts.line import ScriptLine
from lockstep.scripts.process import run_script

if TYPE_CHECKING:
    from lockstep.planner.forecast import Forecast
    from lockstep.planner.machines.costs import Machine
    from lockstep.planner.machines.hardware import Device

TOP = 5


class Quantity(click.FloatRange):
    """A click type: a finite number in a range."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


@click.command("plan", cls=PlansCommand)
@click.option(
    "--on",
    "targets",
    required=True,
    multiple=True,
    metavar="DEVICES",
    help=(
        'The devices: "64 x H100", "16 x A100-80GB over Ethernet", or "this" for this machine\'s.'
        " Several times: side by side."
    ),
)
@click.option(
    "--plans",
    multiple=True,
    metavar="PLAN...",
    help='Plans to predict: "shard=8,tensor=8" ... Default: search all legal ones.',
)
@click.option(
    "--memory", metavar="SIZE", help="Usable memory of a device, such as 80GB. Default: all of it."
)
@click.option(
    "--tokens",
    type=Quantity(min=1),
    metavar="N",
    help="Tokens to train on, for days and cost. Default: the recipe's steps.",
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    type=Quantity(min=0),
    metavar="X",
    help="Price of a device-hour, for the cost; or one for each --on.",
)
@json_option
@html_option("Write a page with all plans.")
@script_arguments()
def command(
    targets: tuple[str, ...],
    plans: tuple[str, ...],
    memory: str | None,
    tokens: float | None,
    prices: tuple[float, ...],
    as_json: bool,
    html: Path | None,
    line: ScriptLine,
) -> int:
    """Predict memory and time of a training step on other devices, and find the best plan for these
    devices.

    Runs the script, unchanged, up to `ls.train`. Executes one training step under each plan on this
    CPU, as one rank, on tensors that have shapes but no values. Simulates the step's operations,
    collectives and memory on the devices. Each figure has an interval, from the errors of the
    predictions of published trainings. Arguments between SCRIPT and --plans are the script's.

    \b
    Examples:
      lockstep plan --on "64 x H100" train.py
      lockstep plan --on "8 x A100-40GB" --memory 38GB --html plan.html train.py --plans shard=8
      lockstep plan --on "8 x H100" --price 2.5 --on "8 x MI300X" --price 2 --tokens 1e10 train.py

    Exit status: 0 if a plan fits, 1 if none does, 2 for a mistake (an unknown device, a bad plan, a
    script that fails or never trains), 130 after Ctrl-C, which prints the plans predicted so far.
    """
    refuse_on_windows("lockstep plan")
    if len(prices) not in (0, 1, len(targets)):
        raise PlanError(
            f"{len(prices)} prices for {len(targets)} --on; give one price, or one for each --on"
        )
    shows_progress = not as_json and sys.stderr.isatty()
    for target in targets:
        _check(target, plans, memory)
    forecasts: list[Forecast] = []
    is_interrupted = False
    for place, target in enumerate(targets):
        price = prices[min(place, len(prices) - 1)] if prices else None
        try:
            found = _predicted(target, plans, memory, line, shows_progress=shows_progress)
            forecasts.append(_forecast(line.script, found, tokens, price))
            is_interrupted = found.is_interrupted
        except KeyboardInterrupt:
            if not forecasts:
                raise
            is_interrupted = True
        except PlanError as error:
            if not forecasts and place == len(targets) - 1:
                raise
            say(f"lockstep plan: {target}: {error}")
        if is_interrupted:
            break
    if html is not None:
        from lockstep.planner.page import plan_page

        write_file("--html", html, plan_page(forecasts))
    if as_json:
        rows = [each.as_json() for each in forecasts]
        print_json(rows[0] if len(targets) == 1 else rows)
    else:
        _show(forecasts)
    if is_interrupted:
        return 128 + signal.SIGINT
    return 0 if any(each.fitting for each in forecasts) else 1


@dataclass(frozen=True, slots=True)
class _Found:
    machine: Machine
    outcomes: list[Outcome]
    ended: Ended
    is_interrupted: bool


def _check(target: str, plans: tuple[str, ...], memory: str | None) -> None:
    from lockstep.planner.machines.hardware import cluster_of

    cluster = cluster_of(target)
    for plan in plans:
        Plan.parse(plan).resolve(cluster if isinstance(cluster, int) else cluster.count)
    if memory is not None:
        limit = memory_bytes(memory)
        if not isinstance(cluster, int):
            _check_memory(memory, limit, cluster.device)


def _check_memory(memory: str, limit: int, device: Device) -> None:
    if limit > device.memory_bytes:
        raise PlanError(
            f"--memory {memory}; a device ({device.name}) has {size(device.memory_bytes)}; give at"
            " most that"
        )


def _predicted(
    target: str,
    plans: tuple[str, ...],
    memory: str | None,
    line: ScriptLine,
    *,
    shows_progress: bool,
) -> _Found:
    from lockstep.planner.machines.costs import Machine
    from lockstep.planner.machines.hardware import devices_here, parse_target, replace_this

    limit = None if memory is None else memory_bytes(memory)
    with work_folder("lockstep-plan-") as folder:
        found = replace_this(target, folder)
        machine = Machine.of(parse_target(found), limit)
        if memory is not None and limit is not None:
            _check_memory(memory, limit, machine.cluster.device)
        request = PlanRequest(
            target=found,
            plans=plans,
            memory_bytes=limit,
            slots=usable_cpus(),
            folder=str(folder),
            is_here=devices_here(target) is not None,
        )
        is_interrupted = not _run(line, request, shows_progress=shows_progress)
        return _Found(machine, _read(folder), Ended.read(folder) or Ended(), is_interrupted)


def memory_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT])(i?)B", text.strip())
    if match is None or not float(match[1]):
        raise PlanError(
            f"--memory {text!r}; it takes a positive size with its unit: 80GB, 79.5GiB, 500MB"
        )
    unit = 1024 if match[3] else 1000
    return int(float(match[1]) * unit ** (1 + "KMGT".index(match[2].upper())))


def _run(line: ScriptLine, request: PlanRequest, *, shows_progress: bool) -> bool:
    folder, shown = Path(request.folder), 0

    def look() -> bool:
        nonlocal shown
        if shows_progress and len(found := _read(folder)) > shown:
            shown = len(found)
            say(f"lockstep plan: {shown} plans predicted, the latest {found[-1].plan}")
        return False

    quiet = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *line.words]
    try:
        end = run_script(command, request, folder, environ={**os.environ, **quiet}, look=look)
    except KeyboardInterrupt:
        if all(each.is_refused for each in _read(folder)):
            raise
        return False
    if Ended.read(folder) is None:
        raise end.nothing_done(
            line,
            before="a call of ls.train",
            needs="a plan is made from the recipe given to ls.train",
            works=f"python {line}",
        )
    return True


def _read(folder: Path) -> list[Outcome]:
    path = folder / OUTCOMES
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Outcome.from_json(json.loads(line)) for line in lines]


def _forecast(script: str, found: _Found, tokens: float | None, price: float | None) -> Forecast:
    from lockstep.planner.forecast import Forecast, struck
    from lockstep.planner.machines.costs import INTERVALS

    cluster, remarks = found.machine.cluster, list[str]()
    if found.ended.why is not None:
        remarks.append(found.ended.why)
    if all(each.is_refused for each in found.outcomes):
        raise PlanError("; ".join(["no plan can be run", *remarks, *struck(found.outcomes)]))
    if found.ended.devices is not None:
        cluster = cluster.of(found.ended.devices)
    if found.is_interrupted:
        remarks.append("interrupted: these are the plans predicted so far")
    return Forecast(
        script=script,
        cluster=cluster,
        outcomes=found.outcomes,
        interval=INTERVALS["seconds"],
        tokens=tokens,
        price_per_hour=price,
        remarks=remarks,
    )


def _show(forecasts: Sequence[Forecast]) -> None:
    from rich.table import Table
    from rich.text import Text

    from lockstep.planner.forecast import HEAD, LEFT, SIDE_BY_SIDE, side_by_side

    console = foreign_text.console(140)

    def show(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        table = Table(title=title, title_justify="left")
        for name in head:
            justify: Literal["left", "right"] = "left" if name in LEFT else "right"
            table.add_column(name, justify=justify, overflow="fold", no_wrap=name == "plan")
        for row in rows:
            table.add_row(*row)
        console.print(table if table.rows else Text(title))

    if len(forecasts) > 1:
        show(f"{forecasts[0].script}: the best plan of each", SIDE_BY_SIDE, side_by_side(forecasts))
    for forecast in forecasts:
        show(forecast.title, HEAD, forecast.rows(TOP))
        for line in (*forecast.remarks, *forecast.lines(TOP)):
            console.print(Text(line))
