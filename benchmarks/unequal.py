"""Measures `assignment=measured` beside `assignment=equal` where one of two processes has half a
core.

    python benchmarks/unequal.py [--steps 150] [--settle 40] [--json FILE]

`ls.train` trains examples/gpt.py's model in bitwise numerics, twice at the same time: one run with
either setting. They take turns of 5 steps, so that both see the same other load; the one whose turn
it is not waits. A run has two processes of one thread, each pinned to a core of its own. Beside the
second one, a loop that does nothing else is pinned to the same core, so that the scheduler gives
each of them half of it. The first steps, in which speeds are measured, do not count (`--settle`).
The ratio is the median over the turns of (seconds of equal) / (seconds of measured).

Quote numbers only from a machine that did nothing else: other work takes from both cores. Linux
only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import lockstep as ls

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import gpt

CONTEXT = 64
GLOBAL_BATCH, MICROBATCH = 16, 1
SETTINGS = ("equal", "measured")
TURN_STEPS = 5
PATIENCE_SECONDS = 120.0


class Turns(ls.Hook):
    """Lets two runs take turns, by a file that names the one whose turn it is; times each step."""

    def __init__(self, folder: Path, name: str, loop: subprocess.Popen[bytes] | None) -> None:
        """`loop`: what takes half of this process's core, and is stopped while this run waits."""
        self.seconds: list[float] = []
        self._turn, self._name, self._loop = folder / "turn", name, loop
        (self._other,) = set(SETTINGS) - {name}
        self._done = folder / f"{self._other}-done"

    def before_step(self, run: Any) -> None:
        if run.step == 0:
            self._wait()
        self._began = time.perf_counter()

    def after_step(self, run: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        if run.step % TURN_STEPS == 0:
            self._signal("SIGSTOP")
            if run.rank == 0:
                self._give()
            self._wait()

    def on_finish(self, run: Any) -> None:
        if run.rank == 0:
            self._turn.with_name(f"{self._name}-done").touch()

    def _give(self) -> None:
        """Give the turn to the other run."""
        new = self._turn.with_suffix(f".{self._name}")
        new.write_text(self._other)
        new.replace(self._turn)

    def _wait(self) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while self._turn.read_text() != self._name and not self._done.exists():
            if time.monotonic() > until:
                raise TimeoutError(
                    f"the run with assignment={self._other} has not given up its turn"
                )
            time.sleep(0.002)
        self._signal("SIGCONT")

    def _signal(self, name: str) -> None:
        if self._loop is not None:
            self._loop.send_signal(getattr(signal, name))


def train(folder: str, assignment: str, steps: int, cores: tuple[int, int]) -> dict[str, Any]:
    """Train on one rank; the second one has half of its core. Returns the seconds of each step, and
    the fingerprint."""
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    windows = torch.randint(0, 256, (4096, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    # on the same core
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if rank == 1 else None
    if loop is not None:
        loop.send_signal(signal.SIGSTOP)
    turns, run_dir = Turns(Path(folder), assignment, loop), Path(folder, assignment)
    try:
        result = ls.train(
            ls.Recipe(
                model=lambda: gpt.GPT(layers=4, width=128, heads=2, context=CONTEXT, dropout=0.1),
                data=torch.utils.data.TensorDataset(windows),
                inputs=lambda batch: batch[0][:, :-1],
                loss=lambda logits, batch: gpt.cross_entropy(logits, batch[0]),
                optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
                global_batch=GLOBAL_BATCH,
                microbatch=MICROBATCH,
                steps=steps,
            ),
            run_dir=str(run_dir),
            plan=f"replicate=2,numerics=bitwise,assignment={assignment}",
            hooks=[turns],
            log_every=TURN_STEPS,
        )
    finally:
        if loop is not None:
            loop.kill()
            loop.wait()
    events = [
        json.loads(line)
        for line in (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    changes = [
        (event["first_step"], event["microbatches"])
        for event in events
        if event["event"] == "assignment-changed"
    ]
    return {"seconds": turns.seconds, "fingerprint": result.fingerprint, "changes": changes}


def both(steps: int) -> dict[str, dict[str, Any]]:
    """Train with both settings, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "turn").write_text(SETTINGS[0])
        line = [sys.executable, __file__, "--steps", str(steps), "--folder", folder, "--one"]
        runs = [subprocess.Popen([*line, name]) for name in SETTINGS]
        try:
            if any(run.wait() for run in runs):
                raise SystemExit("a run has failed")
        finally:
            for run in runs:
                run.kill()
        return {
            name: json.loads(Path(folder, f"{name}.json").read_text(encoding="utf-8"))
            for name in SETTINGS
        }


def show(found: dict[str, dict[str, Any]], settle: int, load: float) -> dict[str, Any]:
    """Print the figures and return them."""
    steps = len(found[SETTINGS[0]]["seconds"])
    starts = range(settle, steps - TURN_STEPS + 1, TURN_STEPS)
    turns = {
        name: [sum(found[name]["seconds"][start : start + TURN_STEPS]) for start in starts]
        for name in SETTINGS
    }
    ratios = [
        equal / measured for equal, measured in zip(turns["equal"], turns["measured"], strict=True)
    ]
    table = Table(
        title=f"the second of 2 has half a core; {len(ratios)} turns, load before {load:.1f}"
    )
    for column in ("assignment", "steps/s", "microbatches at the end", "fingerprint"):
        table.add_column(column, no_wrap=True)
    for name in SETTINGS:
        speed = TURN_STEPS / statistics.median(turns[name])
        each = GLOBAL_BATCH // MICROBATCH // 2
        last = found[name]["changes"][-1][1] if found[name]["changes"] else [each, each]
        table.add_row(
            name, f"{speed:.2f}", " ".join(map(str, last)), found[name]["fingerprint"][:16]
        )
    low, middle, high = statistics.quantiles(ratios, n=4)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(f"ratio {middle:.2f}, quartiles {low:.2f}-{high:.2f}")
    return {"ratio": middle, "ratio_low": low, "ratio_high": high, "load_before": load, **found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument(
        "--settle",
        type=int,
        default=40,
        help="first steps that do not count (default: %(default)s)",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the figures to this file"
    )
    parser.add_argument("--one", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    load, cores = os.getloadavg()[0], sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("one core; each of the two processes is pinned to one of its own")
    if options.one is not None:
        found = ls.spawn(
            train, nproc=2, args=(options.folder, options.one, options.steps, (cores[0], cores[1]))
        )
        Path(options.folder, f"{options.one}.json").write_text(json.dumps(found), encoding="utf-8")
        return
    figures = show(both(options.steps), options.settle, load)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if len({figures[name]["fingerprint"] for name in SETTINGS}) > 1:
        raise SystemExit("the fingerprints differ")


if __name__ == "__main__":
    main()
