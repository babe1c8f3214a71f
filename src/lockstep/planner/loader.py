"""The loader: what a process of this machine needs for a sample, and a step with it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch

from lockstep.base.errors import RecipeError
from lockstep.base.processes import die_with_parent
from lockstep.data.loader import Loader, Microbatch, Span, StreamLoader
from lockstep.hooks.hang.snapshot import error_with_line
from lockstep.plan import Plan
from lockstep.planner.prediction import Prediction
from lockstep.recipe.data import Stream
from lockstep.recipe.recipe import Recipe

LOADER = "loader"
MEASURED_SECONDS = 1.0
"""Microbatches are loaded for so long."""
PATIENCE_SECONDS = 60.0
"""A loader without one microbatch by then is given up."""
MOST_SAMPLES = 32
"""Samples of a measured microbatch whose size the plan chooses."""


@dataclass(frozen=True, slots=True)
class LoaderTime:
    """The time of a sample in a process of this machine."""

    seconds: float
    note: str

    @classmethod
    def measured(cls, recipe: Recipe, folder: Path, seconds: float) -> LoaderTime:
        """Load microbatches by the recipe's data and `collate` for so many seconds, in a fork.
        Raises `RecipeError` if that fails or the first takes longer than `PATIENCE_SECONDS`."""
        path = folder / "loader.json"
        own = os.getpid()
        process = os.fork()
        if not process:
            die_with_parent(own)
            try:
                path.write_text(json.dumps(_loaded(recipe, seconds)), encoding="utf-8")
            except BaseException as error:
                path.write_text(json.dumps(error_with_line(error)), encoding="utf-8")
            finally:
                os._exit(0)
        if not _ends(process, PATIENCE_SECONDS):
            raise _cannot_load(f"took longer than {PATIENCE_SECONDS:.0f} s")
        if not path.exists():
            raise _cannot_load("killed its process")
        told = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(told, str):
            raise _cannot_load(f"failed with {told}")
        return cls(told, f"a process loads {1 / told:,.4g} samples/s here")

    def added_to(
        self, prediction: Prediction, plan: Plan, *, processes: int, cores: float
    ) -> Prediction:
        """Return the prediction with each process's loader. Without workers a process loads, then
        computes; with workers the slower counts. `cores`: of all processes."""
        noted = replace(prediction, note="; ".join(filter(None, (prediction.note, self.note))))
        own, samples = cores / processes, prediction.microbatch * prediction.microbatches
        workers = plan.workers if isinstance(plan.workers, int) else max(1, int(own))
        loading = samples * self.seconds / min(max(1, workers), own)
        if not workers:
            by_limit, added = {**prediction.by_limit, LOADER: loading}, loading
        elif loading > prediction.seconds:
            by_limit, added = {LOADER: loading}, 0.0
        else:
            return noted
        return replace(
            noted,
            seconds=max(prediction.seconds, loading) if workers else prediction.seconds + loading,
            by_limit=dict(sorted(by_limit.items(), key=lambda each: -each[1])),
            seconds_with_twice={
                name: max(each + added, loading)
                for name, each in prediction.seconds_with_twice.items()
            },
        )


def _ends(process: int, seconds: float) -> bool:
    """Wait for a child; kill it if it is late."""
    end = time.monotonic() + seconds
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return False
        time.sleep(0.01)
    return True


def _cannot_load(why: str) -> RecipeError:
    return RecipeError(
        f"loading a microbatch of Recipe.data {why}; a plan is made from one; correct the dataset,"
        " or `collate`"
    )


def _loaded(recipe: Recipe, seconds: float) -> float:
    """Return the seconds of a sample."""
    size = (
        recipe.microbatch
        if isinstance(recipe.microbatch, int)
        else min(recipe.global_batch or 1, MOST_SAMPLES)
    )
    loaded, began = 0, time.perf_counter()
    for microbatch in _microbatches(recipe, size):
        loaded += microbatch.size
        if (spent := time.perf_counter() - began) >= seconds:
            return spent / loaded
    raise AssertionError("there is always another microbatch")


def _microbatches(recipe: Recipe, size: int) -> Iterator[Microbatch]:
    """Yield microbatches without end."""
    in_step = -(-(recipe.global_batch or size) // size)
    spans = (
        Span(
            step=number // in_step,
            index=number % in_step,
            start=number * size,
            stop=(number + 1) * size,
        )
        for number in count()
    )
    if isinstance(recipe.data, Stream):
        stream = StreamLoader(
            recipe.data, collate=recipe.collate, seed=recipe.seed, device=torch.device("cpu")
        )
        return stream.fetch(spans, microbatches=in_step, positions={})
    loader = Loader(
        recipe.data,
        collate=recipe.collate,
        seed=recipe.seed,
        ahead=size,
        device=torch.device("cpu"),
    )
    return loader.fetch(spans)
