"""The format of trace files. A row is a line with a JSON object, which has a `kind`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class RowFile:
    """A file of rows, which are written at once. A killed process loses at most its last row."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)

    def write(self, kind: str, **row: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **row}, default=str) + "\n")

    def close(self) -> None:
        self._file.close()


def read_row_file(path: Path) -> list[Row]:
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows
