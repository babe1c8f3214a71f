"""`lockstep plan`: will it fit, how fast will it be, and which plan is best?"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.base import foreign_text
from lockstep.base.control_group import usable_cpus
from lockstep.base.errors import LaunchError, PlanError, say
from lockstep.base.parent import die_with_parent
from lockstep.base.system import refuse_on_windows
from lockstep.base.units import size
from lockstep.cli.arguments.launch import check_target, script_arguments
from lockstep.cli.arguments.plans import PlansCommand
from lockstep.cli.arguments.work_folder import ended_by_signals, work_folder
from lockstep.plan import Plan
from lockstep.planner.request import ENDED, OUTCOMES, PlanRequest

if TYPE_CHECKING:
    from lockstep.planner.forecast import Forecast
    from lockstep.planner.machines.machine import Machine
    from lockstep.planner.search import Outcome

TOP = 5
"""Plans that are shown."""
_BYTES = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class Quantity(click.FloatRange):
    """A finite number in a range."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


@click.command("plan", cls=PlansCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--on", "target", required=True, metavar="DEVICES", help='The devices: "64 x H100", "16 x A100-80GB over Ethernet", or "this".'
)
@click.option("--plans", multiple=True, metavar="PLAN...", help='Plans to predict: "shard=8,tensor=8" ... Default: search all legal ones.')
@click.option("--memory", metavar="SIZE", help="Memory of a device that may be used, such as 80GB. Default: all of it.")
@click.option("--tokens", type=Quantity(min=1), metavar="N", help="Tokens to train on, for days and cost. Default: the recipe's steps.")
@click.option("--price", type=Quantity(min=0), metavar="X", help="Price of a device-hour, for the cost.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of a table.")
@click.option("--html", type=click.Path(dir_okay=False), metavar="FILE", help="Write a page with all plans.")
@script_arguments()
def command(
    target: str,
    plans: tuple[str, ...],
    memory: str | None,
    tokens: float | None,
    price: float | None,
    as_json: bool,
    html: str | None,
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Predict memory and time of a training step on devices that are not here, and find the best plan for them.

    Runs the script, unchanged, up to `ls.train`. Then one step of its recipe is run under each plan by the code that
    trains, on this CPU, with tensors that have a shape and no values, in a world of which one rank is there. What it
    computes, sends and allocates is simulated on the devices. Each figure has the interval that its errors on published
    trainings suggest. Arguments between SCRIPT and --plans are the script's.

    \b
    Examples:
      lockstep plan --on "64 x H100" train.py
      lockstep plan --on "8 x A100-40GB" --memory 38GB --html plan.html train.py --plans shard=8 shard=4,tensor=2

    Exit status: 0 if a plan fits, 1 if none does, 2 for a mistake (a device that nobody has described, a bad plan, a
    script that fails or never trains).
    """
    refuse_on_windows("lockstep plan")
    check_target(script, is_module=is_module)
    if html is not None and not Path(html).absolute().parent.is_dir():
        raise LaunchError(f"--html {html}; its directory is not there; name a file in a directory that is")
    line = [*(["-m"] if is_module else []), script, *arguments]
    machine, outcomes = _predicted(target, plans, memory, line, None if as_json or not sys.stderr.isatty() else _progress)
    if all(each.is_refused for each in outcomes):
        reasons = dict.fromkeys(f"{each.plan}: {each.reason}" for each in outcomes)
        raise PlanError("no plan can be run; " + "; ".join(reasons))
    forecast = _forecast(script, machine, outcomes, tokens, price)
    if html is not None:
        from lockstep.planner.html_page import page

        Path(html).write_text(page(forecast), encoding="utf-8")
    if as_json:
        print(json.dumps(forecast.as_json(), indent=2, allow_nan=False))
    else:
        _show(forecast)
    return 0 if forecast.fitting else 1


def _predicted(
    target: str, plans: tuple[str, ...], memory: str | None, line: Sequence[str], progress: Callable[[int, str], None] | None
) -> tuple[Machine, list[Outcome]]:
    """Return the machine that the target names, and the outcomes of the plans, or of a search."""
    from lockstep.planner.machines.target import machine_at, processes_here, written

    limit = None if memory is None else memory_bytes(memory)
    processes = processes_here(target)
    count = machine_at(target, None).cluster.count if processes is None else processes
    for plan in plans:  # before this machine is measured, which takes long
        Plan.parse(plan).resolve(count)
    with ended_by_signals(), work_folder(None, "lockstep-plan-", "traces") as folder:
        found = written(target, folder)
        machine = machine_at(found, limit)
        device = machine.cluster.device
        if limit is not None and limit > device.memory_bytes:
            raise PlanError(f"--memory {memory}; a device ({device.name}) has {size(device.memory_bytes)}; give no more than that")
        request = PlanRequest(
            target=found,
            plans=plans,
            memory_bytes=limit,
            slots=usable_cpus(),
            folder=str(folder),
            is_here=processes is not None,
        )
        return machine, _outcomes(line, request, progress)


def memory_bytes(text: str) -> int:
    """Return the bytes of a size such as `80GB` or `79.5GiB`. Raises `PlanError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]i?B)", text.strip())
    if match is None or match[2] not in _BYTES or not float(match[1]):
        raise PlanError(f"--memory {text!r}; it is a size with its unit, more than none: 80GB, 79.5GiB, 500MB")
    return int(float(match[1]) * _BYTES[match[2]])


def _outcomes(line: Sequence[str], request: PlanRequest, progress: Callable[[int, str], None] | None) -> list[Outcome]:
    """Run the script, which predicts the plans. Raises `LaunchError` if it fails, or never trains."""
    folder = Path(request.folder)
    environ = {**os.environ, **request.write(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    with (folder / "output.txt").open("w") as output:
        streams: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        dies_with_this = partial(die_with_parent, os.getpid())
        process = subprocess.Popen([sys.executable, *line], env=environ, start_new_session=True, preexec_fn=dies_with_this, **streams)
        try:
            shown = 0
            while process.poll() is None:
                time.sleep(0.1)
                if progress is not None and len(found := _read(folder)) > shown:
                    progress(shown := len(found), found[-1].plan)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the forks that predict plans
            process.wait()
    if not (folder / ENDED).exists():
        said = (folder / "output.txt").read_text(encoding="utf-8", errors="replace").strip()
        raise LaunchError(_why_no_outcome(line, process.returncode, said))
    return _read(folder)


def _why_no_outcome(line: Sequence[str], status: int, said: str) -> str:
    name = " ".join(line)
    if status == 0:
        return f"{name} ended and did not train; a plan is made from the recipe that it gives to ls.train; call ls.train(recipe)"
    last = "; it said:\n" + "\n".join(said.splitlines()[-20:]) if said else ", and said nothing"
    return f"{name} failed with status {status} before its first step; correct the script{last}"


def _read(folder: Path) -> list[Outcome]:
    from lockstep.planner.search import Outcome

    path = folder / OUTCOMES
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Outcome.from_json(json.loads(line)) for line in lines]


def _progress(count: int, plan: str) -> None:
    say(f"lockstep plan: {count} plans predicted, the latest {plan}")


def _forecast(script: str, machine: Machine, outcomes: Sequence[Outcome], tokens: float | None, price: float | None) -> Forecast:
    from lockstep.planner.forecast import Forecast
    from lockstep.planner.machines.fitted import load_fitted
    from lockstep.planner.machines.this_machine import HERE

    interval = load_fitted()[1]["seconds"] if machine.is_gpu else HERE
    return Forecast.of(script, machine.cluster, outcomes, interval, tokens=tokens, price_per_hour=price)


def _show(forecast: Forecast) -> None:
    """Print the best plans, and what is known beside them."""
    from rich.table import Table
    from rich.text import Text

    from lockstep.planner.forecast import HEAD

    console = foreign_text.console(None if sys.stdout.isatty() else 140)
    table = Table(title=forecast.title, title_justify="left")
    for name in HEAD:
        table.add_column(name, justify="left" if name in ("plan", "limited by") else "right", overflow="fold", no_wrap=name == "plan")
    for row in forecast.rows(TOP):
        table.add_row(*row)
    console.print(table if table.rows else Text(forecast.title))
    for line in forecast.lines(TOP):
        console.print(Text(line))
