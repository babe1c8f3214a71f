"""`lockstep report` as a whole command, on runs as they are written."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import run_files
from processes import LOCKSTEP, ran
from report.run_directories import event, metrics, run_json, whole, write
from training.kept import run

from lockstep.base.container import process_id_space
from lockstep.testing.pool import WorkerPool

pytestmark = pytest.mark.forks


def lockstep(*arguments: Any, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return ran([LOCKSTEP, "report", *map(str, arguments)], cwd=folder)


def told(*arguments: Any) -> dict[str, Any]:
    found = lockstep("--json", *arguments)
    assert found.returncode == 0, found.stderr
    said: dict[str, Any] = json.loads(found.stdout)
    return said


@pytest.mark.command
def test_a_run_that_was_preempted_and_went_on_is_one_run_with_a_page(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    pool.run(1, run, "replicate=1", str(path), 3, {})
    before = lockstep(path)
    assert before.stdout.startswith("a: stopped, resumable, step 4, loss ")
    pool.run(2, run, "replicate=2", str(path), None, {})
    after = lockstep(path)
    assert after.returncode == 0, after.stderr
    first, last = after.stdout.splitlines()
    assert first.startswith("a: ended, step 7, loss ")
    assert last.startswith(f"{path}/report.html (")
    assert "<dt>attempts</dt><dd>2</dd>" in (path / "report.html").read_text()
    (said,) = told(path)["runs"]
    rows = run_files.metrics(path)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert (said["series"]["loss"]["first"], said["series"]["loss"]["last"]) == (
        losses[0],
        losses[-1],
    )
    assert said["fingerprint"] == run_files.fingerprint(path)
    assert len(said["ranks"]) == 2


def test_runs_are_compared_where_o_says_and_named_apart(tmp_path: Path) -> None:
    for name in ("one/a", "two/a"):
        whole(tmp_path / name, steps=100)
    found = lockstep("one/a", "two/a/", "-o", "page.html", folder=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    assert [line.partition(":")[0] for line in found.stdout.splitlines()[:2]] == ["one/a", "two/a"]
    assert (
        lockstep("one/a", "two/a", folder=tmp_path)
        .stdout.splitlines()[-1]
        .startswith("report.html (")
    )
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "page.html", "report.html"}
    assert not (tmp_path / "one" / "a" / "report.html").exists()


def test_json_and_a_page_may_be_had_at_once(tmp_path: Path) -> None:
    whole(tmp_path / "a", steps=100)
    assert not list(tmp_path.glob("**/*.html"))
    found = lockstep("--json", "-o", tmp_path / "page.html", tmp_path / "a")
    assert json.loads(found.stdout)["runs"][0]["name"] == "a"
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_a_live_run_is_running_and_a_killed_one_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a"
    run_json(path)
    write(path, "metrics.jsonl", metrics(range(1, 20)))
    write(path, "events.jsonl", [event(0, "run-started", 0)])
    holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lock = {
        "pid": holder.pid,
        "host": socket.gethostname(),
        "process_ids": process_id_space(),
        "started": "now",
    }
    (path / "lock").write_text(json.dumps(lock))
    try:
        (said,) = told(path)["runs"]
        assert (said["state"], said["reason"]) == (
            "running",
            f"process {holder.pid} on {socket.gethostname()} holds the directory",
        )
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    (said,) = told(path)["runs"]
    assert said["state"] == "unfinished"
    assert said["reason"].startswith("it ended without a record")
    (path / "lock").write_text(
        json.dumps(lock | {"host": "elsewhere", "process_ids": ["another", 1]})
    )
    assert "elsewhere, another host" in told(path)["runs"][0]["reason"]


def test_a_last_line_that_is_being_written_is_left_out_and_others_that_cannot_be_read_are_counted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a"
    run_json(path)
    lines = [
        '{"step": 1, "time": 0, "loss": 2}',
        "[]",
        '{"step": 2, "time": 0, "loss": "x"}',
        '{"step": 3}',
        "[" * 100_000,
        '{"step": 4, "time": NaN, "loss": 1}',
        '{"step": 4, "time": 1e300, "loss": 1}',
        f'{{"step": {10**30}, "time": 1, "loss": 1}}',
        f'{{"step": 4, "time": 1, "loss": {10**400}}}',
        '{"step": 4, "time": 1, "loss": 1}',
    ]
    (path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 5, "ti')
    (path / "events.jsonl").write_text('{"time": 0, "event": "run-st')
    (path / "ranks.jsonl").write_text('{"step": 1, "ranks": {"step": 3}}\n')
    (said,) = told(path)["runs"]
    assert said["unreadable_lines"] == {"metrics.jsonl": 8, "ranks.jsonl": 1}
    assert (said["series"]["loss"]["values"], said["series"]["loss"]["last_step"]) == (2, 4)
    lockstep(path)
    assert "8 lines of metrics.jsonl are invalid" in (path / "report.html").read_text()


def test_a_folder_whose_name_is_no_text_has_a_page(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"run-\xff")
    run_json(folder)
    found = subprocess.run([LOCKSTEP, "report", folder], capture_output=True, check=False)
    assert (found.returncode, found.stderr) == (0, b"")
    assert "run-\\udcff" in (folder / "report.html").read_text()


def test_only_a_report_is_written_over(tmp_path: Path) -> None:
    whole(tmp_path / "a", steps=100)
    first = lockstep(tmp_path / "a")
    assert lockstep(tmp_path / "a").returncode == first.returncode == 0
    (tmp_path / "notes.html").write_text("mine")
    found = lockstep(tmp_path / "a", "-o", tmp_path / "notes.html")
    assert (found.returncode, (tmp_path / "notes.html").read_text()) == (2, "mine")
    assert (
        "notes.html exists and is not a report; only a report is overwritten; name another file"
        in found.stderr
    )
    assert not list(tmp_path.glob("**/*.partial"))


MISTAKES: list[tuple[list[str], str]] = [
    ([], "UsageError: Missing argument 'RUN_DIR...'; see lockstep report --help"),
    (
        ["missing"],
        (
            "RunDirectoryError: missing does not exist; a report needs run directories; give one"
            " that a run has written to"
        ),
    ),
    (
        ["file"],
        (
            "RunDirectoryError: file is a file; a report needs run directories; give the folder"
            " that contains it"
        ),
    ),
    (
        ["runs"],
        (
            "RunDirectoryError: runs is not a run directory: it has no run.json, which a run writes"
            " when it starts; give one of those in it, a, b"
        ),
    ),
    (
        ["empty"],
        (
            "RunDirectoryError: empty is not a run directory: it has no run.json, which a run"
            " writes when it starts; give another"
        ),
    ),
    (
        ["runs/a", "runs/b", "runs/../runs/a"],
        "RunDirectoryError: runs/../runs/a and runs/a are the same run directory; give each once",
    ),
    (
        ["torn"],
        (
            "torn/run.json is not valid JSON (Expecting value: line 1 column 1 (char 0)); a run"
            " never writes it in part"
        ),
    ),
    (["deep"], "deep/run.json is not valid JSON (its values are nested too deep)"),
    (
        ["kinds"],
        "kinds/result.json has str as 'steps', but a run writes int; give another run directory",
    ),
    (
        ["runs/a", "-o", "no/page.html"],
        (
            "LaunchError: -o no/page.html; its directory does not exist; name a file in an "
            "existing one"
        ),
    ),
    (
        ["runs/a", "-o", "empty"],
        "LaunchError: -o empty is a directory; a report is one file; name a file in it",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "text"),
    MISTAKES,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_users_mistake_is_one_message_and_status_2(
    tmp_path: Path, arguments: list[str], text: str
) -> None:
    for name in ("runs/a", "runs/b"):
        run_json(tmp_path / name)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").touch()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "run.json").write_text("[" * 100_000)
    run_json(tmp_path / "kinds")
    (tmp_path / "kinds" / "result.json").write_text('{"steps": "all"}')
    found = lockstep(*arguments, folder=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert text in found.stderr
    assert found.stderr.count("\n") == 1
    assert not list(tmp_path.glob("**/*.html"))


def test_a_place_that_cannot_be_written_to_is_a_users_mistake(tmp_path: Path) -> None:
    run_json(tmp_path / "a")
    found = lockstep(tmp_path / "a", "-o", "/proc/page.html")
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    assert "lockstep: LaunchError: -o /proc/page.html cannot be written (" in found.stderr
    found = lockstep(tmp_path / "a", "-o", tmp_path / ("n" * 300 + ".html"))
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    assert os.listdir(tmp_path) == ["a"]


def test_nothing_is_left_of_a_page_for_which_there_is_no_room(tmp_path: Path) -> None:
    run_json(tmp_path / "a")
    line = f"ulimit -f 4; {LOCKSTEP} report a"
    found = ran(["bash", "-c", line], cwd=tmp_path)
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    assert "-o a/report.html cannot be written (File too large)" in found.stderr
    assert os.listdir(tmp_path / "a") == ["run.json"]


def test_a_report_is_made_without_torch(tmp_path: Path) -> None:
    whole(tmp_path / "a", steps=100)
    program = (
        "import sys\n"
        "from lockstep.cli.main import main\n"
        "try: main()\n"
        "finally: print({'torch', 'numpy'} & set(sys.modules))"
    )
    ended = ran([sys.executable, "-c", program, "report", str(tmp_path / "a")])
    assert ended.stdout.splitlines()[-1] == "set()", ended
