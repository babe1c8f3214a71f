"""Caches the measurements of earlier runs on this host, in one JSON file for each recipe, plan and
machine."""

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
class Measurement:
    """The chosen settings, and the seconds of each candidate (`figures`)."""

    chosen: dict[str, Any]
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def folder(environ: Mapping[str, str]) -> Path:
    given = Path(environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "lockstep" / "measured"


def file_name(facts: Mapping[str, Any]) -> str:
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True)
    return f"{sha256(text.encode()).hexdigest()}.json"


def read(path: Path, fits: Callable[[Mapping[str, Any]], bool]) -> Measurement | None:
    try:
        measured = Measurement(**json.loads(path.read_bytes()))
        if (
            fits(measured.chosen)
            and isinstance(measured.figures, dict)
            and isinstance(measured.seconds, float)
        ):
            return measured
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError):
        pass
    raise ValueError("its content is damaged")


def write(path: Path, measured: Measurement) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(measured), indent=2) + "\n")
