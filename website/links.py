"""The check of a built site: every link and anchor leads somewhere, and no page fetches anything
from elsewhere."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "link": "href"}
"""Tags whose target a browser fetches by itself."""


class PageLinks(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, str]] = []
        """Tag and target of each link."""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        target = values.get(FETCHED.get(tag, "href"))
        if target is not None and (tag in FETCHED or tag == "a"):
            self.links.append((tag, target))


def broken(site: Path) -> list[str]:
    """A sentence for each link of the site that leads nowhere, and for each thing that a page would
    fetch from elsewhere."""
    pages = {path.resolve(): PageLinks(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for tag, target in page.links:
            reason = _reason(path, tag, target, pages)
            if reason is not None:
                found.append(f"{path.relative_to(site.resolve())}: {target!r} {reason}")
    return found


def _reason(path: Path, tag: str, target: str, pages: dict[Path, PageLinks]) -> str | None:
    parts = urlsplit(target)
    if parts.scheme == "data":
        return None
    if parts.scheme or parts.netloc:
        return "is fetched from elsewhere" if tag in FETCHED else None
    to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not to.is_file():
        return "leads to no file"
    anchor = unquote(parts.fragment)
    if anchor and to in pages and anchor not in pages[to].anchors and not anchor.startswith("__"):
        return f"leads to no anchor of {to.name}"
    return None
