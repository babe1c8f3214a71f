"""What earlier runs measured on this host, in the user's cache directory: one JSON file for each recipe, plan and machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from lockstep.base.files import write_atomically

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """What was chosen, and by which figures."""

    chosen: dict[str, Any]
    """Setting -> value."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Seconds, by what was timed."""
    seconds: float = 0.0
    """That measuring took."""


def folder(environ: Mapping[str, str]) -> Path:
    """Below XDG_CACHE_HOME, which is ~/.cache where it is not set, or not absolute. Raises `RuntimeError` where there is no home."""
    given = Path(environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "lockstep" / "measured"


def name_of(facts: Mapping[str, Any]) -> str:
    """The file for what is measured where all of this is so. `facts`: JSON."""
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True)
    return f"{sha256(text.encode()).hexdigest()}.json"


def read(path: Path, fits: Callable[[Mapping[str, Any]], bool]) -> Measured | None:
    """None where there is no such file. `fits`: whether settings have values that may be chosen.

    Raises `OSError` where it cannot be read, and `ValueError` where it is not as `write` wrote it.
    """
    try:
        found = Measured(**json.loads(path.read_bytes()))
        if fits(found.chosen) and isinstance(found.figures, dict) and isinstance(found.seconds, float):
            return found
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError):
        pass
    raise ValueError("it is not as a run writes it")


def write(path: Path, measured: Measured) -> None:
    """Write the file atomically, and its folder if it is missing. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(measured), indent=2) + "\n")
