"""Measures the overhead of `ls.train` over a careful hand-written loop, and of numerics=bitwise
over fast.

    python benchmarks/overhead.py [--rounds 9] [--only mlp gpt shard bitwise] [--processes 1 2 4 8]
                                  [--width 256] [--json FILE]

The hand-written loop has DistributedSampler, DataLoader, DDP with gradients as bucket views (no DDP
on one process), fused AdamW, `zero_grad(set_to_none=True)` and, for the GPT, clipping. It never
reads a loss. In the case `shard` it uses FSDP2's `fully_shard` on each block and on the whole model
instead of DDP. `ls.train` runs with its defaults: run directory, metrics, progress display, a check
of every gradient. Both have the same model, optimizer and sizes, cores ÷ processes threads, no
loader workers, and run in the same processes on the same process group. In the case `hook`,
`ls.train` trains the MLP with one more hook of the user, which counts steps. `wide` is an MLP
1024-4096-1024, clipped.

In these processes `ls.train` has made glibc keep freed memory, so the hand-written loops keep their
memory too. In a process of its own, the loop of `wide` returns memory to the system in each step
and faults it in again. `make peers` compares loops in processes of their own.

The sides alternate within a run, so that other load on the machine affects all of them: one step of
`ls.train` and then one of each loop with the GPT; 100 steps with the MLP, whose steps are so short
that one at a time would measure cold caches. Rank 0 measures the wall time. (`bitwise` alternates
between whole runs of `ls.train`.)

A round has 1000 steps of the MLP or 30 of the GPT. A row's ratio is the median over the rounds of
its steps/s over those of the case's first side in the same round; the column beside it is the
interquartile range of these ratios. The last column is the same ratio by rank 0's processor time:
it does not count waiting for other ranks, and is steadier on a shared machine.

Quote numbers only from a machine that did nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peers.figures import Ratio
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep as ls

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import gpt

HAND = "by hand"
AT_ONCE = "by hand, __getitems__"
NO_LOADER = "by hand, no loader"
LOCKSTEP = "ls.train"
SIZES = {"mlp": (1, 2), "hook": (1,), "wide": (2,), "gpt": (1, 2), "shard": (2,), "bitwise": (2, 3)}
"""The cases, with the numbers of processes of each."""
PREPARED = 64
"""Batches that the loop without a loader repeats."""


@dataclass(frozen=True)
class Workload:
    """The model and data that both sides train.

    A round has `steps` steps, a turn in it `turn` steps; `warmup` turns precede the first round.
    """

    build: Callable[[], nn.Module]
    data: Any
    """The dataset that a user gives to `ls.train`."""
    one_by_one: Any
    """The same dataset with `__getitem__` alone, as most datasets are written."""
    at_once: Any
    """The same dataset with a `__getitems__` that returns a whole batch."""
    inputs: Callable[[Any], Tensor]
    loss: Callable[[Tensor, Any], Tensor]
    global_batch: int
    clip_norm: float | None
    warmup: int
    turn: int
    steps: int

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)


class Rows(TensorDataset):
    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        rows = torch.tensor(indices)
        return tuple(tensor.index_select(0, rows) for tensor in self.tensors)


class SingleWindows:
    def __init__(self, data: gpt.Windows) -> None:
        self.windows = data.windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index].long()


def mlp() -> Workload:
    generator = torch.Generator().manual_seed(0)
    images, labels = (
        torch.randn(60_000, 784, generator=generator),
        torch.randint(0, 10, (60_000,), generator=generator),
    )
    return Workload(
        build=lambda: nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)),
        data=TensorDataset(images, labels),
        one_by_one=TensorDataset(images, labels),
        at_once=Rows(images, labels),
        inputs=lambda batch: batch[0],
        loss=lambda logits, batch: F.cross_entropy(logits, batch[1]),
        global_batch=64,
        clip_norm=None,
        warmup=5,
        turn=100,
        steps=1000,
    )


def wide() -> Workload:
    generator = torch.Generator().manual_seed(0)
    rows, targets = (
        torch.randn(4_000, 1024, generator=generator),
        torch.randn(4_000, 1024, generator=generator),
    )
    return Workload(
        build=lambda: nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)),
        data=TensorDataset(rows, targets),
        one_by_one=TensorDataset(rows, targets),
        at_once=Rows(rows, targets),
        inputs=lambda batch: batch[0],
        loss=lambda output, batch: F.mse_loss(output, batch[1]),
        global_batch=32,
        clip_norm=1.0,
        warmup=10,
        turn=1,
        steps=30,
    )


def small_gpt(width: int, global_batch: int) -> Workload:
    windows = gpt.Windows(gpt.read_text()[0], 128)
    return Workload(
        build=lambda: gpt.GPT(layers=4, width=width, heads=4, context=128, dropout=0.0),
        data=windows,
        one_by_one=SingleWindows(windows),
        at_once=windows,
        inputs=lambda batch: batch[:, :-1],
        loss=gpt.cross_entropy,
        global_batch=global_batch,
        clip_norm=1.0,
        warmup=10,
        turn=1,
        steps=30,
    )


def workload(case: str, width: int) -> Workload:
    if case in ("mlp", "hook"):
        return mlp()
    return wide() if case == "wide" else small_gpt(width, 32 if case == "bitwise" else 16)


class Speed(NamedTuple):
    """Steps per second of wall time, and per second of this process's processor time."""

    wall: float
    processor: float


