"""MkDocs' hooks: they add the pages that are made from code, and check the built site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import commands
import reference
import rewriting
from links import PageLinks, broken
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = {".py": "python", ".yaml": "yaml"}


def _shown() -> dict[str, str]:
    """Path in the repository of each file outside of docs/ that has a page -> path of that page."""
    examples = [path for path in sorted((ROOT / "examples").rglob("*")) if path.suffix in LANGUAGES]
    names = [path.relative_to(ROOT).as_posix() for path in examples]
    return {"CHANGELOG.md": "changes.md", **{name: f"{name}.md" for name in names}}


SHOWN = _shown()


def on_files(files: Files, config: Any) -> Files:
    """Add the reference, the commands, the examples and the changes."""
    made = {f"api/{name}.md": reference.render(page) for name, page in reference.PAGES.items()}
    made |= {
        f"commands/{name}.md": commands.render(name, command)
        for name, command in commands.commands().items()
    }
    made["commands/index.md"] = commands.render_index()
    for path, page in made.items():
        files.append(File.generated(config, path, content=page))
    for source, path in SHOWN.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source.endswith(".md"):
            text = text.replace("](docs/", "](")
        else:
            text = f"# {source}\n\n```{LANGUAGES[Path(source).suffix]}\n{text.rstrip()}\n```\n"
        inclusion = InclusionLevel.INCLUDED if source.endswith(".md") else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, path, content=text, inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    path = page.file.src_uri
    if path.startswith("moving-in/") or path == "index.md":
        page.meta["hide"] = ["toc"] if path != "index.md" else ["toc", "navigation"]
    if path.startswith(("api/", "examples/")) or path == "changes.md":
        # below the pages that explain
        page.meta["search"] = {"boost": 0.2 if path.startswith("examples/") else 0.4}
        return markdown
    if path.startswith("commands/"):
        return markdown
    markdown = rewriting.replace_links(markdown, path, SHOWN)
    markdown = rewriting.link_names(markdown, lambda code: _address(code, posixpath.dirname(path)))
    return rewriting.split_scripts(markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Leave prompts to the style sheet, so that they are not copied with a command."""
    return re.sub(r'<span class="gp">\$ ?</span> ?', '<span class="gp"></span>', html)


def _address(code: str, folder: str) -> str | None:
    """The address of the reference of a name, `ls.train(...)`, or of a command, `lockstep run
    ...`."""
    found = re.match(r"(ls\.|lockstep )(\w+)", code)
    if found is None:
        return None
    if found[1] == "ls.":
        page = reference.page_of(found[2])
        anchor = f"#lockstep.{found[2]}" if found[2] not in ("errors", "samplers") else ""
        target = None if page is None else f"api/{page}.md{anchor}"
    else:
        target = f"commands/{found[2]}.md" if found[2] in commands.commands() else None
    return None if target is None else posixpath.relpath(target, folder or ".")


def on_post_build(config: Any) -> None:
    """Fail if a link leads nowhere, if a page would fetch something from elsewhere, or if a public
    name is missing."""
    site = Path(config.site_dir)
    (site / "404.html").unlink()  # its links are for a server's root folder
    found = broken(site)
    for file, page in reference.PAGES.items():
        anchors = PageLinks(site / "api" / f"{file}.html").anchors
        found += [
            f"api/{file}.html: {name} is not in it" for name in page.names if name not in anchors
        ]
    if found:
        raise PluginError("\n".join(found))
