"""The command line of each Python process that lockstep starts for itself."""

from __future__ import annotations

import sys


def own_python(*arguments: str) -> list[str]:
    """The command of a Python process that imports nothing from the working directory, which may be
    anybody's (/tmp).

    By itself, Python puts that directory first on its path for `-m` and `-c`.
    """
    return [sys.executable, "-P", *arguments]
