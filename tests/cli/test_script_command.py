"""Options of a command that stand after SCRIPT are named, with the corrected command line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from lockstep.cli.main import _COMMANDS, _commands

PROJECT = Path(__file__).parents[2]


def parsed(line: str, folder: Path) -> tuple[click.Context, str]:
    """Parse `lockstep LINE`, and return the command's context and what it said."""
    name, *arguments = shlex.split(line, comments=True)
    parent = click.Context(_commands, info_name="lockstep", **_commands.context_settings)
    command = _commands.get_command(parent, name)
    assert command is not None
    with CliRunner().isolation() as (_, said, _):
        context = command.make_context(
            name,
            [each.replace("train.py", str(folder / "train.py")) for each in arguments],
            parent=parent,
        )
    return context, said.getvalue().decode().replace(f"{folder}/", "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("import lockstep as ls")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "corrected"),
    [
        ("run train.py --nproc 2 --lr 1", "run --nproc 2 train.py --lr 1"),
        (
            "run --max-restarts 3 train.py --plan=replicate=2",
            "run --max-restarts 3 --plan=replicate=2 train.py",
        ),
        ("search train.py --trials 2", "search --trials 2 train.py"),
        ("sweep train.py --lr 1 --set lr=1,2", "sweep --set lr=1,2 train.py --lr 1"),
        ("audit train.py --nproc 2", "audit --nproc 2 train.py"),
        ("plan --on 'H100' train.py --json", "plan --on H100 --json train.py"),
    ],
)
def test_an_option_after_the_script_that_does_not_mention_it_is_named_with_the_corrected_line(
    folder: Path, line: str, corrected: str
) -> None:
    _, said = parsed(line, folder)
    assert said.count("\n") == 1
    assert (
        re.search(
            r"^lockstep: warning: (--\S+) comes after train\.py, .* write: lockstep (.*)\n", said
        ).group(2)
        == corrected
    )  # type: ignore[union-attr]
    assert parsed(corrected, folder)[1] == ""


@pytest.mark.parametrize(
    "line",
    [
        "run -- train.py --nproc 2",
        "run --nproc 1 -- train.py --nproc 2",
        "run train.py -- --nproc 2",
        "verify --plans replicate=2 -- train.py --steps 4",
        "plan --on H100 -- train.py --json",
        "run plain.py --nproc 2",
    ],
)
def test_an_option_that_is_meant_for_the_script_is_not_named(folder: Path, line: str) -> None:
    (folder / "plain.py").write_text("from lib import main")
    assert parsed(line.replace("plain.py", str(folder / "plain.py")), folder)[1] == ""
    assert (
        "--steps comes after" in parsed("verify --plans replicate=2 train.py --steps 4", folder)[1]
    )
    assert "--nproc comes after" in parsed(f"audit {folder}/plain.py --nproc 2", folder)[1]


def test_an_option_that_is_required_and_stands_after_the_script_is_not_called_missing(
    folder: Path,
) -> None:
    with pytest.raises(
        click.UsageError,
        match=(
            r"--on comes after .*train\.py, .* write: lockstep plan --on '64 x H100' \S*train\.py"
            r" --lr 1$"
        ),
    ):
        parsed("plan train.py --lr 1 --on '64 x H100'", folder)


def test_an_option_is_not_taken_for_the_script(folder: Path) -> None:
    with pytest.raises(
        click.UsageError,
        match=r"--best comes after runs/a, .* write: lockstep evaluate --best runs/a$",
    ):
        parsed("evaluate runs/a --best", folder)


@pytest.mark.parametrize(
    ("line", "option", "follows"),
    [
        ("run --profile --run-dir runs/a train.py", "--profile", "--run-dir"),
        ("search --trials 3 --set --run-dir runs/a train.py", "--set", "--run-dir"),
    ],
)
def test_an_option_is_not_taken_for_the_value_of_another(
    folder: Path, line: str, option: str, follows: str
) -> None:
    with pytest.raises(click.UsageError, match=f"{option} takes a value, and {follows} follows"):
        parsed(line, folder)


LINE = re.compile(
    rf"^(?: +|\$ )lockstep ((?:{'|'.join(_COMMANDS)})\b[^$|&>\\\n]*)(?<!\.\.\.)$", re.MULTILINE
)


def examples() -> list[str]:
    """Return the command lines in the help of all commands, in the README and in the docs."""
    commands = [
        _commands.get_command(click.Context(_commands), name) or _commands for name in _COMMANDS
    ]
    pages = [PROJECT / "README.md", *(PROJECT / "docs").rglob("*.md")]
    texts = [
        *(each.help or "" for each in (_commands, *commands)),
        *(page.read_text() for page in pages),
    ]
    return sorted({line for text in texts for line in LINE.findall(text)})


@pytest.mark.parametrize("line", examples())
def test_the_examples_have_their_options_where_they_belong(folder: Path, line: str) -> None:
    assert parsed(line, folder)[1] == ""
