"""Names of run directories."""

from __future__ import annotations

from datetime import datetime
from itertools import count
from pathlib import Path


def default_run_path(script: str | None, now: datetime) -> Path:
    """Return `runs/<script>-<date>-<time>`, numbered if it exists; `run` if `script` is no file."""
    stem = Path(script).stem if script and not script.startswith("-") else "run"
    first = Path("runs") / f"{stem}-{now:%Y%m%d-%H%M%S}"
    return next(
        path for path in (numbered(first, number) for number in count(1)) if not path.exists()
    )


def numbered(path: Path, number: int) -> Path:
    """Return `path`, `path`-2, `path`-3, ..."""
    return path if number == 1 else path.with_name(f"{path.name}-{number}")
