"""An audit from its options to its result: the script is run, and its records are held against the
laws."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from lockstep.audit.compare import CompareOptions, add_compare
from lockstep.audit.finding import Area, Audit, Finding
from lockstep.audit.remedies import Cause
from lockstep.audit.resume import add_resume
from lockstep.audit.runner import AuditOptions, HangStacks, launcher_of, run_audited
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
    line = options.line
    if ScriptSource.find(line).uses_lockstep():
        raise LaunchError(
            f"{line.script} uses lockstep; lockstep audit is for scripts that do not; use"
            f" lockstep verify {line.script} --plans "
            f'"replicate={options.processes}", which compares every gradient with that of one'
            " process"
        )
    torchrun, note = launcher_of(options)
    given = options
    if compare is not None:
        options = options.with_arguments(*compare.arguments(options.processes))
    end = run_audited(options, folder, torchrun=torchrun, echo=echo)
    audit = Audit(
        script=str(options.line),
        processes=options.processes,
        steps=0,
        notes=[note] if note else [],
        error=end.error,
        status=end.status,
        seconds=end.seconds,
    )
    from lockstep.audit.audit import judge

    judge(folder, audit, end.hang)
    if end.hang is not None:
        _say_where(audit, end.hang, options.root)
    elif end.timed_out:
        audit.notes.append(
            f"the script had not ended after {options.timeout_seconds:g} s (--timeout), and was"
            f" ended in step {audit.steps}"
        )
    else:
        if options.resume_arguments is not None:
            add_resume(audit, options, folder, torchrun=torchrun, echo=echo)
        if compare is not None:
            add_compare(audit, given, compare, folder, echo=echo)
        if not end.error and 0 < audit.steps < options.steps:
            audit.notes.append(f"the script ended after {audit.steps} of {options.steps} steps")
    if not (audit.steps or audit.findings):
        launcher = f"torchrun --nproc-per-node {options.processes}" if torchrun else "python"
        raise end.nothing_done(
            line,
            before="an optimizer step",
            needs="an audit looks at the steps of torch's optimizers",
            works=f"{launcher} {options.line}",
        )
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
