"""Storages of searches, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.options import LaunchOptions
from lockstep.recipe.parameters import Parameter, Value
from lockstep.scripts.line import ScriptLine
from lockstep.search.outcome import TrialOutcome
from lockstep.search.proposals import Proposals
from lockstep.search.request import SearchRequest
from lockstep.search.study import TrialStorage

PARAMETERS = (
    Parameter(name="lr", default=0.1, low=1e-3, high=1.0, log=True),
    Parameter(name="width", default=2, choices=(1, 2, 4)),
    Parameter(name="layers", default=3, low=1, high=8),
    Parameter(name="seed", default=0),
)
Open = Callable[..., TrialStorage]


def request(folder: Path, **changes: Any) -> SearchRequest:
    given = {
        "line": ScriptLine("train.py"), "metric": "loss", "direction": "minimize", "trials": 8,
        "parallel": None, "sampler": "random",
        "pruner": "none", "seed": 0, "folder": folder, "storage": None, "name": "train",
        "timeout_seconds": None,
        "launch": LaunchOptions(),
    }  # fmt: skip
    return SearchRequest(**{**given, **changes})


def end_as_killed(storage: TrialStorage) -> None:
    """Release what the system would release of a search that is killed."""
    for number in list(storage._locks):
        storage.release(number)
    backend: Any = getattr(storage.study._storage, "_backend", storage.study._storage)
    backend.remove_session()
    backend.engine.dispose()


def claimed_at_once(opened: Sequence[TrialStorage], wanted: int) -> list[tuple[int, bool]]:
    """Claim all trials in a thread for each storage. Returns, of each claim, the trial's number and
    whether it was resumed; sorted."""
    barrier, claimed = threading.Barrier(len(opened)), list[tuple[int, bool]]()

    def claim(mine: TrialStorage) -> None:
        barrier.wait()
        while (found := mine.claim(wanted)) is not None:
            claimed.append((found.number, found.is_resumed))

    threads = [threading.Thread(target=claim, args=(each,)) for each in opened]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(claimed)


def proposals(storage: TrialStorage, parameters: tuple[Parameter, ...] = PARAMETERS) -> Proposals:
    """The proposals of a search whose script has told its parameters."""
    if storage.parameters is None:
        storage.note_parameters([each.describe() for each in parameters])
    return Proposals(storage._request, storage)


def loss_of(values: Mapping[str, Value]) -> float:
    """A loss that a sampler can learn from."""
    return (
        abs(float(values["lr"] or 0) - 0.03)
        + float(values["width"] or 0) / 10
        + abs(float(values["layers"] or 0) - 5)
    )


def make_trial(storage: TrialStorage, wanted: int) -> tuple[int, dict[str, Value]] | None:
    """Claim a trial, and end it with its loss. Returns its number and values. None if there is
    none."""
    given = proposals(storage)
    claimed = storage.claim(wanted)
    if claimed is None:
        return None
    values = dict(given.values(claimed))
    storage.end(claimed, TrialOutcome(state="complete", value=loss_of(values)))
    return claimed.number, values
