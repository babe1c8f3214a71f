"""Searches that share a PostgreSQL server, as on several machines: their own folders, and the
trials of one study."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.postgres import Server, folder_of_server, initialise, serving, why_not
from cli.searches import left_of, lockstep, reported, results, search, searched, starts
from search.storages import claimed_at_once, end_as_killed, request

from lockstep.search.study import TrialStorage

pytestmark = [
    pytest.mark.command,
    pytest.mark.forks,
    pytest.mark.timeout(150),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one"),
]


@pytest.fixture(scope="module")
def installed() -> Iterator[Path]:
    with folder_of_server() as folder:
        initialise(folder)
        yield folder


@pytest.fixture
def server(installed: Path) -> Iterator[Server]:
    with serving(installed) as server:
        yield server


def folders_of(tmp_path: Path, count: int) -> list[str]:
    """The folder that has each trial, by its number. Fails if a trial was begun in two, or in
    none."""
    found = [(int(path.name[-4:]), path.parent.name) for path in tmp_path.glob("[ab]/trial-*")]
    assert sorted(number for number, _ in found) == list(range(count))
    return [folder for _, folder in sorted(found)]


def test_searches_that_claim_at_once_never_get_the_same_trial(
    tmp_path: Path, server: Server
) -> None:
    opened = [
        TrialStorage(request(tmp_path / name, storage=server.url)) for name in ("a", "b", "a", "b")
    ]
    claimed = claimed_at_once(opened, 20)
    for each in opened:
        end_as_killed(each)
    assert claimed == [(number, False) for number in range(20)]


def test_two_searches_make_each_trial_once_and_none_is_missing(
    tmp_path: Path, server: Server
) -> None:
    (tmp_path / "met").mkdir()
    words = ("--trials", 6, "--parallel", 1, "--storage", server.url, "--run-dir")
    script = ("--", "--meet", tmp_path / "met", "--trouble", ",crash,,crash")
    with (
        search(tmp_path, *words, "a", *script) as one,
        search(tmp_path, *words, "b", *script) as two,
    ):
        said = [each.communicate()[1] for each in (one, two)]
    assert [one.returncode, two.returncode] == [0, 0], said
    folders = folders_of(tmp_path, 6)
    assert set(folders) == {"a", "b"}
    trials = reported(tmp_path, "a", "--storage", server.url)
    assert [starts(tmp_path, number, folders[number]) for number in (0, 1, 3, 5)] == [1] * 4
    assert results(trials) == results(reported(tmp_path, "b", "--storage", server.url))
    assert [trial["number"] for trial in trials] == list(range(6))
    assert {trial["number"] for trial in trials if trial["state"] == "failed"} == {2, 4}
    assert Counter(trial["run_dir"] for trial in trials).most_common(1)[0][1] == 1
    assert [Path(trial["run_dir"]).parent.name for trial in trials] == folders
    assert server.query("SELECT state, count(*) FROM trials GROUP BY state ORDER BY 2") == [
        ("FAIL", 2),
        ("COMPLETE", 4),
    ]
    assert not left_of(tmp_path)


def test_a_server_that_goes_down_is_one_message_and_the_same_command_goes_on(
    tmp_path: Path, server: Server
) -> None:
    words = ("--trials", 2, "--parallel", 2, "--storage", server.url)
    with search(tmp_path, *words, "--", "--seconds", 0.1) as first:
        while not any((tmp_path / "s").glob("trial-*/checkpoints/*")):
            assert first.poll() is None, first.communicate()
            time.sleep(0.02)
        server.stop()
        said = first.communicate()[1]
    assert first.returncode == 2, said
    last = said.splitlines()[-1]
    assert last.startswith(
        "lockstep: LaunchError: --storage postgresql+psycopg2://tester@/postgres?host="
    )
    assert " cannot be reached: " in last
    assert last.endswith("; correct the address, or start the database; the same command continues")
    assert "Traceback" not in said
    found = lockstep(tmp_path, "report", "--json", "--storage", server.url, "s")
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    server.start()
    again = searched(tmp_path, *words, "--", "--seconds", 0.1)
    assert again.returncode == 0, again.stderr
    assert [
        (trial["number"], trial["state"])
        for trial in reported(tmp_path, "s", "--storage", server.url)
    ] == [(0, "complete"), (1, "complete")]
    assert max(starts(tmp_path, number) for number in range(2)) == 2
    assert not left_of(tmp_path)


def test_the_report_of_a_search_asks_for_the_database_and_makes_no_table_in_it(
    tmp_path: Path, server: Server
) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "search.json").write_text(
        json.dumps({"storage": server.url, "name": "searched"})
    )
    found = lockstep(tmp_path, "report", "s")
    assert found.returncode == 2
    assert found.stderr.endswith(
        "lockstep connects only to a database that you name yourself; give --storage"
        f" postgresql+psycopg2://tester@/postgres?host={server.folder}\n"
    )
    found = lockstep(tmp_path, "report", "--storage", server.url, "s")
    assert (
        found.returncode,
        "holds no search; it may be another file or database" in found.stderr,
    ) == (2, True), found.stderr
    assert server.query(
        "SELECT count(*) FROM information_schema.tables WHERE table_schema = 'public'"
    ) == [(0,)]


def test_a_password_is_read_from_a_variable(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy of the refusal of a password in the URL."""
    server.require_password("s3cret")
    words = ("--trials", 1, "--parallel", 1)
    refused = searched(
        tmp_path, *words, "--storage", server.url.replace("tester@", "tester:s3cret@")
    )
    assert (refused.returncode, "PostgreSQL reads PGPASSWORD or ~/.pgpass" in refused.stderr) == (
        2,
        True,
    ), refused.stderr
    assert "s3cret" not in refused.stderr
    without = searched(tmp_path, *words, "--storage", server.url)
    assert (without.returncode, "no password supplied" in without.stderr) == (2, True), (
        without.stderr
    )
    monkeypatch.setenv("PGPASSWORD", "s3cret")
    for nproc in (1, 2):
        name = f"s{nproc}"
        where = ("--run-dir", name, "--name", name, "--storage", server.url)
        found = searched(tmp_path, *words, "--nproc", nproc, *where)
        assert found.returncode == 0, found.stderr
        assert len(reported(tmp_path, name, "--storage", server.url)) == 1
        assert (
            "s3cret"
            not in (tmp_path / name / "search.json").read_text() + found.stderr + found.stdout
        )
