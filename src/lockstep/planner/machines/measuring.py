"""Measures this machine in the processes of a run: operations, collectives, and steps of a tiny model.

Times are the shortest of several, and of collectives the lower quartile: other load on the machine only adds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lockstep.base.control_group import usable_cpus
from lockstep.comm.shared_memory import SharedMemoryGroup
from lockstep.launch.spawn import spawn
from lockstep.plan import Plan
from lockstep.planner.machines.reference import LARGE, Image, Text, adamw, cross_entropy, reference_recipe
from lockstep.planner.machines.this_machine import LEAST_SECONDS, THIN, SecondsCurve
from lockstep.planner.operations import Operation, Phase
from lockstep.planner.predict import Machine, predict
from lockstep.planner.tracing.kernels import kernel
from lockstep.planner.tracing.torch_fakes import TorchDispatchMode
from lockstep.run import train
from lockstep.training.hook import Hook, Run

WIDTHS = (16, 64, 256, 512)
"""Widths of the models whose operations are measured."""
TOKENS = {16: 32, 64: 128, 256: 512, 512: 1024}
"""Tokens in a microbatch of a text model of each width."""
THIN_ROWS = 8
"""Rows of a matrix multiplication that is bound by its bytes."""
LEAST_BYTES = 2**16
"""An operation that was met at smaller sizes alone has no curve of its own."""
REPEATS = 7
AROUND_WIDTH, AROUND_REPEATS = 16, 60
"""Width of the model whose steps show what is around operations, and how often it computes one."""
SIZES_BYTES = (2**8, 2**13, 2**16, 2**19, 2**22)
"""Sizes of the collectives that are measured."""
COLLECTIVE_SECONDS = 0.03
"""Seconds of repeats for each size of each collective, about."""
COUNTS = (1, 5)
"""Microbatches of a rank in the two steps that show what a microbatch and a step take beside operations."""
STEPS, LARGE_STEPS = 24, 14


@dataclass(slots=True)
class Measurements:
    """All that the processes have measured."""

    operations: dict[str, dict[float, float]] = field(default_factory=dict)
    around: dict[str, float] = field(default_factory=dict)
    collectives: dict[str, dict[float, float]] = field(default_factory=dict)
    steps: dict[tuple[str, int], float] = field(default_factory=dict)


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


def simulated_step(plan: str, count: int, machine: Machine) -> float:
    """Return the predicted seconds of the step of the tiny model with `count` microbatches a rank; 0: `LARGE`."""
    return predict(reference_recipe(Plan.parse(plan), count, 100), Plan.parse(plan), machine).seconds


def plans_of(processes: int) -> list[tuple[str, int]]:
    """Return the plans of the tiny model that are measured, each with the microbatches of a rank."""
    few, many = COUNTS
    found = [(f"replicate={processes}", few), (f"replicate={processes}", many), (f"replicate={processes}", LARGE)]
    if processes > 1:
        found += [(f"{axis}={processes}", few) for axis in ("shard", "tensor")] + [(f"pipeline={processes}", 2 * processes)]
    return found


def _measured(processes: int) -> Measurements:
    """Measure on this rank. Called by every rank."""
    found = Measurements()
    for plan, count in plans_of(processes):
        found.steps[plan, count] = _reference_step(plan, count)
    if processes == 1 or dist.get_rank() < usable_cpus():
        found.operations, found.around = _operations()
    if processes > 1:
        dist.barrier()
        for ranks in [size for size in range(2, processes + 1) if processes % size == 0]:
            found.collectives |= _collectives(ranks, processes)
    return found


# Steps of the tiny model


class _StepEnds(Hook):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_step(self, run: Run) -> None:
        self.ends.append(time.perf_counter())


def _reference_step(plan: str, count: int) -> float:
    """Train a reference model. Returns the seconds of a step."""
    ends = _StepEnds()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stderr(nowhere), redirect_stdout(nowhere):
        recipe = reference_recipe(Plan.parse(plan), count, LARGE_STEPS if count == LARGE else STEPS)
        run_dir = os.environ.get("LOCKSTEP_RUN_DIR") or f"{folder}/run"
        train(recipe, plan=plan, run_dir=run_dir, hooks=[ends], log_every=1000, resume="never")
    return min(after - before for before, after in zip(ends.ends[2:-2], ends.ends[3:-1], strict=True))


# Operations


class _TimedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Times each operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.found: list[tuple[Operation, float]] = []
        self.phase: Phase = "other"

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        name: _thinned({size: min(times) for size, times in points.items()}) for name, points in found.items() if max(points) >= LEAST_BYTES
    }
    return curves | {THIN: _thin_matmuls(SecondsCurve.through(curves["matmul float32"]))}, around


def _models(width: int) -> Iterator[tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]]:
    tokens = torch.zeros(max(1, TOKENS[width] // 64), min(64, TOKENS[width]), dtype=torch.long)
    yield Text(width, head_width=max(8, min(64, width // 4))), tokens, lambda output: cross_entropy(output, tokens)
    if width <= 256:
        images = torch.randn(4, 3, 32 if width < 256 else 8, 32 if width < 256 else 8)
        yield Image(width), images, lambda output: functional.cross_entropy(output, torch.zeros(4, dtype=torch.long))


def _timed(model: nn.Module, batch: Tensor, loss: Callable[[Tensor], Tensor]) -> list[tuple[Operation, float]]:
    """Return the operations of a step, each with its time."""
    optimizer, runs = adamw(model), list[_TimedOperations]()
    for _ in range(REPEATS + 1):
        runs.append(_TimedOperations())
        with runs[-1]:
            for part in _parts(model, batch, loss, optimizer):
                runs[-1].phase = part
    several = zip(*(run.found for run in runs[1:]), strict=True)
    return [(each[0][0], min(seconds for _, seconds in each)) for each in several]


def _parts(model: nn.Module, batch: Tensor, loss: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer) -> Iterator[Phase]:
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
    model: nn.Module, batch: Tensor, loss: Callable[[Tensor], Tensor], timed: Sequence[tuple[Operation, float]]
) -> dict[str, float]:
    """Return what each phase takes beside its operations, for each of these."""
    optimizer = adamw(model)
    runs = [_phase_times(_parts(model, batch, loss, optimizer)) for _ in range(AROUND_REPEATS)]
    spent, counts = defaultdict[str, float](float), Counter(operation.phase for operation, _ in timed)
    for several in zip(*runs, strict=True):
        spent[several[0][0]] += min(seconds for _, seconds in several)
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
    """Return seconds over bytes of what products with few rows take beyond their arithmetic: packing and fetching."""
    found = {}
    for width in (64, 256, 1024, 2048):
        rows, weight, result = torch.ones(THIN_ROWS, width), torch.ones(width, width), torch.empty(width, width)
        calls = partial(torch.mm, rows, weight.t()), partial(torch.mm, rows, weight), partial(torch.mm, rows.t(), rows, out=result)
        seconds = sum(_call_seconds(call, 0.03) for call in calls) / len(calls)
        size = 4 * width * (width + 2 * THIN_ROWS)
        found[float(size)] = max(LEAST_SECONDS, seconds - arithmetic.at(2 * THIN_ROWS * width * width))
    return found


def _addition(count: int) -> float:
    one, other, result = torch.ones(count), torch.ones(count), torch.empty(count)
    return _call_seconds(lambda: torch.add(one, other, out=result), 0.03)


def _call_seconds(call: Callable[[], Any], seconds: float) -> float:
    """Return the time of a call, from as many as fit into so many seconds."""
    times, end = list[float](), time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def _thinned(points: dict[float, float]) -> dict[float, float]:
    """Return one point of each doubling of the size: the middle one by time per size."""
    near: dict[int, list[float]] = defaultdict(list)
    for size in points:
        near[int(size).bit_length()].append(size)
    kept = [sorted(sizes, key=lambda size: points[size] / size)[len(sizes) // 2] for sizes in near.values()]
    return {size: points[size] for size in sorted(kept)}


# Collectives


def _collectives(ranks: int, processes: int) -> dict[str, dict[float, float]]:
    """Return seconds over sizes for collectives in groups of `ranks`, all groups at the same time."""
    groups = [dist.new_group(list(range(start, start + ranks))) for start in range(0, processes, ranks)]
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
            found[f"{name} {ranks}"][size] = _collective_seconds(call) / (2 if name == "gloo send" else 1)
    if isinstance(memory, SharedMemoryGroup):
        memory.close()
    return found


def _collective_seconds(call: Callable[[], Any]) -> float:
    """Return the time of a call that all ranks make."""
    times = []
    dist.barrier()
    repeats = torch.tensor([COLLECTIVE_SECONDS / max(1e-5, _call_seconds(call, 0.0))])
    dist.all_reduce(repeats, dist.ReduceOp.MIN)
    for _ in range(max(3, min(100, int(repeats)))):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 4]


def _there_and_back(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Send a tensor to the neighbour, and get it back."""
    place = dist.get_rank(group)
    other = dist.get_global_rank(group, place ^ 1) if place ^ 1 < dist.get_world_size(group) else None
    if other is None:
        return
    if place % 2:
        dist.recv(tensor, other, group)
        dist.send(tensor, other, group)
    else:
        dist.send(tensor, other, group)
        dist.recv(tensor, other, group)
