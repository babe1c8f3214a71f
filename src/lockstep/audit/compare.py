"""Runs the script on several numbers of processes with one global batch, and compares what it
learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from lockstep.audit.audit import add_result
from lockstep.audit.checks.area_result import AreaResult
from lockstep.audit.checks.compare import check_compare
from lockstep.audit.finding import Area, Audit
from lockstep.audit.records import Records, read_records
from lockstep.audit.runner import AuditOptions, run_audited
from lockstep.base.errors import LaunchError, say
from lockstep.base.system import shell_words

PERTURBED_RUNS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """The numbers of processes to compare, and how the script is told its batch."""

    processes: Sequence[int]
    global_batch: int
    """Samples of a step on all processes together."""
    per_rank_batch: str
    """Arguments of the script, with `{}` for the samples of a step on one process."""

    def __post_init__(self) -> None:
        if "{}" not in self.per_rank_batch:
            raise LaunchError(
                f"--per-rank-batch {self.per_rank_batch!r}; it is the script's option for one"
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
        return shell_words(
            "--per-rank-batch",
            self.per_rank_batch.replace("{}", str(self.global_batch // processes)),
        )


def add_compare(
    audit: Audit,
    options: AuditOptions,
    compare: CompareOptions,
    folder: Path,
    *,
    echo: BinaryIO | None,
) -> None:
    """Run the script as often as it takes, and add what depends on the number of processes."""

    def run(name: str, processes: int, perturb: int = 0) -> Records | None:
        if echo is not None:
            say(
                f"lockstep audit: the script runs on {processes}"
                f" process{'es' if processes > 1 else ''} ({name})"
            )
        (folder / name).mkdir()
        changed = replace(options, processes=processes, perturb=perturb)
        changed = changed.with_arguments(*compare.arguments(processes))
        if why := run_audited(changed, folder / name, torchrun=True, echo=echo).did_not_end:
            text = f"the script did not get to its end on {processes} processes: {why}"
            add_result(audit, AreaResult(Area.COMPARE, unseen=[text]))
            return None
        return read_records(folder / name)

    runs = [
        run("reference", 1),
        *(run(f"perturbed-{seed}", 1, seed) for seed in range(1, PERTURBED_RUNS + 1)),
    ]
    others = {count: run(f"processes-{count}", count) for count in compare.processes if count != 1}
    if any(each is None for each in [*runs, *others.values()]):
        return
    reference, *perturbed = [each for each in runs if each is not None]
    seen = {count: each for count, each in others.items() if each is not None}
    likely = f"; likely: {audit.findings[0].title}" if audit.findings else ""
    add_result(audit, check_compare(reference, perturbed, seen, likely))
