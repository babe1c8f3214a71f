"""The pages of the commands, made from the parser of the command line itself."""

from __future__ import annotations

import inspect
import re

import click

from lockstep.cli.main import _commands


def commands() -> dict[str, click.Command]:
    """The commands of `lockstep`, by name, in the order of its `--help`."""
    group = _commands
    assert isinstance(group, click.Group)
    context = click.Context(group, info_name="lockstep")
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def render(name: str, command: click.Command) -> str:
    """The page of a command as Markdown: usage, description, examples, options."""
    context = click.Context(command, info_name=f"lockstep {name}", **command.context_settings)
    usage = " ".join(["lockstep", name, *command.collect_usage_pieces(context)])
    first, *others = _paragraphs(command)
    options = [
        _option(each, context)
        for each in command.get_params(context)
        if isinstance(each, click.Option)
    ]
    return (
        "\n\n".join(
            [f"# lockstep {name}", first, f"```text\n{usage}\n```", *others, "## Options", *options]
        )
        + "\n"
    )


def render_index() -> str:
    """The page that lists the commands."""
    rows = [
        f"| [`lockstep {name}`]({name}.md) | {_paragraphs(command)[0]} |"
        for name, command in commands().items()
    ]
    return "\n".join(
        [
            "# Commands",
            "",
            "| command | |",
            "|---|---|",
            *rows,
            "",
            "Each has `--help`, with the text of its page.",
            "",
        ]
    )


def _paragraphs(command: click.Command) -> list[str]:
    """The help of a command, paragraph by paragraph; its examples are a code block."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(command.help or "")):
        if paragraph.startswith("\b\n"):
            heading, *lines = paragraph.removeprefix("\b\n").splitlines()
            parts.append(f"## {heading.rstrip(':')}")
            parts.append("\n".join(["```console", *(f"$ {line.strip()}" for line in lines), "```"]))
        elif paragraph.startswith("Exit status:"):
            parts += ["## Exit status", prose(paragraph.removeprefix("Exit status:").strip())]
        else:
            parts.append(prose(paragraph))
    return parts


def _option(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    assert record is not None, f"{option.name} is hidden"
    names, text = record
    variable = f" Also as `{option.envvar}`." if isinstance(option.envvar, str) else ""
    return f"`{names}`\n:   {prose(text)}{variable}"


def prose(text: str) -> str:
    """Plain text of a help as Markdown: options are code, and nothing else is markup."""
    text = re.sub(r"([\\`*_<>\[\]|])", r"\\\1", " ".join(text.split()))
    return re.sub(r"(?<![\w-])--?[a-z][\w-]*", lambda found: f"`{found[0]}`{{.option}}", text)
