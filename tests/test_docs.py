"""Every Python example in the documentation runs as it stands, block after block."""

import importlib
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lockstep.recipe.parameters import declared
from lockstep.testing.pool import WorkerPool

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLANS = ("replicate", "shard", "context", "tensor", "pipeline")
"""Each has a page with one example."""
SLOW_PAGES = ("verify.md",)
"""Their examples are whole verifications, which tests/cli/test_verify.py has too."""


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import what sets environment variables for good."""
    for name in ("sklearn.metrics", "tensorboardX"):
        importlib.import_module(name)


def examples(page: Path) -> str:
    return "\n".join(
        re.findall(
            r"^```python\n(.*?)^```",
            page.read_text(encoding="utf-8"),
            flags=re.DOTALL | re.MULTILINE,
        )
    )


def run(page: Path) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    # as in a process of its own
    with patch.multiple(declared, parameters={}, values={}, is_closed=False):
        exec(compile(examples(page), str(page), "exec"), names)
    return names


@pytest.mark.forks("watched")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            marks=pytest.mark.command if page.name in SLOW_PAGES else (),
        )
        for page in PAGES
        if examples(page)
    ],
    ids=lambda page: page.name,
)
def test_the_examples_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "from transformers" in examples(page):
        pytest.importorskip(
            "transformers", reason="transformers is not installed (pip install -e .[dev])"
        )
    run(page)


def loss_of(page: Path) -> float:
    loss: float = run(page)["result"].loss
    return loss


@pytest.mark.parametrize("plan", PLANS)
def test_the_example_of_a_plan_is_the_same_model_under_it(
    pool: WorkerPool, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for size in (1, 2):
        (tmp_path / str(size)).mkdir()
        monkeypatch.chdir(tmp_path / str(size))
        monkeypatch.setenv("LOCKSTEP_PLAN", f"{plan}={size}")
        found += pool.run(size, loss_of, ROOT / "docs" / "plans" / f"{plan}.md")
    assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-4)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", prose):
        found = page.parent / target if target else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(found), f"{page.name} links to {target}#{anchor}"
