"""Holds the planner against this machine's CPU: predicted steps and memory beside measured ones.

    python benchmarks/planner_here.py [--only MODEL ...] [--processes 1 2 3 4]
        [--rounds 3] [--json FILE]

Five small models are trained under plans of one to four processes, in rounds: a virtual machine is
for minutes slower than at other times, so each round measures the machine anew, and trains each
model once. The measured time is the median of the steps of all rounds. Logging steps do not count.
The measured memory is the most bytes of tensors that were there at once on the rank with the most,
by lockstep's own profile of a step (torch's record of each allocation, and notes of the parameters,
gradients and optimizer state that were there before). Predicted is the peak of the traced step,
with no overhead added. Neither has what Python and torch's libraries take.

The machine is measured for each number of processes, and the medians of the rounds count. Nothing
is fitted to these models.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from cpu_model.calibration import measured_machine
from cpu_model.machine import machine_of
from cpu_model.measuring import Measurements, measure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.hooks.profiling.profiler import Profiler
from lockstep.launch.environment import threads_per_process
from lockstep.plan import Plan
from lockstep.planner.machines.costs import Machine
from lockstep.planner.predict import predict

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import gpt

STEPS, SKIPPED, PROFILED = 10, 2, 1
"""Steps that are timed, steps before them, and steps that are profiled after them."""
PLANS: Mapping[int, Sequence[str]] = {
    1: ["replicate=1"],
    2: [
        *(
            "replicate=2",
            "shard=2",
            "tensor=2",
            "pipeline=2,schedule=gpipe",
            "pipeline=2,schedule=1f1b",
        ),
        *("pipeline=2,schedule=interleaved", "pipeline=2,schedule=zero-bubble"),
    ],
    3: [
        "replicate=3",
        "shard=3",
        *(
            f"pipeline=3,schedule={name}"
            for name in ("gpipe", "1f1b", "interleaved", "zero-bubble")
        ),
    ],
    4: [
        *(
            "replicate=4",
            "shard=4",
            "tensor=4",
            "pipeline=4",
            "replicate=2,shard=2",
            "replicate=2,tensor=2",
            "shard=2,tensor=2",
        ),
        *("replicate=2,pipeline=2", "shard=2,pipeline=2", "tensor=2,pipeline=2"),
    ],
}
"""The plans by number of processes."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that is trained, with data in memory."""

    build: Callable[[], nn.Module]
    samples: Callable[[], tuple[Tensor, Tensor]]
    """Inputs and targets of the whole data set."""
    global_batch: int
    microbatch: int
    stages: Sequence[str]
    tensor: Mapping[str, str] = field(default_factory=dict)

    def recipe(self, steps: int) -> ls.Recipe:
        """The recipe for `steps` steps."""
        return ls.Recipe(
            model=self.build,
            data=Rows(*self.samples()),
            inputs=lambda batch: batch[0],
            loss=lambda output, batch: F.cross_entropy(output.flatten(0, -2), batch[1].flatten()),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
            global_batch=self.global_batch,
            microbatch=self.microbatch,
            steps=steps,
            clip_norm=1.0,
            stages=self.stages,
            tensor=self.tensor or None,
        )

    def plans(self, processes: int) -> list[str]:
        """The plans for this number of processes that the model can be trained under."""
        return [plan for plan in PLANS[processes] if self.tensor or "tensor" not in plan]


class Rows(torch.utils.data.TensorDataset):
    """Tensors whose rows are taken all at once."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        rows = torch.tensor(indices)
        return tuple(tensor.index_select(0, rows) for tensor in self.tensors)


class Perceptron(nn.Module):
    """Blocks of two linear layers with a residual connection."""

    def __init__(self, width: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.blocks = nn.Sequential(*(Residual(width, hidden) for _ in range(blocks)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.first(x)))


class Residual(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Convolutional(nn.Module):
    """Convolutions with group norms, for images of 32 x 32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(
            ConvolutionBlock(width, width, 1),
            ConvolutionBlock(width, 2 * width, 2),
            ConvolutionBlock(2 * width, 2 * width, 1),
            ConvolutionBlock(2 * width, 4 * width, 2),
            ConvolutionBlock(4 * width, 4 * width, 1),
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.first(x)))


