"""`lockstep audit`: finds faults in a training script that does not use lockstep."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from lockstep.base import foreign_text
from lockstep.base.errors import USER_ERROR_STATUS, LaunchError, say
from lockstep.base.system import refuse_on_windows, shell_words
from lockstep.cli.arguments import (
    ScriptCommand,
    count_option,
    html_option,
    json_option,
    keep_option,
    print_json,
    script_arguments,
    seconds_option,
    work_folder,
    write_file,
)
from lockstep.scripts.line import ScriptLine

if TYPE_CHECKING:
    from lockstep.audit.finding import Audit, Finding
    from lockstep.audit.run import CompareOptions

_WIDTH = 100


def _numbers(ctx: click.Context, parameter: click.Parameter, text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(each.isdecimal() and int(each) for each in parts):
        raise LaunchError(
            f"--compare {text}; it takes numbers of processes with commas between them; write for "
            "example --compare 1,2,4"
        )
    return [int(each) for each in parts]


def _compare_options(
    compare: list[int] | None, global_batch: int | None, per_rank_batch: str | None
) -> CompareOptions | None:
    from lockstep.audit.run import CompareOptions

    if compare is not None and global_batch is not None and per_rank_batch is not None:
        return CompareOptions(
            processes=compare, global_batch=global_batch, per_rank_batch=per_rank_batch
        )
    given = {"compare": compare, "global-batch": global_batch, "per-rank-batch": per_rank_batch}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    raise LaunchError(
        f"without {', '.join(missing)}; --compare, --global-batch and --per-rank-batch go together;"
        " give all three"
    )


@click.command(
    "audit",
    cls=ScriptCommand,
    uses_lockstep=False,
)
@count_option("--nproc", "processes", 2, "N", "Processes to run the script on.")
@count_option("--steps", "steps", 20, "K", "Optimizer steps to look at.")
@seconds_option(
    "--hang-after",
    "hang_after_seconds",
    60.0,
    "Time without progress on any rank after which the script counts as hanging.",
)
@seconds_option("--timeout", "timeout_seconds", 600.0, "Longest time of the run.")
@click.option(
    "--launcher",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "torchrun", "python"]),
    help="Start the script by torchrun, or by python if it starts its processes itself.",
)
@click.option(
    "--compare",
    metavar="N,N...",
    callback=_numbers,
    help=(
        "Also run the script on these numbers of processes with one global batch, and compare every"
        " step with one process."
    ),
)
@count_option(
    "--global-batch",
    "global_batch",
    None,
    "N",
    "With --compare: samples of a step on all processes together.",
)
@click.option(
    "--per-rank-batch",
    metavar="ARGS",
    help=(
        "With --compare: the script's option for the batch of one process, such as \"--batch-size"
        ' {}".'
    ),
)
@click.option(
    "--resume-args",
    metavar="ARGS",
    help=(
        "Arguments with which the script resumes. The audit then also interrupts and resumes it, "
        "and compares with an uninterrupted run."
    ),
)
@json_option
@html_option("Write a page with each finding, its source and its remedy.")
@keep_option("the records of all processes")
@script_arguments()
def command(
    compare: list[int] | None,
    global_batch: int | None,
    per_rank_batch: str | None,
    resume_args: str | None,
    as_json: bool,
    html: Path | None,
    keep: str | None,
    line: ScriptLine,
    **given: Any,
) -> int:
    """Find out what is wrong with a training script that does not use lockstep.

    Runs SCRIPT unchanged, as torchrun would, and ends it after K optimizer steps. SCRIPT may use
    DDP, FSDP, Accelerate, Lightning or your own loop. Checks each rank's samples, gradients before
    and after their reduction, parameters, buffers, random numbers, learning rates, collectives and
    files. Names each fault with the rule that it breaks (its "law"), the evidence, the line of your
    script, and the lines to change. Also lists the checks that found no fault, and the checks that
    could not be made. All arguments after SCRIPT are the script's.

    \b
    Examples:
      lockstep audit train.py --lr 0.1
      lockstep audit --nproc 4 --steps 50 --html audit.html train.py
      lockstep audit --compare 1,2,4 --global-batch 32 --per-rank-batch "--batch-size {}" train.py
      lockstep audit --resume-args "--resume checkpoint.pt" train.py
      lockstep audit -m project.train --config small.yaml

    Exit status: 0 if nothing is wrong, 1 for findings, 2 if the script fails or takes no optimizer
    step, or for a mistake in the arguments.
    """
    refuse_on_windows("lockstep audit")

    from lockstep.audit.run import run_audit
    from lockstep.audit.runner import AuditOptions

    resume = None if resume_args is None else shell_words("--resume-args", resume_args)
    options = AuditOptions(line=line, resume_arguments=resume, **given)
    compared = _compare_options(compare, global_batch, per_rank_batch)
    echo = None if as_json or sys.stderr is None else sys.stderr.buffer
    with work_folder("lockstep-audit-", keep) as folder:
        if not as_json:
            steps = f"{options.steps} optimizer steps"
            say(f"lockstep audit: {line.script}, {steps}; its output follows")
        audit = run_audit(options, folder, compare=compared, echo=echo)
    if as_json:
        print_json(audit.as_json())
    else:
        _show(audit)
    if html is not None:
        from lockstep.audit.page import audit_page
        from lockstep.audit.source import lines_of_files

        lines = lines_of_files([each.line for each in audit.findings], [options.root])
        write_file("--html", html, audit_page(audit, lines))
    return 1 if audit.findings else USER_ERROR_STATUS if audit.error else 0


def _show(audit: Audit) -> None:
    from rich.table import Table
    from rich.text import Text

    console = foreign_text.console(_WIDTH)

    def wrapped(text: str, indent: str = "") -> str:
        following = f"{indent}   "
        return fill(
            text,
            console.width,
            initial_indent=indent,
            subsequent_indent=following,
            break_long_words=False,
        )

    def tell(text: str | Text, style: str = "") -> None:
        console.print(text if isinstance(text, Text) else Text(text, style), soft_wrap=True)

    style = "green" if audit.passed and not audit.error else "red"
    tell(Text.assemble(f"{audit.script}: {audit.extent}: ", (audit.verdict, style)))
    if audit.findings:
        table = Table(title_justify="left")
        for name in ("", "finding", "line", "evidence"):
            table.add_column(name, justify="left" if name else "right", overflow="fold")
        for number, finding in enumerate(audit.findings, 1):
            table.add_row(*map(Text, (str(number), finding.title, finding.line, finding.evidence)))
        console.print(table)
    for number, finding in enumerate(audit.findings, 1):
        where = f" ({finding.line})" if finding.line else ""
        tell(f"{number}. {finding.title}{where}", "bold")
        for text, is_code in _paragraphs(finding):
            tell(f"{'':9}{text}" if is_code else wrapped(text, "   "))
    for line in _lines(audit):
        tell(wrapped(line))
    if audit.error:
        tell(f"the script failed (exit status {audit.status}):\n{audit.error}")


def _paragraphs(finding: Finding) -> Iterator[tuple[str, bool]]:
    yield f"law: {finding.law}", False
    head = "remedy: "
    for is_code, lines in groupby(
        finding.remedy.splitlines(), key=lambda line: line.startswith("    ")
    ):
        for text in lines if is_code else [head + " ".join(lines)]:
            yield text.removeprefix("    ") if is_code else text, is_code
        head = ""


def _lines(audit: Audit) -> Iterator[str]:
    for area, text in audit.right.items():
        yield f"right: {area.value}: {text}"
    for area, texts in audit.unseen.items():
        for text in texts:
            yield f"not seen: {area.value}: {text}"
    for note in audit.notes:
        yield f"note: {note}"
