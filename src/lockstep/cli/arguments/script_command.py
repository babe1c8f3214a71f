"""A command that runs a script: its own options come before SCRIPT, and all arguments after SCRIPT
are the script's."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import click

from lockstep.base.errors import say
from lockstep.scripts.line import misplaced


class ScriptCommand(click.Command):
    """A command that names its own options where they stand after SCRIPT, and writes the corrected
    command line."""

    def __init__(self, *arguments: Any, uses_lockstep: bool = True, **settings: Any) -> None:
        """`uses_lockstep`: the scripts of this command do."""
        super().__init__(*arguments, **settings)
        self._imports = "lockstep" if uses_lockstep else None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        options = {
            name: each
            for each in self.params
            if isinstance(each, click.Option)
            for name in each.opts
        }
        try:
            rest = super().parse_args(ctx, args)
        except click.MissingParameter as error:
            missing = set(error.param.opts if error.param is not None else ()) & set(_names(given))
            if not missing:
                raise
            raise click.UsageError(
                f"{_where(missing, given, options)}; write: {_line(ctx, given, options, missing)}",
                ctx,
            ) from error
        script, arguments = ctx.params.get("script"), ctx.params.get("arguments", ())
        if script in options:
            raise click.UsageError(
                f"{_where([script], given, options)}; write:"
                f" {_line(ctx, given, options, [script])}",
                ctx,
            )
        for name, value in _values(ctx, options):
            if value in options:
                raise click.UsageError(
                    f"{name} takes a value, and {value} follows, which is an option; give {name}"
                    " its value",
                    ctx,
                )
        is_certain = given[: _script_place(given, options)][-1:] == ["--"]
        if script is None or is_certain or ctx.params.get("is_module"):
            return rest
        if names := misplaced(options, arguments, script, imports=self._imports):
            say(
                f"lockstep: warning: {_where(names, given, options)}, which does not mention it; if"
                f" it is for lockstep, write: {_line(ctx, given, options, names)}"
            )
        return rest


def before_script(
    given: Sequence[str], options: dict[str, click.Option], names: Collection[str]
) -> list[str]:
    """Return the arguments of a command line with the options `names`, and their values, moved
    before SCRIPT."""
    place = _script_place(given, options)
    moved: list[str] = []
    kept: list[str] = []
    after = iter(given[place:])
    for argument in after:
        name, equals, _ = argument.partition("=")
        if name not in names:
            kept.append(argument)
            continue
        moved.append(argument)
        if not equals and not options[name].is_flag and (value := next(after, None)) is not None:
            moved.append(value)
    return [*(each for each in given[:place] if each != "--"), *moved, *kept]


def _script_place(given: Sequence[str], options: dict[str, click.Option]) -> int:
    """Return the position of the first argument that is neither an option nor the value of one."""
    place = 0
    while place < len(given) and given[place].startswith("-"):
        if given[place] == "--":
            return place + 1
        option = options.get(given[place])
        place += 1 if option is None or option.is_flag else 2
    return place


def _where(names: Collection[str], given: Sequence[str], options: dict[str, click.Option]) -> str:
    after = next(iter(given[_script_place(given, options) :]), "SCRIPT")
    verb, noun = ("comes", "is an argument") if len(names) == 1 else ("come", "are arguments")
    return (
        f"{', '.join(sorted(names))} {verb} after {after}, so {'it' if len(names) == 1 else 'they'}"
        f" {noun} of the script"
    )


def _line(
    ctx: click.Context,
    given: Sequence[str],
    options: dict[str, click.Option],
    names: Collection[str],
) -> str:
    return f"{ctx.command_path} {shlex.join(before_script(given, options, names))}"


def _names(given: Sequence[str]) -> list[str]:
    return [argument.partition("=")[0] for argument in given]


def _values(ctx: click.Context, options: dict[str, click.Option]) -> Iterator[tuple[str, Any]]:
    """Yield each option that has a value, by its first name, and the value; of one that is given
    again, each value."""
    for option in {id(each): each for each in options.values() if not each.is_flag}.values():
        values = ctx.params.get(option.name or "")
        for value in values if isinstance(values, tuple) else (values,):
            yield option.opts[0], value if isinstance(value, str) else None
