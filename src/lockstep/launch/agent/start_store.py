"""Messages between the launchers of several machines, in the store of a start."""

from __future__ import annotations

import json
from typing import Any, Literal

from torch.distributed import DistError

_REGROUPS = "lockstep/regroups"
Count = Literal["done", "known"]
"""Machines whose workers are done; machines that know that all are."""


class StartStore:
    """The store of one start of the workers."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._counted = set[Count]()

    def exchange(self, number: int, machines: int, mine: list[Any]) -> list[list[Any]]:
        """Return each machine's JSON value, in order of their numbers. `number`: this machine's."""
        self._store.set(f"lockstep/agent-{number}", json.dumps(mine))
        return [json.loads(self._store.get(f"lockstep/agent-{each}")) for each in range(machines)]

    def count(self, what: Count) -> int:
        """Return the number of machines that have called this with `what`, this one included."""
        is_first = what not in self._counted
        self._counted.add(what)
        return int(self._store.add(f"lockstep/{what}", int(is_first)))

    def announce_regroup(self) -> None:
        """Tell all machines that the workers save and end because they are to be restarted."""
        self._store.set(_REGROUPS, "")

    def regroups(self) -> bool:
        """True if a machine has announced that."""
        try:
            return bool(self._store.check([_REGROUPS]))
        except DistError:
            return False  # the machine that keeps the store has ended
