"""Measures the time from SIGKILL of a worker to the end of the next step that is committed, on one
machine.

    python benchmarks/recovery.py [--losses 20] [--case "replicate=2"] [--json FILE]

`lockstep run --recovery in-place` trains examples/gpt.py's model. A random worker is killed at a
random moment, once all train and the spare process had time to start. The time is from the kill
until a process has done more steps than any had at the kill; a usual step's time is taken from it.
It is split by the run's event `recovered`:

    detect   until the launcher has seen the loss (its clock)
    wait     until all have left their collectives, and the new one has come to its training
    open     until the run is open again, and the state is restored
    step     until the step is committed; under `shard`, with the steps since the image in memory

With two machines, which are two launchers here, one launcher is killed, and another one started: it
joins. `detect` has the two seconds of silence after which a machine counts as lost.

Beside it: `--recovery restart`, and a script on DistributedDataParallel that saves a snapshot after
each step, under `torchrun --max-restarts`. If that does not go on after a loss (its new workers now
and then fail to connect), it has fewer losses in the table. Quote numbers only from a machine that
did nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

CASES = {"replicate=2": 2, "shard=2": 2, "replicate=4": 4, "shard=4": 4}
MACHINES = ("replicate=auto", "shard=auto")
"""Plans of two machines of one process."""
PARTS = ("detect", "wait", "open", "step")
SPARE_SECONDS = 8.0
"""Seconds between two losses: a new spare process takes 3 to 6 s to start."""
LIMIT_SECONDS = 120.0


def train(folder: Path) -> None:
    """Train in a worker, and note when each step is done."""
    import torch

    import lockstep as ls

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import gpt

    class Notes(ls.Hook):
        file: TextIO | None = None

        def on_start(self, run: Any) -> None:
            self.file = (folder / f"{os.getpid()}-{run.context.recorder.attempt}").open(
                "w", buffering=1
            )

        def after_step(self, run: Any) -> None:
            assert self.file is not None
            self.file.write(f"{time.time()} {run.step}\n")

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    windows = torch.randint(0, 256, (4096, 65), generator=torch.Generator().manual_seed(0))
    recipe = ls.Recipe(
        model=lambda: gpt.GPT(layers=4, width=128, heads=2, context=64, dropout=0.1),
        data=torch.utils.data.TensorDataset(windows),
        inputs=lambda batch: batch[0][:, :-1],
        loss=lambda logits, batch: gpt.cross_entropy(logits, batch[0]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        global_batch=16,
        microbatch=2,
        steps=10**6,
    )
    ls.train(recipe, hooks=[Notes()], saving=ls.Saving(every=10**6))


def train_by_hand(folder: Path) -> None:
    """Train on DistributedDataParallel, with a snapshot after each step, as the tutorials do."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import gpt

    dist.init_process_group("gloo")
    rank, snapshot = dist.get_rank(), folder / "snapshot.pt"
    torch.manual_seed(0)
    model = DistributedDataParallel(gpt.GPT(layers=4, width=128, heads=2, context=64, dropout=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if snapshot.exists():
        saved = torch.load(snapshot)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    windows = torch.randint(0, 256, (4096, 65), generator=torch.Generator().manual_seed(0))
    with (folder / f"{os.getpid()}-0").open("w", buffering=1) as file:
        while True:
            batch = windows[torch.randint(0, 4096, (16 // dist.get_world_size(),))]
            loss = gpt.cross_entropy(model(batch[:, :-1]), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if rank == 0:
                torch.save(
                    {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step,
                    },
                    folder / "new.pt",
                )
                (folder / "new.pt").replace(snapshot)
            file.write(f"{time.time()} {step}\n")


def steps_in(path: Path) -> list[tuple[float, int]]:
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(float(line[0]), int(line[1])) for line in lines if len(line) == 2]


def furthest(folder: Path) -> int:
    return max(
        (steps[-1][1] for path in folder.glob("[0-9]*-*") if (steps := steps_in(path))), default=0
    )


def workers(folder: Path, since: float) -> list[int]:
    """The processes that have done a step since then."""
    paths = [
        path
        for path in folder.glob("[0-9]*-*")
        if (steps := steps_in(path)) and steps[-1][0] > since
    ]
    return list({int(path.name.partition("-")[0]) for path in paths})


class Stalled(SystemExit):
    """The run does not go on after a loss."""


def wait_until(condition: Callable[[], Any], output: Path) -> Any:
    until = time.monotonic() + LIMIT_SECONDS
    while not (found := condition()):
        if time.monotonic() > until:
            raise Stalled(f"the run does not go on; its last output:\n{output.read_text()[-2000:]}")
        time.sleep(0.005)
    return found


def losses(
    line: Sequence[str], count: int, processes: int, drawn: random.Random, *, by_hand: bool
) -> list[dict[str, float]]:
    """Kill a worker of the command `count` times, and measure each. Raises `Stalled` if the run
    does not go on; one that is `by_hand` has those before, then."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "output").open("w") as output:
            run = subprocess.Popen(
                [*line, str(folder)],
                cwd=folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            for _ in range(count):
                began = time.time()
                wait_until(
                    lambda since=began: len(workers(folder, since)) == processes, folder / "output"
                )
                time.sleep(SPARE_SECONDS + drawn.random())
                before = furthest(folder)
                usual = usual_step(folder)
                victim = drawn.choice(workers(folder, time.time() - 10 * usual - 1.0))
                killed = time.time()
                os.kill(victim, signal.SIGKILL)
                wait_until(lambda least=before + 2: furthest(folder) > least, folder / "output")
                found.append(measured(folder, killed, usual))
        except Stalled as stalled:
            if not by_hand:
                raise
            print(stalled, file=sys.stderr)
        finally:
            if by_hand:  # torchrun's workers outlive it if it is killed
                run.terminate()
                with suppress(subprocess.TimeoutExpired):
                    run.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    return found


def machine_losses(line: Sequence[str], count: int, drawn: random.Random) -> list[dict[str, float]]:
    """Kill one of two machines `count` times, and measure each. Another one joins before the next
    loss."""
    found = []
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as free:
        folder = Path(name)
        line = [*line[:-1], "--rdzv", f"127.0.0.1:{free.getsockname()[1]}", line[-1], str(folder)]
        free.close()
        with (folder / "output").open("w") as output:

            def start() -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    line, cwd=folder, stdout=output, stderr=output, start_new_session=True
                )

            keeper = start()
            wait_until(lambda: (folder / "output").read_text(), folder / "output")
            other = start()
            try:
                for _ in range(count):
                    began = time.time()
                    wait_until(
                        lambda since=began: len(workers(folder, since)) == 2, folder / "output"
                    )
                    time.sleep(2.0 + drawn.random())
                    before, usual, killed = furthest(folder), usual_step(folder), time.time()
                    other.kill()
                    other.wait()
                    wait_until(lambda least=before + 2: furthest(folder) > least, folder / "output")
                    found.append(measured(folder, killed, usual))
                    other = start()
            finally:
                for each in (keeper, other):
                    each.kill()  # the workers die with it
                    each.wait()
    return found


def usual_step(folder: Path) -> float:
    latest = max(folder.glob("[0-9]*-*"), key=lambda path: path.stat().st_mtime)
    times = [at for at, _ in steps_in(latest)][-20:]
    return statistics.median(after - before for before, after in pairwise(times))


def measured(folder: Path, killed: float, usual: float) -> dict[str, float]:
    """Split the time from the kill to the next committed step. A usual step's time is not part of
    it."""
    time.sleep(0.5)
    everything = [each for path in folder.glob("[0-9]*-*") for each in steps_in(path)]
    done = max((step for at, step in everything if at <= killed + usual), default=0)
    end = min(at for at, step in everything if step > done)
    row = {"seconds": end - killed - usual}
    events = folder / "run" / "events.jsonl"
    recovered = (
        [json.loads(text) for text in events.read_text().splitlines() if '"recovered"' in text]
        if events.exists()
        else []
    )
    if recovered and recovered[-1]["time"] > killed:
        last = recovered[-1]
        lost_at = last["time"] - last["wait_seconds"] - last["open_seconds"]
        row |= {
            "detect": lost_at - killed,
            "wait": last["wait_seconds"],
            "open": last["open_seconds"],
            "step": end - last["time"] - usual,
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--losses", type=int, default=20, help="of each case (default: %(default)s)"
    )
    parser.add_argument("--case", choices=[*CASES, *MACHINES], action="append", help="default: all")
    parser.add_argument(
        "--beside",
        type=int,
        default=5,
        help="losses of each other way to go on (default: %(default)s)",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the figures to this file"
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    load, drawn = os.getloadavg()[0], random.Random(0)
    table = Table(
        title=(
            "seconds from SIGKILL to the next committed step, beyond a usual step; load before"
            f" {load:.1f}"
        )
    )
    for column in ("", "losses", "median", "largest", *PARTS):
        table.add_column(column, no_wrap=True)
    figures: dict[str, list[dict[str, float]]] = {}

    def measure(
        name: str, line: Sequence[str], count: int, processes: int, *, by_hand: bool = False
    ) -> None:
        if not count:
            return
        print(f"{name}: {count} losses", file=sys.stderr)
        line = [*line, str(Path(__file__).resolve())]
        rows = (
            losses(line, count, processes, drawn, by_hand=by_hand)
            if processes
            else machine_losses(line, count, drawn)
        )
        figures[name] = rows
        if options.json is not None:
            options.json.write_text(
                json.dumps({"load_before": load, **figures}, indent=2) + "\n", encoding="utf-8"
            )
        if not rows:
            table.add_row(name, "0", "does not go on")
            return
        seconds = [row["seconds"] for row in rows]
        parts = [
            (
                f"{statistics.median(row[part] for row in rows):.3f}"
                if all(part in row for row in rows)
                else ""
            )
            for part in PARTS
        ]
        table.add_row(
            name, str(len(rows)), f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}", *parts
        )

    lockstep = [
        sys.executable,
        "-m",
        "lockstep",
        "run",
        "--run-dir",
        "run",
        "--max-restarts",
        "1000",
    ]
    for case in options.case or [*CASES, *MACHINES]:
        if case in MACHINES:
            line = [
                *lockstep,
                "--nproc",
                "1",
                "--nnodes",
                "1:2",
                "--plan",
                case,
                "--recovery",
                "in-place",
            ]
            measure(f"{case}, a machine of two", line, options.losses, 0)
            continue
        for recovery, count in (("in-place", options.losses), ("restart", options.beside)):
            line = [*lockstep, "--nproc", str(CASES[case]), "--plan", case, "--recovery", recovery]
            measure(f"{case}, {recovery}", line, count, CASES[case])
        if case.startswith("replicate"):
            torchrun = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(CASES[case]),
            ]
            line = [*torchrun, "--max-restarts", "1000"]
            measure(f"{case}, torchrun by hand", line, options.beside, CASES[case], by_hand=True)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


if __name__ == "__main__":
    if "RANK" in os.environ:
        (train if "LOCKSTEP_LAUNCHER" in os.environ else train_by_hand)(Path(sys.argv[1]))
    else:
        main()
