"""Folders from others: whatever is in them, a command reads it or refuses it, soon, and writes
nowhere else."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import forked
import pytest
from checkpoint.states import with_right_hash
from hostile.folders import mutated, write_run
from hostile.fuzz import Fuzz
from hypothesis import HealthCheck, given, settings, strategies as st
from processes import ran

from lockstep.base.errors import CheckpointError, LaunchError, RunDirectoryError, UserError
from lockstep.checkpoint.manifest import DamagedError, Manifest, check
from lockstep.checkpoint.saved_model import read_safetensors
from lockstep.checkpoint.storage import FolderStorage
from lockstep.cli.export import export, final_model
from lockstep.cli.target import Target
from lockstep.logging.run_directory import RunDirectory
from lockstep.report.reader import read_runs
from lockstep.search.study import results_in


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run")
    return tmp_path / "run"


def commands(*words: object) -> subprocess.CompletedProcess[str]:
    with forked.use():
        return ran([forked.LOCKSTEP, *map(str, words)])


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("folders", "files"), [(100, 600), pytest.param(500, 3000, marks=pytest.mark.slow)]
)
def test_commands_on_folders_changed_at_random(tmp_path: Path, folders: int, files: int) -> None:
    fuzz = Fuzz(tmp_path)
    for seed in range(folders):
        fuzz.try_one(seed)
    for seed in range(files):
        fuzz.try_file(seed)
    assert min(fuzz.found["done"], fuzz.found["refused"]) > folders / 5, fuzz.found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: (
        st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=8), inside, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), JSON, st.integers(0, 2))
def test_any_manifest_is_right_or_damage(random: Any, value: Any, kind: int) -> None:
    content = json.loads(MANIFEST)["content"]
    if kind == 0:
        content = mutated(content, random)
    elif kind == 1:
        content[random.choice(list(content))] = value
    else:
        content["files"]["rank-0.safetensors"]["shards"] = value
    try:
        text = with_right_hash(content)
    except (RecursionError, ValueError, UnicodeEncodeError):
        return
    with suppress(DamagedError):
        Manifest.decode(text)


MANIFEST = with_right_hash(
    {
        "step": 1,
        "metadata": {"plan": "shard=2", "score": {"metric": "loss", "mode": "min", "value": 1.0}},
        "values": {"modules": {"0": {"tied": {}}}},
        "files": {
            f"rank-{rank}.safetensors": {
                "bytes": 100,
                "blocks": ["0" * 32],
                "shards": [["a", "float32", [4, 2], [2 * rank, 0], [2, 2], 50]],
            }
            for rank in range(2)
        },
    }
)


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.safetensors"])
@pytest.mark.parametrize("what", ["a FIFO", "a link", "5 GB", "a folder"])
def test_what_stands_in_the_place_of_a_file_is_damage_and_not_waited_for(
    run: Path, what: str, name: str
) -> None:
    storage = FolderStorage(run / "checkpoints")
    first = storage.names()[0]
    path = run / "checkpoints" / str(first) / name
    aside = path.rename(run / "aside")
    if what == "a FIFO":
        os.mkfifo(path)
    elif what == "a link":
        path.symlink_to(aside)  # to the right bytes
    elif what == "a folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(5 << 30)
    began = time.process_time()
    assert check(storage, first)
    assert time.process_time() - began < 1
    with pytest.raises(UserError):
        export(str(path.parent), run / "out.safetensors")


@pytest.mark.parametrize(
    "name",
    [
        "run.json",
        "result.json",
        "metrics.jsonl",
        "events.jsonl",
        "ranks.jsonl",
        "profile/memory.json",
    ],
)
def test_a_link_in_a_run_is_refused_by_name(run: Path, tmp_path: Path, name: str) -> None:
    (run / name).rename(tmp_path / "aside")
    (run / name).symlink_to(tmp_path / "aside")
    with pytest.raises(RunDirectoryError, match=rf"{name} cannot be read \(.* is a link\)"):
        read_runs([str(run)])


@pytest.mark.parametrize(
    "name", ["events.jsonl", "lock", "checkpoints", "profile", "events.out.tfevents.1.a"]
)
def test_a_run_does_not_write_through_a_link(run: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.touch()
    if (run / name).exists():
        (run / name).rename(tmp_path / "aside")
    (run / name).symlink_to(outside)
    with pytest.raises(
        RunDirectoryError,
        match=(f"holds {name}, which is a link; a run writes to its own files and folders there; "),
    ):
        RunDirectory.create(run, resume=True, reopen=True)
    assert outside.read_bytes() == b""
    (run / name).unlink()  # the remedy
    RunDirectory.create(run, resume=True, reopen=True).close()


def test_folders_that_the_user_links_to_are_read_and_resumed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(run)
    link = str(tmp_path / "latest")
    assert len(Target.find(link).names) == 2
    assert read_runs([link])[0].state == "ended"
    assert final_model(Target.find(link), None) is not None
    RunDirectory.create(Path(link), resume=True, reopen=True).close()
    (tmp_path / "model").symlink_to(run / "model.safetensors")
    assert read_safetensors(tmp_path / "model").specs["weight"] == ("float32", (4, 3))


def test_nothing_is_connected_to_that_only_the_folder_names(run: Path, tmp_path: Path) -> None:
    calls: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        for url in (
            f"http://127.0.0.1:{port}/x",
            f"s3://127.0.0.1:{port}/x",
            f"//127.0.0.1:{port}/x",
        ):
            told = json.loads((run / "run.json").read_text()) | {"checkpoints": url}
            (run / "run.json").write_text(json.dumps(told))
            at = Target.find(str(run))
            assert (len(at.names), at.elsewhere) == (2, url)
            (run / "result.json").rename(tmp_path / "result.json")
            for path in (run / "checkpoints").iterdir():
                path.rename(tmp_path / path.name)
            with pytest.raises(
                CheckpointError, match=r"lockstep connects only to URLs that you name; give "
            ):
                export(str(run), tmp_path / "out.safetensors")
            for path in tmp_path.glob("step-*"):
                path.rename(run / "checkpoints" / path.name)
            (tmp_path / "result.json").rename(run / "result.json")
        (tmp_path / "s").mkdir()
        (tmp_path / "s" / "search.json").write_text(
            json.dumps({"storage": f"mysql://me:pw@127.0.0.1:{port}/x", "name": "x"})
        )
        with pytest.raises(
            LaunchError,
            match=(
                r"lockstep connects only to a database that you name yourself; give --storage"
                r" mysql://me:\*\*\*@"
            ),
        ):
            results_in(tmp_path / "s", None)
        with pytest.raises(TimeoutError):
            calls.append(server.accept())
    assert not calls


def test_a_local_folder_of_checkpoints_that_a_run_names_is_read(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    told = json.loads((run / "run.json").read_text()) | {"checkpoints": str(tmp_path / "elsewhere")}
    (run / "run.json").write_text(json.dumps(told))
    assert len(Target.find(str(run)).names) == 2


@pytest.mark.parametrize(
    ("statements", "text"),
    [
        ([], "holds no search; it may be another file or database"),
        (
            ["CREATE TABLE studies (x)", "CREATE VIEW trials AS SELECT 1"],
            "holds 'trials', which is not a table; a search writes tables only",
        ),
        (
            ["CREATE TABLE t (x)", "CREATE TRIGGER y AFTER INSERT ON t BEGIN DELETE FROM t; END"],
            "holds 'y', which is not a table",
        ),
        (["CREATE VIRTUAL TABLE studies USING fts5(x)"], "holds 'studies', which is not a table"),
    ],
)
def test_a_database_that_no_search_made_is_not_written_to(
    tmp_path: Path, statements: list[str], text: str
) -> None:
    connection = sqlite3.connect(tmp_path / "search.db")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
    (tmp_path / "search.json").write_text(json.dumps({"storage": None, "name": "x"}))
    before = (tmp_path / "search.db").read_bytes()
    with pytest.raises(LaunchError, match=text):
        results_in(tmp_path, None)
    assert (tmp_path / "search.db").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["search.db", "search.json"]


def test_a_database_that_is_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "search.db")
    (tmp_path / "search.json").write_text(json.dumps({"storage": None, "name": "x"}))
    failures: list[BaseException] = []

    def read() -> None:
        try:
            results_in(tmp_path, None)
        except LaunchError as error:
            failures.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(60)
    assert [type(each) for each in failures] == [LaunchError]


@pytest.mark.command
def test_a_whole_command_says_one_line(run: Path, tmp_path: Path) -> None:
    (run / "events.jsonl").write_text(
        '{"time": 1.0, "event": "stopped", "step": 1, "reason": "[red]x[/] \\u001b]0;t\\u0007"}\n'
    )
    shown = commands("inspect", run)
    assert (shown.returncode, "stopped: [red]x[/] \\x1b]0;t\\x07" in shown.stdout) == (
        0,
        True,
    ), shown
    (run / "result.json").unlink()
    os.mkfifo(run / "result.json")
    for words in (
        ["inspect", run],
        ["report", run],
        ["export", run, tmp_path / "m.safetensors"],
        ["average", run, run / "x", "-o", "m.safetensors"],
    ):
        found = commands(*words)
        assert found.returncode == 2
        assert found.stderr.count("\n") == 1, found.stderr
