"""Measures this machine in the processes of a run: operations, collectives, and steps of a tiny
model.

Times are medians: those of parts then add up to that of a step, on a machine with other load as
well.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lockstep.base.container import usable_cpus
from lockstep.base.temporary_folder import locked_folder
from lockstep.base.torch_private import TorchDispatchMode
from lockstep.comm.shared_memory import SharedMemoryGroup
from lockstep.launch.spawn import spawn
from lockstep.planner.trace import Operation, Phase
from lockstep.planner.tracing.kernels import kernel
from lockstep.run import train
from lockstep.training.hook import Hook
from lockstep.training.run import Run

from .machine import LEAST_SECONDS, THIN, SecondsCurve
from .reference import (
    Image,
    ReferenceStep,
    Text,
    adamw,
    cross_entropy,
    reference_recipe,
)

WIDTHS = (16, 32, 64, 128, 256, 512)
"""Widths of the models whose operations are measured."""
THIN_ROWS = 8
"""Rows of a matrix multiplication that is bound by its bytes."""
LARGE_BYTES, COLD_BYTES = 2**17, 2**26
"""A weight of so many bytes is seldom in a core's cache when it is used again, because others were
used since; and bytes of weights that no cache holds."""
LEAST_BYTES = 2**16
"""An operation that was met at smaller sizes alone has no curve of its own."""
REPEATS = 7
AROUND_WIDTH, AROUND_REPEATS = 16, 60
"""Width of the model whose steps show what is around operations, and how often it computes one."""
SIZES_BYTES = (2**8, 2**13, 2**16, 2**19, 2**22, 2**24)
"""Sizes of the collectives that are measured."""
COLLECTIVE_SECONDS = 0.03
"""Seconds of repeats for each size of each collective, about."""
BETWEEN_WIDTH = 96
"""Width of the matrix product before each collective of Gloo, whose threads have to be woken then,
as in a run."""
SLICE_SECONDS = 0.15
"""Time in which it is seen how long a process waits for a core."""
LEAST_SLICE_SECONDS = 3e-4
"""A shorter interruption is no wait for a core that another process uses."""
STEPS = {"tiny": 24, "middle": 24, "large": 14}
"""Steps of a reference model, of which the first and last two do not count."""
TURNS = 2
"""Times that the reference models are trained, one after another: a virtual machine is slower for
seconds."""


@dataclass(slots=True)
class Measurements:
    """All that the processes have measured."""

    operations: dict[str, dict[float, float]] = field(default_factory=dict)
    around: dict[str, float] = field(default_factory=dict)
    collectives: dict[str, dict[float, float]] = field(default_factory=dict)
    steps: dict[ReferenceStep, float] = field(default_factory=dict)
    slice_seconds: float = 0.0


def measure(processes: int, threads: int) -> Measurements:
    """Start the processes, and return what rank 0 has measured."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        return spawn(_measured, nproc=processes, args=(processes,))
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def reference_steps(processes: int) -> list[ReferenceStep]:
    """Return the steps that are measured: four under `replicate`, and for each size of a group two
    under each other axis, of few microbatches and of many."""
    alone = f"replicate={processes}"
    found = [ReferenceStep(alone, "tiny", 1), ReferenceStep(alone, "tiny", 5)]
    found += [ReferenceStep(alone, "middle", 3), ReferenceStep(alone, "large", 3)]
    for ranks in _group_sizes(processes):
        several = "" if ranks == processes else f"replicate={processes // ranks},"
        found += [
            ReferenceStep(f"{several}{axis}={ranks}", "middle", count)
            for axis in ("shard", "tensor")
            for count in (1, 3)
        ]
    if processes > 1:
        found.append(ReferenceStep(f"pipeline={processes}", "middle", processes))
        found.append(
            ReferenceStep(f"schedule=interleaved,pipeline={processes}", "middle", 3 * processes)
        )
    return found


def _group_sizes(processes: int) -> list[int]:
    return [size for size in range(2, processes + 1) if processes % size == 0]


def _measured(processes: int) -> Measurements:
    """Measure on this rank. Called by every rank."""
    found = Measurements()
    times: dict[ReferenceStep, list[float]] = defaultdict(list)
    for step in reference_steps(processes) * TURNS:
        times[step] += _step_times(step)
    found.steps = {step: median(several) for step, several in times.items()}
    if processes == 1 or dist.get_rank() < usable_cpus():
        found.operations, found.around = _operations()
    if processes > 1:
        dist.barrier()
        found.slice_seconds = _slice_seconds()
        for ranks in _group_sizes(processes):
            found.collectives |= _collectives(ranks, processes)
    return found