class Spent(NamedTuple):
    """Seconds of wall time and of processor time."""

    wall: float
    processor: float

    @classmethod
    def until_now(cls) -> Spent:
        return cls(time.perf_counter(), time.process_time())

    def since(self, start: Spent) -> Spent:
        return Spent(self.wall - start.wall, self.processor - start.processor)


def speed(steps: int, turns: Sequence[Spent]) -> Speed:
    """Return the speed of `steps` steps in these turns."""
    return Speed(
        steps / sum(each.wall for each in turns), steps / sum(each.processor for each in turns)
    )


def hand_written(
    work: Workload, *, at_once: bool = False, loader: bool = True, sharded: bool = False
) -> Iterator[None]:
    """A careful hand-written loop. Each `next` is a step."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = work.build()
    if sharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = work.optimizer(model)
    parallel = (
        DistributedDataParallel(model, gradient_as_bucket_view=True)
        if size > 1 and not sharded
        else model
    )
    batches = _loaded(work, rank, size, at_once=at_once)
    if not loader:
        batches = itertools.cycle([next(batches) for _ in range(PREPARED)])
    for batch in batches:
        loss = work.loss(parallel(work.inputs(batch)), batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if work.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), work.clip_norm)
        optimizer.step()
        yield


def _loaded(work: Workload, rank: int, size: int, *, at_once: bool) -> Iterator[Any]:
    data = work.at_once if at_once else work.one_by_one
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=size, rank=rank, shuffle=True, seed=0, drop_last=True
    )
    collate = (lambda batch: batch) if at_once else None
    batches = DataLoader(
        data,
        batch_size=work.global_batch // size,
        sampler=sampler,
        collate_fn=collate,
        drop_last=True,
    )
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from batches
        epoch += 1


class Count(ls.Hook):
    """Counts the steps, as the simplest hook of a user does."""

    def __init__(self) -> None:
        self.steps = 0

    def after_step(self, run: Any) -> None:
        self.steps += 1


class Turns(ls.Hook):
    """Runs a turn of each hand-written loop after each turn of `ls.train`, and times them all."""

    def __init__(self, loops: dict[str, Iterator[None]], steps: int) -> None:
        self.loops = loops
        self.steps = steps
        self.spent: dict[str, list[Spent]] = {name: [] for name in (*loops, LOCKSTEP)}
        self._started: Spent | None = None

    def after_step(self, run: Any) -> None:
        if run.step % self.steps:
            return
        names = list(self.loops)
        first = run.step // self.steps % len(names) if names else 0
        before = Spent.until_now()
        if self._started is not None:
            self.spent[LOCKSTEP].append(before.since(self._started))
        for name in names[first:] + names[:first]:
            for _ in range(self.steps):
                next(self.loops[name])
            now = Spent.until_now()
            self.spent[name].append(now.since(before))
            before = now
        self.threads = torch.get_num_threads()
        self._started = Spent.until_now()


def lockstep(
    work: Workload,
    *,
    microbatch: int,
    plan: str = "",
    rounds: int = 1,
    loops: dict[str, Iterator[None]],
    hooks: Sequence[ls.Hook] = (),
) -> dict[str, list[Speed]]:
    """Alternate between `ls.train` and the loops. Return each side's speed in each round."""
    turns = Turns(loops, work.turn)
    recipe = ls.Recipe(
        model=work.build,
        data=work.data,
        inputs=work.inputs,
        loss=work.loss,
        optimizer=work.optimizer,
        global_batch=work.global_batch,
        microbatch=microbatch,
        steps=work.warmup * work.turn + rounds * work.steps,
        clip_norm=work.clip_norm,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        redirect_stderr(nowhere),
    ):
        ls.train(recipe, plan=plan, run_dir=f"{folder}/run", hooks=[*hooks, turns])
    if "bitwise" not in plan and turns.threads != torch.get_num_threads():
        others = torch.get_num_threads()
        raise SystemExit(
            f"ls.train computed with {turns.threads} threads and the hand-written loop with"
            f" {others}; nothing to compare"
        )
    each = work.steps // work.turn
    return {
        name: [
            speed(work.steps, spent[-each * (number + 1) :][:each])
            for number in reversed(range(rounds))
        ]
        for name, spent in turns.spent.items()
    }


