"""The target of commands such as `lockstep inspect`: a run directory, a folder of checkpoints, or
one checkpoint, at a path or a URL."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.base.errors import CheckpointError
from lockstep.base.urls import without_password
from lockstep.checkpoint.object_store import open_storage
from lockstep.checkpoint.saved_model import StateDictReader
from lockstep.checkpoint.storage import CheckpointName, Storage
from lockstep.logging.fingerprint import TensorRecord, digest
from lockstep.logging.run_files import RUN, is_there, read_metadata, read_result
from lockstep.saving import Saving
from lockstep.search.request import SEARCH


@dataclass(frozen=True, slots=True)
class Target:
    storage: Storage
    names: list[CheckpointName]
    run: Path | None
    elsewhere: str | None = None
    """URL of the run's checkpoints, from `run.json`. The user did not name the URL, so it is not
    opened."""

    @classmethod
    def find(cls, text: str) -> Target:
        with checkpoint_readable(text):
            return _at_url(text) if "://" in text else _at_path(text)

    @property
    def none_there(self) -> str:
        if self.names:
            return "all are damaged; lockstep inspect shows them"
        if self.elsewhere is None:
            return "it has none; lockstep inspect shows its contents"
        url = without_password(self.elsewhere)
        return (
            f"{RUN} says that they are in {url}; lockstep connects only to URLs that you name; "
            f"give {url}"
        )

    def result(self) -> dict[str, Any] | None:
        return None if self.run is None else read_result(self.run)


@contextmanager
def checkpoint_readable(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{what} cannot be read ({error.strerror or error}); check that it exists, and that "
            "you may read it"
        ) from error


def fingerprint_of_saved(model: StateDictReader) -> str:
    def records() -> Iterator[TensorRecord]:
        for name in sorted(model.specs, key=str.encode):
            data = model.read(name)
            yield TensorRecord(name, *model.specs[name], len(data), [data])

    return digest(records())


def best_of(scores: Mapping[CheckpointName, dict[str, Any] | None]) -> CheckpointName | None:
    """Return the checkpoint with the best evaluation, the earliest of equal ones. If `Saving.best`
    changed during the run, use only the scores of the latest metric."""
    given = {name: score for name, score in scores.items() if score is not None}
    if not given:
        return None
    latest = given[max(given)]
    metric = latest["metric"]
    values = {
        name: score["value"] for name, score in sorted(given.items()) if score["metric"] == metric
    }
    return Saving(best=metric, mode=latest["mode"]).best_of(values)


def _at_url(url: str) -> Target:
    parent, _, last = url.rstrip("/").rpartition("/")
    if (name := CheckpointName.parse(last)) is not None:
        return _single_checkpoint(open_storage(parent), name, url)
    storage = open_storage(url)
    if not (names := storage.names()):
        raise CheckpointError(
            f"{url} holds no checkpoint; give the URL of a checkpoint, or of a folder of them, as "
            "in Saving(folder=...)"
        )
    return Target(storage, names, None)


def _at_path(text: str) -> Target:
    path = Path(os.path.realpath(text))
    if not path.exists():
        raise CheckpointError(
            f"{text} does not exist; give a run directory, or a checkpoint in its folder "
            "`checkpoints`"
        )
    if not path.is_dir():
        raise CheckpointError(
            f"{text} is a file; a run and a checkpoint are folders; give its folder"
        )
    if (name := CheckpointName.parse(path.name)) is not None:
        return _single_checkpoint(open_storage(path.parent), name, text)
    if is_there(path, RUN):
        return _of_run(path)
    if is_there(path, SEARCH):
        raise CheckpointError(
            f"{text} is the folder of a search; its runs are the folders `trial-*`; give one of "
            "them"
        )
    storage = open_storage(path)
    if not (names := storage.names()):
        raise CheckpointError(
            f"{text} is neither a run directory (it has no run.json) nor a checkpoint, and holds "
            "no checkpoint; give one"
        )
    return Target(storage, names, None)


def _single_checkpoint(storage: Storage, name: CheckpointName, text: str) -> Target:
    if name not in storage.names():
        raise CheckpointError(
            f"{text} is not a complete checkpoint; {storage} has"
            f" {', '.join(map(str, storage.names())) or 'none'}"
        )
    return Target(storage, [name], None)


def _of_run(path: Path) -> Target:
    place = read_metadata(path).get("checkpoints")
    elsewhere = place if place is not None and _is_remote(place) else None
    storage = open_storage(path / "checkpoints" if place is None or elsewhere else place)
    return Target(storage, storage.names(), path, elsewhere)


def _is_remote(place: str) -> bool:
    return ("://" in place and not place.startswith("file://")) or place.startswith((r"\\", "//"))
