"""The Dockerfile and the page on containers against what there is: files, options, checks. No
engine."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import doctor, run

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE, PAGE = ROOT / "examples" / "Dockerfile", ROOT / "docs" / "containers.md"
DOCKER_RUN = {
    **dict.fromkeys(
        (
            "--gpus",
            "--ulimit",
            "--stop-timeout",
            "-v",
            "--cpus",
            "--memory",
            "--shm-size",
            "--ipc",
            "--network",
        ),
        True,
    ),
    **dict.fromkeys(("--pid", "--device", "--pids-limit", "--cpuset-cpus"), True),
    "--rm": False,
}
"""The options of `docker run` that the page names, and if they take a value."""
COMMANDS = {"run": run.command, "doctor": doctor.command}
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def instructions() -> list[tuple[str, str]]:
    lines = [
        line
        for line in DOCKERFILE.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def is_sent(path: str) -> bool:
    """True if the file, or all in the folder, is sent to the engine: the last rule that fits
    decides."""
    rules = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert rules[0] == "*"
    return any(path == rule.removeprefix("!") for rule in rules[1:] if rule.startswith("!"))


def test_the_image_is_made_of_files_that_there_are_and_that_the_package_is_built_from() -> None:
    copied = {
        source: target
        for name, rest in instructions()
        if name == "COPY"
        for *sources, target in [rest.split()]
        for source in sources
    }
    assert not [source for source in copied if not (ROOT / source).exists() or not is_sent(source)]
    project = PROJECT["project"]
    assert {
        "pyproject.toml",
        project["readme"],
        "LICENSE",
        *PROJECT["tool"]["setuptools"]["packages"]["find"]["where"],
    } <= copied.keys()
    assert ("RUN", "pip install --no-cache-dir /lockstep") in instructions()
    assert all(
        copied[source].startswith("/lockstep")
        for source in ("pyproject.toml", project["readme"], "LICENSE", "src")
    )
    ((_, image),) = [each for each in instructions() if each[0] == "FROM"]
    version = re.fullmatch(r"python:(\d+)\.(\d+)-slim", image)
    least = re.fullmatch(r">=(\d+)\.(\d+)", project["requires-python"])
    assert version is not None
    assert least is not None
    assert tuple(map(int, version.groups())) >= tuple(map(int, least.groups()))


def test_its_entry_point_is_our_command() -> None:
    given = dict(instructions())
    (entry,) = ast.literal_eval(given["ENTRYPOINT"])
    assert entry in PROJECT["project"]["scripts"]
    assert ast.literal_eval(given["CMD"]) == ["doctor"]


def lines() -> list[list[str]]:
    blocks = re.findall(
        r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return [
        shlex.split(line.removeprefix("$ "), comments=True)
        for block in blocks
        for line in block.splitlines()
    ]


def after_options(words: list[str], options: dict[str, bool]) -> list[str]:
    """What follows the options, each of which is one of `options`."""
    while words[0].startswith("-"):
        name, equals, _ = words[0].partition("=")
        words = words[2 if options[name] and not equals else 1 :]
    return words


def lockstep_words(line: list[str]) -> list[str] | None:
    """The arguments of `lockstep` in a command line of the page. None if it has none."""
    if line[:2] == ["docker", "run"]:
        image, *rest = after_options(line[2:], DOCKER_RUN)
        assert image == "train"
        return rest
    if line[0] == "srun":
        program, *rest = after_options(
            line[1:],
            dict.fromkeys(("--ntasks-per-node", "--container-image", "--container-mounts"), True),
        )
        assert program == "lockstep"
        return rest
    assert line == ["docker", "build", "-f", "examples/Dockerfile", "-t", "train", "."]
    return None


@pytest.mark.parametrize(
    "words", [words for line in lines() if (words := lockstep_words(line))], ids=" ".join
)
def test_the_commands_of_the_page_are_ours_and_keep_the_run_in_a_volume(words: list[str]) -> None:
    given = COMMANDS[words[0]].make_context(f"lockstep {words[0]}", words[1:]).params
    (line,) = [line for line in lines() if lockstep_words(line) == words]
    mounts = [
        word.partition("=")[2] or word
        for word in line
        if re.search(r"^(--container-mounts=)?/\w+(/\w+)*:/\w+$", word)
    ]
    assert [
        target
        for target in (mount.partition(":")[2] for mount in mounts)
        if given["run_dir"].startswith(target)
    ]


def test_the_page_s_checks_and_options_are_the_doctor_s() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `([^`]+)` \|[^|]*\|([^|]*)\|$",
        text[text.index("## What the doctor finds") :],
        flags=re.MULTILINE,
    )
    source = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "src/lockstep/doctor").glob("*.py")
    )
    assert len(rows) == 9
    for check, remedies in rows:
        assert re.search(rf'(_check|at_least)\(\s*"{check}"', source)
        for option in re.findall(r"`(-[^`]*)`", remedies):
            assert all(
                word.partition("=")[0] in DOCKER_RUN
                for word in option.split()
                if word.startswith("-")
            )
