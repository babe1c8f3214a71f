"""An audit from its options to its result: the script is run, and its records are held against the
laws."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from lockstep.audit.compare import CompareOptions, add_compare
from lockstep.audit.finding import Area, Audit, Cause, Finding
from lockstep.audit.resume import add_resume
from lockstep.audit.runner import AuditOptions, HangStacks, ScriptRun, launcher_of, run_script
from lockstep.audit.source import ScriptSource
from lockstep.audit.stacks import waiting_lines
from lockstep.base.errors import LaunchError


def run_audit(
    options: AuditOptions,
    folder: Path,
    *,
    compare: CompareOptions | None = None,
    echo: BinaryIO | None = None,
) -> Audit:
    """Run the script and return what was found. `folder` is empty; the records stay in it. `echo`:
    of the script's output. Raises `LaunchError` if there was nothing to look at."""
    if ScriptSource.find(options.script, is_module=options.is_module).uses_lockstep():
        raise LaunchError(
            f"{options.script} uses lockstep; lockstep audit is for scripts that do not; use"
            f" lockstep verify {options.script} --plans "
            f'"replicate={options.processes}", which compares every gradient with that of one'
            " process"
        )
    torchrun, note = launcher_of(options)
    given = options
    if compare is not None:
        options = replace(
            options, arguments=[*options.arguments, *compare.arguments(options.processes)]
        )
    result = run_script(options, folder, torchrun=torchrun, echo=echo)
    audit = Audit(
        script=shlex.join(options.line),
        processes=options.processes,
        steps=0,
        notes=[note] if note else [],
        error=result.error,
        status=result.status,
        seconds=result.seconds,
    )
    from lockstep.audit.audit import judge

    judge(folder, audit, result.hang)
    if options.resume_arguments is not None and result.hang is None and not result.timed_out:
        add_resume(audit, options, folder, torchrun=torchrun, echo=echo)
    if compare is not None and result.hang is None and not result.timed_out:
        add_compare(audit, given, compare, folder, echo=echo)
    if result.hang is not None:
        _say_where(audit, result.hang, options.root)
    if result.timed_out:
        audit.notes.append(
            f"the script had not ended after {options.timeout_seconds:g} s (--timeout), and was"
            f" ended in step {audit.steps}"
        )
    if not (audit.steps or audit.findings):
        raise LaunchError(_why_not(options, result, torchrun=torchrun))
    if (
        not result.error
        and result.hang is None
        and 0 < audit.steps < options.steps
        and not result.timed_out
    ):
        audit.notes.append(f"the script ended after {audit.steps} of {options.steps} steps")
    return audit


def _say_where(audit: Audit, hang: HangStacks, root: str) -> None:
    """Note where each process of a script that hangs stands, and see to it that a hang is a
    finding."""
    if not any(finding.area is Area.COLLECTIVES for finding in audit.findings):
        evidence = f"no process made progress for {hang.seconds:.0f} s"
        audit.findings.append(Finding(cause=Cause.HANG, area=Area.COLLECTIVES, evidence=evidence))
    audit.notes += [
        f"process {pid} stands at {place}"
        for pid, place in waiting_lines(hang.stacks, root).items()
    ]


def _why_not(options: AuditOptions, run: ScriptRun, *, torchrun: bool) -> str:
    """Return why nothing was seen: the script failed, or took no step."""
    launcher = f"torchrun --nproc-per-node {options.processes}" if torchrun else "python"
    if run.timed_out:
        return (
            f"{options.script} took no optimizer step in {options.timeout_seconds:g} s; an audit"
            " looks at the steps of torch's optimizers; give it less to do before its first step,"
            " or a longer --timeout"
        )
    if run.error or run.status:
        return (
            f"{options.script} failed before its first optimizer step (exit status {run.status}),"
            f" so there is nothing to look at; make `{launcher} {shlex.join(options.line)}` work"
            f" first. It ended with:\n{run.error}"
        )
    return (
        f"{options.script} ended without an optimizer step; an audit looks at the steps of torch's"
        " optimizers; give it the arguments with which it trains"
    )
