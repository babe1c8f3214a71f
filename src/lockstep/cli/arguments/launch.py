"""Command-line arguments that several commands have: options derived from `LaunchOptions`, and the
script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

import click

from lockstep.options import LaunchOptions, RunOptions, flag, option_of, read_names, variable
from lockstep.scripts.line import ScriptLine

Command = TypeVar("Command", bound=Callable[..., Any])

_FIELDS = {each.name: each for each in fields(LaunchOptions) if option_of(each).on_command_line}
_IN_ENVIRONMENT = {each.name for each in fields(RunOptions)}


def launch_options(command: Command) -> Command:
    """Give a command all options of `LaunchOptions`: first the launcher's own, then those passed to
    workers."""
    for name in sorted(_FIELDS, key=_IN_ENVIRONMENT.__contains__)[::-1]:
        command = launch_option(name)(command)
    return command


def launch_option(name: str, **changed: Any) -> Callable[[Command], Command]:
    """Give a command one option of `LaunchOptions`, None if not given. `changed`: arguments of
    `click.option`."""
    option = option_of(_FIELDS[name])
    details: dict[str, Any] = {"help": option.help, "metavar": option.metavar}
    if option.kind is bool:
        details |= {"is_flag": True, "default": None}
    elif option.kind is int:
        details["type"] = click.IntRange(option.least, option.most)
    elif option.kind is frozenset:
        details["type"] = read_names
    elif option.kind is tuple:
        details |= {"multiple": True, "default": None}
    elif option.choices:
        details["type"] = click.Choice(option.choices)
    # click would split the variable at spaces
    if name in _IN_ENVIRONMENT and option.kind is not tuple:
        details["envvar"] = variable(name)
    return click.option(flag(name), name, **(details | changed))


def options_from(values: dict[str, Any]) -> LaunchOptions:
    """The launch options from a command's parameters, with defaults for the others."""
    return LaunchOptions(
        **{name: value for name, value in values.items() if value not in (None, ())}
    )


def script_arguments(*, required: bool = True) -> Callable[[Command], Command]:
    """Give a command the parameter `line`, a `ScriptLine`; None if it is not given. Everything
    after SCRIPT is the script's."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def called(is_module: bool, script: str | None, arguments: Any, **given: Any) -> Any:
            line = None if script is None else ScriptLine(script, arguments, is_module)
            if line is not None:
                line.check()
            return command(line=line, **given)

        for option in (
            click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED),
            click.argument("script", required=required),
            click.option(
                "-m",
                "is_module",
                is_flag=True,
                help="SCRIPT is the name of a module, as in python -m.",
            ),
        ):
            called = option(called)
        return called  # type: ignore[return-value]

    return decorate
