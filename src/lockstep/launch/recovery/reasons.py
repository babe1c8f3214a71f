"""Reasons for a restart of a run's workers, and for its failure, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from lockstep.launch.failures import WorkerFailure
from lockstep.launch.machine_store import JOIN_SECONDS
from lockstep.launch.machines import Machines
from lockstep.launch.rendezvous import SILENCE_SECONDS
from lockstep.options import Restart, RunOptions

FAILED, LOST_A_PEER, JOINED = range(3)
"""Why a machine restarts its workers. If machines differ, the first reason in this order counts."""


def restart_reason(everyone: Sequence[Any], machines: Sequence[str]) -> str | None:
    """The reason for a restart; None at the first start. `everyone`: each machine's restarts, the
    former machines' addresses, and its reason's kind and words. `machines`: the present machines'
    addresses.
    """
    reasons = [why for _, _, why in everyone if why is not None]
    if not reasons:
        return None
    kind, words = min(reasons)
    before = max((addresses for _, addresses, _ in everyone), key=len)
    if kind == LOST_A_PEER and len(machines) < len(before):
        lost = (Counter(before) - Counter(machines)).elements()
        return f"a machine was lost: {', '.join(lost)}; {len(machines)} of {len(before)} are left"
    return str(words)


def restart_variables(
    everyone: Sequence[Any], machines: Sequence[str], *, in_place: bool
) -> dict[str, str]:
    """The variables that tell workers why they start again; none at the first start. `everyone`:
    each machine's values: first `restart_reason`'s arguments, last but one why it is not
    `in_place`."""
    why = restart_reason([each[:3] for each in everyone], machines)
    if why is None:
        return {}
    not_in_place = next((reason for *_, reason, _ in everyone if reason), None)
    restart = Restart(why, in_place, not_in_place)
    # Whatever --resume was given: by now the run directory may hold an unfinished run.
    return RunOptions(restarted=restart, resume="auto").to_environment()


def failure_reason(first: WorkerFailure | None, lost: Sequence[str]) -> tuple[int, str]:
    """The kind and the words of a machine's reason. `first`: the causing failure of its workers.
    `lost`: the addresses of lost machines."""
    if first is not None:
        return (LOST_A_PEER if first.lost_a_peer else FAILED), first.line
    silent = (
        f"lost the machine {', '.join(lost)}: its workers failed, or it has been silent for"
        f" {SILENCE_SECONDS} s"
    )
    return LOST_A_PEER, silent if lost else "another machine has lost a worker"


def rendezvous_error(error: Exception, machines: Machines) -> str:
    """Why a rendezvous failed, in words."""
    if isinstance(error, RendezvousClosedError):
        return (
            f"the run at {machines.endpoint} was ended by another machine, whose own output"
            " says why"
        )
    if isinstance(error, RendezvousTimeoutError):
        return (
            f"fewer than {machines.least} machines came to {machines.endpoint} within"
            f" {JOIN_SECONDS} s; start the same command on them"
        )
    return (
        f"the rendezvous at {machines.endpoint} is gone: the machine that keeps it has ended, or"
        " cannot be reached; what was saved is in the run directory; the same command (with"
        " --run-dir, if it had none), started again on every machine, resumes from there"
    )
