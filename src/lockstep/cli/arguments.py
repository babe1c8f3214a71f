"""Options and arguments that several `lockstep` commands share."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click

from lockstep.base.errors import LaunchError, say
from lockstep.base.files import finite, open_named
from lockstep.base.temporary_folder import locked_folder
from lockstep.options import LaunchOptions, RunOptions, flag, option_of, read_names, variable
from lockstep.scripts.line import ScriptLine, misplaced
from lockstep.scripts.process import ended_by_signals

Command = TypeVar("Command", bound=Callable[..., Any])
_FIELDS = {each.name: each for each in fields(LaunchOptions) if option_of(each).on_command_line}
_IN_ENVIRONMENT = {each.name for each in fields(RunOptions)}


class Decorator(Protocol):
    def __call__(self, command: Command, /) -> Command: ...


def together(*options: Decorator) -> Decorator:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def launch_option(name: str, **changed: Any) -> Decorator:
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
    # click would split the value of the environment variable at spaces
    if name in _IN_ENVIRONMENT and option.kind is not tuple:
        details["envvar"] = variable(name)
    return click.option(flag(name), name, **(details | changed))


launch_options = together(*map(launch_option, sorted(_FIELDS, key=_IN_ENVIRONMENT.__contains__)))
"""All options of `LaunchOptions`. The options of the launcher come before the options that it
passes to the workers."""


def options_from(values: dict[str, Any]) -> LaunchOptions:
    given = {name: value for name, value in values.items() if value not in (None, ())}
    return LaunchOptions(**given)


def script_arguments(*, required: bool = True) -> Decorator:
    """Add the parameter `line`: the user's script with its arguments."""
    options = together(
        click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module, as in python -m."),
        click.argument("script", required=required),
        click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED),
    )

    def decorate(command: Command) -> Command:
        @wraps(command)
        def called(is_module: bool, script: str | None, arguments: Any, **given: Any) -> Any:
            line = None if script is None else ScriptLine(script, arguments, is_module)
            if line is not None:
                line.check()
            return command(line=line, **given)

        return options(called)  # type: ignore[return-value]

    return decorate


json_option: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for programs instead of a table."
)


def print_json(value: Any) -> None:
    print(json.dumps(finite(value), indent=2, allow_nan=False))


mode_option: Decorator = click.option(
    "--mode",
    type=click.Choice(["min", "max"]),
    help="min if less is better, else max. Default for a loss: min.",
)
model_option: Decorator = click.option(
    "--model",
    "module",
    type=click.IntRange(min=0),
    metavar="N",
    help="Which model, if a session prepared several: 0 is the first.",
)


def seconds_option(name: str, field: str, default: float, help: str) -> Decorator:
    kind = click.FloatRange(min=1)
    details: dict[str, Any] = {"show_default": True, "metavar": "SECONDS", "help": help}
    return click.option(name, field, default=default, type=kind, **details)


def count_option(
    name: str, field: str, default: int | None, metavar: str, help: str, *, least: int = 1
) -> Decorator:
    details: dict[str, Any] = {"show_default": default is not None, "metavar": metavar}
    kind = click.IntRange(min=least)
    return click.option(name, field, default=default, type=kind, help=help, **details)


class NewFile(click.Path):
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
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(option, path, error) from error


def unwritable(option: str, path: Path, error: OSError) -> LaunchError:
    return LaunchError(f"{option} {path} cannot be written ({error.strerror}); name another file")


def check_output(path: Path, what: str, is_old: Callable[[bytes], bool]) -> None:
    """Raise `LaunchError` if the file of `-o` cannot be written, or if the file exists and is not
    an earlier output."""
    try:
        if path.is_dir():
            raise LaunchError(f"-o {path} is a directory; a {what} is one file; name a file in it")
        if not path.absolute().parent.is_dir():
            raise LaunchError(
                f"-o {path}; its directory does not exist; name a file in an existing one"
            )
        with open(open_named(path), "rb") as file:
            beginning = file.read(300)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unwritable("-o", path, error) from error
    if not is_old(beginning):
        raise LaunchError(
            f"-o {path} exists and is not a {what}; only a {what} is overwritten; name another"
            " file, or remove it"
        )


def keep_option(contents: str) -> Decorator:
    kind, help = click.Path(file_okay=False), f"Keep {contents} in this new directory."
    return click.option("--keep", type=kind, metavar="DIR", help=help)


@contextmanager
def work_folder(prefix: str, keep: str | None = None) -> Iterator[Path]:
    """Yield a temporary folder, or the new directory `keep`, which is not removed. SIGTERM and
    SIGHUP raise an exception inside the `with` block."""
    if keep is None:
        with ended_by_signals(), locked_folder(prefix) as folder:
            yield folder
        return
    path = Path(keep).absolute()
    if path.exists() and any(path.iterdir()):
        raise LaunchError(
            f"--keep {keep}; the directory is not empty, and files are kept in an empty one; name"
            " another, or remove it"
        )
    path.mkdir(parents=True, exist_ok=True)
    with ended_by_signals():
        yield path


