"""Holds the records of a run against all laws, and keeps of each fault the finding that names its
cause."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.audit.checks.area_result import AreaResult
from lockstep.audit.checks.collectives import check_collectives, check_files, is_broken_collective
from lockstep.audit.checks.gradients import check_applied_gradients
from lockstep.audit.checks.losses import check_losses
from lockstep.audit.checks.randomness import check_modes, check_randomness
from lockstep.audit.checks.replicas import check_replicas
from lockstep.audit.checks.samples import check_samples
from lockstep.audit.checks.schedules import check_schedules
from lockstep.audit.finding import Audit, Finding
from lockstep.audit.records import Records, read_records
from lockstep.audit.remedies import Cause
from lockstep.audit.runner import HangStacks

CONSEQUENCES = {
    Cause.NOT_REDUCED: {
        Cause.REPLICAS_DRIFT,
        Cause.WRONG_SCALE,
        Cause.MEAN_OF_MEANS,
        Cause.OPTIMIZER_STATE_DIFFERS,
        Cause.UNUSED_PARAMETER,
    },
    Cause.INITIAL_VALUES_DIFFER: {Cause.REPLICAS_DRIFT, Cause.OPTIMIZER_STATE_DIFFERS},
    Cause.UNUSED_PARAMETER: {Cause.REPLICAS_DRIFT, Cause.OPTIMIZER_STATE_DIFFERS},
    Cause.LOCAL_CLIPPING: {Cause.REPLICAS_DRIFT, Cause.NOT_REDUCED, Cause.OPTIMIZER_STATE_DIFFERS},
    Cause.LEARNING_RATES_DIFFER: {Cause.REPLICAS_DRIFT},
    Cause.NOT_TRAINED: {
        Cause.INITIAL_VALUES_DIFFER,
        Cause.NOT_REDUCED,
        Cause.REPLICAS_DRIFT,
        Cause.UNUSED_PARAMETER,
    },
    Cause.STALE_GRADIENTS: {Cause.WRONG_SCALE, Cause.MEAN_OF_MEANS},
    Cause.CLIPPED_SCALED: {Cause.WRONG_SCALE},
    Cause.UNEVEN_INPUTS: {Cause.SAMPLES_MISSING, Cause.HANG, Cause.COLLECTIVE_MISMATCH},
    Cause.COLLECTIVE_MISMATCH: {Cause.HANG},
    Cause.SAME_SAMPLES: {Cause.SAMPLES_MISSING, Cause.SAMPLES_REPEATED, Cause.SAME_AUGMENTATION},
    Cause.DATASETS_DIFFER: {Cause.SAMPLES_MISSING, Cause.EVALUATION_REPEATS},
    Cause.SEED_RESET: {Cause.SAME_RANDOM_NUMBERS, Cause.SAME_AUGMENTATION},
}
"""Causes -> those that follow from them, and are not said beside them."""


def judge(folder: Path, audit: Audit, hang: HangStacks | None) -> None:
    """Fill in what was found, what is right and what could not be seen, from the records in
    `folder`."""
    records = read_records(folder)
    if is_broken_collective(audit.error) and any(rank.has_ended for rank in records.ranks):
        audit.error, audit.status = "", 0  # the audit itself ended a rank, and the others missed it
        audit.notes.append(
            "the ranks did not take the same number of steps; all were ended when the first of them"
            " had taken enough"
        )
    audit.steps = records.steps
    if records.world_size:
        audit.processes = records.world_size
    checks = [
        check_samples(records),
        check_applied_gradients(records),
        check_losses(records),
        check_replicas(records),
        check_randomness(records),
        check_schedules(records),
        check_collectives(records, hung=hang is not None, error=audit.error),
        check_modes(records),
        check_files(records),
    ]
    for each in checks:
        add_result(audit, each)
    hidden = {cause for finding in audit.findings for cause in CONSEQUENCES.get(finding.cause, ())}
    audit.findings = [finding for finding in audit.findings if finding.cause not in hidden]
    if records.problems:
        audit.notes.append(
            f"{len(records.problems)} errors of the probes themselves; what they watch is not seen:"
            f" {records.problems[0]}"
        )
    if hang is not None:
        audit.notes.append(f"the script made no progress for {hang.seconds:.0f} s, and was ended")
    _say_single_process(audit, records)


def add_result(audit: Audit, result: AreaResult) -> None:
    """Add what was seen of one area."""
    known = {finding.cause for finding in audit.findings}
    audit.findings += [
        _with_short_line(finding) for finding in result.findings if finding.cause not in known
    ]
    if result.right and not result.findings:
        audit.right[result.area] = result.right
    if result.unseen:
        audit.unseen[result.area] = list(dict.fromkeys(result.unseen))


def _with_short_line(finding: Finding) -> Finding:
    path, _, number = finding.line.rpartition(":")
    if not path:
        return finding
    short = os.path.relpath(path)
    kept = {name: getattr(finding, name) for name in ("cause", "area", "evidence", "step", "names")}
    return Finding(line=f"{path if short.startswith('..') else short}:{number}", **kept)


def _say_single_process(audit: Audit, records: Records) -> None:
    if records.world_size == 1:
        audit.notes.append("the script trained on one process: nothing was compared between ranks")
