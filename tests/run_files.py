"""What a run has written to its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows(path: Path | str) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def metrics(run: Path | str) -> list[dict[str, Any]]:
    return rows(Path(run, "metrics.jsonl"))


def events(run: Path | str, *names: str) -> list[dict[str, Any]]:
    """Return the events with these names, or all of them."""
    found = rows(Path(run, "events.jsonl"))
    return [event for event in found if not names or event["event"] in names]


def result(run: Path | str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(run, "result.json").read_text())
    return found


def fingerprint(run: Path | str) -> str:
    return str(result(run)["fingerprint"])
