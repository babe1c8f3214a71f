"""`lockstep verify`: does a plan train the same model as one process?"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.base import foreign_text
from lockstep.base.control_group import usable_cpus
from lockstep.base.errors import USER_ERROR_STATUS, LaunchError, say
from lockstep.base.system import refuse_on_windows
from lockstep.cli.arguments.launch import (
    check_target,
    launch_option,
    options_from,
    script_arguments,
)
from lockstep.cli.arguments.plans import PlansCommand
from lockstep.cli.arguments.work_folder import ended_by_signals, work_folder
from lockstep.verify.jobs import parse_plans

if TYPE_CHECKING:
    from lockstep.verify.verdict import Report, Verdict


@click.command("verify", cls=PlansCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--plans",
    multiple=True,
    metavar="PLAN...",
    help='Plans to verify: "replicate=2" "shard=2,numerics=bitwise" ...',
)
@click.option(
    "--steps",
    default=8,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="K",
    help="Steps to compare.",
)
@click.option(
    "--bitwise", is_flag=True, help="Require the same bits under every plan (numerics=bitwise)."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of a table.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write a page with each plan's divergence from one process.",
)
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
@click.option(
    "--timeout",
    default=600.0,
    show_default=True,
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="Longest time of a run.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes at once. Default: the number of cores; with GPUs, one run.",
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Keep the traces of all runs in this new directory.",
)
@launch_option("share_devices")
@script_arguments()
def command(
    plans: tuple[str, ...],
    steps: int,
    bitwise: bool,
    as_json: bool,
    html: str | None,
    no_float64: bool,
    whole_microbatch_loss: bool,
    timeout: float,
    jobs: int | None,
    keep: str | None,
    share_devices: bool | None,
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Prove that plans train the same model as one process.

    Runs the script, unchanged, on one process and under each plan for K steps, and compares every
    gradient, parameter and buffer. The tolerance is measured: it is a multiple of what rounding
    alone does to this model (perturbed runs with noise of one unit in the last place). Names the
    first step and parameter that differ by more, and the likely cause. Arguments between SCRIPT and
    --plans are the script's; everything from --plans on is for verify.

    \b
    Examples:
      lockstep verify train.py --lr 0.1 --plans "replicate=2" "replicate=3,numerics=bitwise"
      lockstep verify --plans replicate=2 --steps 4 --html verify.html train.py --lr 0.1

    Exit status: 0 if all plans pass, 1 if one does not, 2 for a mistake (a bad plan, a script that
    fails or never trains).
    """
    if not plans and (
        meant := next((each for each in arguments if each.partition("=")[0] == "--plan"), None)
    ):
        raise LaunchError(
            f"{meant} is an argument of SCRIPT here; the option of lockstep verify is --plans;"
            " write --plans PLAN..."
        )
    parsed = parse_plans(plans, bitwise=bitwise)
    refuse_on_windows("lockstep verify")
    check_target(script, is_module=is_module)
    if html is not None and not Path(html).absolute().parent.is_dir():
        raise LaunchError(
            f"--html {html}; its directory is not there; name a file in a directory that is"
        )

    # imports numpy and safetensors: after all checks that need neither
    from lockstep.verify.runner import Runner
    from lockstep.verify.verification import Verification, VerifyOptions

    options = VerifyOptions(
        plans=parsed,
        steps=steps,
        float64=not no_float64,
        check_microbatch_size=not whole_microbatch_loss,
    )
    line = [*(["-m"] if is_module else []), script, *arguments]
    launch = options_from({"share_devices": share_devices})
    with (
        ended_by_signals(),
        work_folder(keep, "lockstep-verify-", "traces") as folder,
        Runner(
            line,
            folder,
            timeout_seconds=timeout,
            slots=jobs or _slots(),
            launch=launch,
            **_reports(quiet=as_json),
        ) as runner,
    ):
        report = Verification(script, options, runner).run()
        if html is not None:
            from lockstep.verify.page import verify_page

            Path(html).write_text(verify_page(report), encoding="utf-8")
    if as_json:
        print(json.dumps(report.as_json(), indent=2, allow_nan=False))
    else:
        show(report)
    if any(
        not verdict.ran and verdict.exit_status == USER_ERROR_STATUS for verdict in report.verdicts
    ):
        return USER_ERROR_STATUS
    return 0 if report.passed else 1


def show(report: Report) -> None:
    """Print the table, and below it the mismatches and notes."""
    from rich.table import Table
    from rich.text import Text

    from lockstep.verify.verdict import COLUMNS, ROUNDING

    console = foreign_text.console(None if sys.stdout.isatty() else 120)
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
        table.add_row(*verdict.row(report.tolerance), style=None if verdict.passed else "red")
    console.print(table)
    console.print(Text(report.summary(), style="green" if report.passed else "red"))
    for verdict in report.verdicts:
        for line in _lines(verdict):
            console.print(Text(line))
    if (mismatch := report.microbatch_size_mismatch) is not None:
        console.print(
            Text(
                f"the same batch with another microbatch size: {mismatch.text()}\n "
                f" {mismatch.why()}"
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
    """Return what `Runner` calls: each run is reported that begins, unless `quiet`; to a person,
    each that ends too."""

    def report(line: str) -> None:
        say(f"lockstep verify: {line}")

    if sys.stderr.isatty():
        return {"begins": report, "progress": report}
    return {} if quiet else {"begins": report}


def _slots() -> int:
    if os.path.exists("/dev/nvidia0"):
        return 1
    return usable_cpus()
