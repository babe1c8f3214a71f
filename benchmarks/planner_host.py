"""Measures the host's time of a step: Python, torch's dispatcher, autograd, DTensor, FSDP2's hooks
and lockstep.

    python benchmarks/planner_host.py [--write]

Each step is that of lockstep's own engines, of a small transformer, in a world of two ranks of
which one is there, with tensors of a few numbers: the operations of a real step, with no work in
them. Its time on this CPU, over what its trace counts (kernels, microbatches, DTensor's dispatches,
collectives by mesh axis), gives the host's time of each, by least squares over steps of several
depths and numbers of microbatches. `--write` writes `planner/machines/host.toml`.

A GPU adds the launch itself, which a CPU does not have: `LAUNCHED_SECONDS`, less what the same call
takes here.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cpu_model.reference import Text, adamw
from rich.console import Console
from rich.table import Table
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional

import lockstep.planner
from lockstep.plan import Plan
from lockstep.planner.trace import DISPATCH, REDUCED, Communicate, Compute, Mark, TracedStep
from lockstep.planner.tracing.fake_world import fake_world
from lockstep.planner.tracing.stand_ins import without_others
from lockstep.planner.tracing.torch_fakes import replaced
from lockstep.planner.tracing.tracer import LoneSession, StepTraceHook, TraceOptions, trace_step
from lockstep.recipe.recipe import Recipe, Sum
from lockstep.recipe.sequence import Sequence as TokenSequence
from lockstep.run import train_in
from lockstep.training.run import Run

HOST_FILE = Path(lockstep.planner.__file__).parent / "machines" / "host.toml"
LAUNCHED_SECONDS = 9.68e-6
"""A small eager kernel (`x.add_(1)`) on the host of an H200, torch 2.11, 2026-11-26: the mean of
1,000 in a row."""
STEPS, WARM = 60, 15
BLOCKS, MICROBATCHES = (2, 8), (1, 4)
WIDTH, HEAD, TOKENS = 16, 8, 4
PLANS = ("replicate=1", "replicate=2", "tensor=2", "shard=2", "context=2")
COLWISE, ROWWISE = ("query", "key", "value", "gate", "up"), ("output", "down")


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is measured."""

    plan: str
    blocks: int
    microbatches: int

    def recipe(self) -> Recipe:
        """Return its recipe."""
        plan = Plan.parse(self.plan)
        count = self.microbatches * int(plan.replicate or 1) * int(plan.shard or 1)
        return Recipe(
            model=partial(Text, WIDTH, self.blocks, HEAD),
            data=[torch.zeros(TOKENS, dtype=torch.long)] * 512,
            inputs=_same,
            loss=_summed,
            weight=_tokens,
            sequence=TokenSequence(chunks=4) if plan.context != 1 else None,
            optimizer=adamw,
            clip_norm=1.0,
            global_batch=count,
            microbatch=1,
            steps=STEPS,
            stages=["embedding", "blocks.*", "head"],
            tensor={f"blocks.*.{name}": "colwise" for name in COLWISE}
            | {f"blocks.*.{name}": "rowwise" for name in ROWWISE},
        )


def _same(batch: Any) -> Any:
    return batch


def _summed(output: Any, batch: Any) -> Sum:
    return Sum(functional.cross_entropy(output.flatten(0, -2), batch.flatten(), reduction="sum"))


def _tokens(batch: Any) -> int:
    return int(batch.numel())


class Ended(Exception):
    """The steps are timed."""


class Clock(StepTraceHook):
    """Times steps, and records nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def before_step(self, run: Run) -> None:
        self.times.append(time.thread_time())

    def after_backward(self, run: Run, model: torch.nn.Module) -> None:
        """Nothing is labelled."""

    def after_step(self, run: Run) -> None:
        """End the run after the last step: its weights would be gathered."""
        if len(self.times) == STEPS:
            raise Ended

    def labelled(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return loss

    def see_batch(self, microbatch: Any, batch: Any) -> Any:
        return batch


class TimedSession(LoneSession):
    """Computes with values of no importance."""

    STEPS = STEPS

    def _enter_modes(self, stack: ExitStack) -> None:
        for owner, names in without_others(self._options.boundaries, self._options.skew):
            stack.enter_context(replaced(owner, **names))


def options_of(step: Step) -> tuple[Plan, TraceOptions]:
    """Return the plan, resolved, and how it is traced."""
    size = 1 if step.plan == "replicate=1" else 2
    plan, options = (
        Plan.parse(step.plan).resolve(size),
        TraceOptions(world_size=size, local_size=size),
    )
    return plan, options


def seconds(step: Step) -> float:
    """Return the host's time of a step: that of its thread alone, the shortest."""
    plan, options = options_of(step)
    clock = Clock()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        world = stack.enter_context(fake_world(0, options.world_size, options.local_size))
        session = TimedSession(
            step.recipe(), plan, world, replace(options, is_fake=False), folder, clock
        )
        stack.callback(gc.enable)
        gc.disable()
        with suppress(Ended), session:
            train_in(session)
    lengths = [end - start for start, end in zip(clock.times, clock.times[1:], strict=False)]
    return min(lengths[WARM:])


