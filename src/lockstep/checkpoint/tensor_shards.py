"""Plans the saving and loading of shards. A *shard* is a box-shaped part of a tensor, or the full
tensor.

Planning works like in `torch.distributed.checkpoint` (DCP), but ranks exchange JSON instead of
pickles. Torch is imported in functions only: checkpoints can be read without torch.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from lockstep.base.dtypes import dtype_name, torch_dtype
from lockstep.base.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
    from torch.distributed.checkpoint.planner import WriteItem

Box = tuple[slice, ...]
ALIGNMENT = 64
SMALL_BYTES = 1 << 20
"""Shards of up to this size are adjacent in a file and copied together. Starting a copy takes 20
µs, as long as copying this many bytes."""
MOST_DIMS = 64
_MOST_SPLIT_DIMS = 8
_LARGEST = 2**62
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "uint16": "U16", "int16": "I16",
    "float16": "F16", "bfloat16": "BF16", "uint32": "U32", "int32": "I32", "float32": "F32",
    "complex64": "C64", "uint64": "U64",
    "int64": "I64", "float64": "F64",
}  # fmt: skip
"""Maps torch's dtype names to safetensors' dtype names."""
TORCH_DTYPES = {theirs: ours for ours, theirs in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A box of a tensor: the elements [offset, offset + length) along each dim."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.lengths) * item_bytes(self.dtype)

    @property
    def key(self) -> str:
        """Text such as `weight[0:4,8:16]`. The name alone if the shard is the full tensor."""
        if self.lengths == self.shape:
            return self.name
        spans = zip(self.offsets, self.lengths, strict=True)
        return f"{self.name}[{','.join(f'{at}:{at + size}' for at, size in spans)}]"

    def to_json(self) -> list[Any]:
        return [self.name, self.dtype, self.shape, self.offsets, self.lengths]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> TensorShard:
        """Raises `ValueError` for a box outside of the tensor, or an unknown dtype."""
        name, dtype, *boxes = fields
        if not all(isinstance(box, list | tuple) for box in boxes):
            raise ValueError(f"a shard of {name!r} has boxes that are not lists")
        shape, offsets, lengths = (tuple(whole_number(size) for size in box) for box in boxes)
        if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"it names the type {dtype!r}")
        name.encode()  # half a surrogate pair is not allowed in a name
        if not len(shape) == len(offsets) == len(lengths) <= MOST_DIMS:
            raise ValueError(
                f"{name!r} has boxes of other dims than its shape, or more than {MOST_DIMS}"
            )
        if any(at + size > whole for at, size, whole in zip(offsets, lengths, shape, strict=True)):
            raise ValueError(f"a shard of {name!r} reaches beyond its shape")
        return cls(name, dtype, shape, offsets, lengths)


class FileLayout:
    """The layout of a safetensors file (https://huggingface.co/docs/safetensors), computed without
    its data. Shards whose size is a multiple of 64 bytes come first. The remaining shards are
    sorted by element size, largest first. Small shards are at the end. Each shard is aligned for
    its dtype and can be used in place."""

    def __init__(
        self, shards: Sequence[TensorShard], metadata: Mapping[str, str] | None = None
    ) -> None:
        ordered = sorted(shards, key=_position)
        entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        starts: dict[TensorShard, int] = {}
        at = 0
        for shard in ordered:
            starts[shard] = at
            entries[shard.key] = {
                "dtype": DTYPES[shard.dtype],
                "shape": shard.lengths,
                "data_offsets": [at, at + shard.bytes],
            }
            at += shard.bytes
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-(8 + len(header)) % ALIGNMENT)
        self.header = len(header).to_bytes(8, "little") + header
        self.bytes = len(self.header) + at
        self.starts = {shard: len(self.header) + starts[shard] for shard in shards}

    def span(self, shard: TensorShard) -> tuple[int, int]:
        return self.starts[shard], self.starts[shard] + shard.bytes


def _position(shard: TensorShard) -> tuple[bool, int, str]:
    is_odd = shard.bytes % ALIGNMENT != 0
    return is_odd, -item_bytes(shard.dtype) if is_odd else shard.bytes <= SMALL_BYTES, shard.key


@dataclass(frozen=True, slots=True)
class ShardCopy:
    shard: TensorShard
    source: Box
    target: Box


def local_shards(state: Mapping[str, Tensor]) -> dict[str, TensorShard]:
    """Empty shards are left out."""
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    items = create_default_local_save_plan(dict(state), is_coordinator=True).items
    shards = [_shard_of(item) for item in items]
    return {
        shard.name: shard
        for shard in shards
        if math.prod(shard.lengths) or not math.prod(shard.shape)
    }


def assign_writes(everyone: Sequence[Sequence[TensorShard]]) -> list[list[TensorShard]]:
    """Choose one rank to write each shard, and balance the bytes over ranks. Raises
    `CheckpointError` unless the shards cover each tensor."""
    try:
        check_cover(shard for shards in everyone for shard in shards)
    except ValueError as error:
        raise CheckpointError(
            f"the state cannot be saved: {error}; a tensor in a state_dict is the same on all"
            " ranks, or a DTensor; make it so, or leave it out"
        ) from error
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan

    planner = DefaultSavePlanner(flatten_state_dict=False)
    plans, _ = planner.create_global_plan(
        [SavePlan([_write_item(shard) for shard in shards]) for shards in everyone]
    )
    return [[_shard_of(item) for item in plan.items] for plan in plans]


def plan_copies(state: Mapping[str, Tensor], saved: Sequence[TensorShard]) -> Iterator[ShardCopy]:
    from lockstep.base.torch_private import is_distributed  # imports torch

    assert state.keys() <= {shard.name for shard in saved}
    distributed = {name: tensor for name, tensor in state.items() if is_distributed(tensor)}
    for shard in saved:
        if shard.name in state and shard.name not in distributed:
            assert tuple(state[shard.name].shape) == shard.shape
            whole = box_of([0] * len(shard.shape), shard.lengths)
            yield ShardCopy(shard, whole, box_of(shard.offsets, shard.lengths))
    if not distributed:
        return
    from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

    metadata, by_name = _metadata(saved)
    for item in create_default_local_load_plan(distributed, metadata).items:
        shard = by_name[item.storage_index.fqn][item.storage_index.index or 0]
        source = box_of(item.storage_offsets, item.lengths)
        yield ShardCopy(shard, source, box_of(item.dest_offsets, item.lengths))


def whole_number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"{value!r} is no size")
    return value


def check_cover(shards: Iterable[TensorShard]) -> None:
    """Equal shards count once: an emergency save may write a shard to several files."""
    by_name: dict[str, set[TensorShard]] = {}
    for shard in shards:
        by_name.setdefault(shard.name, set()).add(shard)
    for name, boxes in by_name.items():
        first = next(iter(boxes))
        if any((box.dtype, box.shape) != (first.dtype, first.shape) for box in boxes):
            raise ValueError(f"the shards of {name!r} differ in type or shape")
        if math.prod(first.shape) and not _is_tiled(first.shape, boxes):
            raise ValueError(f"the shards of {name!r} overlap, or do not cover it")


def _is_tiled(shape: Sequence[int], boxes: Iterable[TensorShard]) -> bool:
    """The boxes tile the shape if and only if their signed corners add up to the signed corners of
    the shape."""
    split = [
        dim for dim, size in enumerate(shape) if any(box.lengths[dim] != size for box in boxes)
    ]
    if len(split) > _MOST_SPLIT_DIMS:
        return False
    signed = [(-1, [(0, shape[dim]) for dim in split])]
    for box in boxes:
        sides = [(box.offsets[dim], box.offsets[dim] + box.lengths[dim]) for dim in split]
        signed.append((1, sides))
    count: Counter[tuple[int, ...]] = Counter()
    for sign, sides in signed:
        for ends in product((0, 1), repeat=len(split)):
            corner = tuple(side[end] for side, end in zip(sides, ends, strict=True))
            count[corner] += sign * (-1) ** sum(ends)
    return not any(count.values())


def item_bytes(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1


def _shard_of(item: WriteItem) -> TensorShard:
    data = item.tensor_data
    assert data is not None, "a state has tensors only"
    dtype = dtype_name(data.properties.dtype)
    return TensorShard(
        item.index.fqn, dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    )


def _chunk(shard: TensorShard) -> ChunkStorageMetadata:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.lengths))


def _write_item(shard: TensorShard) -> WriteItem:
    import torch
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=torch_dtype(shard.dtype))
    return WriteItem(
        MetadataIndex(shard.name, torch.Size(shard.offsets)),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(_chunk(shard), properties, torch.Size(shard.shape)),
    )


def _metadata(saved: Sequence[TensorShard]) -> tuple[Metadata, dict[str, list[TensorShard]]]:
    import torch
    from torch.distributed.checkpoint.metadata import (
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    by_name: dict[str, list[TensorShard]] = {}
    for shard in saved:
        by_name.setdefault(shard.name, []).append(shard)
    tensors = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=torch_dtype(shards[0].dtype)),
            torch.Size(shards[0].shape),
            [_chunk(shard) for shard in shards],
        )
        for name, shards in by_name.items()
    }
    return Metadata(dict(tensors)), by_name


def box_of(offsets: Sequence[int], lengths: Sequence[int]) -> Box:
    return tuple(slice(at, at + size) for at, size in zip(offsets, lengths, strict=True))
