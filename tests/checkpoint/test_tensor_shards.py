"""The shards that each rank writes, and those that it reads: every element once, however tensors
are sharded."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise, product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load

from lockstep.base.dtypes import torch_dtype
from lockstep.base.errors import CheckpointError
from lockstep.checkpoint.tensor_shards import (
    DTYPES,
    FileLayout,
    TensorShard,
    assign_writes,
    local_shards,
    plan_copies,
)


def grid(
    name: str, shape: tuple[int, ...], splits: list[list[int]], dtype: str = "float32"
) -> list[TensorShard]:
    """Split a tensor along each dim at these positions."""
    edges = [
        sorted({0, size, *(at % (size + 1) for at in each)})
        for size, each in zip(shape, splits, strict=True)
    ]
    ranges = [list(pairwise(edge)) for edge in edges]
    boxes = product(*ranges)
    return [
        TensorShard(name, dtype, shape, tuple(a for a, _ in box), tuple(b - a for a, b in box))
        for box in boxes
    ]


@st.composite
def grids(draw: st.DrawFn, name: str = "weight") -> list[TensorShard]:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    splits = [draw(st.lists(st.integers(0, 9), max_size=3)) for _ in shape]
    return grid(name, shape, splits, draw(st.sampled_from(sorted(DTYPES))))


@given(grids(), st.integers(1, 5), st.data())
def test_each_shard_is_written_once_by_a_rank_that_holds_it(
    pieces: list[TensorShard], ranks: int, data: st.DataObject
) -> None:
    holders = [data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in pieces]
    everyone = [
        [piece for piece, ranks_ in zip(pieces, holders, strict=True) if rank in ranks_]
        for rank in range(ranks)
    ]
    written = assign_writes(everyone)
    assert Counter(piece for mine in written for piece in mine) == Counter(pieces)
    assert all(set(mine) <= set(held) for mine, held in zip(written, everyone, strict=True))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 5))
def test_ranks_that_hold_the_same_shards_write_a_part_each(sizes: list[int], ranks: int) -> None:
    pieces = [
        TensorShard(f"{number}", "float32", (size,), (0,), (size,))
        for number, size in enumerate(sizes)
    ]
    written = [sum(piece.bytes for piece in mine) for mine in assign_writes([pieces] * ranks)]
    assert max(written) - min(written) <= max(piece.bytes for piece in pieces)


def test_a_state_whose_shards_are_no_tensor_is_not_saved() -> None:
    """A plain tensor that is longer on one rank than on another; a part that no rank holds."""
    short, long = (TensorShard("m", "float32", (size,), (0,), (size,)) for size in (2, 3))
    half = TensorShard("m", "float32", (4,), (0,), (2,))
    for everyone in ([[short], [long]], [[half], [half]]):
        with pytest.raises(CheckpointError, match="the state cannot be saved: the shards of 'm'"):
            assign_writes(everyone)


@given(grids())
def test_a_shard_is_exchanged_as_json(pieces: list[TensorShard]) -> None:
    assert [
        TensorShard.from_json(json.loads(json.dumps(piece.to_json()))) for piece in pieces
    ] == pieces
    assert len({piece.key for piece in pieces}) == len(pieces)


@settings(max_examples=50)
@given(grids())
def test_every_element_is_read_once(pieces: list[TensorShard]) -> None:
    shape = pieces[0].shape
    truth = torch.arange(torch.Size(shape).numel()).reshape(shape)
    found, times = torch.full_like(truth, -1), torch.zeros_like(truth)
    for copy in plan_copies({"weight": found}, pieces):
        own = truth[
            tuple(
                slice(at, at + size)
                for at, size in zip(copy.shard.offsets, copy.shard.lengths, strict=True)
            )
        ]
        found[copy.target] = own[copy.source]
        times[copy.target] += 1
    assert torch.equal(found, truth)
    assert bool((times == 1).all())


def test_the_shards_of_plain_tensors_are_full_tensors() -> None:
    state = {
        "weight": torch.zeros(2, 3, dtype=torch.bfloat16),
        "step": torch.tensor(3),
        "none": torch.zeros(0, 4),
    }
    found = local_shards(state)
    assert found["weight"] == TensorShard("weight", "bfloat16", (2, 3), (0, 0), (2, 3))
    assert found["step"] == TensorShard("step", "int64", (), (), ())
    assert (found["weight"].bytes, found["step"].bytes, found["none"].bytes) == (12, 8, 0)


@given(st.lists(grids(), min_size=1, max_size=4))
def test_a_layout_is_that_of_a_safetensors_file(tensors: list[list[TensorShard]]) -> None:
    pieces = [
        TensorShard(f"{i}", p.dtype, p.shape, p.offsets, p.lengths)
        for i, several in enumerate(tensors)
        for p in several
    ]
    image = FileLayout(pieces)
    data = bytearray(image.bytes)
    data[: len(image.header)] = image.header
    values = {}
    for number, piece in enumerate(pieces):
        start, stop = image.span(piece)
        assert start % torch_dtype(piece.dtype).itemsize == 0
        data[start:stop] = bytes([number % 2]) * (stop - start)
        values[piece.key] = number % 2
    loaded = load(bytes(data))
    assert loaded.keys() == values.keys()
    for piece in pieces:
        assert loaded[piece.key].shape == piece.lengths
        assert loaded[piece.key].dtype == torch_dtype(piece.dtype)
        assert set(loaded[piece.key].contiguous().reshape(-1).view(torch.uint8).tolist()) == {
            values[piece.key]
        }
