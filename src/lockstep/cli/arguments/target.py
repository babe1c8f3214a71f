"""The target of a command: a run directory, a folder of checkpoints, or one checkpoint, at a path or a URL."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.base.errors import CheckpointError
from lockstep.checkpoint.object_store import open_storage
from lockstep.checkpoint.saved_model import StateDictReader
from lockstep.checkpoint.storage import CheckpointName, Storage
from lockstep.logging.fingerprint_format import TensorRecord, digest
from lockstep.saving import Saving
from lockstep.search.request import SEARCH

RESULT = "result.json"
MODEL = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Target:
    storage: Storage
    names: list[CheckpointName]
    """Names of its checkpoints, in order of their steps."""
    run: Path | None
    """The run directory. None if the target is not one."""

    @classmethod
    def find(cls, text: str) -> Target:
        """Raises `CheckpointError`, and `RunDirectoryError` for a URL without a driver."""
        with reachable(text):
            return _at_url(text) if "://" in text else _at_path(text)

    def result(self) -> dict[str, Any] | None:
        """The contents of `result.json`; None unless the target is a run that has ended."""
        return None if self.run is None or not (self.run / RESULT).is_file() else _read_json(self.run / RESULT)


@contextmanager
def reachable(what: str) -> Iterator[None]:
    """Turn an error of the system or of a store into a `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what} cannot be read ({error.strerror or error}); see that it is there, and yours to read") from error


def fingerprint(model: StateDictReader) -> str:
    """The fingerprint of a saved model, as `ls.fingerprint` computes it. Raises `DamagedError`, `UnreachableError`."""

    def records() -> Iterator[TensorRecord]:
        for name in sorted(model.specs, key=str.encode):
            data = model.read(name)
            yield TensorRecord(name, *model.specs[name], len(data), [data])

    return digest(records())


def best_of(scores: Mapping[CheckpointName, dict[str, Any] | None]) -> CheckpointName | None:
    """Return the earliest checkpoint with the best score; None if none has one. `scores`: as the checkpoints record
    them. If the run has changed its metric, those of the latest one count."""
    given = {name: score for name, score in scores.items() if score is not None}
    if not given:
        return None
    latest = given[max(given)]
    saving, best = Saving(best=latest["metric"], mode=latest["mode"]), None
    for name in sorted(name for name, score in given.items() if score["metric"] == latest["metric"]):
        if saving.improves(given[name]["value"], None if best is None else given[best]["value"]):
            best = name
    return best


def _at_url(url: str) -> Target:
    parent, _, last = url.rstrip("/").rpartition("/")
    if (name := CheckpointName.parse(last)) is not None:
        return _one(open_storage(parent), name, url)
    storage = open_storage(url)
    if not (names := storage.names()):
        raise CheckpointError(
            f"{url} holds no checkpoint; give the URL of one, or of the folder that they are in, as in Saving(folder=...)"
        )
    return Target(storage, names, None)


def _at_path(text: str) -> Target:
    path = Path(text).resolve()
    if not path.exists():
        raise CheckpointError(f"{text} is not there; give a run directory, or a checkpoint in its folder `checkpoints`")
    if not path.is_dir():
        raise CheckpointError(f"{text} is a file; a run and a checkpoint are folders; give the one that it is in")
    if (name := CheckpointName.parse(path.name)) is not None:
        return _one(open_storage(path.parent), name, text)
    if (path / "run.json").is_file():
        storage = open_storage(_read_json(path / "run.json").get("checkpoints") or path / "checkpoints")
        return Target(storage, storage.names(), path)
    if (path / SEARCH).is_file():
        raise CheckpointError(f"{text} is the folder of a search, whose runs are in its folders `trial-*`; give one of them")
    storage = open_storage(path)
    if not (names := storage.names()):
        raise CheckpointError(f"{text} is neither a run directory (it has no run.json) nor a checkpoint, nor does it hold any; give one")
    return Target(storage, names, None)


def _one(storage: Storage, name: CheckpointName, text: str) -> Target:
    if name not in storage.names():
        raise CheckpointError(f"{text} is no complete checkpoint; {storage} has {', '.join(map(str, storage.names())) or 'none'}")
    return Target(storage, [name], None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON ({error}); a run wrote it otherwise; give one of its checkpoints by name") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}; a run writes an object there; give one of its checkpoints by name")
    return found
