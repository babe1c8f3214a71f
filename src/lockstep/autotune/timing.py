"""Times a run's model and data before the first step. The model, the random generators and the
order of the data do not change."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn

from lockstep.assignment import MicrobatchAssignment
from lockstep.base import accelerator
from lockstep.data.device import to_device
from lockstep.data.generators import PreservedGenerators, seed_generators
from lockstep.data.loader import Loader, Microbatch, StreamLoader
from lockstep.keys import RandomStream, key
from lockstep.launch.failures import out_of_memory
from lockstep.recipe.checks import Precision
from lockstep.recipe.data import Stream as DataStream
from lockstep.recipe.recipe import Recipe
from lockstep.training import precision as precisions
from lockstep.training.context import Context
from lockstep.training.executor import call_model
from lockstep.training.loss import contribution, weights_of
from lockstep.training.microbatches import Batching

SECONDS = 4.0
"""Time limit of all timings together."""
FETCH_SECONDS = 1.0
MAX_REPETITIONS = 5
TIMED_FETCHES = 8
MIN_FREE_MEMORY = 0.1
"""Fraction of a GPU's memory that a microbatch must leave free."""


@dataclass(slots=True)
class MicrobatchTiming:
    """Times microbatches on one rank. All ranks make the same calls."""

    recipe: Recipe
    model: nn.Module
    context: Context
    timings: int
    """Number of timings that share the time limit."""
    _loader: Loader | StreamLoader = field(init=False)
    _stack: ExitStack = field(default_factory=ExitStack)
    _began: float = field(default_factory=time.perf_counter)
    _known: dict[tuple[int | None, Precision, int], float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        data, collate, seed, device = (
            self.recipe.data,
            self.recipe.collate,
            self.recipe.seed,
            self.context.device,
        )
        kind = StreamLoader if isinstance(data, DataStream) else Loader
        self._loader = kind(data, collate=collate, seed=seed, workers=0, device=device)

    def __enter__(self) -> MicrobatchTiming:
        device = self.context.device
        self._stack.callback(self._loader.close)
        self._stack.enter_context(PreservedGenerators())
        if accelerator.is_accelerator(device):
            self._stack.callback(accelerator.reset_peak_bytes, device)
            self._stack.callback(accelerator.free_unused_memory, device)
            self._stack.enter_context(accelerator.preserved_generators(device))
        if self.context.plan.compile:  # otherwise each size would be compiled first
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._stack.callback(self._drop_gradients)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def batching(self, microbatch: int | None) -> Batching:
        recipe, data, plan = self.recipe, self.recipe.data, self.context.plan
        assert recipe.global_batch is not None, "auto is refused with a batch_sampler"
        return Batching(
            samples=recipe.global_batch if isinstance(data, DataStream) else len(data),
            global_batch=recipe.global_batch,
            microbatch=microbatch,
            steps=recipe.steps,
            epochs=recipe.epochs,
            mesh=self.context.mesh,
            assignment=MicrobatchAssignment(plan.data_ranks, plan.has_rounds),
            microbatch_splits=plan.microbatch_splits,
        )

    def fetched(self, microbatch: int | None) -> Iterator[Microbatch]:
        """Yield this rank's microbatches from the first training step on."""
        batching = self.batching(microbatch)
        spans = (span for step in range(batching.steps) for span in batching.mine_in_step(step))
        if isinstance(self._loader, StreamLoader):
            return self._loader.fetch(spans, microbatches=batching.max_microbatches, positions={})
        return self._loader.fetch(spans)

    def is_time_up(self) -> bool:
        """Rank 0 decides. All ranks must call this method."""
        return bool(
            self.context.mesh.world.value_of(0, time.perf_counter() - self._began > SECONDS)
        )

    def compute_seconds(
        self, *, microbatch: int | None, precision: Precision, threads: int
    ) -> float | None:
        """Return the time of forward and backward on the slowest rank. Return None if a rank ran
        out of memory."""
        case = (microbatch, precision, threads)
        if case not in self._known:
            torch.set_num_threads(threads)
            item = next(self.fetched(microbatch), None)
            everyone = self.context.mesh.world.gather_values(
                0.0 if item is None else self._timed(item, precision)
            )
            self._known[case] = None if None in everyone else max(everyone)
        return self._known[case]

    def fetch_seconds(self, microbatch: int | None) -> tuple[float, float]:
        """Return the mean and the longest time to load a microbatch, on the slowest rank."""
        fetched, took, began = (
            islice(self.fetched(microbatch), 1 + TIMED_FETCHES),
            list[float](),
            time.perf_counter(),
        )
        while (before := time.perf_counter()) - began < FETCH_SECONDS and next(
            fetched, None
        ) is not None:
            took.append(time.perf_counter() - before)
        took = took[1:] or took or [0.0]  # the first fetch opens files
        everyone = self.context.mesh.world.gather_values([sum(took) / len(took), max(took)])
        return max(mean for mean, _ in everyone), max(most for _, most in everyone)

    def _timed(self, item: Microbatch, precision: Precision) -> float | None:
        accelerator.reset_peak_bytes(self.context.device)
        until = time.perf_counter() + SECONDS / self.timings
        took: list[float] = []
        try:
            while len(took) < (2 if sum(took) < SECONDS / 4 else 1) or (
                len(took) <= MAX_REPETITIONS and time.perf_counter() < until
            ):
                took.append(
                    self._forward_backward_seconds(item, copy.deepcopy(item.batch), precision)
                )
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            took = []
        if not took or not self._leaves_room():
            self._drop_gradients()
            return None
        return min(took[1:] or took)

    def _forward_backward_seconds(
        self, item: Microbatch, given: Any, precision: Precision
    ) -> float:
        recipe, device = self.recipe, self.context.device
        weights = (
            None
            if recipe.weight is None
            else {name: value or 1.0 for name, value in weights_of(recipe.weight(given)).items()}
        )
        seed_generators(key(recipe.seed, RandomStream.FORWARD, 0, item.index), device)
        accelerator.synchronize(device)
        began = time.perf_counter()
        batch = to_device(given, device)
        with precisions.autocast(precision, device):
            assert recipe.loss is not None, "auto is refused with a batch loss"
            loss = recipe.loss(call_model(recipe.inputs, self.model, batch), batch)
        one = torch.ones((), dtype=accelerator.wide_dtype(device), device=device)
        part = contribution(
            loss,
            samples=item.size,
            step_samples=item.size,
            batch=given,
            weights=weights,
            prescale=one,
        )
        torch.autograd.backward(part.total, part.grad_output)
        accelerator.synchronize(device)
        return time.perf_counter() - began

    def _leaves_room(self) -> bool:
        device = self.context.device
        peak, total = accelerator.peak_bytes(device), accelerator.total_bytes(device)
        return peak is None or total is None or peak <= (1 - MIN_FREE_MEMORY) * total

    def _drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