def _slice_seconds() -> float:
    """Return the middle time for which a process that computes waits for a core; 0 if it has one to
    itself."""
    waits, last = list[float](), time.perf_counter()
    end = last + SLICE_SECONDS
    while last < end:
        now = time.perf_counter()
        if now - last > LEAST_SLICE_SECONDS:
            waits.append(now - last)
        last = now
    return sorted(waits)[len(waits) // 2] if waits else 0.0


# Steps of reference models


class _StepEnds(Hook):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_step(self, run: Run) -> None:
        self.ends.append(time.perf_counter())


def _step_times(step: ReferenceStep) -> list[float]:
    """Train a reference model. Returns the seconds of each step."""
    ends = _StepEnds()
    with (
        locked_folder() as folder,
        open(os.devnull, "w") as nowhere,
        redirect_stderr(nowhere),
        redirect_stdout(nowhere),
    ):
        recipe = reference_recipe(step, STEPS[step.scale])
        run_dir = os.environ.get("LOCKSTEP_RUN_DIR") or f"{folder}/run"
        train(recipe, plan=step.plan, run_dir=run_dir, hooks=[ends], log_every=1000, resume="never")
    return [after - before for before, after in zip(ends.ends[2:-2], ends.ends[3:-1], strict=True)]


# Operations


class _TimedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Times each operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.found: list[tuple[Operation, float]] = []
        self.phase: Phase = "other"

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        began = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        seconds = time.perf_counter() - began
        if (found := kernel(function, args, kwargs or {}, result, self.phase)) is not None:
            self.found.append((found, seconds))
        return result


def _operations() -> tuple[dict[str, dict[float, float]], dict[str, float]]:
    """Return seconds over sizes by operation, and seconds around an operation by phase."""
    found: dict[str, dict[float, list[float]]] = defaultdict(partial(defaultdict, list))
    around: dict[str, float] = {}
    for width in WIDTHS:
        for model, batch, loss in _models(width):
            timed = _timed(model, batch, loss)
            for operation, seconds in timed:
                size = operation.flops or operation.bytes
                points = found[f"{operation.name} {operation.dtype}"]
                points[size].append(seconds)
                if operation.flops:
                    found[f"{operation.kind} {operation.dtype}"][size].append(seconds)
            if isinstance(model, Text) and width == AROUND_WIDTH:
                around = _around(model, batch, loss, timed)
    for size in (2**10, 2**14, 2**18, 2**21, 2**24):
        found["memory"][3 * 4 * size] = [_addition(size)]
    curves = {
        name: _thinned({size: median(times) for size, times in points.items()})
        for name, points in found.items()
        if max(points) >= LEAST_BYTES
    }
    return curves | {THIN: _thin_matmuls(SecondsCurve.through(curves["matmul float32"]))}, around


def _models(width: int) -> Iterator[tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]]:
    tokens = torch.zeros(max(1, 2 * width // 64), min(64, 2 * width), dtype=torch.long)
    yield (
        Text(width, head_width=max(8, min(64, width // 4))),
        tokens,
        lambda output: cross_entropy(output, tokens),
    )
    if width <= 256:
        images = torch.randn(4, 3, 32 if width < 256 else 8, 32 if width < 256 else 8)
        yield (
            Image(width),
            images,
            lambda output: functional.cross_entropy(output, torch.zeros(4, dtype=torch.long)),
        )


def _timed(
    model: nn.Module, batch: Tensor, loss: Callable[[Tensor], Tensor]
) -> list[tuple[Operation, float]]:
    """Return the operations of a step, each with its time."""
    optimizer, runs = adamw(model), list[_TimedOperations]()
    for _ in range(REPEATS + 1):
        runs.append(_TimedOperations())
        with runs[-1]:
            for part in _parts(model, batch, loss, optimizer):
                runs[-1].phase = part
    several = zip(*(run.found for run in runs[1:]), strict=True)
    return [(each[0][0], median(seconds for _, seconds in each)) for each in several]


def _parts(
    model: nn.Module,
    batch: Tensor,
    loss: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
) -> Iterator[Phase]:
    """Compute a step of two microbatches. Yields the phase before each part of it."""
    for parameter in model.parameters():
        parameter.grad = None
    for _ in range(2):
        yield "forward"
        total = loss(model(batch))
        yield "backward"
        total.backward()  # type: ignore[no-untyped-call]  # torch
    yield "update"
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()


def _around(
    model: nn.Module,
    batch: Tensor,
    loss: Callable[[Tensor], Tensor],
    timed: Sequence[tuple[Operation, float]],
) -> dict[str, float]:
    """Return what each phase takes beside its operations, for each of these."""
    optimizer = adamw(model)
    runs = [_phase_times(_parts(model, batch, loss, optimizer)) for _ in range(AROUND_REPEATS)]
    spent, counts = (
        defaultdict[str, float](float),
        Counter(operation.phase for operation, _ in timed),
    )
    for several in zip(*runs, strict=True):
        spent[several[0][0]] += median(seconds for _, seconds in several)
    for operation, seconds in timed:
        spent[operation.phase] -= seconds
    found = {phase: spent[phase] / counts[phase] for phase in ("forward", "backward")}
    return found | dict.fromkeys(("recompute", "update", "other"), found["forward"])


def _phase_times(parts: Iterator[Phase]) -> list[tuple[Phase, float]]:
    """Return the seconds of each part."""
    times, phase, began = list[tuple[Phase, float]](), next(parts), time.perf_counter()
    for following in parts:
        times.append((phase, time.perf_counter() - began))
        phase, began = following, time.perf_counter()
    return [*times, (phase, time.perf_counter() - began)]


def _thin_matmuls(arithmetic: SecondsCurve) -> dict[float, float]:
    """Return seconds over bytes of what products with few rows take beyond their arithmetic:
    packing and fetching. A weight that is large comes from memory, because others were used
    since."""
    found = {}
    for width in (64, 256, 1024, 2048):
        size = 4 * width * (width + 2 * THIN_ROWS)
        count = COLD_BYTES // size if size >= LARGE_BYTES else 1
        rows, others = (
            torch.ones(THIN_ROWS, width),
            itertools.cycle(torch.ones(count, width, width).unbind()),
        )
        seconds = _call_seconds(partial(_thin_products, rows, others), 0.08) / 3
        found[float(size)] = max(
            LEAST_SECONDS, seconds - arithmetic.at(2 * THIN_ROWS * width * width)
        )
    return found


def _thin_products(rows: Tensor, others: Iterator[Tensor]) -> None:
    """Multiply rows by a weight, by its transpose, and by themselves for its gradient, as a layer
    does."""
    weight = next(others)
    torch.mm(rows, weight.t())
    torch.mm(rows, next(others))
    torch.mm(rows.t(), rows)


def _addition(count: int) -> float:
    one, other, result = torch.ones(count), torch.ones(count), torch.empty(count)
    return _call_seconds(lambda: torch.add(one, other, out=result), 0.03)


def _call_seconds(call: Callable[[], Any], seconds: float) -> float:
    """Return the time of a call, from as many as fit into so many seconds. The first, which touches
    fresh memory, does not count."""
    call()
    times, end = list[float](), time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times)


def _thinned(points: dict[float, float]) -> dict[float, float]:
    """Return one point of each doubling of the size: the middle one by time per size, of two the
    faster."""
    near: dict[int, list[float]] = defaultdict(list)
    for size in points:
        near[int(size).bit_length()].append(size)
    kept = [
        sorted(sizes, key=lambda size: points[size] / size)[(len(sizes) - 1) // 2]
        for sizes in near.values()
    ]
    return {size: points[size] for size in sorted(kept)}


# Collectives


def _collectives(ranks: int, processes: int) -> dict[str, dict[float, float]]:
    """Return seconds over sizes for collectives in groups of `ranks`, all groups at the same
    time."""
    groups = [
        dist.new_group(list(range(start, start + ranks))) for start in range(0, processes, ranks)
    ]
    group = groups[dist.get_rank() // ranks]
    found: dict[str, dict[float, float]] = defaultdict(dict)
    memory = SharedMemoryGroup.create(group)
    for size in SIZES_BYTES:
        whole = torch.zeros(-(-size // 4 // ranks) * ranks)
        part = whole[: len(whole) // ranks].clone()
        calls: dict[str, Callable[[], Any]] = {
            "gloo all_reduce": partial(dist.all_reduce, whole, group=group),
            "gloo all_gather": partial(dist.all_gather_single, whole, part, group=group),
            "gloo reduce_scatter": partial(dist.reduce_scatter_single, part, whole, group=group),
            "gloo send": partial(_there_and_back, whole, group),
        }
        if isinstance(memory, SharedMemoryGroup):
            calls |= {
                "shared all_reduce": partial(memory.all_reduce, whole),
                "shared all_gather": partial(memory.all_gather, whole, part),
                "shared reduce_scatter": partial(memory.reduce_scatter, part, whole),
            }
        for name, call in calls.items():
            seconds = _collective_seconds(call, computes=name != "gloo send" and "gloo" in name)
            found[f"{name} {ranks}"][size] = seconds / (2 if name == "gloo send" else 1)
    if isinstance(memory, SharedMemoryGroup):
        memory.close()
    return found


def _collective_seconds(call: Callable[[], Any], *, computes: bool) -> float:
    """Return the time of a call that all ranks make. `computes`: after they have computed
    something."""
    one = torch.ones(BETWEEN_WIDTH, BETWEEN_WIDTH)
    times = []
    dist.barrier()
    repeats = torch.tensor([COLLECTIVE_SECONDS / max(1e-5, _call_seconds(call, 0.0))])
    dist.all_reduce(repeats, dist.ReduceOp.MIN)
    for _ in range(max(5, min(100, int(repeats)))):
        if computes:
            torch.mm(one, one)
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times)


def _there_and_back(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Send a tensor to the neighbour, and get it back."""
    place = dist.get_rank(group)
    other = (
        dist.get_global_rank(group, place ^ 1) if place ^ 1 < dist.get_world_size(group) else None
    )
    if other is None:
        return
    if place % 2:
        dist.recv(tensor, other, group)
        dist.send(tensor, other, group)
    else:
        dist.send(tensor, other, group)
        dist.recv(tensor, other, group)
