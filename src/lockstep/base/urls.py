"""Finds passwords in URLs, and removes them from text."""

from __future__ import annotations

import re

HIDDEN = "***"
_PASSWORDS = re.compile(r"pass(?!file)|pwd|secret|token|credential", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z0-9.+-]*")
_SHOWN = frozenset(
    [
        "host",
        "port",
        "user",
        "dbname",
        "sslmode",
        "charset",
        "driver",
        "passfile",
        "read_default_file",
        "connect_timeout",
        "timeout",
    ]
)


def has_password(url: str) -> bool:
    before, query = _split(url)
    names = [name for name, _ in query]
    return _without_login(before) != before or any(map(_PASSWORDS.search, names))


def without_password(url: str) -> str:
    before, query = _split(url)
    shown = "&".join(
        f"{name}={value if name in _SHOWN else HIDDEN}" if value else name for name, value in query
    )
    return _without_login(before) + (f"?{shown}" if query else "")


def _split(url: str) -> tuple[str, list[tuple[str, str]]]:
    login, at, rest = url.rpartition("@")
    before, question, query = rest.partition("?")
    pairs = [pair.partition("=") for pair in query.split("&")] if question else []
    return f"{login}{at}{before}", [(name, value) for name, _, value in pairs]


def _without_login(text: str) -> str:
    scheme, separator, rest = text.partition("://")
    # mistyped: it is not known where its parts end
    if not separator or not _SCHEME.fullmatch(scheme):
        return re.sub(r"(?s)[@:=].*", f":{HIDDEN}", text)
    login, at, place = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    if at:
        return f"{scheme}://{user}{f':{HIDDEN}' if colon else ''}@{place}"
    host, slash, path = rest.partition("/")
    name, colon, port = host.partition(":")
    # a login whose host is missing
    if colon and port and not port.isdecimal() and not host.startswith("["):
        host = f"{name}:{HIDDEN}"
    return f"{scheme}://{host}{slash}{path}"
