"""`lockstep verify`: checks that a plan trains the same model as one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.base import foreign_text
from lockstep.base.container import usable_cpus
from lockstep.base.errors import USER_ERROR_STATUS, LaunchError, say
from lockstep.base.system import refuse_on_windows
from lockstep.cli.arguments import (
    PlansCommand,
    count_option,
    html_option,
    json_option,
    keep_option,
    launch_option,
    options_from,
    print_json,
    script_arguments,
    seconds_option,
    work_folder,
    write_file,
)
from lockstep.scripts.line import ScriptLine
from lockstep.verify.jobs import parse_plans

if TYPE_CHECKING:
    from lockstep.verify.verdict import Report, Verdict


@click.command("verify", cls=PlansCommand)
@click.option(
    "--plans",
    multiple=True,
    metavar="PLAN...",
    help='Plans to verify: "replicate=2" "shard=2,numerics=bitwise" ...',
)
@count_option("--steps", "steps", 8, "K", "Steps to compare.")
@click.option(
    "--bitwise", is_flag=True, help="Require the same bits under every plan (numerics=bitwise)."
)
@json_option
@html_option("Write a page with each plan's divergence from one process.")
@click.option(
    "--no-float64",
    is_flag=True,
    help="Do not repeat the first step in float64, which shows what rounding hides.",
)
@click.option(
    "--whole-microbatch-loss",
    is_flag=True,
    help="The loss may depend on how the batch is split into microbatches (contrastive losses).",
)
@seconds_option("--timeout", "timeout", 600.0, "Longest time of a run.")
@count_option(
    "--jobs",
    "jobs",
    None,
    "N",
    "Processes at once. Default: the number of cores; with GPUs, one run.",
)
@keep_option("the traces of all runs")
@launch_option("share_devices")
@script_arguments()
def command(
    plans: tuple[str, ...],
    steps: int,
    bitwise: bool,
    as_json: bool,
    html: Path | None,
    no_float64: bool,
    whole_microbatch_loss: bool,
    timeout: float,
    jobs: int | None,
    keep: str | None,
    share_devices: bool | None,
    line: ScriptLine,
) -> int:
    """Prove that plans train the same model as one process.

    Runs the script, unchanged, on one process and under each plan for K steps, and compares every
    gradient, parameter and buffer. Runs with noise of one unit in the last place measure the effect
    of rounding on the model. The tolerance is a multiple of the effect of rounding. The command
    names the first step and parameter with a larger difference, and the likely cause. Arguments
    between SCRIPT and --plans go to the script, and everything from --plans on to verify.

    \b
    Examples:
      lockstep verify train.py --lr 0.1 --plans "replicate=2" "replicate=3,numerics=bitwise"
      lockstep verify --plans replicate=2 --steps 4 --html verify.html train.py --lr 0.1

    Exit status: 0 if all plans pass, 1 if one does not, 2 for a mistake (a bad plan, a script that
    fails or never trains).
    """
    given = [each for each in line.arguments if each.partition("=")[0] == "--plan"]
    if given and not plans:
        raise LaunchError(
            f"{given[0]} is an argument of SCRIPT here; the option of lockstep verify is --plans;"
            " write --plans PLAN..."
        )
    parsed = parse_plans(plans, bitwise=bitwise)
    refuse_on_windows("lockstep verify")

    # after all checks that do not need numpy and safetensors, because it imports them
    from lockstep.verify.runner import Runner
    from lockstep.verify.verification import Verification, VerifyOptions

    options = VerifyOptions(
        plans=parsed,
        steps=steps,
        float64=not no_float64,
        check_microbatch_size=not whole_microbatch_loss,
    )
    launch = options_from({"share_devices": share_devices})
    # with GPUs, each run uses all of them
    slots = jobs or (1 if os.path.exists("/dev/nvidia0") else usable_cpus())
    reports = _reports(quiet=as_json)
    with (
        work_folder("lockstep-verify-", keep) as folder,
        Runner(line, folder, timeout, slots, launch=launch, **reports) as runner,
    ):
        report = Verification(line, options, runner).run()
        if html is not None:
            from lockstep.verify.page import verify_page

            write_file("--html", html, verify_page(report))
    if as_json:
        print_json(report.as_json())
    else:
        _show(report)
    if USER_ERROR_STATUS in [each.exit_status for each in report.verdicts if not each.ran]:
        return USER_ERROR_STATUS
    return 0 if report.passed else 1


def _show(report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    from lockstep.verify.verdict import COLUMNS, ROUNDING

    console = foreign_text.console(120)
    table = Table(
        title=f"{report.script}: {report.steps} steps against one process", title_justify="left"
    )
    for name in COLUMNS:
        table.add_column(
            name,
            justify="right" if name == "processes" else "left",
            overflow="fold",
            no_wrap=name == "plan",
        )
    for verdict in report.verdicts:
        table.add_row(*verdict.row(), style=None if verdict.passed else "red")
    console.print(table)
    console.print(Text(report.summary(), style="green" if report.passed else "red"))
    for verdict in report.verdicts:
        for line in _lines(verdict):
            console.print(Text(line))
    if (mismatch := report.microbatch_size_mismatch) is not None:
        console.print(
            Text(
                f"the same batch with another microbatch size: {mismatch.text()}\n"
                f"  {mismatch.why()}"
            )
        )
    for note in report.notes:
        console.print(Text(f"note: {note}"))
    if not all(verdict.bitwise for verdict in report.verdicts):
        console.print(Text(ROUNDING, style="dim"))


def _lines(verdict: Verdict) -> Iterator[str]:
    if not verdict.ran:
        yield (
            f"{verdict.plan}: the run failed (exit status {verdict.exit_status}):\n{verdict.error}"
        )
    if verdict.mismatch is not None:
        yield f"{verdict.plan}: {verdict.mismatch.text()}"
        yield f"  {verdict.mismatch.why()}"
    for each in verdict.compression:
        yield f"  {verdict.plan}: {each.text()}"
    for note in verdict.notes:
        yield f"  note, {verdict.plan}: {note}"


def _reports(*, quiet: bool) -> dict[str, Callable[[str], None]]:
    def report(line: str) -> None:
        say(f"lockstep verify: {line}")

    if sys.stderr.isatty():
        return {"begins": report, "progress": report}
    return {} if quiet else {"begins": report}
