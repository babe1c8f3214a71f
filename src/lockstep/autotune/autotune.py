"""Chooses a value for each setting that is `auto`.

The value comes from the checkpoint, from the measurements of an earlier run, or from timing.
Precision and microbatch change the training, so a checkpoint contains both and a resumed run keeps
them.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lockstep.autotune import cache as cached
from lockstep.autotune.cache import Measurement
from lockstep.autotune.candidates import (
    DEFAULT_PREFETCH,
    MIN_SPEEDUP,
    REFERENCE_MICROBATCH,
    doubling_sizes,
    loader_workers,
    preferred_candidate,
    prefetch_depth,
    step_seconds,
    timing_order,
)
from lockstep.autotune.timing import MicrobatchTiming
from lockstep.base.errors import PlanError, RecipeError
from lockstep.base.version import __version__
from lockstep.data.loader import structure
from lockstep.hooks.checkpointing import saved_recipe
from lockstep.launch.environment import threads_per_process
from lockstep.logging.run_directory import device_name
from lockstep.model.sync_batchnorm import SyncBatchNormExchange, training_batchnorms
from lockstep.opening import Opened
from lockstep.plan import MEASURED
from lockstep.recipe.recipe import Recipe
from lockstep.training import precision as precisions
from lockstep.training.context import Context
from lockstep.training.loop import order_and_samples
from lockstep.training.prepare import ModelOptions, build_model
from lockstep.training.set_up import use_threads

RECIPE_SETTINGS = ("precision", "microbatch")
TIMED_SETTINGS = ("threads", "precision", "microbatch")
"""Settings in the order in which they are timed. A setting is timed with the values chosen for the
earlier settings."""


def autotune(recipe: Recipe, opened: Opened) -> tuple[Recipe, Context]:
    """Replace each `auto` by a value. All ranks must call this function before the model is
    built."""
    context = opened.context
    auto = [name for name in RECIPE_SETTINGS if getattr(recipe, name) == "auto"]
    auto += [name for name in MEASURED if getattr(context.plan, name) == "auto"]
    saved = (
        {}
        if context.overrides.bare and context.overrides.begin_at is None
        else saved_recipe(opened.request.checkpoints(context), context.world)
    )
    saved = {
        name: value for name, value in saved.items() if name not in opened.request.allow_change
    }
    kept = {name: saved[name] for name in auto if name in RECIPE_SETTINGS and name in saved}
    recipe = replace(recipe, **kept)
    autotuner = _Autotuner(recipe, context, [name for name in auto if name not in kept])
    measured, source = autotuner.run()
    chosen = {**kept, **measured.chosen}
    sources = {
        name: "checkpoint" if name in kept else "rule" if name in autotuner.fixed else source
        for name in auto
    }
    recipe = replace(
        recipe, **{name: value for name, value in chosen.items() if name in RECIPE_SETTINGS}
    )
    plan = replace(
        context.plan, **{name: value for name, value in chosen.items() if name in MEASURED}
    )
    if isinstance(plan.threads, int):
        use_threads(plan.threads)
    facts: dict[str, Any] = {
        "settings": {name: {"value": chosen[name], "source": sources[name]} for name in auto},
        "seconds": measured.figures,
        "took_seconds": round(measured.seconds, 3),
    }
    context.recorder.update_chosen(recipe.describe(), plan, context.device, facts)
    context.recorder.event("settings-chosen", 0, **facts)
    context.recorder.message(f"chosen: {_summary(chosen, sources, measured.seconds)}")
    precision = chosen.get("precision", context.precision)
    return recipe, replace(context, plan=plan, precision=precision, recipe=recipe.describe())


def _summary(chosen: Mapping[str, Any], sources: Mapping[str, str], seconds: float) -> str:
    words = {
        "checkpoint": "from the checkpoint",
        "rule": "by rule",
        "cache": "as measured before",
        "measurement": f"measured in {seconds:.1f} s",
    }
    parts = {
        source: [f"{name} {chosen[name]}" for name in sources if sources[name] == source]
        for source in words
    }
    return "; ".join(
        f"{', '.join(values)} ({words[source]})" for source, values in parts.items() if values
    )


@dataclass
class _Autotuner:
    recipe: Recipe
    context: Context
    names: list[str]
    candidates: dict[str, list[Any]] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def model(self) -> nn.Module:
        """A temporary model, parallelized for the plan. All ranks must access `model` together."""
        options = ModelOptions(
            blocks=self.recipe.blocks,
            tensor=self.recipe.tensor,
            stages=self.recipe.stages,
            sequence=self.recipe.sequence,
            head=self.recipe.head,
            experts=self.recipe.experts,
        )
        made = build_model(
            self.context,
            self.recipe.model,
            options,
            number=0,
            exchange=SyncBatchNormExchange(),
            weights=None,
        )
        if made.parallel.streams is not None:
            made.parallel.streams.close()
        model: nn.Module = made.built.module
        return model

    def run(self) -> tuple[Measurement, str]:
        if self.context.overrides.bare:
            bare = {
                "precision": "fp32",
                "microbatch": None,
                "threads": torch.get_num_threads(),
                "workers": 0,
                "prefetch": DEFAULT_PREFETCH,
            }
            self.fixed = {name: bare[name] for name in self.names}
            return Measurement(self.fixed), "rule"
        self._check()
        by_name = {
            "precision": lambda: precisions.candidates(self.context.device),
            "microbatch": self._microbatches,
            "threads": self._threads,
        }
        self.candidates = {name: by_name[name]() for name in self.names if name in by_name}
        self.fixed = {
            name: values[0] for name, values in self.candidates.items() if len(values) == 1
        }
        if self.context.plan.workers == 0 and "prefetch" in self.names:
            self.fixed["prefetch"] = DEFAULT_PREFETCH
        if len(self.fixed) == len(self.names):
            return Measurement(self.fixed), "rule"
        self._check_no_model_parallelism()
        found, path = self._cached()
        if found is not None:
            return found, "cache"
        measured = self._measured()
        if path is not None and self.context.world.rank == 0:
            try:
                cached.write(path, measured)
            except OSError as error:
                self.context.recorder.event(
                    "cache-not-written", 0, path=str(path), reason=str(error)
                )
        return measured, "measurement"

    def _check(self) -> None:
        if "microbatch" not in self.names:
            return
        assert self.recipe.global_batch is not None, "auto is refused with a batch_sampler"
        example = (
            f"give a microbatch, for example microbatch={max(1, self.recipe.global_batch // 8)}"
        )
        if self.context.plan.numerics == "bitwise":
            raise RecipeError(
                "numerics=bitwise with microbatch='auto'; another machine or number of processes"
                f" may choose another microbatch; {example}"
            )
        if layers := training_batchnorms([self.model]):
            raise RecipeError(
                f"microbatch='auto' with BatchNorm ({layers[0][0]!r}); it takes its statistics over"
                " one microbatch, so the size changes what is learned, not only the speed;"
                f" {example}"
            )

    def _check_no_model_parallelism(self) -> None:
        if divided := self.context.plan.state_divided:
            raise PlanError(
                f"{self.names[0]}=auto with {', '.join(divided)}; it can be measured only if each"
                f" process holds the whole model (replicate); give {self.names[0]} a value, for"
                " example the one that a run under replicate chose (see its run.json)"
            )

    def _microbatches(self) -> list[Any]:
        recipe = self.recipe
        assert recipe.global_batch is not None, "auto is refused with a batch_sampler"
        batch = (
            recipe.global_batch
            if recipe.epochs is None
            else min(recipe.global_batch, order_and_samples(recipe)[1])
        )
        return doubling_sizes(-(-batch // self.context.mesh.data.size))

    def _threads(self) -> list[Any]:
        """Return only the current number of threads on a GPU or with numerics=bitwise."""
        if self.context.device.type != "cpu" or self.context.plan.numerics == "bitwise":
            return [torch.get_num_threads()]
        return doubling_sizes(threads_per_process(self.context.world.local_size))

    def _cached(self) -> tuple[Measurement | None, Any]:
        """Return the measurement of an earlier run, and the path of its file on rank 0."""
        path, fields, problem = None, None, None
        # every rank builds the model, because this has collectives; below, only rank 0 uses it
        _ = self.model
        if self.context.world.rank == 0:
            try:
                path = cached.folder(os.environ) / cached.file_name(self._cache_key())
                measured = cached.read(path, self._fits)
                fields = (
                    None
                    if measured is None
                    else [measured.chosen, measured.figures, measured.seconds]
                )
            except (OSError, ValueError, RuntimeError) as error:
                problem = str(error)
        fields, problem = self.context.world.value_of(0, [fields, problem])
        if problem is not None:
            self.context.recorder.event("cache-ignored", 0, path=str(path), reason=problem)
        return None if fields is None else Measurement(*fields), path

    def _fits(self, chosen: Mapping[str, Any]) -> bool:
        return chosen.keys() == set(self.names) and all(
            (
                value in self.candidates[name]
                if name in self.candidates
                else type(value) is int and value >= 0
            )
            for name, value in chosen.items()
        )

    def _cache_key(self) -> dict[str, Any]:
        recipe, context, model = self.recipe, self.context, self.model
        with self._timing(1) as timing:
            item = next(timing.fetched(self._reference_microbatch()), None)
        described = recipe.describe()
        return {
            "candidates": {name: self.candidates.get(name) for name in self.names},
            "recipe": {
                name: described[name]
                for name in (
                    "data",
                    "loss",
                    "inputs",
                    "collate",
                    "global_batch",
                    "microbatch",
                    "precision",
                )
            },
            "modules": {name: type(module).__qualname__ for name, module in model.named_modules()},
            "tensors": [
                [name, str(each.dtype), list(each.shape), each.requires_grad]
                for named in (model.named_parameters(), model.named_buffers())
                for name, each in named
            ],
            "batch": None if item is None else [str(structure(item.batch)), _shapes(item.batch)],
            "plan": str(context.plan),
            "world": [
                context.world.size,
                context.world.local_size,
                threads_per_process(1),
                torch.get_num_threads(),
            ],
            "machine": [
                socket.gethostname(),
                device_name(context.device),
                torch.__version__,
                __version__,
            ],
        }

    def _reference_microbatch(self) -> int | None:
        given = self.recipe.microbatch
        return (
            min(REFERENCE_MICROBATCH, self.candidates["microbatch"][-1])
            if given == "auto"
            else given
        )

    def _timing(self, timings: int) -> MicrobatchTiming:
        given = self.recipe.microbatch
        recipe = replace(self.recipe, microbatch=None) if given == "auto" else self.recipe
        return MicrobatchTiming(recipe, self.model, self.context, timings)

    def _measured(self) -> Measurement:
        """Time the candidates on all ranks at the same time."""
        began = time.perf_counter()
        several = [
            name for name in TIMED_SETTINGS if name in self.candidates and name not in self.fixed
        ]
        now: dict[str, Any] = {
            "threads": torch.get_num_threads(),
            "precision": self.recipe.precision,
            "microbatch": self._reference_microbatch(),
        }
        now |= self.fixed
        figures: dict[str, Any] = {}
        with self._timing(1 + sum(len(self.candidates[name]) for name in several)) as timing:
            for name in several:
                figures[name] = self._timed(timing, name, now)
                seconds = {
                    each: value for each, value in figures[name].items() if value is not None
                }
                now[name] = preferred_candidate(self.candidates[name], seconds, MIN_SPEEDUP[name])
            if "workers" in self.names or "prefetch" in self.names:
                mean, most = timing.fetch_seconds(now["microbatch"])
                computed = timing.compute_seconds(**now)
                figures |= {"fetch": {"mean": mean, "most": most}, "compute": computed}
                now |= self._choose_loader(mean, most, computed)
        return Measurement(
            {name: now[name] for name in self.names}, figures, time.perf_counter() - began
        )

    def _timed(
        self, timing: MicrobatchTiming, name: str, now: Mapping[str, Any]
    ) -> dict[Any, float | None]:
        sizes = name == "microbatch"
        timings: dict[Any, float | None] = {}
        for each in (
            timing_order(self.candidates[name], now[name]) if sizes else self.candidates[name]
        ):
            if timings and timing.is_time_up():
                break
            if sizes and any(
                seconds is None and smaller < each for smaller, seconds in timings.items()
            ):
                continue
            case = {**now, name: each}
            try:
                timings[each] = seconds = timing.compute_seconds(**case)
            except Exception as error:
                if self.recipe.microbatch == "auto":
                    error.add_note(
                        f"raised in a timing of {case['microbatch']} samples at once, for"
                        " microbatch='auto'; give a number"
                    )
                raise
            if sizes and seconds is not None:
                count = timing.batching(each).max_microbatches
                timings[each] = step_seconds(
                    seconds, microbatches=count, ranks=self.context.mesh.data.size
                )
        return timings

    def _choose_loader(self, mean: float, most: float, computed: float | None) -> dict[str, int]:
        plan, chosen = self.context.plan, {}
        workers = plan.workers
        if workers == "auto":
            cores = threads_per_process(self.context.world.local_size)
            workers = chosen["workers"] = (
                0 if computed is None else loader_workers(mean, computed, cores)
            )
        if "prefetch" in self.names:
            chosen["prefetch"] = (
                DEFAULT_PREFETCH if computed is None else prefetch_depth(most, computed, workers)
            )
        return chosen


def _shapes(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return list(batch.shape)
    parts = (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, list | tuple)
        else ()
    )
    return [_shapes(part) for part in parts]
