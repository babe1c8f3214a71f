"""Quantities as people write them."""

from __future__ import annotations

import re

from lockstep.errors import UserError

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


def seconds(text: str, name: str, raises: type[UserError]) -> float:
    """A time such as "90s", "55m" or "1h30m". `name`: what it was given as. Raises `raises`."""
    if not (found := duration(text)):
        raise raises(f"{name}={text!r}; it is a time with its unit, more than none: 90s, 55m, 1h30m")
    return found


def duration(text: str) -> float:
    """Seconds; 0 where it is no time."""
    found = _DURATION.fullmatch(text)
    return sum(float(part) * unit for part, unit in zip(found.groups(), _UNITS.values(), strict=True) if part) if found else 0.0
