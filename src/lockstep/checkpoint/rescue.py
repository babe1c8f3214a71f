"""Saving when the processes can no longer talk to each other: after an error, or when one of them is gone.

Ranks that hold the same part of the state are one *place*. One rank of each place, the first that claims it, writes all that it holds, and
whoever finds every place written makes a checkpoint of them. So one survivor of several replicas is enough, and nobody waits for anybody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.block_hashes import cut, seal
from lockstep.checkpoint.file_layout import Image
from lockstep.checkpoint.folder import Name, Storage
from lockstep.checkpoint.manifest import File, Manifest, Place, merged
from lockstep.checkpoint.pieces import pieces_of
from lockstep.checkpoint.writer import note
from lockstep.comm.mesh import to_local

_COMMIT = "commit"


def rescue(
    folder: Storage,
    name: Name,
    *,
    place: int,
    places: int,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> bool:
    """Write this rank's part of the state, and make a checkpoint where it was the last part missing. Each rank that still can calls it.

    `place` of `places`: which part of the state this rank holds. Returns whether a rank of its place has not done it before. Raises
    `OSError`.
    """
    try:
        folder.begin(name)
        if not folder.claim(name, _file(place)):
            return False
        _write(folder, name, _file(place), tensors, values)
        notes = [_read(folder.written(name, note(_file(each)))) for each in range(places)]
        if None not in notes and folder.claim(name, _COMMIT):  # two that end together see each other's
            _commit(folder, name, notes, facts)
    except OSError:
        if name in folder.names():  # another rank of the place was faster
            return False
        raise
    return True


def _write(folder: Storage, name: Name, file: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    pieces = list(pieces_of(tensors).values())
    image = Image(pieces)
    content = torch.empty(image.bytes, dtype=torch.uint8)
    content[: len(image.header)] = torch.frombuffer(bytearray(image.header), dtype=torch.uint8)
    for piece in pieces:
        start, stop = image.span(piece)
        part = to_local(tensors[piece.name]).detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        content[start:stop] = part.reshape(-1).view(torch.uint8)
    data = content.numpy().data
    folder.write(name, file, cut(data))
    mine = File(seal(data), tuple(Place(piece.say(), image.span(piece)[0]) for piece in pieces))
    folder.write(name, note(file), [json.dumps([mine.say(), values]).encode()])


def _commit(folder: Storage, name: Name, notes: list[Any], facts: Mapping[str, Any]) -> None:
    files = {_file(place): File.read(said) for place, (said, _) in enumerate(notes)}
    for place in range(len(notes)):
        folder.drop(name, note(_file(place)))
        folder.drop(name, f"{_file(place)}.claim")
    folder.drop(name, f"{_COMMIT}.claim")
    folder.commit(name, Manifest(step=name.step, files=files, values=merged([values for _, values in notes]), facts=facts).encode())


def _read(said: bytes | None) -> Any:
    """A note; None while it is not there, or not whole."""
    try:
        return None if said is None else json.loads(said)
    except ValueError:
        return None


def _file(place: int) -> str:
    return f"part-{place}.safetensors"
