"""`lockstep verify`, whole. Each run of it starts several processes that import torch."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import LOCKSTEP, ran, started

from lockstep.cli.arguments import PlansCommand, rearranged
from lockstep.cli.verify import command

# a dozen processes that import torch, two at a time
pytestmark = [pytest.mark.forks, pytest.mark.timeout(240)]

SCRIPTS = Path(__file__).parent.parent / "scripts"
SCRIPT = str(SCRIPTS / "faults" / "train.py")


def verify(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return ran(
        [LOCKSTEP, "verify", *arguments], cwd=folder, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )


def found(*arguments: str, folder: Path) -> tuple[int, dict[str, Any]]:
    ended = verify(*arguments, "--json", folder=folder)
    assert ended.stderr == ""
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.parametrize(
    ("given", "click_sees"),
    [
        ("train.py --plans replicate=2", "--plans replicate=2 train.py"),
        (
            "train.py --lr 0.1 data=x --plans replicate=2 replicate=3 --steps 4 --json",
            "--plans replicate=2 --plans replicate=3 --steps 4 --json train.py --lr 0.1 data=x",
        ),
        (
            "--plans replicate=2 replicate=3 --steps 4 --bitwise train.py --plans none",
            "--plans replicate=2 --plans replicate=3 --steps 4 --bitwise train.py --plans none",
        ),
        (
            "--steps 4 -m package.train x --plans replicate=2",
            "--steps 4 -m --plans replicate=2 package.train x",
        ),
        ("--plans=replicate=2 train.py", "--plans=replicate=2 train.py"),
        ("--plans replicate=2 -- train.py --steps 4", "--plans replicate=2 -- train.py --steps 4"),
        ("--help", "--help"),
        ("train.py --help", "train.py --help"),
    ],
)
def test_the_scripts_arguments_are_told_from_ours(given: str, click_sees: str) -> None:
    assert isinstance(command, PlansCommand)
    flags = {name for name, option in command.options().items() if option.is_flag}
    assert rearranged(given.split(), {*flags, "--help"}) == click_sees.split()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["train.py"],
            (
                "PlanError: no plan to verify; --plans takes at least one; give for example --plans"
                " replicate=2"
            ),
        ),
        (
            ["train.py", "--plans", "replicate=2,numerics=slow"],
            "PlanError: numerics=slow; the known values are fast, bitwise",
        ),
        (
            ["missing.py", "--plans", "replicate=2"],
            (
                "LaunchError: 'missing.py' is not there; SCRIPT is the path of a Python file;"
                " correct it, or give -m before a module's name"
            ),
        ),
        (
            ["train.py", "--plans", "replicate=2", "--html", "no/such/place.html"],
            (
                "LaunchError: --html no/such/place.html; its directory does not exist; name a "
                "file in an existing one"
            ),
        ),
        (
            ["train.py", "--plans", "replicate=2", "shard"],
            "LaunchError: 'shard' after --plans is not a plan; a plan is KEY=VALUE",
        ),
        (
            ["train.py", "--plan", "replicate=2"],
            "LaunchError: --plan is an argument of SCRIPT here; the option of lockstep verify is",
        ),
        (
            ["--plans", "replicate=2"],
            "UsageError: Missing argument 'SCRIPT'; see lockstep verify --help",
        ),
        (
            ["train.py", "--plans", "replicate=2", "--step", "3"],
            "UsageError: No such option '--step'",
        ),
    ],
)
def test_a_mistake_is_one_message_and_status_2(
    tmp_path: Path, arguments: list[str], text: str
) -> None:
    (tmp_path / "train.py").write_text("print('started')")
    ended = verify(*arguments, folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"lockstep: {text}")


@pytest.mark.command
def test_right_plans_pass_and_are_shown(tmp_path: Path) -> None:
    """With numerics=bitwise, which needs only two runs; docs/verify.md tests the other kind."""
    options = ["--steps", "3", "--whole-microbatch-loss", "--html", "page.html", "--keep", "kept"]
    ended = verify(
        SCRIPT, "--steps", "9", "--plans", "replicate=2,numerics=bitwise", *options, folder=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    runs = ["run 1: one process, numerics=bitwise", "run 2 of 2: replicate=2,numerics=bitwise"]
    assert ended.stderr.splitlines() == [f"lockstep verify: {run}" for run in runs]
    assert f"{SCRIPT}: 3 steps against one process"[-60:] in ended.stdout.replace("\n", "")
    assert ended.stdout.count("passes") == 1
    assert "same bits" in ended.stdout
    assert (tmp_path / "page.html").read_text().count("<svg") == 3
    assert (tmp_path / "kept" / "reference-bitwise" / "trace" / "rank-0.jsonl").exists()
    assert (tmp_path / "kept" / "plan-replicate2-numericsbitwise" / "output.txt").exists()


def check(
    name: str, folder: Path, plans: Sequence[str] = ("replicate=2",), *options: str
) -> tuple[int, dict[str, Any]]:
    return found(
        SCRIPT, "--mistake", name, "--plans", *plans, "--steps", "2", *options, folder=folder
    )


@pytest.mark.slow
def test_a_rate_that_follows_the_number_of_processes_is_found(tmp_path: Path) -> None:
    status, report = check(
        "rate of the world", tmp_path, ("replicate=2",), "--no-float64", "--whole-microbatch-loss"
    )
    assert (status, report["passed"]) == (1, False)
    mismatch = report["plans"][0]["mismatch"]
    assert (mismatch["step"], mismatch["check"]) == (0, "lr")
    assert mismatch["cause"].startswith("another learning rate: 0.02 instead of 0.01")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(
            "fails",
            "failed before a training step under one process (exit status 1); verify compares",
            marks=pytest.mark.slow,
        )
    ],
)
def test_a_script_that_cannot_be_compared_is_a_mistake(
    tmp_path: Path, name: str, text: str
) -> None:
    ended = verify(SCRIPT, "--mistake", name, "--plans", "replicate=2", folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert text in ended.stderr
    assert ("ValueError: boom" in ended.stderr) == (name == "fails")
    assert "lockstep/cli" not in ended.stderr


@pytest.mark.command
def test_sigterm_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(1000)")
    with started(
        [LOCKSTEP, "verify", str(script), "--plans", "replicate=2"], cwd=tmp_path
    ) as command:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        command.terminate()
    assert command.returncode == 143
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what", "tensor", "cause"),
    [
        (
            "mask of the rank",
            "microbatch",
            None,
            "starts from the right random state but ends in another state",
        ),
        (
            "bias of the world",
            "microbatch",
            "head.bias",
            "every microbatch's gradient of 'head.bias' is 2 times what it should be",
        ),
    ],
)
def test_a_mistake_of_the_scripts_is_named(
    tmp_path: Path, name: str, what: str, tensor: str | None, cause: str
) -> None:
    status, report = check(name, tmp_path)
    mismatch = report["plans"][0]["mismatch"]
    assert (status, mismatch["step"], mismatch["check"]) == (1, 0, what)
    assert tensor is None or mismatch["name"] == tensor
    assert cause in mismatch["cause"]


@pytest.mark.slow
def test_data_that_differ_by_rank_end_the_plan_with_the_sample(tmp_path: Path) -> None:
    status, report = check("data of the rank", tmp_path)
    (plan,) = report["plans"]
    assert (status, plan["ran"], plan["exit_status"]) == (2, False, 2)
    assert "DataError: data: sample 0[0] differs between rank 0 and rank 1" in plan["error"]


@pytest.mark.slow
def test_a_mean_over_tokens_is_found_though_every_plan_agrees(tmp_path: Path) -> None:
    status, report = check("mean over tokens", tmp_path)
    assert status == 1
    assert report["plans"][0]["passed"]
    assert "the loss is not a sum over samples" in report["microbatch_size"]["mismatch"]["cause"]


@pytest.mark.slow
def test_a_plan_under_which_the_script_fails_is_shown_with_its_error(tmp_path: Path) -> None:
    status, report = check("fails on two", tmp_path, ("replicate=2", "replicate=3"), "--no-float64")
    assert status == 1
    assert [plan["ran"] for plan in report["plans"]] == [False, True]
    assert "ValueError: boom on two" in report["plans"][0]["error"]


@pytest.mark.slow
def test_the_whole_of_it_passes_on_a_right_script(tmp_path: Path) -> None:
    plans = (
        "replicate=2",
        "replicate=3",
        "replicate=4",
        "replicate=2,numerics=bitwise",
        "replicate=3,numerics=bitwise",
    )
    status, report = check("", tmp_path, plans)
    assert (status, report["passed"], report["microbatch_size"]["checked"], report["notes"]) == (
        0,
        True,
        True,
        [],
    )
    assert all(plan["float64"] for plan in report["plans"][:3])
    assert [plan["largest"] for plan in report["plans"][3:]] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "data",
            (
                "DataError: two runs of {} on one process have other data: contents of a batch of"
                " microbatch 0 after step 0; the script"
            ),
        ),
        (
            "loss",
            (
                "RecipeError: two runs of {} on one process have gradients of the first step that"
                " differ by"
            ),
        ),
    ],
)
def test_a_script_that_is_another_run_on_each_start_is_refused(
    tmp_path: Path, kind: str, text: str
) -> None:
    script = str(SCRIPTS / "entropy.py")
    ended = verify(script, kind, "--steps", "2", "--plans", "replicate=1", folder=tmp_path)
    assert ended.returncode == 2
    assert text.format(script) in ended.stderr