class ConvolutionBlock(nn.Sequential):
    """A convolution, a group norm and a ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.GroupNorm(4, outputs),
            nn.ReLU(),
        )


class RootMeanSquareNorm(nn.Module):
    """Divides by the root of the mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class Rotary(nn.Module):
    """Turns pairs of features by angles that grow with the position."""

    def __init__(self, head_width: int, length: int) -> None:
        super().__init__()
        angles = torch.outer(
            torch.arange(length), 10000.0 ** (-torch.arange(0, head_width, 2) / head_width)
        )
        self.register_buffer("cosine", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sine", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cosine + torch.cat([-second, first], -1) * self.sine


class LlamaBlock(nn.Module):
    """Attention with rotary positions, and SwiGLU."""

    def __init__(self, width: int, heads: int, hidden: int, length: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm, self.feedforward_norm = (
            RootMeanSquareNorm(width),
            RootMeanSquareNorm(width),
        )
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.rotary = Rotary(self.head_width, length)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        normed = self.feedforward_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def attention(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            self.rotary(query), self.rotary(key), value, is_causal=True
        )
        return self.output(mixed.transpose(1, 2).flatten(2))


class Llama(nn.Module):
    """A language model like Llama."""

    def __init__(
        self, *, layers: int, width: int, heads: int, hidden: int, length: int, tokens: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(
            *(LlamaBlock(width, heads, hidden, length) for _ in range(layers))
        )
        self.head = nn.Sequential(RootMeanSquareNorm(width), nn.Linear(width, tokens, bias=False))

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(text)))


def rows(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that makes a data set of random inputs, and targets of ten classes."""
    return lambda: (torch.randn(512, *shape), torch.randint(0, 10, (512,)))


def texts(length: int, tokens: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that makes a data set of random texts."""
    return lambda: (
        torch.randint(0, tokens, (512, length)),
        torch.randint(0, tokens, (512, length)),
    )


PARTS = ["first", "blocks.*", "head"]
HALVES = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
MODELS: Mapping[str, Model] = {
    "mlp": Model(
        build=lambda: Perceptron(256, 512, 6),
        samples=rows(64),
        global_batch=512,
        microbatch=64,
        stages=PARTS,
        tensor=HALVES,
    ),
    "wide mlp": Model(
        build=lambda: Perceptron(768, 1536, 4),
        samples=rows(64),
        global_batch=128,
        microbatch=16,
        stages=PARTS,
        tensor=HALVES,
    ),
    "gpt": Model(
        build=lambda: gpt.GPT(layers=4, width=128, heads=4, context=64, dropout=0.0),
        samples=texts(64, 256),
        global_batch=16,
        microbatch=2,
        stages=["embedding", "blocks.*", "head"],
        tensor={
            "blocks.*.query_key_value": "colwise_gathered",
            "blocks.*.projection": "rowwise_split",
            "blocks.*.perceptron.1": "colwise",
            "blocks.*.perceptron.3": "rowwise",
        },
    ),
    "convolutional": Model(
        build=lambda: Convolutional(32),
        samples=rows(3, 32, 32),
        global_batch=32,
        microbatch=4,
        stages=PARTS,
    ),
    "llama": Model(
        build=lambda: Llama(layers=4, width=128, heads=4, hidden=352, length=64, tokens=512),
        samples=texts(64, 512),
        global_batch=16,
        microbatch=2,
        stages=["embedding", "blocks.*", "head"],
        tensor={
            **{f"blocks.*.{name}": "colwise" for name in ("query", "key", "value", "gate", "up")},
            **{f"blocks.*.{name}": "rowwise" for name in ("output", "down")},
        },
    ),
}


class StepTimes(ls.Hook):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_step(self, run: Any) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """The timed steps."""
        return [
            b - a
            for a, b in zip(
                self.ends[SKIPPED : SKIPPED + STEPS], self.ends[SKIPPED + 1 :], strict=False
            )
        ]


def measured(
    names: Sequence[str], processes: int, with_memory: bool
) -> dict[str, tuple[list[float], int]]:
    """Train each model under each plan, in this many processes. Returns the seconds of each step,
    and bytes, by model and plan. Called by every rank."""
    cases = [(name, plan) for name in names for plan in MODELS[name].plans(processes)]
    return {
        f"{name} {plan}": one_run(MODELS[name], plan, with_memory=with_memory)
        for name, plan in cases
    }


def one_run(model: Model, plan: str, *, with_memory: bool) -> tuple[list[float], int]:
    """Train a model. Returns the seconds of each step on this rank, and the bytes of the rank with
    the most."""
    times, last = StepTimes(), SKIPPED + STEPS + 1
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        redirect_stderr(nowhere),
    ):
        run_dir = os.environ.get("LOCKSTEP_RUN_DIR") or folder
        hooks = [times, *([Profiler(range(last, last + PROFILED))] if with_memory else [])]
        recipe = model.recipe(last + PROFILED + 1)
        result = ls.train(
            recipe, plan=plan, run_dir=f"{run_dir}/run", hooks=hooks, log_every=1000, resume="never"
        )
        memory = Path(result.run_dir) / "profile" / "memory.json"
        ranks = (
            json.loads(memory.read_text(encoding="utf-8"))["ranks"]
            if result.rank == 0 and memory.exists()
            else []
        )
    return times.seconds, max((each["peak_bytes"] for each in ranks), default=0)


@dataclass(frozen=True)
class Row:
    """A model under a plan."""

    model: str
    plan: str
    processes: int
    predicted_seconds: float
    measured_seconds: float
    predicted_bytes: int
    measured_bytes: int
    by_limit: Mapping[str, float]

    @property
    def time_error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_bytes / self.measured_bytes - 1


def compared(names: Sequence[str], processes: int, rounds: int) -> list[Row]:
    """Measure and predict all models under all plans of this many processes. In each round the
    machine is measured, and each model trained under each plan."""
    threads = threads_per_process(processes)
    machines, runs = list[Measurements](), list[dict[str, tuple[list[float], int]]]()
    for number in range(rounds):
        machines.append(measure(processes, threads))
        runs.append(ls.spawn(measured, nproc=processes, args=(names, processes, number == 0)))
    machine = machine_of(measured_machine(middle(machines), processes, threads))
    found = []
    for name in names:
        for plan in MODELS[name].plans(processes):
            steps = [each for run in runs for each in run[f"{name} {plan}"][0]]
            found.append(
                row(name, plan, machine, (statistics.median(steps), runs[0][f"{name} {plan}"][1]))
            )
    return found


def middle(found: Sequence[Measurements]) -> Measurements:
    """Return the medians of several measurements."""

    def curves(
        several: Sequence[Mapping[str, Mapping[float, float]]],
    ) -> dict[str, dict[float, float]]:
        names = dict.fromkeys(name for each in several for name in each)
        return {name: medians([each[name] for each in several if name in each]) for name in names}

    def medians(several: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
        keys = dict.fromkeys(key for each in several for key in each)
        return {
            key: statistics.median(each[key] for each in several if key in each) for key in keys
        }

    return Measurements(
        operations=curves([each.operations for each in found]),
        around=medians([each.around for each in found]),
        collectives=curves([each.collectives for each in found]),
        steps=medians([each.steps for each in found]),
        slice_seconds=statistics.median(each.slice_seconds for each in found),
    )


def row(name: str, plan: str, machine: Machine, found: tuple[float, int]) -> Row:
    """Predict a model under a plan."""
    told = predict(MODELS[name].recipe(100), Plan.parse(plan), machine)
    return Row(
        name,
        plan,
        machine.cluster.count,
        told.seconds,
        found[0],
        told.peak.bytes,
        found[1],
        dict(told.by_limit),
    )


def mean_error(errors: Sequence[float]) -> float:
    """Return the mean absolute error."""
    return statistics.mean(abs(error) for error in errors)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL"
    )
    parser.add_argument(
        "--processes", nargs="+", type=int, default=list(PLANS), choices=list(PLANS)
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found: list[Row] = []
    for processes in options.processes:
        found += compared(options.only, processes, options.rounds)
        report(found, options.json)


def report(found: Sequence[Row], file: Path | None) -> None:
    """Print the rows that there are, and write them."""
    table = Table(
        "model",
        "plan",
        "predicted ms",
        "measured ms",
        "error",
        "predicted MiB",
        "measured MiB",
        "error",
    )
    for each in found:
        times = (
            f"{1e3 * each.predicted_seconds:.1f}",
            f"{1e3 * each.measured_seconds:.1f}",
            f"{each.time_error:+.0%}",
        )
        sizes = (
            f"{each.predicted_bytes / 2**20:.1f}",
            f"{each.measured_bytes / 2**20:.1f}",
            f"{each.memory_error:+.0%}",
        )
        table.add_row(each.model, each.plan, *times, *sizes)
    console = Console(width=130)
    console.print(table)
    times, sizes = (
        mean_error([each.time_error for each in found]),
        mean_error([each.memory_error for each in found]),
    )
    console.print(
        f"{len(found)} rows; mean absolute error of the step time {times:.1%}, of the memory"
        f" {sizes:.1%}"
    )
    if file:
        rows_ = [
            {**asdict(each), "time_error": each.time_error, "memory_error": each.memory_error}
            for each in found
        ]
        file.write_text(
            json.dumps({"time": times, "memory": sizes, "rows": rows_}, indent=1) + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
