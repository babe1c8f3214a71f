"""Checks lockstep on one GPU, and measures it there, within ten minutes.

    python benchmarks/gpu [--out FILE] [--only NAME,...] [--skip NAME,...]
        [--seconds 560] [--cpu] [--list]

Each check is a process of its own with its own time limit. One JSON line for each goes to FILE as
it ends; a summary is printed at the end. Checks come in the order of their importance; those of a
stage run beside one another, except where time is measured. Several ranks share the one GPU. See
README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import torch
from results import HERE, Row, rows_of


@dataclass(frozen=True)
class Stage:
    at_once: int
    seconds: float
    checks: dict[str, float]
    """The longest time of each, in seconds."""


STAGES = [
    Stage(1, 60, {"facts": 60}),
    Stage(
        4,
        250,
        {"bits": 90, "nccl2": 120, "kill": 80, "kernels": 60, "gloo2": 90, "plan": 150, "hang": 60}
        | {
            "raises": 80,
            "nccl4": 110,
            "peer": 140,
            "pipelines": 60,
            "oom": 80,
            "example": 90,
            "verify": 140,
            "doctor": 70,
            "here": 120,
        },
    ),
    Stage(
        1,
        300,
        {"speed:lockstep-eager": 60, "speed:hand-eager": 60, "speed:lockstep-bitwise": 60}
        | {
            "stall": 60,
            "times:bitwise": 40,
            "waits": 50,
            "context": 60,
            "speed:lockstep-compile": 90,
            "speed:hand-compile": 90,
        },
    ),
]
SLOWER_ON_CPU = 4


class Checks:
    """Runs checks, and writes what they report."""

    def __init__(self, out: Path, folder: Path, *, cpu: bool, seconds: float) -> None:
        self.out, self.folder, self.cpu = out, folder, cpu
        self.began, self.seconds = time.monotonic(), seconds
        self.rows: list[Row] = []
        self._lock = threading.Lock()

    def write(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)
            line = json.dumps(row, default=str)
            with self.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            print(line[:1000], flush=True)

    def run(self, stage: Stage, wanted: list[str]) -> None:
        began = time.monotonic()
        factor = SLOWER_ON_CPU if self.cpu else 1

        def one(name: str) -> None:
            now = time.monotonic()
            left = self.seconds - (now - self.began)
            if not self.cpu:  # where a stage's checks run one after another
                left = min(left, stage.seconds - (now - began))
            self.check(name, min(stage.checks[name] * factor, left))

        with ThreadPoolExecutor(1 if self.cpu else stage.at_once) as pool:
            list(pool.map(one, wanted))

    def check(self, name: str, limit: float) -> None:
        if limit < 8:
            self.write({"check": name, "ok": None, "status": "no time left"})
            return
        began = time.monotonic()
        place = self.folder / name.replace(":", "-")
        results, log = place.with_suffix(".jsonl"), place.with_suffix(".log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "check.py"), name],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment(self.folder, results, limit, cpu=self.cpu),
            )
            try:
                status: int | str = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = "time limit"
            end(process, f"GPU_CHECK_MARK={results}")
        found = rows_of(results)
        ok = status == 0 and not any(row.get("ok") is False for row in found)
        times = {"seconds": round(time.monotonic() - began, 1), "at": round(began - self.began, 1)}
        row: Row = {"check": name, "ok": ok, "status": status, **times, "found": found}
        if not ok:
            row["log_end"] = log.read_text(errors="replace")[-2500:]
        self.write(row)


def environment(folder: Path, results: Path, limit: float, *, cpu: bool) -> dict[str, str]:
    path = [str(HERE), os.environ.get("PYTHONPATH", "")]
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        path.insert(0, str(HERE / "older_torch"))
    added = {
        "GPU_CHECK_FOLDER": str(folder),
        "GPU_CHECK_RESULTS": str(results),
        "GPU_CHECK_MARK": str(results),
        "GPU_CHECK_ENDS": str(time.time() + limit),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
    }
    if cpu:
        added |= {"GPU_CHECK_CPU": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **added}


def end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a check's process and all that it started, in other sessions too: `mark` is in their
    environment."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(5)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and mark.encode() in (entry / "environ").read_bytes().split(
                b"\0"
            ):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue
    process.wait()


def forecast(rows: list[Row]) -> list[Row]:
    """Compare predictions with measurements, and `ls.train` with the loop by hand."""
    found = {each["what"]: each for row in rows for each in row.get("found", [])}
    plans = {each["plan"]: each for each in found.get("lockstep plan", {}).get("plans", [])}
    compared: list[Row] = []
    for mode, plan in (("eager", "replicate=1"), ("compile", "replicate=1,compile=yes")):
        own, hand, predicted = (
            found.get(f"lockstep {mode}"),
            found.get(f"hand {mode}"),
            plans.get(plan),
        )
        if own and hand:
            ratio = round(hand["step_seconds"] / own["step_seconds"], 4)
            compared.append(
                {
                    "what": f"{mode}: speed to the loop by hand",
                    "ratio": ratio,
                    "ok": ratio >= 0.98,
                    "short": str(ratio),
                }
            )
        if own and predicted and "reserved_gb" in own:
            time_ratio = round(predicted["seconds"] / own["step_seconds"], 3)
            gb = (predicted["needed_bytes"] - predicted["overhead_bytes"]) / 1e9
            memory_ratio = round(gb / own["reserved_gb"], 3)
            ratios = {"seconds": time_ratio, "memory": memory_ratio}
            compared.append(
                {"what": f"{mode}: predicted to measured"}
                | ratios
                | {"ok": abs(time_ratio - 1) <= 0.15 and abs(memory_ratio - 1) <= 0.08}
                | {"short": f"time {time_ratio}, memory {memory_ratio}"}
            )
    eager, bitwise = found.get("lockstep eager"), found.get("lockstep bitwise")
    if eager and bitwise:
        ratio = round(eager["step_seconds"] / bitwise["step_seconds"], 4)
        compared.append(
            {"what": "bitwise to fast", "ratio": ratio, "ok": ratio >= 0.9, "short": str(ratio)}
        )
    return compared


def summary(rows: list[Row]) -> None:
    print()
    for row in rows:
        if "check" not in row:
            continue
        state = {True: "ok", False: "FAILED", None: row.get("status", "")}[row["ok"]]
        said = []
        for found in row.get("found", []):
            if found.get("ok") is False:
                said.append(
                    f"NO: {found['what']} {found.get('short', '')}"
                    f" {str(found.get('error', ''))[:90]}".strip()
                )
            elif found.get("short"):
                said.append(f"{found['what']}: {found['short']}")
        print(
            f"{row['check']:<24} {state:<10} {row.get('seconds', 0):>6} s  {'; '.join(said)[:600]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_check.jsonl"), help="default: %(default)s"
    )
    parser.add_argument("--only", default="", help="names of checks, with commas")
    parser.add_argument("--skip", default="")
    parser.add_argument("--seconds", type=float, help="in all; default: 560, or 3600 with --cpu")
    parser.add_argument("--cpu", action="store_true", help="try the script itself, with tiny sizes")
    parser.add_argument(
        "--list", action="store_true", help="print the checks and their time limits"
    )
    options = parser.parse_args()
    only, skip = ({*filter(None, names.split(","))} for names in (options.only, options.skip))
    known = {
        name
        for stage in STAGES
        for check in stage.checks
        for name in (check, check.partition(":")[0])
    }
    if unknown := sorted((only | skip) - known):
        parser.error(f"no checks {', '.join(unknown)}; --list prints those that there are")
    if options.list:
        for stage in STAGES:
            print(f"{stage.at_once} at once, at most {stage.seconds:g} s:", ", ".join(stage.checks))
        return
    if not options.cpu and not torch.cuda.is_available():
        print("no GPU here: nothing was measured (--cpu tries the script itself)")
        return
    if missing := [
        name
        for name in ("lockstep", "rich", "blake3", "crc32c", "safetensors", "click", "fsspec")
        if not find_spec(name)
    ]:
        raise SystemExit(f"not installed: {', '.join(missing)}. {HERE / 'README.md'} says how")
    options.out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        checks = Checks(
            options.out,
            Path(folder),
            cpu=options.cpu,
            seconds=options.seconds or (3600 if options.cpu else 560),
        )
        checks.write({"started": f"{datetime.now():%Y-%m-%d %H:%M:%S}", "torch": torch.__version__})
        for stage in STAGES:
            names = {name: {name, name.partition(":")[0]} for name in stage.checks}
            checks.run(
                stage,
                [
                    name
                    for name, known in names.items()
                    if (not only or only & known) and not skip & known
                ],
            )
        if not options.cpu and (compared := forecast(checks.rows)):
            checks.write(
                {"check": "compared", "ok": all(row["ok"] for row in compared), "found": compared}
            )
        summary(checks.rows)
        print(f"in all {time.monotonic() - checks.began:.0f} s; everything is in {options.out}")


if __name__ == "__main__":
    main()
