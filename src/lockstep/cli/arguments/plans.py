"""The option `--plans`, which takes several values, of commands that run a script under several
plans."""

from __future__ import annotations

from collections.abc import Sequence

import click

from lockstep.base.errors import LaunchError
from lockstep.cli.arguments.script_command import ScriptCommand

_FLAGS = {
    "--bitwise",
    "--json",
    "--no-float64",
    "--whole-microbatch-loss",
    "--share-devices",
    "-m",
    "-h",
    "--help",
}
"""Options of these commands that take no value."""


class PlansCommand(ScriptCommand):
    """A command whose `--plans` takes several values. Arguments between SCRIPT and `--plans` are
    the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, rearranged(args))

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["SCRIPT [ARGS]... --plans PLAN... [OPTIONS]"]


def rearranged(args: Sequence[str]) -> list[str]:
    """Return `args` with the options first, a `--plans` before each plan, then the script and its
    arguments, with the `--` that was given before it."""
    own, rest = _own(args, 0)
    script, after = args[rest : rest + 1], list(args[rest + 1 :])
    if list(args[:rest][-1:]) == ["--"]:
        script = ["--", *script]
    if "--plans" not in own:
        place = next(
            (i for i, arg in enumerate(after) if arg == "--plans" or arg.startswith("--plans=")),
            len(after),
        )
        more, stop = _own(after, place)
        if stop < len(after):
            raise LaunchError(
                f"{after[stop]!r} is behind --plans and is no plan; a plan is"
                " KEY=VALUE[,KEY=VALUE...], and SCRIPT's arguments come before --plans; write for"
                " example --plans replicate=2 shard=2"
            )
        own, after = own + more, after[:place]
    return [*own, *script, *after]


def _own(args: Sequence[str], start: int) -> tuple[list[str], int]:
    """Return the options that begin at `start`, and the position behind them."""
    found: list[str] = []
    place = start
    while place < len(args) and args[place].startswith("-"):
        option, place = args[place], place + 1
        if option == "--":
            break
        if option == "--plans":
            first = place
            while place < len(args) and "=" in args[place] and not args[place].startswith("-"):
                found += ["--plans", args[place]]
                place += 1
            if place == first:
                follows = repr(args[first]) if first < len(args) else "nothing"
                raise LaunchError(
                    f"--plans is followed by {follows}, which is no plan; a plan is"
                    " KEY=VALUE[,KEY=VALUE...], such as replicate=2"
                )
        elif option in _FLAGS or "=" in option:
            found.append(option)
        else:
            found += [option, *args[place : place + 1]]
            place += 1
    return found, place
