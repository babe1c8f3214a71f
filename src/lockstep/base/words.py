"""Formats numbers and lists in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """For example "1 step", "1,200 steps", "2 microbatches"."""
    plural = "" if number == 1 else "es" if noun.endswith(("ss", "tch")) else "s"
    return f"{number:,} {noun}{plural}"


def listed(noun: str, names: Sequence[object]) -> str:
    """Return a noun with names as text: "rank 3", "ranks 1, 2"."""
    return f"{noun}{'' if len(names) == 1 else 's'} {', '.join(map(str, names))}"


def enumerated(items: Sequence[object]) -> str:
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
