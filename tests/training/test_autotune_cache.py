"""The file in which a host keeps what was measured: found again, whole, or said to be damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from lockstep.autotune import cache as cached
from lockstep.autotune.cache import Measurement

MEASURED = Measurement({"precision": "fp32", "workers": 2}, {"fetch": {"mean": 0.25}}, 1.5)


def test_written_values_are_read_and_a_missing_file_gives_none(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "name.json"
    assert cached.read(path, lambda chosen: True) is None
    cached.write(path, MEASURED)
    assert cached.read(path, lambda chosen: chosen == MEASURED.chosen) == MEASURED
    assert [each.name for each in path.parent.iterdir()] == ["name.json"]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"chosen": {}}x',
        b'{"other": 1}',
        b"\xff\xfe",
        b'{"chosen": 3, "figures": [], "seconds": 1.0}',
    ],
)
def test_a_damaged_file_is_reported(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "name.json"
    path.write_bytes(damage)
    with pytest.raises(ValueError, match="its content is damaged"):
        cached.read(path, lambda chosen: chosen.keys() == {"precision"})


def test_invalid_values_count_as_damage(tmp_path: Path) -> None:
    cached.write(tmp_path / "name.json", MEASURED)
    with pytest.raises(ValueError, match="its content is damaged"):
        cached.read(tmp_path / "name.json", lambda chosen: chosen["precision"] == "bf16")


@given(st.dictionaries(st.text(), st.integers()), st.dictionaries(st.text(), st.integers()))
def test_another_key_has_another_file(one: dict[str, int], other: dict[str, int]) -> None:
    assert (cached.file_name(one) == cached.file_name(other)) == (one == other)


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cached.folder({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/lockstep/measured")
    for environ in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert cached.folder(environ) == Path("/home/somebody/.cache/lockstep/measured")
