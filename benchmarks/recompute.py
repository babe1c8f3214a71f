"""Measures what `--recompute-every` costs, that it raises no alarm, and which ranks it names.

    python benchmarks/recompute.py [--nproc 2] [--microbatches 4] [--rounds 40] [--width 256]
    python benchmarks/recompute.py --nproc 4 --stages 2 [--microbatches 8]
    python benchmarks/recompute.py --clean 10000 [--nproc 3]
    python benchmarks/recompute.py --planted 60 --nproc 6 --stages 2

`ls.train` trains examples/gpt.py's model under replicate and numerics=bitwise, with a check in
every fourth step; with `--stages`, each replica is a pipeline. Steps with and without a check
alternate within one run, so other load on the machine affects both. Rank 0 measures the processor
time of the training thread. The cost at K = 50 is (the median of the steps with a check ÷ the
median of the others - 1) ÷ 50; a check recomputes one microbatch, so 1 ÷ `microbatches` ÷ 50 is
expected. In a pipeline of S stages a microbatch alone takes as long as S, and a step as long as
`microbatches` + S - 1: so S ÷ (`microbatches` + S - 1) ÷ 50 is expected of the time, if each
process has a processor of its own.

`--clean STEPS` trains a tiny model for as many steps, with a check in each; a WrongResultError ends
it. `--planted FAULTS` trains a tiny model as many times, each time with a persistent fault in the
products of one rank (tests/training/faulty.py), and counts the ranks that are named.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep as ls
from lockstep.base.errors import WrongResultError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import gpt
from training import faulty

EVERY = 4
CONTEXT = 64
FAULTS: list[dict[str, Any]] = [
    *({"product": product} for product in faulty.PRODUCTS),
    {"product": "weight gradient", "least": 200},
    {"product": "forward", "same": True},
]


class Clock(ls.Hook):
    """Processor seconds of each step."""

    def __init__(self) -> None:
        self.with_check: list[float] = []
        self.without: list[float] = []
        self._began = 0.0

    def before_step(self, run: Any) -> None:
        self._began = time.thread_time()

    def after_step(self, run: Any) -> None:
        took = time.thread_time() - self._began
        checked = (run.step - 1) % EVERY == 0
        (self.with_check if checked else self.without).append(took)


def plan_of(stages: int) -> str:
    replicas = int(os.environ["WORLD_SIZE"]) // stages
    return f"replicate={replicas},pipeline={stages},numerics=bitwise"


def cost(
    run_dir: str, width: int, microbatches: int, rounds: int, stages: int
) -> tuple[float, float]:
    """Return the median seconds of a step with a check, and of one without. Runs on each rank."""
    torch.set_num_threads(1)
    windows = torch.randint(0, 256, (512, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    clock = Clock()
    replicas = int(os.environ["WORLD_SIZE"]) // stages
    ls.train(
        ls.Recipe(
            model=lambda: gpt.GPT(layers=4, width=width, heads=4, context=CONTEXT, dropout=0.1),
            data=torch.utils.data.TensorDataset(windows),
            inputs=lambda batch: batch[0][:, :-1],
            loss=lambda logits, batch: gpt.cross_entropy(logits, batch[0]),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
            global_batch=4 * microbatches * replicas,
            microbatch=4,
            steps=EVERY * (rounds + 2),
            stages=["embedding", "blocks.*", "head"],
        ),
        run_dir=run_dir,
        plan=plan_of(stages),
        hooks=[clock],
    )
    return statistics.median(clock.with_check[2:]), statistics.median(clock.without[6:])


def tiny(model: Callable[[], nn.Sequential], *, samples: int, steps: int, stages: int) -> ls.Recipe:
    """Return the recipe of a model with 8 inputs and one output, whose modules are its parts."""
    rows = torch.randn(samples, 9, generator=torch.Generator().manual_seed(0))
    replicas = int(os.environ["WORLD_SIZE"]) // stages
    return ls.Recipe(
        model=model,
        data=torch.utils.data.TensorDataset(rows),
        inputs=lambda batch: batch[0][:, :8],
        loss=lambda output, batch: nn.functional.mse_loss(output, batch[0][:, 8:]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        global_batch=4 * max(2, stages) * replicas,
        microbatch=4,
        steps=steps,
        stages=["*"],
    )


def clean(run_dir: str, steps: int, stages: int) -> str:
    """Train a tiny model with a check in each step. Runs on each rank."""
    torch.set_num_threads(1)
    result = ls.train(
        tiny(
            lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1)),
            samples=4096,
            steps=steps,
            stages=stages,
        ),
        run_dir=run_dir,
        plan=plan_of(stages),
    )
    return result.fingerprint


class Named(ls.Hook):
    """The ranks that a run has named, with the steps since the fault began."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.found: list[tuple[list[int], bool, int]] = []

    def on_event(self, run: Any, event: Any) -> None:
        if event.name == "microbatch-differs":
            given = event.details
            self.found.append((given["ranks"], given["is_certain"], event.step - self.begin))


