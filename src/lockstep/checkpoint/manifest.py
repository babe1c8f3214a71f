"""What a checkpoint says of itself: its files, block by block, what lies where in them, and all of the state that is no tensor. JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.base.errors import LockstepError
from lockstep.checkpoint.block_hashes import Seal, digest

FORMAT = 1


class Damaged(LockstepError):
    """A checkpoint whose bytes are not those that were written. The text says which."""


class Unreadable(LockstepError):
    """A checkpoint of a format that this version does not know."""


class Unreachable(LockstepError):
    """A checkpoint that cannot be read now: no permission, no answer. It may be whole. The text says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece is."""

    piece: Sequence[Any]
    """As `Piece.say` says it."""
    start: int
    """Its first byte in the file."""


@dataclass(frozen=True, slots=True)
class File:
    seal: Seal
    places: tuple[Place, ...]

    def say(self) -> dict[str, Any]:
        places = [[*place.piece, place.start] for place in self.places]
        return {"bytes": self.seal.size_bytes, "blocks": list(self.seal.blocks), "pieces": places}

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> File:
        places = tuple(Place(tuple(piece), start) for *piece, start in said["pieces"])
        return cls(Seal(said["bytes"], tuple(said["blocks"])), places)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Of one checkpoint."""

    step: int
    """Steps done."""
    files: Mapping[str, File]
    values: Mapping[str, Any]
    """JSON: the rest of the state."""
    facts: Mapping[str, Any]
    """JSON: what the run was: recipe, plan, processes, versions, the time."""

    def encode(self) -> bytes:
        files = {name: file.say() for name, file in self.files.items()}
        content = json.dumps({"step": self.step, "facts": self.facts, "values": self.values, "files": files}, separators=(",", ":"))
        return f'{{"format":{FORMAT},"blake3":"{_hash(FORMAT, content.encode())}","content":{content}}}\n'.encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Raises `Damaged` where a byte is not as it was written, `Unreadable` where a later version wrote it."""
        try:
            whole = json.loads(data)
            known = whole["format"]
            content = whole["content"]
            start = data.index(b'"content":') + len(b'"content":')
            if not data.endswith(b"}\n") or _hash(known, data[start:-2]) != whole["blake3"]:
                raise Damaged("the manifest's hash is not that of its content")
            if known != FORMAT:
                raise Unreadable(
                    f"the checkpoint has format {known}, and this version of lockstep reads {FORMAT}; load it with a newer one"
                )
            files = {name: File.read(said) for name, said in content["files"].items()}
            return cls(step=content["step"], files=files, values=content["values"], facts=content["facts"])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(f"the manifest is no manifest: {error}") from error


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One JSON object of what several ranks have: each key of any, the first rank's value where it is no object itself."""
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
            found[key] = merged([found[key], value]) if both else found.get(key, value)
    return found


def _hash(known: Any, content: bytes) -> str:
    """Of any format's content."""
    return digest([f"{known}:".encode(), content])
