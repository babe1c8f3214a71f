"""The words of an audit's report that the terminal and the page share. Pure."""

from __future__ import annotations

from lockstep.audit.finding import Audit


def extent(audit: Audit) -> str:
    """Return how much was looked at."""
    return (
        f"{_count(audit.processes, 'process', 'processes')}, {_count(audit.steps, 'step', 'steps')}"
    )


def verdict(audit: Audit) -> str:
    """Return the result in a few words."""
    found = (
        _count(len(audit.findings), "finding", "findings") if audit.findings else "nothing found"
    )
    return f"{found}; the script failed" if audit.error else found


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
