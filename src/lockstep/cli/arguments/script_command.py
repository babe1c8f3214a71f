"""A command that runs a script: its options come before SCRIPT, and the script's arguments after
it."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from typing import Any

import click

from lockstep.base.errors import LaunchError, say
from lockstep.scripts.line import misplaced


class ScriptCommand(click.Command):
    """A command that names its options after SCRIPT, and prints the corrected command line."""

    def __init__(self, *arguments: Any, uses_lockstep: bool = True, **settings: Any) -> None:
        """`uses_lockstep`: the scripts of this command do."""
        super().__init__(*arguments, **settings)
        self._imports = "lockstep" if uses_lockstep else None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        options = self.options()
        place = _script_place(given, options)

        def where(names: Collection[str]) -> str:
            after, one = given[place] if place < len(given) else "SCRIPT", len(names) == 1
            verb, what = ("comes", "it is an argument") if one else ("come", "they are arguments")
            return f"{', '.join(sorted(names))} {verb} after {after}, so {what} of the script"

        def corrected(names: Collection[str]) -> str:
            words = before_script(given, options, names)
            return f"write: {ctx.command_path} {shlex.join(words)}"

        try:
            rest = super().parse_args(ctx, args)
        except click.MissingParameter as error:
            named = {argument.partition("=")[0] for argument in given}
            missing = named.intersection(error.param.opts if error.param is not None else ())
            if not missing:
                raise
            raise click.UsageError(f"{where(missing)}; {corrected(missing)}", ctx) from error
        script, arguments = ctx.params.get("script"), ctx.params.get("arguments", ())
        if script in options:
            raise click.UsageError(f"{where([script])}; {corrected([script])}", ctx)
        for name, option in options.items():
            values = ctx.params.get(option.name or "")
            for value in values if isinstance(values, tuple) else (values,):
                if isinstance(value, str) and value in options and name == option.opts[0]:
                    raise click.UsageError(
                        f"{name} takes a value, and {value} follows, which is an option; give"
                        f" {name} its value",
                        ctx,
                    )
        if script is None or given[:place][-1:] == ["--"] or ctx.params.get("is_module"):
            return rest
        if names := misplaced(options, arguments, script, imports=self._imports):
            say(
                f"lockstep: warning: {where(names)}, which does not mention it; if it is for"
                f" lockstep, {corrected(names)}"
            )
        return rest

    def options(self) -> dict[str, click.Option]:
        """The options of the command by their names."""
        each = (each for each in self.params if isinstance(each, click.Option))
        return {name: option for option in each for name in option.opts}


class PlansCommand(ScriptCommand):
    """A command whose `--plans` takes several values. Arguments between SCRIPT and `--plans` are
    the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags = {name for name, option in self.options().items() if option.is_flag}
        return super().parse_args(ctx, rearranged(args, {*flags, "-h", "--help"}))

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["SCRIPT [ARGS]... --plans PLAN... [OPTIONS]"]


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
        (moved if name in names else kept).append(argument)
        if name in names and not equals and not options[name].is_flag:
            moved += [value for value in [next(after, None)] if value is not None]
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


def rearranged(args: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return `args` with the options first, a `--plans` before each plan, then the script and its
    arguments, with the `--` that was given before it. `flags`: options without a value."""
    own, rest = _own(args, 0, flags)
    script, after = args[rest : rest + 1], list(args[rest + 1 :])
    if list(args[:rest][-1:]) == ["--"]:
        script = ["--", *script]
    if "--plans" not in own:
        heads = [argument.partition("=")[0] for argument in after]
        place = heads.index("--plans") if "--plans" in heads else len(after)
        more, stop = _own(after, place, flags)
        if stop < len(after):
            raise LaunchError(
                f"{after[stop]!r} after --plans is no plan; a plan is"
                " KEY=VALUE[,KEY=VALUE...], and SCRIPT's arguments come before --plans; write for"
                " example --plans replicate=2 shard=2"
            )
        own, after = own + more, after[:place]
    return [*own, *script, *after]


def _own(args: Sequence[str], start: int, flags: Collection[str]) -> tuple[list[str], int]:
    """Return the options that begin at `start`, and the position behind them."""
    own: list[str] = []
    place = start
    while place < len(args) and args[place].startswith("-"):
        option, place = args[place], place + 1
        if option == "--":
            break
        if option == "--plans":
            first = place
            while place < len(args) and "=" in args[place] and not args[place].startswith("-"):
                own += ["--plans", args[place]]
                place += 1
            if place == first:
                follows = repr(args[first]) if first < len(args) else "nothing"
                raise LaunchError(
                    f"--plans is followed by {follows}, which is no plan; a plan is"
                    " KEY=VALUE[,KEY=VALUE...], such as replicate=2"
                )
        elif option in flags or "=" in option:
            own.append(option)
        else:
            own += [option, *args[place : place + 1]]
            place += 1
    return own, place
