"""Launch options: declared once, the same on the command line, in the environment and in a
worker."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

import lockstep
from lockstep.base.errors import LaunchError
from lockstep.cli.arguments import options_from
from lockstep.cli.run import command
from lockstep.launch.environment import Environment
from lockstep.options import (
    OTHER_VARIABLES,
    LaunchOptions,
    Restart,
    RunOptions,
    check_shared_options,
    flag,
    option_of,
    variable,
)

GIVEN: dict[str, Any] = {
    "plan": "replicate=2",
    "run_dir": "/runs/a",
    "resume": "must",
    "save_every": "500",
    "out_of_memory": "halve",
    "hang_after": "90s",
    "on_hang": "report",
    "compare_every": 0,
    "recompute_every": 50,
    "profile": "steps=2:4",
    "check": True,
    "backend": "ucc",
    "share_devices": True,
    "allow_change": frozenset({"steps", "schedule"}),
    "set": ("lr=1e-3", "name=a b"),
    "stop_at": 1e9,
    "default_run_dir": "/runs/b",
    "restarted": Restart("rank 1 failed", not_in_place="shard=2"),
}
LAUNCHER: dict[str, Any] = {
    "nproc": "2",
    "stop_after": "55m",
    "max_restarts": 3,
    "recovery": "in-place",
    "nnodes": "2",
    "rdzv": "node1:1",
    "node_rank": 0,
    "master_addr": "node1",
    "master_port": 2,
    "interface": "eth1",
    "strict": True,
    "local_rank_argument": True,
}


def test_every_option_is_tried_here() -> None:
    assert {each.name for each in fields(LaunchOptions)} == GIVEN.keys() | LAUNCHER.keys()
    assert all(option_of(each).help.endswith(".") for each in fields(LaunchOptions))


def test_every_variable_is_in_one_table() -> None:
    known = {variable(name) for name in OTHER_VARIABLES.keys() | GIVEN.keys()}
    files = list(Path(lockstep.__path__[0]).rglob("*.py"))
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    named = {variable(name) for name in re.findall(r'\bvariable\("(\w+)"\)', text)}
    assert named | set(re.findall(r"\bLOCKSTEP_\w+", text)) <= known
    assert len(known) <= 22


def test_what_a_launcher_passes_on_its_workers_read() -> None:
    environment = RunOptions(**GIVEN).to_environment()
    assert environment.keys() == {variable(name) for name in GIVEN}
    read = Environment.read(environment)
    assert {name: getattr(read, name) for name in GIVEN} == GIVEN
    assert RunOptions().to_environment() == {}


def test_what_is_written_as_arguments_the_command_line_reads() -> None:
    on_command_line = {
        each.name for each in fields(LaunchOptions) if option_of(each).on_command_line
    }
    options = LaunchOptions(
        **{name: value for name, value in (GIVEN | LAUNCHER).items() if name in on_command_line}
    )
    with command.make_context(
        "run", [*options.arguments(), "train.py", "--plan", "its own"]
    ) as context:
        given = dict(context.params)
    assert (given.pop("is_module"), given.pop("script"), given.pop("arguments")) == (
        False,
        "train.py",
        ("--plan", "its own"),
    )
    assert options_from(given) == options


def test_without_options_all_have_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GIVEN:
        monkeypatch.delenv(variable(name), raising=False)
    with command.make_context("run", ["train.py"]) as context:
        given = {
            name: value for name, value in context.params.items() if flag(name) in command_flags()
        }
    assert options_from(given) == LaunchOptions()


def test_a_variable_is_an_option_and_the_command_line_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCKSTEP_SAVE_EVERY", "7")
    monkeypatch.setenv("LOCKSTEP_RESUME", "must")
    monkeypatch.setenv("LOCKSTEP_PLAN", "")
    with command.make_context("run", ["--resume", "never", "train.py"]) as context:
        assert (context.params["save_every"], context.params["resume"], context.params["plan"]) == (
            "7",
            "never",
            None,
        )


def command_flags() -> set[str]:
    return {
        name
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
    }


def test_an_option_that_is_not_the_same_on_all_ranks_is_named() -> None:
    everyone = [
        RunOptions(plan=plan, run_dir=str(rank)).shared()
        for rank, plan in enumerate(("shard=2", "shard=2"))
    ]
    check_shared_options(everyone)
    changed = [RunOptions().shared(), RunOptions(allow_change=frozenset({"steps"})).shared()]
    with pytest.raises(
        LaunchError,
        match=(
            r"^LOCKSTEP_ALLOW_CHANGE is \[\] for rank 0 and \['steps'\] for rank 1; all processes"
            r" of a run"
        ),
    ):
        check_shared_options(changed)


def test_workers_are_told_moments_and_absolute_paths() -> None:
    told = LaunchOptions(run_dir="a", stop_after="1m", nproc="3").for_workers(
        default_run_dir="/runs/b", now_seconds=100.0
    )
    assert told.run_dir is not None
    assert told.run_dir.endswith("/a")
    assert told == RunOptions(run_dir=told.run_dir, stop_at=160.0, default_run_dir="/runs/b")


def test_machines_compare_what_they_must_be_given_alike() -> None:
    options = LaunchOptions(plan="shard=2", nproc="2", stop_after="55m", check=True)
    assert options.same_on_all_machines() == ["plan=shard=2", "check=1", "stop_after=55m"]


def test_options_do_not_import_torch() -> None:
    subprocess.run(
        [sys.executable, "-c", "import lockstep.options, sys; assert 'torch' not in sys.modules"],
        check=True,
    )


@pytest.mark.parametrize("given", [{}, {"max_restarts": 1, "local_rank_argument": True}])
def test_a_recovery_in_place_that_could_never_be_is_refused(given: dict[str, Any]) -> None:
    for recovery in ("in-place", "shrink"):
        with pytest.raises(LaunchError, match=f"--recovery {recovery} with"):
            LaunchOptions(recovery=recovery, **given).validate()
        LaunchOptions(recovery=recovery, max_restarts=1).validate()


def test_an_empty_backend_is_refused() -> None:
    with pytest.raises(LaunchError, match="--backend ''; "):
        LaunchOptions(backend="").validate()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"plan": "replicate=4"},
            (
                "--recovery shrink with --plan replicate=4, which fits one number of processes;"
                " .*replicate=auto"
            ),
        ),
        (
            {"nnodes": "1:2", "rdzv": "host:29400"},
            "--recovery shrink with --nnodes 1:2; .*--recovery in-place continues without a lost machine",
        ),
    ],
)
def test_a_run_that_could_not_shrink_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        LaunchOptions(recovery="shrink", max_restarts=1, **given).validate()
    LaunchOptions(recovery="shrink", max_restarts=1, plan="shard=auto").validate()
