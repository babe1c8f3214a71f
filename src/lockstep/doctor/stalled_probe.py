"""Name the ranks that kept a probe from ending, from the last status of each rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.doctor.check_result import CheckResult, Section

RENDEZVOUS_PROBES = 2
"""Number of probes that belong to the rendezvous: connecting to the store, and creating the process group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """The probe that a rank is in."""

    rank: int
    index: int
    """Number of the probe. All ranks run the same probes in the same order."""
    probe: str
    location: str | None = None
    """File, line and function in the user's or the system's code. None if the rank waits for other ranks."""
    error: str | None = None


def stalled_check(statuses: Sequence[RankStatus], world_size: int) -> CheckResult:
    """Return the reason why the probes ended early. `statuses`: those of all ranks that answered, at least one."""
    last = max(statuses, key=lambda status: status.index)
    failed = [status for status in statuses if status.error is not None]
    silent = sorted(set(range(world_size)) - {status.rank for status in statuses})
    blocking = [f"{_format_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer"] if silent else []
    blocking += [f"rank {status.rank} is at {status.location}" for status in statuses if status.location and status.error is None]
    blocking += [
        f"rank {status.rank} is still in {status.probe}"
        for status in statuses
        if status.index < last.index and status.location is None and status.error is None
    ]
    if failed:
        first = min(failed, key=lambda status: (status.index, status.rank))
        check, found = first.probe, f"rank {first.rank} failed: {first.error}"
        remedy = "fix the error above; if a connection failed, look at the interface check and at firewalls between the machines"
    elif blocking:
        check, found = last.probe, f"timed out: {'; '.join(blocking)}"
        remedy = (
            "look at that process: it is stopped, swapping, or in a call that hangs; if it is on another machine, check the network to it"
        )
    else:
        check, found = last.probe, "timed out: all ranks entered it and wait"
        remedy = "the network drops messages: look for firewalls between the machines, the MTU, a link that is down"
    section: Section = "collectives" if last.index > RENDEZVOUS_PROBES else "rendezvous"
    return CheckResult(section=section, check=check, verdict="failed", found=found, remedy=remedy)


def _format_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0, 2, 5`."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
