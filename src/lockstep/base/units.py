"""Parses and formats durations and sizes, such as "90s" and "1.97 kB"."""

from __future__ import annotations

import math
import re

from lockstep.base.errors import UserError

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}
_SIZES = ("B", "kB", "MB", "GB", "TB", "PB")
ROUNDS = 0.9995
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


def seconds(text: str, name: str, raises: type[UserError]) -> float:
    """Parse a duration such as "90s", "55m" or "1h30m"."""
    if not (duration := parse_duration(text)):
        raise raises(
            f"{name}={text!r}; it must be a time with its unit, more than none: 90s, 55m, 1h30m"
        )
    return duration


def parse_duration(text: str) -> float:
    """Return seconds. 0 if the text is not a duration."""
    if not (match := _DURATION.fullmatch(text)):
        return 0.0
    parts = zip(match.groups(), _UNITS.values(), strict=True)
    return sum(float(part) * unit for part, unit in parts if part)


def size(count: float) -> str:
    """Format a number of bytes with three digits: 1.97 kB."""
    place = min(max(0, math.floor(math.log(count / ROUNDS, 1000))) if count else 0, len(_SIZES) - 1)
    return f"{count / 1000**place:.3g} {_SIZES[place]}"
