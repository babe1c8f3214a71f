"""Runs that lose workers and recover in place: whole commands. They end with the bits of the run
that nothing happened to."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import run_files
from processes import LOCKSTEP, ran

from lockstep.testing import leaks

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "in_place.py")
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

pytestmark = [pytest.mark.command, pytest.mark.forks, pytest.mark.timeout(180)]


@dataclass
class Ended:
    run: Path
    output: str
    errors: str

    @property
    def fingerprint(self) -> str:
        found: str = run_files.fingerprint(self.run)
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        return run_files.events(self.run, name)

    def processes(self, rank: int) -> list[int]:
        """The processes that have done a step as this rank, in their order."""
        found = re.findall(rf"process (\d+) rank {rank} did", self.output)
        return list(dict.fromkeys(map(int, found)))


def train(
    folder: Path,
    plan: str,
    nproc: int,
    *arguments: str,
    options: Sequence[str] = ("--recovery", "in-place"),
) -> Ended:
    folder.mkdir()
    line = [
        LOCKSTEP,
        "run",
        "--nproc",
        str(nproc),
        "--plan",
        f"{plan},numerics=bitwise",
        "--run-dir",
        str(folder / "run"),
    ]
    line += ["--max-restarts", "2", *options, SCRIPT, *arguments]
    before = leaks.take(["shared-memory"])
    ended = ran(line, cwd=folder, env=ENVIRONMENT)
    assert ended.returncode == 0, ended.stderr
    assert leaks.remaining(before) == []
    return Ended(folder / "run", ended.stdout, ended.stderr)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train(
        tmp_path_factory.mktemp("undisturbed") / "folder", "replicate=2", 2, "once"
    ).fingerprint


@pytest.mark.parametrize(
    ("plan", "nproc", "rank", "state"),
    [
        ("replicate=3", 3, 1, "replica"),
        pytest.param("replicate=2", 2, 0, "replica", marks=pytest.mark.slow),
        ("shard=2", 2, 0, "image"),
        pytest.param("replicate=2,shard=2", 4, 3, "image", marks=pytest.mark.slow),
    ],
)
def test_the_others_keep_their_processes_and_the_bits_are_the_same(
    tmp_path: Path, undisturbed: str, plan: str, nproc: int, rank: int, state: str
) -> None:
    ended = train(tmp_path / "folder", plan, nproc, "once", str(rank), "13")
    assert ended.fingerprint == undisturbed
    assert [len(ended.processes(each)) for each in range(nproc)] == [
        1 + (each == rank) for each in range(nproc)
    ]
    (recovered,) = ended.events("recovered")
    assert recovered["state"] == state
    assert recovered["step"] == 13 if state == "replica" else recovered["step"] <= 13
    assert recovered["repeated_steps"] == 13 - recovered["step"]
    assert recovered["reason"].startswith(f"rank {rank} was killed by SIGKILL")
    assert not ended.events("restarted")


@pytest.mark.parametrize(
    "plan", ["replicate=auto", pytest.param("shard=auto", marks=pytest.mark.slow)]
)
def test_the_others_go_on_without_the_lost_one_if_asked_to(
    tmp_path: Path, undisturbed: str, plan: str
) -> None:
    ended = train(tmp_path / "folder", plan, 3, "once", "1", "13", options=("--recovery", "shrink"))
    assert ended.fingerprint == undisturbed
    assert run_files.result(ended.run)["world_size"] == 2
    processes = [ended.processes(rank) for rank in range(3)]
    assert (len(processes[0]), len(processes[1])) == (1, 2)
    assert processes[1][1] == processes[2][0]  # who was rank 2 before
    assert len(ended.events("recovered")) == 1


@pytest.mark.slow
def test_the_others_keep_their_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(tmp_path))  # inductor leaves a folder there
    ended = train(
        tmp_path / "folder",
        "replicate=auto,compile=yes",
        2,
        "compiles",
        "1",
        "13",
        options=("--recovery", "shrink"),
    )
    (process,) = ended.processes(0)
    counts = re.findall(rf"process {process} compiled (\d+) functions", ended.output)
    assert len(counts) == 2
    assert int(counts[0]) == int(counts[1]) > 0


def test_if_all_are_lost_their_images_are_left(tmp_path: Path, undisturbed: str) -> None:
    ended = train(tmp_path / "folder", "replicate=auto", 2, "all", "0", "13")
    assert ended.fingerprint == undisturbed
    assert [len(ended.processes(rank)) for rank in range(2)] == [2, 2]
    (recovered,) = ended.events("recovered")
    assert recovered["state"] == "image"
    assert 0 < recovered["step"] <= 13


@pytest.mark.slow
def test_the_others_train_until_a_process_that_takes_long_joins(
    tmp_path: Path, undisturbed: str
) -> None:
    ended = train(tmp_path / "folder", "replicate=auto", 2, "slow", "1", "5")
    assert ended.fingerprint == undisturbed
    lost, joined = ended.events("recovered")
    assert (lost["step"], joined["reason"], joined["state"]) == (
        5,
        "a new process joined",
        "replica",
    )
    assert joined["step"] > 5
    assert [event["world_size"] for event in ended.events("run-started")] == [2, 1, 2]
    assert [len(ended.processes(rank)) for rank in range(2)] == [1, 2]


@pytest.mark.parametrize("case", ["stops", pytest.param("sleeps", marks=pytest.mark.slow)])
def test_one_that_hangs_is_named_and_replaced(tmp_path: Path, undisturbed: str, case: str) -> None:
    ended = train(
        tmp_path / "folder",
        "replicate=2",
        2,
        case,
        "1",
        "13",
        options=("--recovery", "in-place", "--hang-after", "3s"),
    )
    assert ended.fingerprint == undisturbed
    assert [len(ended.processes(rank)) for rank in range(2)] == [1, 2]
    (recovered,) = ended.events("recovered")
    assert recovered["reason"].startswith(
        "rank 1 failed (exit status 76): HangError: rank 1 is waited for: "
    )
    assert recovered["state"] == "replica"


def test_a_loss_in_an_evaluation_goes_back_to_an_image(tmp_path: Path, undisturbed: str) -> None:
    ended = train(tmp_path / "folder", "replicate=2", 2, "evaluates", "1", "14")
    assert ended.fingerprint == undisturbed
    (recovered,) = ended.events("recovered")
    assert (recovered["state"], len(ended.processes(0))) == ("image", 1)
    rows = run_files.metrics(ended.run)
    assert sorted(row["step"] for row in rows if "evaluation/loss" in row) == [7, 14, 21, 28, 30]


@pytest.mark.parametrize(
    ("plan", "case"),
    [
        ("shard=2", "counts"),
        pytest.param("replicate=2", "counts", marks=pytest.mark.slow),
        pytest.param("shard=2", "counts deep", marks=pytest.mark.slow),
    ],
)
def test_a_hook_that_cannot_be_set_back_makes_all_start_again_and_the_event_says_so(
    tmp_path: Path, undisturbed: str, plan: str, case: str
) -> None:
    ended = train(tmp_path / "folder", plan, 2, case, "1", "13")
    assert ended.fingerprint == undisturbed
    (restarted,) = ended.events("restarted")
    part = "count" if case == "counts" else "counts['all']['steps']"
    assert (
        restarted["not_in_place"]
        == f"rank 0: hook Watched has no state_dict, and {part} has changed since the start: it"
        " cannot be set back; add one"
    )


def test_a_script_that_was_edited_meanwhile_is_not_mixed_in(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    shutil.copy(SCRIPT, script)
    line = [
        LOCKSTEP,
        "run",
        "--nproc",
        "2",
        "--plan",
        "replicate=2,numerics=bitwise",
        "--run-dir",
        "run",
        "--save-every",
        "4",
    ]
    line += ["--max-restarts", "2", "--recovery", "in-place", str(script), "edits", "1", "13"]
    ended = ran(line, cwd=tmp_path, env=ENVIRONMENT)
    assert ended.returncode == 2, ended.stderr
    (restarted,) = Ended(tmp_path / "run", "", "").events("restarted")
    assert "script.py is another version on rank 1 than on rank 0" in restarted["not_in_place"]
    assert "CheckpointError: the recipe differs from the one in checkpoint step-" in ended.stderr
    assert "loss: its code has changed, or a value that it uses" in ended.stderr


@pytest.mark.slow
def test_a_session_before_the_training_makes_all_start_again(tmp_path: Path) -> None:
    ended = train(tmp_path / "folder", "replicate=2", 2, "measures", "1", "13")
    (restarted,) = Ended(ended.run.with_name("run-2"), "", "").events("restarted")
    assert (
        restarted["not_in_place"]
        == "rank 0: the script has opened a session before, and a new process would have to do that"
        " again"
    )


def test_a_process_joins_one_that_holds_all_under_shard(tmp_path: Path, undisturbed: str) -> None:
    ended = train(tmp_path / "folder", "shard=auto", 2, "slow", "1", "5")
    assert ended.fingerprint == undisturbed
    assert [event["world_size"] for event in ended.events("run-started")] == [2, 1, 2]
    assert [event["state"] for event in ended.events("recovered")] == ["image", "image"]


def test_a_loss_in_a_second_training_makes_all_start_again(tmp_path: Path) -> None:
    ended = train(tmp_path / "folder", "replicate=2", 2, "twice", "1", "13")
    second = Ended(ended.run.with_name("run-2"), ended.output, ended.errors)
    (restarted,) = second.events("restarted")
    assert (
        restarted["not_in_place"]
        == "rank 0: the script has trained before, and a new process would have to do that again"
    )
    assert second.fingerprint == ended.fingerprint


def train_mixture(folder: Path, killed: str, *options: str) -> dict[str, Any]:
    folder.mkdir()
    script = str(Path(SCRIPT).with_name("mixture.py"))
    line = [LOCKSTEP, "run", "--nproc", "2", "--plan", "expert=2", "--run-dir", "run"]
    ended = ran(
        [*line, "--max-restarts", "1", *options, script, killed], cwd=folder, env=ENVIRONMENT
    )
    assert ended.returncode == 0, ended.stderr
    said = "lockstep: rank 1 was killed by SIGKILL" in ended.stderr
    assert said == (killed != "none")
    found: dict[str, Any] = run_files.result(folder / "run")
    return found


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_rank_that_is_killed_while_it_sends_tokens_to_experts_is_named_and_replaced(
    tmp_path: Path,
) -> None:
    expected = train_mixture(tmp_path / "undisturbed", "none")
    for options in ([], ["--recovery", "in-place"]):
        found = train_mixture(tmp_path / "-".join(["killed", *options]), "1", *options)
        assert (found["steps"], found["fingerprint"]) == (5, expected["fingerprint"])


CHECKED = ("--recompute-every", "4", "--save-every", "2")


@pytest.mark.parametrize(
    ("plan", "nproc", "recovery", "size"),
    [
        ("replicate=auto", 3, "shrink", 2),
        pytest.param("shard=auto", 3, "shrink", 2, marks=pytest.mark.slow),
        pytest.param("replicate=3", 3, "in-place", 3, marks=pytest.mark.slow),
        pytest.param("shard=3", 3, "restart", 3, marks=pytest.mark.slow),
        pytest.param("replicate=auto,pipeline=2", 6, "shrink", 4, marks=pytest.mark.slow),
        pytest.param("replicate=3,pipeline=2", 6, "in-place", 6, marks=pytest.mark.slow),
    ],
)
def test_one_that_computes_wrong_results_leaves_and_the_bits_are_the_same(
    tmp_path: Path, undisturbed: str, plan: str, nproc: int, recovery: str, size: int
) -> None:
    options = ("--recovery", recovery, *CHECKED)
    ended = train(tmp_path / "folder", plan, nproc, "wrong", "1", "13", options=options)
    assert ended.fingerprint == undisturbed
    assert run_files.result(ended.run)["world_size"] == size
    (event,) = ended.events("microbatch-differs")
    assert (event["step"], event["ranks"], event["agreed"]) == (16, [1], 12)
    (restarted,) = ended.events("restarted")
    assert restarted["step"] <= 12
    assert "WrongResultError: after step 16, microbatch " in restarted["reason"]
    if recovery != "restart":
        assert restarted["not_in_place"].startswith("the states in memory may be wrong")
        assert len(ended.processes(0)) == 1
