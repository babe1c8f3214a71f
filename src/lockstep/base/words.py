"""Numbers and lists in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """Return a number with a noun as text: "1 step", "1,200 steps", "2 microbatches"."""
    plural = "" if number == 1 else "es" if noun.endswith(("ss", "tch")) else "s"
    return f"{number:,} {noun}{plural}"


def listed(noun: str, names: Sequence[object]) -> str:
    """Return a noun with names as text: "rank 3", "ranks 1, 2"."""
    return f"{noun}{'' if len(names) == 1 else 's'} {', '.join(map(str, names))}"


def enumerated(items: Sequence[object]) -> str:
    """Return the items as text for a sentence: "1, 2 and 3"."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
