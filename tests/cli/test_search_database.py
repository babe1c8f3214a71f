"""Searches that share a PostgreSQL server, as on several machines: their own folders, and the trials of one study."""

from __future__ import annotations

import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.postgres import Server, serving, why_not
from cli.searches import BAD, left_of, lockstep, reported, results, search, searched, starts
from search.storages import claimed_at_once, end_as_killed, request

from lockstep.search.study import TrialStorage

pytestmark = [
    pytest.mark.command,
    pytest.mark.timeout(150),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one"),
]


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def folders_of(tmp_path: Path, count: int) -> list[str]:
    """The folder that has each trial, by its number. Fails if a trial was begun in two, or in none."""
    found = [(int(path.name[-4:]), path.parent.name) for path in tmp_path.glob("[ab]/trial-*")]
    assert sorted(number for number, _ in found) == list(range(count))
    return [folder for _, folder in sorted(found)]


def test_searches_that_claim_at_once_never_get_the_same_trial(tmp_path: Path, server: Server) -> None:
    url = server.url.replace("tester@", "tester:secret@")
    opened = [TrialStorage(request(tmp_path / name, storage=url)) for name in ("a", "b", "a", "b")]
    claimed = claimed_at_once(opened, 40)
    for each in opened:
        end_as_killed(each)
    assert claimed == [(number, False) for number in range(40)]
    told = tmp_path / "a" / "search.json"
    assert "secret" in told.read_text()
    assert stat.S_IMODE(told.stat().st_mode) == 0o600


def test_two_searches_make_each_trial_once_and_none_is_missing(tmp_path: Path, server: Server) -> None:
    (tmp_path / "met").mkdir()
    words = ("--trials", 16, "--parallel", 1, "--storage", server.url)
    with (
        search(tmp_path, *words, "--run-dir", "a", "--", "--meet", tmp_path / "met", "--trouble", "crash") as one,
        search(tmp_path, *words, "--run-dir", "b", "--", "--meet", tmp_path / "met", "--trouble", "crash") as two,
    ):
        said = [each.communicate()[1] for each in (one, two)]
    assert [one.returncode, two.returncode] == [0, 0], said
    folders = folders_of(tmp_path, 16)
    assert set(folders) == {"a", "b"}
    trials = reported(tmp_path, "a")
    bad = {trial["number"] for trial in trials if trial["parameters"]["lr"] > 0.1}
    assert [starts(tmp_path, number, folder) for number, folder in enumerate(folders) if number not in bad] == [1] * (16 - len(bad))
    assert results(trials) == results(reported(tmp_path, "b"))
    assert [trial["number"] for trial in trials] == list(range(16))
    assert {trial["number"] for trial in trials if trial["state"] == "failed"} == bad > BAD
    assert Counter(trial["run_dir"] for trial in trials).most_common(1)[0][1] == 1
    assert [Path(trial["run_dir"]).parent.name for trial in trials] == folders
    assert server.query("SELECT state, count(*) FROM trials GROUP BY state ORDER BY 2") == [
        ("FAIL", sum(trial["state"] == "failed" for trial in trials)),
        ("COMPLETE", sum(trial["state"] == "complete" for trial in trials)),
    ]
    assert not left_of(tmp_path)


def test_a_server_that_goes_down_is_one_message_and_the_same_command_goes_on(tmp_path: Path, server: Server) -> None:
    words = ("--trials", 4, "--parallel", 2, "--storage", server.url)
    with search(tmp_path, *words, "--", "--seconds", 0.1) as first:
        while not any((tmp_path / "s").glob("trial-*/checkpoints/*")):
            assert first.poll() is None, first.communicate()
            time.sleep(0.02)
        server.stop()
        said = first.communicate()[1]
    assert first.returncode == 2, said
    last = said.splitlines()[-1]
    assert last.startswith("lockstep: LaunchError: --storage postgresql+psycopg2://tester@/postgres?host=")
    assert " cannot be reached: " in last
    assert last.endswith("; correct the address, or start the database; the same command goes on")
    assert "Traceback" not in said
    found = lockstep(tmp_path, "report", "--json", "s")
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    server.start()
    again = searched(tmp_path, *words, "--", "--seconds", 0.1)
    assert again.returncode == 0, again.stderr
    assert [(trial["number"], trial["state"]) for trial in reported(tmp_path)] == [(number, "complete") for number in range(4)]
    assert max(starts(tmp_path, number) for number in range(4)) == 2
    assert not left_of(tmp_path)
