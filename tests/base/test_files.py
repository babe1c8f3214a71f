"""Whatever fails in the middle of an atomic write, the old content stays and nothing else is left
in the folder."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.base.files import replace_atomically, write_atomically


class ScriptedError(OSError):
    pass


def fail(*_: object, **__: object) -> None:
    raise ScriptedError


@pytest.mark.parametrize("content", ["new, ünicode", "new, ünicode".encode()])
@pytest.mark.parametrize("is_new", [True, False])
def test_the_content_is_there_and_no_other_file(
    tmp_path: Path, content: str | bytes, is_new: bool
) -> None:
    path = tmp_path / "file"
    if not is_new:
        path.write_text("old")
    write_atomically(path, content)
    assert path.read_text(encoding="utf-8") == "new, ünicode"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("owner", "stage"),
    [(Path, "touch"), (Path, "write_bytes"), (os, "open"), (os, "fsync"), (os, "replace")],
    ids=lambda value: str(value),
)
def test_a_failure_at_any_stage_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, stage: str
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(owner, stage, fail)
        with pytest.raises(ScriptedError):
            write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_half_a_write_is_never_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with suppress(ScriptedError), replace_atomically(path) as temporary:
        temporary.write_text("half of the new")
        assert path.read_text() == "old"
        raise ScriptedError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_content_is_on_the_disk_before_the_rename_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log = tmp_path / "file", []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        log.append("sync folder" if target == tmp_path else f"sync {target.read_text()}")
        fsync(descriptor)

    def logged_replace(source: Path, target: Path) -> None:
        log.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    write_atomically(path, "new")
    assert log == ["sync new", "rename", "sync folder"]


def test_two_writers_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replace_atomically(path) as first:
        first.write_text("first")
        write_atomically(path, "second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["file"]