def counts(step: Step) -> Counter[str]:
    """Return what the step's trace counts."""
    return counted(trace_step(step.recipe(), *options_of(step)))


def counted(trace: TracedStep) -> Counter[str]:
    """Return the number of kernels, marks, and collectives by axis."""
    found: Counter[str] = Counter()
    for item in trace.items:
        match item:
            case Compute():
                found["kernel"] += 1
            case Communicate(collective):
                found[f"{collective.axis} collective"] += 1
            case Mark(name) if name in (DISPATCH, REDUCED, "microbatch", "end"):
                found[name] += 1
    return found


def solve(rows: Sequence[tuple[Counter[str], float]], known: dict[str, float]) -> dict[str, float]:
    """Return the seconds of what `known` lacks, by least squares of the relative error."""
    names = sorted({name for count, _ in rows for name in count} - set(known))
    left = np.array([[count[name] / measured for name in names] for count, measured in rows])
    right = np.array(
        [
            1 - sum(known[name] * count[name] for name in known) / measured
            for count, measured in rows
        ]
    )
    found = np.linalg.lstsq(left, right, rcond=None)[0]
    return known | dict(zip(names, found.tolist(), strict=True))


def call_seconds(call: Callable[[], Any], repeats: int = 5000) -> float:
    """Return the shortest mean time of a call."""
    times = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(repeats):
            call()
        times.append((time.thread_time() - began) / repeats)
    return min(times)


def call_times() -> dict[str, float]:
    """Return the times of a functional collective, as DTensor uses them, and of a message between
    stages."""
    with fake_world(0, 2, 2):
        tensor, world = torch.ones(4, 4), dist.group.WORLD
        reduce = call_seconds(
            lambda: collectives.wait_tensor(collectives.all_reduce(tensor, "sum", world)), 500
        )
        message = call_seconds(
            lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1)])[0].wait(), 500
        )
    return {"tensor collective": reduce, "pipeline collective": message}


def main() -> None:
    """Print the table, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the planner's file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    small = torch.ones(1)
    here = call_seconds(lambda: small.add_(1), 20_000)
    measured: dict[Step, tuple[Counter[str], float]] = {}
    known = call_times() | {"replicate collective": 0.0}
    for plan in PLANS:
        steps = [Step(plan, blocks, count) for blocks in BLOCKS for count in MICROBATCHES]
        measured |= {step: (counts(step), seconds(step)) for step in steps}
        known = solve([measured[step] for step in steps], known)
    table = Table(
        "plan",
        "blocks",
        "microbatches",
        "kernels",
        "measured",
        "by the counts",
        title="The host's time of a step",
    )
    for step, (count, taken) in measured.items():
        sum_of = sum(known[name] * count[name] for name in count)
        times = f"{taken * 1e3:.2f} ms", f"{sum_of * 1e3:.2f} ms"
        table.add_row(
            step.plan, str(step.blocks), str(step.microbatches), str(count["kernel"]), *times
        )
    console = Console()
    console.print(table)
    for name, each in known.items():
        console.print(f"{name}: {each * 1e6:.1f} us", highlight=False)
    console.print(
        f"x.add_(1) here: {here * 1e6:.2f} us, on the host of a GPU"
        f" {LAUNCHED_SECONDS * 1e6:.2f} us",
        highlight=False,
    )
    if options.write:
        HOST_FILE.write_text(toml_of(known, LAUNCHED_SECONDS - here), encoding="utf-8")


def toml_of(known: dict[str, float], launch: float) -> str:
    """Return the planner's file."""
    collectives = {
        name.removesuffix(" collective"): each
        for name, each in known.items()
        if name.endswith(" collective")
    }
    lines = [
        (
            "# The host's seconds in a step, measured by benchmarks/planner_host.py on one core of"
            f" this kind, {date.today()}:"
        ),
        f"# {cpu()}, torch {torch.__version__}. launch: what a GPU adds to the same call on a CPU.",
        f"launch = {launch:.3g}",
        f"kernel = {max(0.0, known['kernel']):.3g}",
        "",
        "[marks]",
        *(
            f"{name} = {max(0.0, known[name]):.3g}"
            for name in ("microbatch", DISPATCH, REDUCED, "end")
        ),
        "",
        "[collectives]",
        *(f"{name} = {max(0.0, each):.3g}" for name, each in collectives.items()),
    ]
    return "\n".join(lines) + "\n"


def cpu() -> str:
    """Return the processor's name."""
    told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return next(
        (
            line.partition(":")[2].strip()
            for line in told.splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )


if __name__ == "__main__":
    main()
