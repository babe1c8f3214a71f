"""Every Python example in the documentation runs as it stands, block after block."""

import re
from pathlib import Path

import pytest
import sklearn.metrics  # noqa: F401  # it sets environment variables for good, when first imported

ROOT = Path(__file__).parent.parent
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if "```python" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    if any("from transformers" in block for block in blocks):
        pytest.importorskip("transformers", reason="transformers is not installed (pip install -e .[dev])")
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
