"""Runs on several machines, of which each is a `lockstep run` here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "elastic.py")
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

Agents = Callable[..., subprocess.Popen[str]]


def events(run: Path, *names: str) -> list[dict[str, Any]]:
    """Those of these names; all that is whole in the file, where none is given."""
    lines = (
        (run / "events.jsonl").read_text().splitlines() if (run / "events.jsonl").exists() else []
    )
    return [event for event in map(json.loads, lines) if not names or event["event"] in names]


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():  # the test's own time limit ends it
        time.sleep(0.1)


def wait_until_it_keeps_the_rendezvous(first: subprocess.Popen[str]) -> None:
    assert first.stderr is not None
    assert "waits at" in first.stderr.readline()


def steps(folder: Path) -> int:
    """Done, as far as the scripts of the agents in this folder have printed."""
    return max(
        (
            int(found)
            for path in folder.glob("output-*")
            for found in re.findall(r"did (\d+)", path.read_text())
        ),
        default=0,
    )


def worlds(run: Path) -> list[int]:
    """The number of processes of each start."""
    return [event["world_size"] for event in events(run, "run-started")]
