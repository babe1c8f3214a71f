"""The result of one check, which is a row of the doctor's table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.base.units import size
from lockstep.pages.scale import format_number

Verdict = Literal["ok", "skipped", "slow", "failed"]
Section = Literal[
    "machine", "environment", "run directory", "rendezvous", "collectives", "point-to-point"
]

_BAD: tuple[Verdict, ...] = ("slow", "failed")


@dataclass(frozen=True, slots=True)
class CheckResult:
    section: Section
    check: str
    verdict: Verdict
    """`skipped` means that the check was not made, which is not a fault."""
    found: str
    remedy: str = ""
    """The remedy is empty only if the verdict is `ok`."""
    machine: str = ""
    """Name of the machine; empty for a check of all machines together."""

    def __post_init__(self) -> None:
        assert self.remedy or self.verdict == "ok", self

    @property
    def is_bad(self) -> bool:
        return self.verdict in _BAD


def check_result(
    section: Section, check: str, verdict: Verdict, found: str, remedy: str = ""
) -> CheckResult:
    return CheckResult(section, check, verdict, found, "" if verdict == "ok" else remedy)


def worst(checks: Iterable[CheckResult]) -> Verdict:
    return max((check.verdict for check in checks if check.is_bad), key=_BAD.index, default="ok")


def machine_names(machines: Sequence[Mapping[str, Any]]) -> list[str]:
    hosts, addresses = (
        [str(each["info"][key]) for each in machines] for key in ("host", "address")
    )
    for names in (hosts, addresses):
        if len(set(names)) == len(names):
            return names
    return [f"{host}#{number}" for number, host in enumerate(hosts)]


def format_bytes(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} TiB"


def format_seconds(seconds: float) -> str:
    return format_number(seconds, "seconds")


def format_bandwidth(bytes_per_second: float) -> str:
    return f"{size(bytes_per_second)}/s"