def planted(folder: str, number: int, stages: int) -> list[list[Any]]:
    """Train a tiny model `number` times, with a fault on each rank in turn. Return for each fault
    what was named. Runs on each rank."""
    torch.set_num_threads(1)
    processes = int(os.environ["WORLD_SIZE"])
    found = []
    for place in range(number):
        fault = {**FAULTS[place % len(FAULTS)], "begin": 1 + place % 4, "seed": place}
        named = Named(fault["begin"])
        rank = place // len(FAULTS) % processes
        with suppress(WrongResultError):
            ls.train(
                tiny(
                    lambda: nn.Sequential(
                        faulty.Linear(8, 32),
                        nn.Tanh(),
                        faulty.Linear(32, 32),
                        nn.Tanh(),
                        faulty.Linear(32, 32),
                        nn.Tanh(),
                        faulty.Linear(32, 1),
                    ),
                    samples=256,
                    steps=3 * EVERY,
                    stages=stages,
                ),
                run_dir=f"{folder}/{place}",
                plan=plan_of(stages),
                hooks=[faulty.Planted(rank, **fault), named],
            )
        found.append([rank, fault["product"], named.found])
    return found


def report(found: list[list[Any]]) -> None:
    """Print the faults whose rank was not named, and the number of those that were."""
    right = 0
    for rank, product, named in found:
        if named and named[0][:2] == ([rank], True):
            right += 1
        else:
            print(f"rank {rank}, {product}: named {named}")
    late = max((named[0][2] for _, _, named in found if named), default=0)
    print(
        f"{right} of {len(found)} named with the right rank, at most {late} steps after they began"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4, help="of each process, in a step")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--stages", type=int, default=1, help="of the pipeline of each replica")
    parser.add_argument("--clean", type=int, metavar="STEPS")
    parser.add_argument("--planted", type=int, metavar="FAULTS")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        if options.clean is not None:
            os.environ["LOCKSTEP_RECOMPUTE_EVERY"] = "1"
            sizes = (options.clean, options.stages)
            found = ls.spawn(clean, nproc=options.nproc, args=(f"{folder}/run", *sizes))
            print(f"no alarm in {options.clean} steps; fingerprint {found}")
            return
        os.environ["LOCKSTEP_RECOMPUTE_EVERY"] = str(EVERY)
        if options.planted is not None:
            args = (folder, options.planted, options.stages)
            report(ls.spawn(planted, nproc=options.nproc, args=args))
            return
        sizes = (options.width, options.microbatches, options.rounds, options.stages)
        checked, plain = ls.spawn(cost, nproc=options.nproc, args=(f"{folder}/run", *sizes))
    ratio = checked / plain
    print(
        f"{options.nproc} processes, load before {load:.1f}: a step {1e3 * plain:.1f} ms; with a"
        f" check {ratio:.3f} of it (1 + 1/{options.microbatches} expected); at K = 50:"
        f" {(ratio - 1) / 50:.2%}"
    )


if __name__ == "__main__":
    main()
