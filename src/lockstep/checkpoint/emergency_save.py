"""Writes a checkpoint without collectives, after an error or the loss of a process.

Ranks with the same shards hold the same *part* of the state. The first rank that claims a part in
the storage writes the part. The rank that finds all parts written commits the checkpoint. One
surviving rank per part is enough, and no rank waits for another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lockstep.base.errors import LockstepError
from lockstep.checkpoint.manifest import (
    FileEntry,
    JsonObject,
    Manifest,
    hash_blocks,
    merge_objects,
    split_blocks,
)
from lockstep.checkpoint.storage import (
    MANIFEST,
    CheckpointName,
    Storage,
    discarding_after_failure,
)
from lockstep.checkpoint.tensor_shards import FileLayout, local_shards
from lockstep.checkpoint.writer import note
from lockstep.comm.mesh import to_local

_COMMIT = "commit"


class StateChangedError(LockstepError):
    """The tensors to save have changed since the end of their step."""


def emergency_save(
    folder: Storage,
    name: CheckpointName,
    *,
    part: int,
    parts: int,
    tensors: Mapping[str, Tensor],
    values: JsonObject,
    metadata: JsonObject,
    is_unchanged: Callable[[], bool] = lambda: True,
) -> bool:
    """Every surviving rank must call this function. Return False if another rank has written this
    part. Raises `OSError` after removing this rank's files. Raises `StateChangedError` if
    `is_unchanged()` is false after the copy."""
    try:
        with discarding_after_failure(folder, name) as written:
            folder.begin(name)
            if not folder.claim(name, _file(part)):
                return False
            written += _files(part)
            layout, content = _copy(tensors)
            if not is_unchanged():
                folder.remove(name, f"{_file(part)}.claim")
                raise StateChangedError(
                    f"the device went on from step {name.step} while its state was copied"
                )
            data = content.numpy().data
            folder.write(name, _file(part), split_blocks(data))
            mine = FileEntry(hash_blocks(data), layout.starts)
            text = json.dumps([mine.to_json(), values])
            folder.write(name, note(_file(part)), [text.encode()])
            notes = [
                _read(folder.read_uncommitted(name, note(_file(each)))) for each in range(parts)
            ]
            # two ranks that finish at the same time both find all parts written, so one must claim
            # the commit
            if None not in notes and folder.claim(name, _COMMIT):
                written += [MANIFEST, f"{_COMMIT}.claim", *chain(*map(_files, range(parts)))]
                _commit(folder, name, notes, metadata)
    except OSError:
        if name in folder.names():  # another rank with the same part was faster
            return False
        raise
    return True


def _copy(tensors: Mapping[str, Tensor]) -> tuple[FileLayout, Tensor]:
    layout = FileLayout(list(local_shards(tensors).values()))
    content = torch.empty(layout.bytes, dtype=torch.uint8)
    content[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    for shard in layout.starts:
        start, stop = layout.span(shard)
        part = to_local(tensors[shard.name]).detach().to("cpu").resolve_conj().resolve_neg()
        content[start:stop] = part.contiguous().reshape(-1).view(torch.uint8)
    return layout, content


def _commit(folder: Storage, name: CheckpointName, notes: list[Any], metadata: JsonObject) -> None:
    files = {_file(part): FileEntry.from_json(entry) for part, (entry, _) in enumerate(notes)}
    for part in range(len(notes)):
        folder.remove(name, note(_file(part)))
        folder.remove(name, f"{_file(part)}.claim")
    folder.remove(name, f"{_COMMIT}.claim")
    values = merge_objects([values for _, values in notes])
    manifest = Manifest(step=name.step, files=files, values=values, metadata=metadata)
    folder.commit(name, manifest.encode())


def _read(text: bytes | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:  # still being written
        return None


def _file(part: int) -> str:
    return f"part-{part}.safetensors"


def _files(part: int) -> list[str]:
    return [_file(part), note(_file(part)), f"{_file(part)}.claim"]
