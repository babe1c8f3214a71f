"""Plants causes of jumps in small runs, and counts how many `lockstep blame` names.

    python benchmarks/blame.py [--only sample rate flip machine] [--json FILE]

Each run trains a small network with dropout and clipping under numerics=bitwise, on 2 to 8
processes, with one of these causes:

- `sample`: the target of one sample is 1,000 times as large, in other places of the data and of
  the microbatch. Right: that sample is named.
- `rate`: the learning rate jumps. Right: the learning rate is named, with its step.
- `flip`: a bit of the summed gradient flips in a step, on one rank. Right: that it was once, in
  that step.
- `machine`: one rank computes wrong products from a step on. Right: a machine is named, from that
  step on.

`blame` makes the steps again on one process, or on two. The faults of the last two kinds are
planted by a hook, from the environment, so the replays do not have them.

The last column is the time of `lockstep blame` over that of the run, both with their starts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

LOCKSTEP = str(Path(sys.executable).parent / "lockstep")
STEPS = 48
SCRIPT = f"""
import json, os, sys
import torch
from torch import nn
import lockstep as ls

sample, jump = int(sys.argv[1]), int(sys.argv[2])
generator = torch.Generator().manual_seed(0)
x = torch.randn(384, 12, generator=generator)
y = x @ torch.randn(12, 3, generator=generator)
if sample >= 0:
    y[sample] *= 1000


def model():
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 3))


def loss(output, batch):
    return (output - batch[1]).square().mean()


def rate(step):
    return 1.0 if jump < 0 or step < jump else 300.0


class Fault(ls.Hook):
    def __init__(self, kind, step, rank):
        self.kind, self.step, self.rank = kind, step, rank

    def is_now(self, run):
        return run.step == self.step and run.context.world.rank == self.rank

    def before_step(self, run):
        if self.kind == "machine" and self.is_now(run):
            true = nn.Linear.forward
            nn.Linear.forward = lambda self, x: true(self, x) * 40.0

    def after_backward(self, run, model):
        if self.kind == "flip" and self.is_now(run):
            gradient = next(iter(model.parameters())).grad
            gradient.to_local().view(torch.int32)[1, 2] ^= 1 << 30


recipe = ls.Recipe(
    model=model,
    data=torch.utils.data.TensorDataset(x, y),
    inputs=lambda batch: batch[0],
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.003),
    schedule=rate,
    global_batch=24,
    microbatch=3,
    steps={STEPS},
    clip_norm=50.0,
)
fault = os.environ.get("FAULT")
hooks = [] if fault is None else [Fault(*json.loads(fault))]
ls.train(recipe, log_every=1, saving=ls.Saving(every=4, keep="log"), hooks=hooks)
"""


@dataclass(frozen=True)
class Planted:
    """A run with a cause, and what `blame` has to say of it."""

    kind: str
    plan: str
    processes: int
    replayed_on: int = 1
    sample: int = -1
    jump: int = -1
    fault: tuple[str, int, int] | None = None

    def is_named(self, found: dict[str, Any] | None) -> bool:
        if found is None:
            return False
        match self.kind:
            case "sample":
                return found["cause"] == "sample" and found["samples"] == [self.sample]
            case "rate":
                # the schedule is called with the steps done before
                named = f"in step {self.jump + 1};" in found["text"]
                return found["cause"] == "learning rate" and named
            case "flip":
                assert self.fault is not None
                return found["cause"] == "once" and found["step"] == self.fault[1] + 1
            case _:
                assert self.fault is not None
                return found["cause"] == "machine" and found["step"] == self.fault[1] + 1


PLANTED = [
    *(
        Planted("sample", plan, processes, on, sample=sample)
        for plan, processes, on, sample in (
            ("replicate=2", 2, 1, 5),
            ("shard=2", 2, 2, 17),
            ("replicate=3", 3, 1, 211),
            ("replicate=2,shard=2", 4, 1, 333),
            ("replicate=6", 6, 1, 100),
            ("replicate=4,shard=2", 8, 2, 383),
        )
    ),
    *(
        Planted("rate", plan, processes, on, jump=jump)
        for plan, processes, on, jump in (
            ("replicate=2", 2, 1, 20),
            ("shard=2", 2, 2, 40),
            ("replicate=3", 3, 1, 13),
            ("replicate=2,shard=2", 4, 2, 25),
            ("replicate=3,shard=2", 6, 1, 33),
            ("replicate=8", 8, 1, 30),
        )
    ),
    *(
        Planted("flip", plan, processes, on, fault=("flip", step, rank))
        for plan, processes, on, step, rank in (
            ("shard=2", 2, 1, 14, 0),
            ("shard=2", 2, 2, 18, 1),
            ("shard=3", 3, 1, 27, 2),
            ("shard=4", 4, 1, 33, 3),
            ("shard=6", 6, 2, 21, 4),
            ("shard=8", 8, 1, 22, 7),
        )
    ),
    *(
        Planted("machine", plan, processes, on, fault=("machine", step, rank))
        for plan, processes, on, step, rank in (
            ("replicate=2", 2, 1, 14, 1),
            ("shard=2", 2, 2, 18, 0),
            ("replicate=3", 3, 1, 27, 2),
            ("replicate=2,shard=2", 4, 1, 33, 3),
            ("replicate=6", 6, 1, 21, 5),
            ("replicate=2,shard=4", 8, 2, 22, 6),
        )
    ),
]


def command(*words: str, fault: object = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if fault is not None:
        environment["FAULT"] = json.dumps(fault)
    return subprocess.run(
        [LOCKSTEP, *words], capture_output=True, text=True, check=False, env=environment
    )


def tried(each: Planted, folder: Path) -> tuple[bool, str, float]:
    """Return whether the cause is named, what `blame` says, and its time over that of the run."""
    script, run = folder / "train.py", folder / "run"
    script.write_text(SCRIPT)
    began = time.perf_counter()
    ended = command(
        *("run", "--nproc", str(each.processes), "--plan", f"{each.plan},numerics=bitwise"),
        *("--compare-every", "0", "--run-dir", str(run)),
        *(str(script), str(each.sample), str(each.jump)),
        fault=each.fault,
    )
    trained = time.perf_counter()
    if ended.returncode:
        raise SystemExit(ended.stderr)
    on = str(each.replayed_on)
    ended = command(
        "blame", "--nproc", on, "--plan", f"replicate={on},numerics=bitwise", "--json", str(run)
    )
    seconds = time.perf_counter() - trained
    if ended.returncode:
        return False, ended.stderr.strip().splitlines()[-1], seconds / (trained - began)
    found = json.loads(ended.stdout)
    said = "no unusual step" if found is None else found["text"]
    return each.is_named(found), said, seconds / (trained - began)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = list(dict.fromkeys(each.kind for each in PLANTED))
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    table = Table(title="causes planted in runs, and what lockstep blame says")
    for name in ("cause", "plan", "replayed on", "named", "says", "time"):
        table.add_column(name, overflow="fold")
    rows = []
    for each in PLANTED:
        if each.kind not in given.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            named, said, ratio = tried(each, Path(folder))
        rows.append(
            {"cause": each.kind, "plan": each.plan, "named": named, "says": said, "time": ratio}
        )
        print(each.kind, each.plan, "named" if named else "NOT NAMED", said, file=sys.stderr)
        table.add_row(
            *(each.kind, each.plan, str(each.replayed_on), "yes" if named else "no", said),
            f"{ratio:.2f}",
        )
    Console().print(table)
    print(f"{sum(row['named'] for row in rows)} of {len(rows)} named")
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
