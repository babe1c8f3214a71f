"""What stands beside the code for a release: CITATION.cff, the issue templates, the workflow,
CONTRIBUTING.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import lockstep

ROOT = Path(__file__).parent.parent
TEMPLATES = sorted(
    path
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
    if path.name != "config.yml"
)
HEADINGS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
"""Those of Keep a Changelog."""


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def targets() -> set[str]:
    return set(
        re.findall(
            r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE
        )
    )


def test_the_citation_has_what_the_schema_requires_and_no_version_of_its_own() -> None:
    citation = loaded(ROOT / "CITATION.cff")
    assert (citation["cff-version"], citation["type"], citation["license"]) == (
        "1.2.0",
        "software",
        "Apache-2.0",
    )
    assert citation["message"]
    assert citation["title"].startswith("lockstep")
    assert all(author.keys() & {"name", "family-names"} for author in citation["authors"])
    assert not citation.keys() & {
        "version",
        "date-released",
    }, "the version is in lockstep.base.version alone"


def test_the_version_is_in_one_place() -> None:
    places = [
        path
        for path in (ROOT / "src").rglob("*.py")
        if f'"{lockstep.__version__}"' in path.read_text(encoding="utf-8")
    ]
    assert [path.name for path in places] == ["version.py"]
    assert (
        lockstep.__version__
        not in (ROOT / "pyproject.toml")
        .read_text(encoding="utf-8")
        .split("[build-system]")[1]
        .split("[project.opt")[0]
    )


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_an_issue_template_is_a_form(path: Path) -> None:
    form = loaded(path)
    assert {"name", "description", "body"} <= form.keys()
    assert all(
        field["type"] == "textarea" and field["id"] and field["attributes"]["label"]
        for field in form["body"]
    )


@pytest.mark.parametrize("name", ["bug.yml", "slow.yml"])
def test_reports_ask_for_the_doctor(name: str) -> None:
    form = loaded(ROOT / ".github" / "ISSUE_TEMPLATE" / name)
    (doctor,) = (field for field in form["body"] if field["id"] == "doctor")
    assert doctor["attributes"]["label"] == "lockstep doctor --json"
    assert doctor["validations"]["required"]


def test_the_workflow_runs_ci_on_linux_and_files_that_exist_elsewhere() -> None:
    jobs = loaded(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]
    assert [step["run"] for step in jobs["linux"]["steps"] if "run" in step] == [".ci/run"]
    assert jobs["other-systems"]["strategy"]["matrix"]["os"] == ["macos-latest", "windows-latest"]
    command = jobs["other-systems"]["steps"][-1]["run"]
    tests = re.findall(r"tests/\w+\.py", command)
    assert "tests/test_platforms.py" in tests
    assert [name for name in tests if not (ROOT / name).exists()] == []


def test_every_make_target_in_contributing_exists() -> None:
    named = re.findall(r"\bmake ([a-z]+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(named) >= 5
    assert set(named) <= targets()


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_links_and_files_of_a_page_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    paths = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text) + re.findall(
        r"(?:^|[`\s])((?:src|tests|docs)/[\w./-]+\.(?:py|md))", text
    )
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_changelog_has_the_sections_of_keep_a_changelog() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert next(line for line in lines if line.startswith("## ")) == "## [Unreleased]"
    assert {line.removeprefix("### ") for line in lines if line.startswith("### ")} <= set(HEADINGS)
