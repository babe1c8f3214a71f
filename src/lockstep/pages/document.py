"""Makes an HTML document in a single file. The document's content security policy forbids
requests."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from lockstep.base.foreign_text import printable
from lockstep.pages.heatmap import RAMP
from lockstep.pages.markup import Content, Html, element, joined
from lockstep.pages.scale import format_date


def document(
    command: str,
    title: str,
    *body: Content,
    header: Content,
    data: Mapping[str, Any] | None = None,
    made: float | None = None,
    maker: str = "",
) -> str:
    """Return an HTML document. page.js shows the values in `data`. `made` is the time of creation,
    and `maker` the command that writes the file."""
    script, style = _read_asset("page.js"), _read_asset("page.css")
    light, dark = (
        f"--ramp:linear-gradient(90deg,{','.join(ramp)});"
        + "".join(f"--value-{place}:{colour};" for place, colour in enumerate(ramp[2:]))
        for ramp in (RAMP, RAMP[::-1])
    )
    ramps = f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )
    values = json.dumps(
        _printable(data or {}), separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).replace("<", "\\u003c")
    when = None if made is None else element("span", f"made {format_date(made)}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"{generator_tag(maker or command)}"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{joined(title)}</title><style>{style}{ramps}</style></head><body><main>"
        f"{element('header', element('p', command, when, kind='brand'), header)}"
        f"{joined(body)}</main>"
        f'<script type="application/json" id="data">{values}</script><script>{script}</script>'
        "</body></html>\n"
    )


def generator_tag(command: str) -> Html:
    return Html(f'<meta name="generator" content="{joined(command)}">')


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {name: _printable(each) for name, each in value.items()}
    return list(map(_printable, value)) if isinstance(value, list | tuple) else value


@cache
def _read_asset(name: str) -> str:
    return files("lockstep.pages").joinpath(name).read_text(encoding="utf-8")
