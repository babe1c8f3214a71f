"""What the site changes in the text of a page of docs/, which stays plain Markdown for GitHub."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping

FENCE = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)
TWO_SCRIPTS = re.compile(
    r"^```text\n(# \S[^\n]*?\s{2,})(# [^\n]*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE
)
LINK_OR_CODE = re.compile(r"!?\[[^\]]*\]\([^)]*\)|`[^`\n]+`")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[\w-]+)?\)")


def two_scripts(text: str) -> tuple[str, str, str, str] | None:
    """The first block with two scripts side by side: title and code of the left one, title and code
    of the right."""
    found = TWO_SCRIPTS.search(text)
    return None if found is None else _columns(found)


def _columns(found: re.Match[str]) -> tuple[str, str, str, str]:
    width = len(found[1])
    rows = found[3].splitlines()
    for row in rows:
        if row[width - 1 : width].strip():
            raise ValueError(
                f"{row!r} runs into the right column, which begins at column {width + 1}"
            )
    left = "\n".join(row[:width].rstrip() for row in rows).rstrip()
    right = "\n".join(row[width:].rstrip() for row in rows).rstrip()
    return found[1].strip("# "), left, found[2].strip("# "), right


def split_scripts(text: str) -> str:
    """Make two code blocks of each block with two scripts side by side: a phone shows one below the
    other."""

    def blocks(found: re.Match[str]) -> str:
        title, left, other_title, right = _columns(found)
        return (
            '<div class="two-scripts" markdown="1">\n\n```python'
            f' title="{title}"\n{left}\n```\n\n```python'
            f' title="{other_title}"\n{right}\n```\n\n</div>'
        )

    return TWO_SCRIPTS.sub(blocks, text)


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Change what is not in a fenced code block."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def replace_links(text: str, page: str, pages: Mapping[str, str]) -> str:
    """Let links out of docs/ lead to the page that shows that file (`pages`: path in the repository
    -> path in the site); a link to anything else outside becomes its plain text. `page`: path of
    this page in docs/."""
    folder = posixpath.dirname(page)

    def replaced(found: re.Match[str]) -> str:
        image, shown, target, anchor = found[1], found[2], found[3], found[4] or ""
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if "://" in target or path.startswith("docs/"):
            return found[0]
        if path in pages:
            return f"{image}[{shown}]({posixpath.relpath(pages[path], folder or '.')}{anchor})"
        return shown

    return outside_fences(text, lambda prose: LINK.sub(replaced, prose))


def link_names(text: str, address: Callable[[str], str | None]) -> str:
    """Link the first mention of each public name and command, as code, to its reference: `address`
    of the code."""
    seen: set[str] = set()

    def linked(found: re.Match[str]) -> str:
        target = None if found[0][0] != "`" else address(found[0][1:-1])
        if target is None or target in seen:
            return found[0]
        seen.add(target)
        return f"[{found[0]}]({target})"

    def change(prose: str) -> str:
        lines = prose.split("\n")
        return "\n".join(
            line if line.startswith("#") else LINK_OR_CODE.sub(linked, line) for line in lines
        )

    return outside_fences(text, change)