class ScriptCommand(click.Command):
    """A click command whose options come before SCRIPT. All arguments after SCRIPT are passed to
    the script."""

    def __init__(self, *arguments: Any, uses_lockstep: bool = True, **settings: Any) -> None:
        settings["context_settings"] = {"allow_interspersed_args": False}
        super().__init__(*arguments, **settings)
        self._imports = "lockstep" if uses_lockstep else None

    def options(self) -> dict[str, click.Option]:
        options = (each for each in self.params if isinstance(each, click.Option))
        return {name: option for option in options for name in option.opts}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given, options = list(args), self.options()
        start = _script_index(given, options)

        def told(names: Collection[str], if_meant: str = "") -> str:
            after = given[start] if start < len(given) else "SCRIPT"
            verb, what = ("comes", "it is an argument of the script")
            if len(names) > 1:
                verb, what = ("come", "they are arguments of the script")
            words = shlex.join(before_script(given, options, names))
            return (
                f"{', '.join(sorted(names))} {verb} after {after}, so {what}{if_meant or '; '}"
                f"write: {ctx.command_path} {words}"
            )

        try:
            rest = super().parse_args(ctx, args)
        except click.MissingParameter as error:
            opts = error.param.opts if error.param is not None else ()
            missing = {argument.partition("=")[0] for argument in given}.intersection(opts)
            if not missing:
                raise
            raise click.UsageError(told(missing), ctx) from error
        script, arguments = ctx.params.get("script"), ctx.params.get("arguments", ())
        if script in options:
            raise click.UsageError(told([script]), ctx)
        for name, option in options.items():
            values = ctx.params.get(option.name or "")
            for value in values if isinstance(values, tuple) else (values,):
                if isinstance(value, str) and value in options and name == option.opts[0]:
                    raise click.UsageError(
                        f"{name} takes a value, and {value} follows, which is an option; give"
                        f" {name} its value",
                        ctx,
                    )
        if script is None or given[:start][-1:] == ["--"] or ctx.params.get("is_module"):
            return rest
        if names := misplaced(options, arguments, script, imports=self._imports):
            say(
                "lockstep: warning: "
                + told(names, ", which does not mention it; if it is for lockstep, ")
            )
        return rest


class PlansCommand(ScriptCommand):
    """A click command whose `--plans` takes several values. Arguments between SCRIPT and `--plans`
    are passed to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags = {name for name, option in self.options().items() if option.is_flag}
        return super().parse_args(ctx, rearranged(args, {*flags, "-h", "--help"}))

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["SCRIPT [ARGS]... --plans PLAN... [OPTIONS]"]


def before_script(
    given: Sequence[str], options: dict[str, click.Option], names: Collection[str]
) -> list[str]:
    """Return the command line with the options `names` before SCRIPT."""
    start = _script_index(given, options)
    moved: list[str] = []
    kept: list[str] = []
    after = iter(given[start:])
    for argument in after:
        name, equals, _ = argument.partition("=")
        (moved if name in names else kept).append(argument)
        if name in names and not equals and not options[name].is_flag:
            moved += [value for value in [next(after, None)] if value is not None]
    return [*(each for each in given[:start] if each != "--"), *moved, *kept]


def _script_index(given: Sequence[str], options: dict[str, click.Option]) -> int:
    index = 0
    while index < len(given) and given[index].startswith("-"):
        if given[index] == "--":
            return index + 1
        option = options.get(given[index])
        index += 1 if option is None or option.is_flag else 2
    return index


def rearranged(args: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return arguments in the order that click parses: options, then the script, then its
    arguments. Each plan gets its own `--plans`."""
    own, rest = _leading_options(args, 0, flags)
    script, after = args[rest : rest + 1], list(args[rest + 1 :])
    if list(args[:rest][-1:]) == ["--"]:
        script = ["--", *script]
    if "--plans" not in own:
        heads = [argument.partition("=")[0] for argument in after]
        start = heads.index("--plans") if "--plans" in heads else len(after)
        more, stop = _leading_options(after, start, flags)
        if stop < len(after):
            raise LaunchError(
                f"{after[stop]!r} after --plans is not a plan; a plan is KEY=VALUE[,KEY=VALUE...],"
                " and SCRIPT's arguments come before --plans; write for example --plans"
                " replicate=2 shard=2"
            )
        own, after = own + more, after[:start]
    return [*own, *script, *after]


def _leading_options(
    args: Sequence[str], index: int, flags: Collection[str]
) -> tuple[list[str], int]:
    own: list[str] = []
    while index < len(args) and args[index].startswith("-"):
        option, index = args[index], index + 1
        if option == "--":
            break
        if option == "--plans":
            first = index
            while index < len(args) and "=" in args[index] and not args[index].startswith("-"):
                own += ["--plans", args[index]]
                index += 1
            if index == first:
                follows = repr(args[first]) if first < len(args) else "nothing"
                raise LaunchError(
                    f"--plans is followed by {follows}, which is not a plan; a plan is"
                    " KEY=VALUE[,KEY=VALUE...], such as replicate=2"
                )
        elif option in flags or "=" in option:
            own.append(option)
        else:
            own += [option, *args[index : index + 1]]
            index += 1
    return own, index
