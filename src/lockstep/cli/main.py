"""The command `lockstep`: a group that imports a command when the command is used."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from importlib import import_module

import click

from lockstep.base.errors import USER_ERROR_STATUS, did_you_mean, say
from lockstep.base.interrupt import interrupts_end
from lockstep.base.system import check_surroundings, remedy_of
from lockstep.base.temporary_folder import remove_own_folders
from lockstep.base.version import __version__

_COMMANDS = (
    "run",
    "verify",
    "audit",
    "plan",
    "search",
    "sweep",
    "average",
    "evaluate",
    "replay",
    "blame",
    "report",
    "doctor",
    "inspect",
    "export",
    "slurm",
)


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        with interrupts_end():
            command: click.Command = import_module(f"lockstep.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS:
            ctx.fail(f"No such command {args[0]!r}{did_you_mean(args[0], _COMMANDS)}")
        return super().resolve_command(ctx, args)


def _print_version(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = "absent"
        click.echo(f"lockstep {__version__}, torch {torch}, Python {sys.version.partition(' ')[0]}")
        ctx.exit()


@click.command(
    cls=_Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the versions and end.",
)
def _commands() -> None:
    """Train a PyTorch model on any number of processes and get the same model.

    \b
    Example:
      lockstep run --nproc 2 train.py
      lockstep verify train.py --plans "replicate=2"
      lockstep audit --nproc 2 train.py
      lockstep plan --on "64 x H100" train.py
      lockstep search --trials 50 train.py
      lockstep sweep --set lr=1e-3,3e-3 train.py
      lockstep average runs/a runs/b -o model.safetensors
      lockstep evaluate runs/a
      lockstep replay --step 1200 runs/a
      lockstep blame runs/a
      lockstep report runs/a
      lockstep doctor --nproc 2
      lockstep inspect runs/a
      lockstep export runs/a model.safetensors
      lockstep slurm train.py --nodes 4 --gpus-per-node 8 --time 2:00:00
    """
    check_surroundings()


def main() -> None:
    """Print one message for a user's mistake, and exit with status 2."""
    _open_closed_streams()
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        # Under PYTHONUNBUFFERED, if a signal interrupts a write, the rest of the text would be
        # lost.
        sys.stdout = open(  # noqa: SIM115
            1,
            "w",
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
            buffering=1,
            closefd=False,
        )
    try:
        status = _commands.main(prog_name="lockstep", standalone_mode=False)
    except click.UsageError as error:
        # An error without a context: the value of a command's option is missing.
        where = error.ctx.command_path if error.ctx is not None else f"lockstep {sys.argv[1]}"
        _fail(f"UsageError: {error.format_message().rstrip('.')}; see {where} --help")
    except click.ClickException as error:
        _fail(f"UsageError: {error.format_message()}")
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except OSError as error:
        if (remedy := remedy_of(error)) is None:
            raise
        where = f" ({error.filename})" if error.filename else ""
        _fail(f"{type(error).__name__}: {error.strerror}{where}; {remedy}")
    if "torch" in sys.modules:
        # All work has ended. Without this, Python takes half a second more to destroy torch's
        # modules.
        sys.stdout.flush()
        with suppress(OSError):  # the reader of the pipe has ended
            sys.stderr.flush()
        remove_own_folders()
        os._exit(status or 0)
    sys.exit(status or 0)


def _open_closed_streams() -> None:
    """Open the streams that the shell has closed (`2>&-`) on the null device. A file that is opened
    later would get the descriptor of a closed stream."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor == number:
                os.set_inheritable(number, True)
            else:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _fail(message: str) -> None:
    say(f"lockstep: {message}")
    sys.exit(USER_ERROR_STATUS)
