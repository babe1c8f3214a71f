"""The command line of lockstep's own Python processes."""

from __future__ import annotations

import sys


def own_python(*arguments: str) -> list[str]:
    """Return a command that imports nothing from the working directory, which may be anybody's.
    Python itself would, with `-m` and `-c`."""
    return [sys.executable, "-P", *arguments]
