"""What checks report, and the commands that they start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
CPU = os.environ.get("GPU_CHECK_CPU") == "1"
"""Try the script itself: on the CPU, with tiny sizes."""

Row = dict[str, Any]


def report(what: str, **values: Any) -> None:
    """Append one result to the file that the starter of this process reads.

    `ok`: True, False, or None for what is information. `short`: a few words for the summary.
    """
    line = json.dumps({"what": what, **values}, default=str)
    print(line, flush=True)
    with Path(os.environ["GPU_CHECK_RESULTS"]).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def attempt(what: str, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function. A failure is a result."""
    try:
        function(*arguments)
    except Exception as error:
        traceback.print_exc()
        report(what, ok=False, error=f"{type(error).__name__}: {error}"[:600])


def seconds_left() -> float:
    return float(os.environ["GPU_CHECK_ENDS"]) - time.time()


def folder(name: str) -> Path:
    """Return a new folder for the runs of this check."""
    path = Path(os.environ["GPU_CHECK_FOLDER"]) / "runs" / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def rows_of(path: Path) -> list[Row]:
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.exists()
        else []
    )


def command(
    *arguments: str, seconds: float = 1e9, **environment: str
) -> tuple[int | str, str, list[Row]]:
    """Run a command until the check's time ends, or `seconds`. Return its status, its output, and
    its results."""
    place = Path(mkdtemp(dir=os.environ["GPU_CHECK_FOLDER"]))
    results, output = place / "results", place / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            arguments,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, "GPU_CHECK_RESULTS": str(results)},
        )
        try:
            status: int | str = process.wait(max(5.0, min(seconds, seconds_left() - 4)))
        except subprocess.TimeoutExpired:
            status = "time limit"
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    text = output.read_text(errors="replace")
    print(text, flush=True)
    found = rows_of(results)
    for row in found:
        report(**row)
    return status, text, found


def lockstep(name: str, *arguments: str, **more: Any) -> tuple[int | str, str, list[Row]]:
    """Run `lockstep NAME ...`."""
    return command(sys.executable, "-m", "lockstep", name, *arguments, **more)


def run(nproc: int, *arguments: str, **more: Any) -> tuple[int | str, str, list[Row]]:
    """Run `lockstep run` with `nproc` processes on the one device."""
    shared = ["--share-devices"] if nproc > 1 and not CPU else []
    return lockstep("run", "--nproc", str(nproc), *shared, *arguments, **more)


def events(run_dir: Path) -> list[str]:
    return [f"{row['event']}@{row['step']}" for row in rows_of(run_dir / "events.jsonl")]
