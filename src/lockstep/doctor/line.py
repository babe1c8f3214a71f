"""What the doctor says: one line a check. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Verdict = Literal["ok", "absent", "slow", "wrong"]
Section = Literal["machine", "environment", "run directory", "meeting", "collectives", "links"]

_BAD: tuple[Verdict, ...] = ("slow", "wrong")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One check."""

    section: Section
    check: str
    """What was looked at, in a word or three."""
    verdict: Verdict
    """`absent`: not there, or not tried; no fault by itself."""
    found: str
    """What was seen."""
    remedy: str = ""
    """What to do. Never empty where the verdict is not `ok`."""
    machine: str = ""
    """Where it was seen. Empty: by all processes together."""

    def __post_init__(self) -> None:
        assert self.remedy or self.verdict == "ok", self

    @property
    def is_bad(self) -> bool:
        """Whether training would fail, or be slower than it need be."""
        return self.verdict in _BAD


def worst(lines: Iterable[Line]) -> Verdict:
    """The verdict over all: `wrong`, else `slow`, else `ok`."""
    return max((line.verdict for line in lines if line.is_bad), key=_BAD.index, default="ok")


def names_of_machines(hosts: Sequence[tuple[str, str]]) -> list[str]:
    """A name for each machine, from its host name and address: the first, or where several have the same, the second; else both and a
    number."""
    names = [name for name, _ in hosts]
    addresses = [address for _, address in hosts]
    if len(set(names)) == len(names):
        return names
    if len(set(addresses)) == len(addresses):
        return addresses
    return [f"{name}#{number}" for number, name in enumerate(names)]


def on(machine: str, lines: Iterable[Line]) -> list[Line]:
    """The same lines, seen on this machine."""
    return [replace(line, machine=machine) for line in lines]


def size(size_bytes: float) -> str:
    """In binary units: 64 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} TiB"


def duration(seconds: float) -> str:
    """In the unit that fits: 61 µs, 4.2 ms, 1.3 s."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 100 else f"{seconds * factor:.0f} {unit}"
    return f"{seconds:.3g} s"
