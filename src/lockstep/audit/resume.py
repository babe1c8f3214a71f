"""Interrupts the script after a save, resumes it, and compares it with the run that went on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from lockstep.audit.audit import add_result
from lockstep.audit.checks.area_result import AreaResult
from lockstep.audit.checks.resume import check_resumed
from lockstep.audit.finding import Area, Audit
from lockstep.audit.records import Records, read_records
from lockstep.audit.runner import AuditOptions, run_audited
from lockstep.base.errors import say

STEPS = 8
"""Steps that are compared after the resume."""


def add_resume(
    audit: Audit, options: AuditOptions, folder: Path, *, torchrun: bool, echo: BinaryIO | None
) -> None:
    """Run the script twice more, and add what is not taken up. The records of the run without
    interruption are in `folder`."""
    whole = read_records(folder)
    saved = _saved_after(whole)
    if saved is None:
        text = (
            f"nothing was saved between two of the {whole.steps} steps that were seen (more"
            " --steps)"
        )
        add_result(audit, AreaResult(Area.RESUME, unseen=[text]))
        return
    _remove_new_files(whole)
    for name, steps, more in (
        ("interrupted", saved, ()),
        ("resumed", STEPS, options.resume_arguments or ()),
    ):
        if echo is not None:
            say(f"lockstep audit: the script is {name}, for {steps} steps")
        (folder / name).mkdir()
        changed = replace(options, steps=steps).with_arguments(*more)
        if why := run_audited(changed, folder / name, torchrun=torchrun, echo=echo).did_not_end:
            text = f"the {name} script did not get to step {steps}: {why}"
            add_result(audit, AreaResult(Area.RESUME, unseen=[text]))
            return
    add_result(
        audit,
        check_resumed(
            whole, read_records(folder / "interrupted"), read_records(folder / "resumed"), saved
        ),
    )


def _remove_new_files(records: Records) -> None:
    """Remove what the first run has saved and what was not there before: a script may go on from it
    by itself."""
    seen: set[str] = set()
    for row in (row for rank in records.ranks for row in rank.of("save")):
        if row["path"] not in seen and not row["existed"]:
            say(f"lockstep audit: {row['path']}, which the first run saved, is removed")
            Path(row["path"]).unlink(missing_ok=True)
        seen.add(row["path"])


def _saved_after(records: Records) -> int | None:
    """The number of steps after which the script first saved, and went on."""
    steps = [
        row["step"]
        for rank in records.ranks
        for row in rank.of("save")
        if 0 < row["step"] < records.steps
    ]
    return min(steps, default=None)
