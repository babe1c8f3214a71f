"""What a rank holds of a state's tensors, which rank writes which part, and which saved part goes where: DCP's planning, on plain values.

A state is a dict of tensors by name; a name may be on some ranks only, and a tensor may be distributed. A *piece* is a box of a tensor.
Plans go between ranks as JSON: DCP's own way is to pickle them. Torch is imported by what needs it: what is saved is read without.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
    from torch.distributed.checkpoint.planner import WriteItem

Box = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor."""

    name: str
    """The tensor's."""
    dtype: str
    """As torch calls it: float32."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.lengths) * item_bytes(self.dtype)

    @property
    def key(self) -> str:
        """A name of its own: the tensor's, and where it is a part of it, which: `weight[0:4,8:16]`."""
        if self.lengths == self.shape:
            return self.name
        return f"{self.name}[{','.join(f'{at}:{at + size}' for at, size in zip(self.offsets, self.lengths, strict=True))}]"

    def say(self) -> list[Any]:
        return [self.name, self.dtype, self.shape, self.offsets, self.lengths]

    @classmethod
    def read(cls, said: Sequence[Any]) -> Piece:
        """From what `say` gave, through JSON."""
        name, dtype, *boxes = said
        shape, offsets, lengths = (tuple(int(size) for size in box) for box in boxes)
        return cls(str(name), str(dtype), shape, offsets, lengths)


@dataclass(frozen=True, slots=True)
class Copy:
    """Part of a saved piece that goes to part of what a rank holds of the same tensor."""

    piece: Piece
    source: Box
    """In the piece."""
    target: Box
    """In the rank's own part."""


def pieces_of(state: Mapping[str, Tensor]) -> dict[str, Piece]:
    """What this rank holds of each tensor of the state, by its name. Not what is empty."""
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    items = create_default_local_save_plan(dict(state), is_coordinator=True).items
    found = {item.index.fqn: _piece(item) for item in items}
    return {name: piece for name, piece in found.items() if math.prod(piece.lengths) or not math.prod(piece.shape)}


def dealt(everyone: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
    """What each rank writes, so that each piece is written once, by a rank that holds it, and ranks have about as many bytes."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan

    planner = DefaultSavePlanner(flatten_state_dict=False)
    plans, _ = planner.create_global_plan([SavePlan([_write_item(piece) for piece in pieces]) for pieces in everyone])
    return [[_piece(item) for item in plan.items] for plan in plans]


def copies(state: Mapping[str, Tensor], saved: Sequence[Piece]) -> Iterator[Copy]:
    """What fills this rank's part of the state from saved pieces. Names and shapes of the state are among the saved ones."""
    assert state.keys() <= {piece.name for piece in saved}
    from lockstep.base.torch_private import is_distributed

    distributed = {name: tensor for name, tensor in state.items() if is_distributed(tensor)}
    for piece in saved:
        if piece.name in state and piece.name not in distributed:
            assert tuple(state[piece.name].shape) == piece.shape
            yield Copy(piece, _box([0] * len(piece.shape), piece.lengths), _box(piece.offsets, piece.lengths))
    if not distributed:
        return
    from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

    metadata, by_name = _metadata(saved)
    for item in create_default_local_load_plan(distributed, metadata).items:
        piece = by_name[item.storage_index.fqn][item.storage_index.index or 0]
        yield Copy(piece, _box(item.storage_offsets, item.lengths), _box(item.dest_offsets, item.lengths))


def item_bytes(dtype: str) -> int:
    """Of one element."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1


def torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _piece(item: WriteItem) -> Piece:
    data = item.tensor_data
    assert data is not None, "a state has tensors only"
    dtype = str(data.properties.dtype).removeprefix("torch.")
    return Piece(item.index.fqn, dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.lengths))


def _write_item(piece: Piece) -> WriteItem:
    import torch
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=torch_dtype(piece.dtype))
    return WriteItem(
        MetadataIndex(piece.name, torch.Size(piece.offsets)),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(_chunk(piece), properties, torch.Size(piece.shape)),
    )


def _metadata(saved: Sequence[Piece]) -> tuple[Metadata, dict[str, list[Piece]]]:
    import torch
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

    by_name: dict[str, list[Piece]] = {}
    for piece in saved:
        by_name.setdefault(piece.name, []).append(piece)
    tensors = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=torch_dtype(pieces[0].dtype)), torch.Size(pieces[0].shape), [_chunk(piece) for piece in pieces]
        )
        for name, pieces in by_name.items()
    }
    return Metadata(dict(tensors)), by_name


def _box(offsets: Sequence[int], lengths: Sequence[int]) -> Box:
    return tuple(slice(at, at + size) for at, size in zip(offsets, lengths, strict=True))
