"""The documentation site: what its pages are made of, and the check of its links. `make docs`
builds the whole."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import FunctionType

import click
import pytest

import lockstep
from website import commands, links, reference, rewriting

ROOT = Path(__file__).parent.parent


def test_every_public_name_is_in_the_reference() -> None:
    names = {*lockstep.__all__, *(set(dir(lockstep)) - {"__version__"})}
    assert {name for name in names if reference.page_of(name) is None} == set()


@pytest.mark.parametrize("submodule", ["samplers", "errors"])
def test_every_public_name_of_a_submodule_is_in_the_reference(submodule: str) -> None:
    home = getattr(lockstep, submodule)
    kind = type if submodule == "errors" else FunctionType
    public = {
        name
        for name, each in vars(home).items()
        if isinstance(each, kind) and each.__module__ == home.__name__ and name[0] != "_"
    }
    listed = {name for page in reference.PAGES.values() for name in page.names}
    assert len(public) >= 4
    assert {name for name in public if f"lockstep.{submodule}.{name}" not in listed} == set()


def test_every_name_of_the_reference_exists_and_has_a_docstring() -> None:
    for name in [name for page in reference.PAGES.values() for name in page.names]:
        path, _, last = name.rpartition(".")
        home = (
            lockstep
            if path == "lockstep"
            else getattr(lockstep, path.removeprefix("lockstep."), None)
            or importlib.import_module(path)
        )
        value = getattr(home, last)
        assert value.__doc__, f"{name} has no docstring"
        source = Path(sys.modules[value.__module__].__file__ or "").read_text(encoding="utf-8")
        missing = [
            each
            for each in reference.MEMBERS.get(name, ())
            if not re.search(rf"(def |self\.){each}\b", source)
        ]
        assert missing == [], f"{name} has no {missing}"


def test_every_page_is_in_the_navigation() -> None:
    docs = ROOT / "docs"
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    pages |= {f"commands/{name}.md" for name in commands.commands()}
    _, _, navigation = (ROOT / "website" / "mkdocs.yml").read_text("utf-8").partition("\nnav:")
    assert pages - set(navigation.split()) == set()


def test_the_page_of_a_command_has_all_its_options_and_examples() -> None:
    found = commands.commands()
    assert list(found)[:2] == ["run", "verify"]
    assert len(found) >= 8
    for name, command in found.items():
        page = commands.render(name, command)
        options = [
            option
            for each in command.params
            if isinstance(each, click.Option)
            for option in each.opts
        ]
        assert [option for option in options if option not in page] == []
        assert f"```console\n$ lockstep {name}" in page, f"{name} --help has no example"
        assert f"[`lockstep {name}`]({name}.md)" in commands.render_index()


def test_text_of_a_help_is_not_markup() -> None:
    assert (
        commands.prose("NAME_JOB_1 is *one* <file>, by --run-dir")
        == r"NAME\_JOB\_1 is \*one\* \<file\>, by `--run-dir`{.option}"
    )


MOVING_IN = sorted((ROOT / "docs" / "moving-in").glob("*.md"))


@pytest.mark.parametrize("page", MOVING_IN, ids=lambda page: page.name)
def test_a_page_on_moving_in_has_two_scripts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    title, theirs, our_title, ours = rewriting.two_scripts(text)
    assert our_title.startswith("lockstep")
    assert not title.startswith("lockstep")
    assert "ls." in ours
    assert "ls." not in theirs
    compile(ours, f"{page.name}, right", "exec")
    compile(theirs, f"{page.name}, left", "exec")
    assert rewriting.split_scripts(text).count("```python title=") == 2


def test_links_out_of_docs_lead_to_pages_or_become_text() -> None:
    text = (
        "[a](../../examples/a.py) [b](../../benchmarks/) [c](../plans.md#x) `[d](../../b)`\n"
        "```\n"
        "[e](../../benchmarks/)\n"
        "```\n"
    )
    pages = {"examples/a.py": "examples/a.py.md"}
    assert (
        rewriting.replace_links(text, "moving-in/ddp.md", pages)
        == "[a](../examples/a.py.md) b [c](../plans.md#x) `d`\n```\n[e](../../benchmarks/)\n```\n"
    )


def test_the_first_mention_of_a_name_is_linked() -> None:
    text = (
        "# `ls.train`\n"
        "`ls.train(x)` and `ls.train`, [`ls.rank`](r.md), `other`\n"
        "```\n"
        "`ls.rank`\n"
        "```\n"
    )
    address = {"ls.train": "t", "ls.train(x)": "t", "ls.rank": "r"}.get
    assert (
        rewriting.link_names(text, address)
        == "# `ls.train`\n[`ls.train(x)`](t) and `ls.train`, [`ls.rank`](r.md),"
        " `other`\n```\n`ls.rank`\n```\n"
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('<a href="b.html#there">', None),
        ('<a href="#here"><p id="here">', None),
        ('<a href="https://example.org">', None),
        ('<a href="c.html">', "a.html: 'c.html' leads to no file"),
        ('<a href="b.html#gone">', "a.html: 'b.html#gone' leads to no anchor of b.html"),
        (
            '<script src="https://example.org/x.js">',
            "a.html: 'https://example.org/x.js' is fetched from elsewhere",
        ),
        (
            '<link rel="stylesheet" href="//example.org/x.css">',
            "a.html: '//example.org/x.css' is fetched from elsewhere",
        ),
    ],
)
def test_a_broken_link_is_named(body: str, reason: str | None, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(body)
    (tmp_path / "b.html").write_text('<h1 id="there">')
    assert links.broken(tmp_path) == ([] if reason is None else [reason])
