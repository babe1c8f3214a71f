"""A manifest is read as it was written, or named as damaged."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from checkpoint.states import with_right_hash
from hypothesis import given

from lockstep.checkpoint.manifest import (
    BLOCK_BYTES,
    BlockHashes,
    DamagedError,
    FileEntry,
    Manifest,
    UnknownFormatError,
    hash_blocks,
    hash_bytes,
)
from lockstep.checkpoint.tensor_shards import TensorShard, check_cover

MANIFEST = Manifest(
    step=60,
    files={
        "rank-0.safetensors": FileEntry(
            BlockHashes(70, ("00" * 16,)),
            {
                TensorShard("weight", "float32", (1, 3), (0, 0), (1, 3)): 58,
                TensorShard("step", "int64", (), (), ()): 50,
            },
        )
    },
    values={"position": 960, "rate": 0.1, "größe": [None, True]},
    metadata={"plan": "shard=2"},
)


def plain(value: object) -> object:
    """Lists for tuples."""
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def test_it_is_read_as_it_was_written() -> None:
    found = Manifest.decode(MANIFEST.encode())
    assert (found.step, found.values, found.metadata) == (
        MANIFEST.step,
        MANIFEST.values,
        MANIFEST.metadata,
    )
    assert plain(found.files["rank-0.safetensors"].to_json()["shards"]) == plain(
        MANIFEST.files["rank-0.safetensors"].to_json()["shards"]
    )
    assert found.files["rank-0.safetensors"].hashes == MANIFEST.files["rank-0.safetensors"].hashes


@given(st.data())
def test_a_changed_byte_or_a_truncated_file_is_damage(data: st.DataObject) -> None:
    written = MANIFEST.encode()
    place = data.draw(st.integers(0, len(written) - 1))
    changed = bytes([written[place] ^ data.draw(st.integers(1, 255))])
    flipped = written[:place] + changed + written[place + 1 :]
    for wrong in (flipped, written[:place], written + b" "):
        with pytest.raises(DamagedError):
            Manifest.decode(wrong)


def test_a_later_format_is_not_called_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("lockstep.checkpoint.manifest.FORMAT", 7)
        later = MANIFEST.encode()
    with pytest.raises(
        UnknownFormatError,
        match=(
            "the checkpoint has format 7, and this version of lockstep reads 1; load it with a"
            " newer one"
        ),
    ):
        Manifest.decode(later)


@given(st.integers(0, 3 * BLOCK_BYTES), st.integers(0, 3 * BLOCK_BYTES))
def test_blocks_cover_the_given_bytes(start: int, stop: int) -> None:
    start, stop = sorted((start, stop))
    sealed = BlockHashes(3 * BLOCK_BYTES, ("",) * 3)
    covered = [sealed.span(block) for block in sealed.covering(start, stop)]
    assert all(a < stop and b > start for a, b in covered)
    assert start == stop or (covered[0][0] <= start and covered[-1][1] >= stop)


def test_a_block_hash_depends_on_its_bytes() -> None:
    data = bytearray(BLOCK_BYTES + 5)
    sealed = hash_blocks(memoryview(data))
    assert (sealed.size_bytes, len(sealed.blocks)) == (BLOCK_BYTES + 5, 2)
    assert sealed.blocks[1] == hash_bytes([bytes(5)]) == hash_bytes([bytes(2), bytes(3)])
    assert sealed.blocks[1] not in (hash_bytes([bytes(4)]), hash_bytes([b"\0\0\1\0\0"]))


RIGHT = {"bytes": 100, "blocks": ["00" * 16], "shards": [["a", "float32", [4], [0], [4], 50]]}


def content(files: Any, **fields: Any) -> dict[str, Any]:
    return {"step": 1, "metadata": {}, "values": {}, "files": files, **fields}


def entry(*shards: Any, **fields: Any) -> dict[str, Any]:
    return {**RIGHT, "shards": list(shards), **fields}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (content({"../a.safetensors": RIGHT}), "it names a file"),
        (content({"/etc/rank-0.safetensors": RIGHT}), "it names a file"),
        (content({"rank-0.safetensors\n": RIGHT}), "it names a file"),
        (content({"manifest.json": RIGHT}), "it names a file"),
        (
            content({"rank-0.safetensors": {**RIGHT, "blocks": []}}),
            "0 hashes do not fit 100 bytes",
        ),
        (content({"rank-0.safetensors": {**RIGHT, "bytes": 2**70}}), "is no size"),
        (content({"rank-0.safetensors": {**RIGHT, "bytes": 100.0}}), "is no size"),
        (
            content({"rank-0.safetensors": {**RIGHT, "blocks": ["0" * 31 + "X"]}}),
            "1 hashes do not fit",
        ),
        (content({"rank-0.safetensors": {**RIGHT, "blocks": [7]}}), "expected string"),
        (
            content({"rank-0.safetensors": entry(["a", "float32", [4], [0], [4], 90])}),
            "reaches beyond its file",
        ),
        (
            content({"rank-0.safetensors": entry(["a", "float32", [4], [0], [4], -16])}),
            "is no size",
        ),
        (
            content({"rank-0.safetensors": entry(["a", "float32", [4], [2], [4], 0])}),
            "reaches beyond its shape",
        ),
        (
            content(
                {
                    "rank-0.safetensors": entry(
                        ["a", "float32", [4], [0], [4], 0], ["b", "float32", [4], [0], [4], 8]
                    )
                }
            ),
            "overlaps another",
        ),
        (
            content(
                {
                    "rank-0.safetensors": entry(
                        ["a", "float32", [4], [0], [4], 0], ["a", "float32", [4], [0], [4], 50]
                    )
                }
            ),
            "a shard twice",
        ),
        (
            content({"rank-0.safetensors": entry(["a", "float32", [4], [0], [3], 0])}),
            "overlap, or do not cover it",
        ),
        (
            content(
                {
                    "rank-0.safetensors": entry(
                        ["a", "float32", [4], [0], [2], 0], ["a", "float32", [4], [0], [2], 50]
                    )
                }
            ),
            "a file has a shard twice",
        ),
        (
            content(
                {
                    "rank-0.safetensors": entry(
                        ["a", "float32", [4], [0], [3], 0], ["a", "float32", [4], [1], [3], 50]
                    )
                }
            ),
            "overlap, or do not cover it",
        ),
        (
            content(
                {
                    "rank-0.safetensors": entry(["a", "float32", [4], [0], [4], 0]),
                    "rank-1.safetensors": entry(["a", "int32", [4], [0], [4], 0]),
                }
            ),
            "differ in type or shape",
        ),
        (
            content({"rank-0.safetensors": entry(["a", "object", [4], [0], [4], 0])}),
            "it names the type 'object'",
        ),
        (
            content({"rank-0.safetensors": entry(["a", "float32", [4, 1], [0], [4], 0])}),
            "other dims than its shape",
        ),
        (
            content({"rank-0.safetensors": entry(["a", "uint8", [0] * 65, [0] * 65, [0] * 65, 0])}),
            "more than 64",
        ),
        (
            content({"rank-0.safetensors": entry([["a"], "float32", [4], [0], [4], 0])}),
            "cannot be parsed",
        ),
        (
            content({"rank-0.safetensors": entry(["a", "float32", {}, {}, {}, 0])}),
            "has boxes that are not lists",
        ),
        (content({}, step=-1), "is no size"),
        (content({}, metadata=[]), "values and metadata are objects"),
        (
            content({}, metadata={"score": 3}),
            "has int as 'metadata.score', but a run writes an object",
        ),
        (
            content({}, metadata={"score": {"value": "1"}}),
            "has str as 'metadata.score.value', but a run writes a number",
        ),
        (content({}, values=None), "cannot be parsed"),
        (content([]), "cannot be parsed"),
        ([], "cannot be parsed"),
    ],
)
def test_a_forged_manifest_is_damage(given: object, says: str) -> None:
    with pytest.raises(DamagedError, match=says):
        Manifest.decode(with_right_hash(given))


def test_a_full_tensor_may_be_in_several_files() -> None:
    found = Manifest.decode(
        with_right_hash(content({"part-0.safetensors": RIGHT, "part-1.safetensors": RIGHT}))
    )
    assert len(found.files) == 2


@given(st.data())
def test_shards_cover_a_tensor_if_each_element_is_in_one(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    boxes = {(tuple(0 for _ in shape), shape)}
    # cut a box, and then perhaps move an end or take one away
    for _ in range(data.draw(st.integers(0, 4))):
        offsets, lengths = data.draw(st.sampled_from(sorted(boxes)))
        if shape:
            dim = data.draw(st.integers(0, len(shape) - 1))
            cut = data.draw(st.integers(0, lengths[dim]))
            low, high = list(lengths), list(lengths)
            low[dim], high[dim] = cut, lengths[dim] - cut
            moved = list(offsets)
            moved[dim] += cut
            boxes = (boxes - {(offsets, lengths)}) | {
                (offsets, tuple(low)),
                (tuple(moved), tuple(high)),
            }
    if data.draw(st.booleans()) and shape:
        offsets, lengths = data.draw(st.sampled_from(sorted(boxes)))
        boxes -= {(offsets, lengths)}
        wrong = tuple(
            data.draw(st.integers(0, size - at)) for at, size in zip(offsets, shape, strict=True)
        )
        boxes |= data.draw(st.sampled_from([{(offsets, wrong)}, set()]))
    count = np.zeros(shape, int)
    for offsets, lengths in boxes:
        count[tuple(slice(at, at + size) for at, size in zip(offsets, lengths, strict=True))] += 1
    shards = [TensorShard("a", "float32", shape, *box) for box in boxes]
    if not shards or (count == 1).all():
        check_cover(shards)
        return
    with pytest.raises(ValueError, match="overlap, or do not cover it"):
        check_cover(shards)
