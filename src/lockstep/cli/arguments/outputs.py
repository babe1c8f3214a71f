"""Options for the outputs of commands: JSON, a page, a folder that stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import click

from lockstep.base.errors import LaunchError
from lockstep.base.temporary_folder import locked_folder
from lockstep.cli.arguments.launch import Command
from lockstep.scripts.process import ended_by_signals


class Decorator(Protocol):
    """Gives a command an option."""

    def __call__(self, command: Command, /) -> Command: ...


json_option: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for programs instead of a table."
)


def seconds_option(name: str, field: str, default: float, help: str) -> Decorator:
    kind = click.FloatRange(min=1)
    details: dict[str, Any] = {"show_default": True, "metavar": "SECONDS", "help": help}
    return click.option(name, field, default=default, type=kind, **details)


def count_option(name: str, field: str, default: int | None, metavar: str, help: str) -> Decorator:
    """An option whose value is a whole number of at least 1."""
    details: dict[str, Any] = {"show_default": default is not None, "metavar": metavar}
    kind = click.IntRange(min=1)
    return click.option(name, field, default=default, type=kind, help=help, **details)


class NewFile(click.Path):
    """A file that a command writes, in a directory that exists."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(str(super().convert(value, param, ctx)))
        if not path.absolute().parent.is_dir():
            name = "the file" if param is None else param.opts[-1]
            raise LaunchError(
                f"{name} {value}; its directory does not exist; name a file in an existing one"
            )
        return path


def html_option(help: str) -> Decorator:
    return click.option("--html", type=NewFile(), metavar="FILE", help=help)


def write_file(option: str, path: Path, text: str) -> None:
    """Write a file that the user named. Raises `LaunchError`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(
            f"{option} {path}; it cannot be written ({error.strerror}); name another file"
        ) from error


def keep_option(contents: str) -> Decorator:
    return click.option(
        "--keep",
        type=click.Path(file_okay=False),
        metavar="DIR",
        help=f"Keep {contents} in this new directory.",
    )


@contextmanager
def work_folder(prefix: str, keep: str | None = None) -> Iterator[Path]:
    """A temporary folder, or the new or empty directory `keep`, which stays. SIGTERM and SIGHUP
    raise an exception within, so that leaving the block ends its processes. Raises
    `LaunchError`."""
    if keep is None:
        with ended_by_signals(), locked_folder(prefix) as folder:
            yield folder
        return
    path = Path(keep).absolute()
    if path.exists() and any(path.iterdir()):
        raise LaunchError(
            f"--keep {keep}; the directory is not empty, and what is kept goes to an empty one;"
            " name another, or remove it"
        )
    path.mkdir(parents=True, exist_ok=True)
    with ended_by_signals():
        yield path
