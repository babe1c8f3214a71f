"""Divides the GPUs and threads of a machine among trials that run at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.base.errors import LaunchError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSlot:
    threads: int
    gpus: Sequence[str] = ()
    """Entries of CUDA_VISIBLE_DEVICES."""

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        threads = {} if "OMP_NUM_THREADS" in environ else {"OMP_NUM_THREADS": str(self.threads)}
        return threads | ({"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {})


def slots(
    parallel: int | None,
    processes: int,
    *,
    cpus: int,
    gpus: int,
    visible: str | None,
    share_devices: bool = False,
) -> list[TrialSlot]:
    """Return a slot for each trial that can run at the same time. A trial has `processes`
    processes, each with its own GPU."""
    if gpus and gpus < processes and not share_devices:
        raise LaunchError(
            f"a trial of {processes} processes on {gpus} GPUs; each process needs its own GPU;"
            " give a smaller --plan or --nproc, or --share-devices, to try a plan on fewer GPUs"
            " than it needs"
        )
    units = gpus or cpus
    most = max(1, units // processes)
    count = most if parallel is None else min(parallel, most) if gpus else parallel
    threads = max(1, cpus // (count * processes))
    if not gpus:
        return [TrialSlot(threads=threads)] * count
    names = visible.split(",") if visible else [str(number) for number in range(gpus)]
    return [
        TrialSlot(threads=threads, gpus=names[place * processes : (place + 1) * processes])
        for place in range(count)
    ]