def loops_of(case: str, work: Workload) -> dict[str, Iterator[None]]:
    if case == "shard":
        return {AT_ONCE: hand_written(work, at_once=True, sharded=True)}
    return {
        HAND: hand_written(work),
        AT_ONCE: hand_written(work, at_once=True),
        NO_LOADER: hand_written(work, at_once=True, loader=False),
    }


def measure(
    case: str, rounds: int, steps: int | None, threads: int, width: int
) -> dict[str, list[Speed]]:
    """Return each side's speed in each round, as this rank measured it. Runs in each process."""
    size = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(threads)
    if size > 1:
        dist.init_process_group("gloo")
    work = workload(case, width)
    if steps is not None:
        work = replace(work, steps=steps, turn=min(work.turn, steps))
    if case == "bitwise":
        speeds = run_by_run(work, rounds)
    else:
        plan = "shard=auto" if case == "shard" else ""
        hooks = [Count()] if case == "hook" else []
        loops = loops_of(case, work)
        speeds = lockstep(
            work,
            microbatch=work.global_batch // size,
            plan=plan,
            rounds=rounds,
            loops=loops,
            hooks=hooks,
        )
    if size > 1:
        dist.destroy_process_group()
    return speeds


def run_by_run(work: Workload, rounds: int) -> dict[str, list[Speed]]:
    """Run `ls.train` with both numerics. The first round is the warm-up."""
    speeds: dict[str, list[Speed]] = {"fast": [], "bitwise": []}
    for turn in range(-1, rounds):
        for numerics in sorted(speeds, reverse=turn % 2 == 0):
            found = lockstep(work, microbatch=4, plan=f"numerics={numerics}", loops={})[LOCKSTEP]
            if turn >= 0:
                speeds[numerics] += found
    return speeds


def rows_of(
    case: str, size: int, threads: int, speeds: dict[str, list[Speed]]
) -> list[dict[str, Any]]:
    baseline = next(iter(speeds.values()))
    rows = []
    for name, own in speeds.items():
        by_wall, by_processor = (
            Ratio.of([getattr(each, by) for each in own], [getattr(each, by) for each in baseline])
            for by in Speed._fields
        )
        rows.append(
            {
                "case": case,
                "processes": size,
                "threads": threads,
                "side": name,
                "steps_per_second": statistics.median(speed.wall for speed in own),
                "ratio": by_wall.median,
                "ratio_low": by_wall.low,
                "ratio_high": by_wall.high,
                "processor_ratio": by_processor.median,
                "speeds": own,
            }
        )
    return rows


def show(rows: list[dict[str, Any]], rounds: int) -> None:
    table = Table(
        title=(
            f"steps/s on n processes of t threads, {os.cpu_count()} cores, median of {rounds}"
            " rounds"
        )
    )
    for column in ("case", "n", "t", "side", "steps/s", "ratio", "quartiles", "cpu ratio"):
        table.add_column(
            column, justify="left" if column in ("case", "side") else "right", no_wrap=True
        )
    for row in rows:
        spread = f"{row['ratio_low']:.3f}-{row['ratio_high']:.3f}"
        numbers = (
            f"{row['steps_per_second']:.1f}",
            f"{row['ratio']:.3f}",
            spread,
            f"{row['processor_ratio']:.3f}",
        )
        table.add_row(
            row["case"], str(row["processes"]), str(row["threads"]), row["side"], *numbers
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=tuple(SIZES), default=tuple(SIZES))
    parser.add_argument("--processes", type=int, nargs="+", help="default: those of the case")
    parser.add_argument(
        "--width",
        type=int,
        default=128,
        help="width of the GPT, which has 48 x width^2 weights (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="steps of each side in each round (default: 1000 for the MLP, 30 for the GPT)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        help=(
            "threads per process, on all sides (default: cores ÷ processes, as ls.train sets them)"
        ),
    )
    parser.add_argument(
        "--json", metavar="FILE", help="also write the rows, with every rate, to this file"
    )
    options = parser.parse_args()
    rows = []
    for case in options.only:
        for size in options.processes or SIZES[case]:
            threads = options.threads or max(1, (os.cpu_count() or 1) // size)
            os.environ["OMP_NUM_THREADS"] = str(threads)
            speeds = ls.spawn(
                measure,
                nproc=size,
                args=(case, options.rounds, options.steps, threads, options.width),
            )
            found = rows_of(case, size, threads, speeds)
            show(found, options.rounds)
            rows += found
    if options.json:
        Path(options.json).write_text(
            json.dumps({"rounds": options.rounds, "rows": rows}, indent=2)
        )


if __name__ == "__main__":
    main()
