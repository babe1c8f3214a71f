"""The result of one check: a row of the doctor's table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
    """`skipped`: not available here, or not run; not a fault by itself."""
    found: str
    remedy: str = ""
    """Never empty unless the verdict is `ok`."""
    machine: str = ""
    """Empty if all processes made the check together."""

    def __post_init__(self) -> None:
        assert self.remedy or self.verdict == "ok", self

    @property
    def is_bad(self) -> bool:
        """True if training would fail or be slow."""
        return self.verdict in _BAD


def check_result(
    section: Section, check: str, verdict: Verdict, found: str, remedy: str = ""
) -> CheckResult:
    """Return a result, without the remedy if the verdict is `ok`."""
    return CheckResult(section, check, verdict, found, "" if verdict == "ok" else remedy)


def worst(checks: Iterable[CheckResult]) -> Verdict:
    """Return `failed` if any check failed, else `slow` if any is slow, else `ok`."""
    return max((check.verdict for check in checks if check.is_bad), key=_BAD.index, default="ok")


def machine_names(machines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return unique names of the machines: host names, else addresses, else numbered host names.
    `machines`: one dict each, with the `MachineInfo` as JSON in `info`."""
    hosts, addresses = (
        [str(each["info"][key]) for each in machines] for key in ("host", "address")
    )
    for names in (hosts, addresses):
        if len(set(names)) == len(names):
            return names
    return [f"{host}#{number}" for number, host in enumerate(hosts)]


def format_bytes(size_bytes: float) -> str:
    """Return a size such as 64 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} TiB"


def format_duration(seconds: float) -> str:
    """Return a duration such as 61 µs, 4.2 ms or 1.3 s."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if (value := seconds * factor) < 1000:
            return f"{value:{'.3g' if value < 100 else '.0f'}} {unit}"
    return f"{seconds:.3g} s"


def format_bandwidth(bytes_per_second: float) -> str:
    """Return a bandwidth such as 1.31 GB/s."""
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_per_second >= 0.9995 * factor:  # this would round up to 1.00 of this unit
            return f"{bytes_per_second / factor:.3g} {unit}"
    return f"{bytes_per_second / 1e3:.3g} kB/s"
