"""Who did not come, from what the ranks noted when a probe did not end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep.doctor.line import Line

MEETING_PROBES = 2
"""The first ones: all at the store, and the process group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Where a rank stands."""

    rank: int
    index: int
    """Of the probe: all ranks go through the same ones."""
    probe: str
    place: str | None = None
    """In the user's or the system's code. None: it waits in the collective, or for the others."""
    error: str | None = None
    """What its part of the probe raised. None: nothing."""

    def at(self, place: str | None) -> Note:
        return replace(self, place=place)

    def with_error(self, error: str) -> Note:
        return replace(self, error=error)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Note:
        return cls(**value)


def line_of(notes: Sequence[Note], world_size: int) -> Line:
    """Why the examination ended early. `notes`: of all ranks that answered, at least one."""
    last = max(notes, key=lambda note: note.index)
    failed = [note for note in notes if note.error is not None]
    silent = sorted(set(range(world_size)) - {note.rank for note in notes})
    missing = [f"{ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer"] if silent else []
    missing += [f"rank {note.rank} stands in {note.place}" for note in notes if note.place is not None and note.error is None]
    missing += [
        f"rank {note.rank} is still in {note.probe}"
        for note in notes
        if note.index < last.index and note.place is None and note.error is None
    ]
    if failed:
        first = min(failed, key=lambda note: (note.index, note.rank))
        check, found = first.probe, f"rank {first.rank} failed: {first.error}"
        remedy = "mend what it says; where it is a connection, look at the lines on the interface, and at firewalls between the machines"
    elif missing:
        check, found = last.probe, f"did not end in time: {'; '.join(missing)}"
        remedy = "look at that process: stopped, swapping, or in a call that hangs; where it is on another machine, at the way there"
    else:
        check, found = last.probe, "did not end in time: all ranks came, and wait"
        remedy = "the network drops what they send: firewalls between the machines, MTU, a link that is down"
    return Line(
        section="collectives" if last.index > MEETING_PROBES else "meeting", check=check, verdict="wrong", found=found, remedy=remedy
    )


def ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2, 5`."""
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
