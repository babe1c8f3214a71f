"""A manifest is read as it was written, or named as damaged."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
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
from lockstep.checkpoint.tensor_shards import TensorShard

MANIFEST = Manifest(
    step=60,
    files={
        "rank-0.safetensors": FileEntry(
            BlockHashes(70, ("00" * 16,)),
            {TensorShard("weight", "float32", (2, 3), (0, 0), (1, 3)): 58, TensorShard("step", "int64", (), (), ()): 50},
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
    assert (found.step, found.values, found.metadata) == (MANIFEST.step, MANIFEST.values, MANIFEST.metadata)
    assert plain(found.files["rank-0.safetensors"].to_json()["shards"]) == plain(MANIFEST.files["rank-0.safetensors"].to_json()["shards"])
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
        UnknownFormatError, match="the checkpoint has format 7, and this version of lockstep reads 1; load it with a newer one"
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
