"""Runs the audited script, and checks the records of its processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from lockstep.audit.checks.collectives import check_collectives, check_files, is_broken_collective
from lockstep.audit.checks.experts import check_experts, divided
from lockstep.audit.checks.gradients import check_applied_gradients
from lockstep.audit.checks.losses import check_losses
from lockstep.audit.checks.packing import check_packing
from lockstep.audit.checks.randomness import check_modes, check_randomness
from lockstep.audit.checks.replicas import check_replicas
from lockstep.audit.checks.reruns import check_compare, check_resumed
from lockstep.audit.checks.samples import check_samples
from lockstep.audit.checks.schedules import check_schedules
from lockstep.audit.finding import Area, AreaResult, Audit, Cause, Finding
from lockstep.audit.records import Records, read_records
from lockstep.audit.runner import AuditOptions, HangStacks, launcher_of, run_audited, waiting_lines
from lockstep.audit.source import ScriptSource
from lockstep.base.errors import LaunchError, say
from lockstep.base.system import shell_words
from lockstep.base.words import counted

RESUMED_STEPS = 8
PERTURBED_RUNS = 2
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
    Cause.EXPERTS_MIXED: {Cause.INITIAL_VALUES_DIFFER, Cause.REPLICAS_DRIFT},
    Cause.NORM_WITHOUT_EXPERTS: {
        Cause.LOCAL_CLIPPING,
        Cause.REPLICAS_DRIFT,
        Cause.OPTIMIZER_STATE_DIFFERS,
    },
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
"""Maps each cause to causes that follow from it. If a cause is found, the causes that follow from
it are not reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """The numbers of processes to compare, and the arguments that set the script's batch size."""

    processes: Sequence[int]
    global_batch: int
    """Number of samples in a step, over all processes."""
    per_rank_batch: str
    """Arguments of the script that set the batch size of one process. `{}` stands for the number of
    samples."""

    def __post_init__(self) -> None:
        if "{}" not in self.per_rank_batch:
            raise LaunchError(
                f"--per-rank-batch {self.per_rank_batch!r}; it must be the script's option for one"
                " process's batch, with {} for the number; write for example --per-rank-batch"
                ' "--batch-size {}"'
            )
        shell_words("--per-rank-batch", self.per_rank_batch)
        if uneven := [each for each in self.processes if each < 1 or self.global_batch % each]:
            raise LaunchError(
                f"--compare {','.join(map(str, self.processes))} with --global-batch"
                f" {self.global_batch}; it must be a multiple of each number of processes, which it"
                f" is not of {uneven[0]}; choose others"
            )

    def arguments(self, processes: int) -> list[str]:
        batch = str(self.global_batch // processes)
        return shell_words("--per-rank-batch", self.per_rank_batch.replace("{}", batch))


def run_audit(
    options: AuditOptions,
    folder: Path,
    *,
    compare: CompareOptions | None = None,
    echo: BinaryIO | None = None,
) -> Audit:
    """Run an audit that writes its records to `folder`. Raise `LaunchError` if the script takes no
    optimizer step."""
    line = options.line
    if ScriptSource.find(line).uses_lockstep():
        raise LaunchError(
            f"{line.script} uses lockstep; lockstep audit is for scripts that do not; use"
            f" lockstep verify {line.script} --plans "
            f'"replicate={options.processes}", which compares every gradient with one'
            " process's"
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
    records = read_records(folder)
    _judge(records, audit, end.hang)
    if end.hang is not None:
        _say_where(audit, end.hang, options.root)
    elif end.timed_out:
        audit.notes.append(
            f"the script had not ended after {options.timeout_seconds:g} s (--timeout), and was"
            f" ended in step {audit.steps}"
        )
    else:
        if options.resume_arguments is not None:
            _add(audit, _resumed(records, options, folder, torchrun, echo))
        if compare is not None:
            _add(audit, _compared(audit, given, compare, folder, echo))
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


def _judge(records: Records, audit: Audit, hang: HangStacks | None) -> None:
    if is_broken_collective(audit.error) and any(rank.has_ended for rank in records.ranks):
        # the audit itself ended a rank, so collectives of other ranks failed
        audit.error, audit.status = "", 0
        audit.notes.append(
            "the ranks did not take the same number of steps; all were ended when the first of them"
            " had taken enough"
        )
    audit.steps = records.steps
    audit.processes = records.world_size or audit.processes
    experts = divided(records)
    for result in (
        check_samples(records),
        check_applied_gradients(experts.others),
        check_losses(experts.others),
        check_experts(experts),
        check_packing(records),
        check_replicas(experts.others),
        check_randomness(records),
        check_schedules(records),
        check_collectives(records, hung=hang is not None, error=audit.error),
        check_modes(records),
        check_files(records),
    ):
        _add(audit, result)
    hidden = {cause for finding in audit.findings for cause in CONSEQUENCES.get(finding.cause, ())}
    audit.findings = [finding for finding in audit.findings if finding.cause not in hidden]
    if records.problems:
        audit.notes.append(
            f"{len(records.problems)} errors of the probes themselves; what they watch is not seen:"
            f" {records.problems[0]}"
        )
    if hang is not None:
        audit.notes.append(f"the script made no progress for {hang.seconds:.0f} s, and was ended")
    if records.world_size == 1:
        audit.notes.append("the script trained on one process: nothing was compared between ranks")


def _add(audit: Audit, result: AreaResult) -> None:
    known = {finding.cause for finding in audit.findings}
    for finding in result.findings:
        path, _, number = finding.line.rpartition(":")
        short = os.path.relpath(path) if path else ""
        if short and not short.startswith(".."):
            finding = replace(finding, line=f"{short}:{number}")
        if finding.cause not in known:
            audit.findings.append(finding)
    if result.right and not result.findings:
        audit.right[result.area] = result.right
    if result.unseen:
        audit.unseen[result.area] = list(dict.fromkeys(result.unseen))


def _say_where(audit: Audit, hang: HangStacks, root: str) -> None:
    if not any(finding.area is Area.COLLECTIVES for finding in audit.findings):
        evidence = f"no process made progress for {hang.seconds:.0f} s"
        audit.findings.append(Finding(cause=Cause.HANG, area=Area.COLLECTIVES, evidence=evidence))
    for pid, place in waiting_lines(hang.stacks, root).items():
        audit.notes.append(f"process {pid} stands at {place}")


def _resumed(
    whole: Records, options: AuditOptions, folder: Path, torchrun: bool, echo: BinaryIO | None
) -> AreaResult:
    saves = [row for rank in whole.ranks for row in rank.of("save")]
    saved = min((row["step"] for row in saves if 0 < row["step"] < whole.steps), default=None)
    if saved is None:
        text = (
            f"nothing was saved between two of the {whole.steps} steps that were seen (more"
            " --steps)"
        )
        return AreaResult(Area.RESUME, unseen=[text])
    # a script may automatically resume from what the first run has saved
    for path, existed in {row["path"]: row["existed"] for row in reversed(saves)}.items():
        if not existed:
            say(f"lockstep audit: {path}, which the first run saved, is removed")
            Path(path).unlink(missing_ok=True)
    for name, steps, more in (
        ("interrupted", saved, ()),
        ("resumed", RESUMED_STEPS, options.resume_arguments or ()),
    ):
        if echo is not None:
            say(f"lockstep audit: the script is {name}, for {steps} steps")
        (folder / name).mkdir()
        changed = replace(options, steps=steps).with_arguments(*more)
        if why := run_audited(changed, folder / name, torchrun=torchrun, echo=echo).did_not_end:
            text = f"the {name} script did not get to step {steps}: {why}"
            return AreaResult(Area.RESUME, unseen=[text])
    interrupted, resumed = (read_records(folder / name) for name in ("interrupted", "resumed"))
    return check_resumed(whole, interrupted, resumed, saved)


def _compared(
    audit: Audit,
    options: AuditOptions,
    compare: CompareOptions,
    folder: Path,
    echo: BinaryIO | None,
) -> AreaResult:
    result = AreaResult(Area.COMPARE)

    def run(name: str, processes: int, perturb: int = 0) -> Records:
        if echo is not None:
            say(f"lockstep audit: the script runs on {counted(processes, 'process')} ({name})")
        (folder / name).mkdir()
        changed = replace(options, processes=processes, perturb=perturb)
        changed = changed.with_arguments(*compare.arguments(processes))
        if why := run_audited(changed, folder / name, torchrun=True, echo=echo).did_not_end:
            result.unseen = [f"the script did not get to its end on {processes} processes: {why}"]
        return read_records(folder / name)

    reference = run("reference", 1)
    perturbed = [run(f"perturbed-{seed}", 1, seed) for seed in range(1, PERTURBED_RUNS + 1)]
    others = {count: run(f"processes-{count}", count) for count in compare.processes if count != 1}
    if result.unseen:
        return result
    likely = f"; likely: {audit.findings[0].title}" if audit.findings else ""
    return check_compare(reference, perturbed, others, likely)
