"""Settings that a recipe or a plan leaves to the run (`auto`): kept where it goes on, else as an earlier run measured, else measured.

What is learned depends on the precision, and on the microbatch (dropout masks are its own): once chosen, both are part of the run, saved
with it, and the same under every plan that it goes on under.
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
from lockstep.autotune.cache import Measured
from lockstep.autotune.choices import (
    PREFETCH,
    REFERENCE,
    WORTH,
    doubling,
    in_turn,
    loader_workers,
    preferred,
    prefetch_depth,
    step_seconds,
)
from lockstep.autotune.trial import Trial
from lockstep.base.errors import PlanError, RecipeError
from lockstep.base.version import __version__
from lockstep.data.structure import structure
from lockstep.hooks.checkpointer import saved_recipe
from lockstep.launch.environment import threads_per_process
from lockstep.logging.run_directory import device_name
from lockstep.model.sync_batchnorm import SyncBatchNormExchange, training_batchnorms
from lockstep.opening import Opened
from lockstep.plan import MEASURED
from lockstep.recipe import Recipe
from lockstep.training import precision as precisions
from lockstep.training.context import Context
from lockstep.training.prepare import ModelOptions, build_model
from lockstep.training.set_up import use_threads

OF_THE_RECIPE = ("precision", "microbatch")
TIMED = ("threads", "precision", "microbatch")
"""In this order, each with what was chosen before."""
CUTTING = ("shard", "tensor", "pipeline")


def autotune(recipe: Recipe, opened: Opened) -> tuple[Recipe, Context]:
    """The recipe and the context with a value for each `auto`. Every rank calls it, before the run's model is built.

    Measures with a model that is built for it and then dropped. Raises `RecipeError` and `PlanError` if a setting cannot be measured.
    """
    context = opened.context
    auto = [name for name in OF_THE_RECIPE if getattr(recipe, name) == "auto"]
    auto += [name for name in MEASURED if getattr(context.plan, name) == "auto"]
    saved = {} if context.overrides.bare else saved_recipe(opened.request.checkpoints(context), context.world)
    saved = {name: value for name, value in saved.items() if name not in opened.request.allow_change}
    kept = {name: saved[name] for name in auto if name in OF_THE_RECIPE and name in saved}
    recipe = replace(recipe, **kept)
    choosing = _Choosing(recipe, context, [name for name in auto if name not in kept])
    measured, source = choosing.choose()
    chosen = {**kept, **measured.chosen}
    sources = {name: "checkpoint" if name in kept else "rule" if name in choosing.ruled else source for name in auto}
    recipe = replace(recipe, **{name: value for name, value in chosen.items() if name in OF_THE_RECIPE})
    plan = replace(context.plan, **{name: value for name, value in chosen.items() if name in MEASURED})
    if isinstance(plan.threads, int):
        use_threads(plan.threads)
    facts: dict[str, Any] = {
        "settings": {name: {"value": chosen[name], "source": sources[name]} for name in auto},
        "seconds": measured.figures,
        "took_seconds": round(measured.seconds, 3),
    }
    context.recorder.settle(recipe.describe(), plan, context.device, facts)
    context.recorder.event("settings-chosen", 0, **facts)
    context.recorder.message(f"chosen: {_said(chosen, sources, measured.seconds)}")
    precision = chosen.get("precision", context.precision)
    return recipe, replace(context, plan=plan, precision=precision, recipe=recipe.describe())


def _said(chosen: Mapping[str, Any], sources: Mapping[str, str], seconds: float) -> str:
    """In words, those from one source together."""
    words = {
        "checkpoint": "as the run had it",
        "rule": "by rule",
        "cache": "as measured before",
        "measurement": f"measured in {seconds:.1f} s",
    }
    parts = {source: [f"{name} {chosen[name]}" for name in sources if sources[name] == source] for source in words}
    return "; ".join(f"{', '.join(said)} ({words[source]})" for source, said in parts.items() if said)


@dataclass
class _Choosing:
    recipe: Recipe
    """With `auto` for what is still to be chosen."""
    context: Context
    names: list[str]
    """What is to be chosen."""
    candidates: dict[str, list[Any]] = field(default_factory=dict)
    """Of those that are chosen from a list, in the order of preference."""
    ruled: dict[str, Any] = field(default_factory=dict)
    """Those for which there is one value only."""

    @cached_property
    def model(self) -> nn.Module:
        """A model to measure with, in training mode, as the plan wants it. Built at the first access, which every rank must make."""
        options = ModelOptions(blocks=self.recipe.blocks, tensor=self.recipe.tensor, stages=self.recipe.stages)
        made = build_model(self.context, self.recipe.model, options, number=0, exchange=SyncBatchNormExchange(), weights=None)
        if made.parallel.streams is not None:
            made.parallel.streams.close()
        model: nn.Module = made.built.module
        return model

    def choose(self) -> tuple[Measured, str]:
        """And where those are from that are not `ruled`: `cache` or `measurement`."""
        if self.context.overrides.bare:
            bare = {"precision": "fp32", "microbatch": None, "threads": torch.get_num_threads(), "workers": 0, "prefetch": PREFETCH}
            self.ruled = {name: bare[name] for name in self.names}
            return Measured(self.ruled), "rule"
        self._check()
        by_name = {"precision": self._precisions, "microbatch": self._microbatches, "threads": self._threads}
        self.candidates = {name: by_name[name]() for name in self.names if name in by_name}
        self.ruled = {name: values[0] for name, values in self.candidates.items() if len(values) == 1}
        if self.context.plan.workers == 0 and "prefetch" in self.names:
            self.ruled["prefetch"] = PREFETCH
        if len(self.ruled) == len(self.names):
            return Measured(self.ruled), "rule"
        self._check_whole()
        found, path = self._cached()
        if found is not None:
            return found, "cache"
        measured = self._measured()
        if path is not None and self.context.world.rank == 0:
            try:
                cached.write(path, measured)
            except OSError as error:
                self.context.recorder.event("cache-not-written", 0, path=str(path), reason=str(error))
        return measured, "measurement"

    def _check(self) -> None:
        """Raises `RecipeError` where the microbatch cannot be left to measurement."""
        if "microbatch" not in self.names:
            return
        example = f"give a microbatch, for example microbatch={max(1, self.recipe.global_batch // 8)}"
        if self.context.plan.numerics == "bitwise":
            raise RecipeError(
                f"numerics=bitwise with microbatch='auto'; other machines and numbers of processes may measure another one; {example}"
            )
        if layers := training_batchnorms([self.model]):
            raise RecipeError(
                f"microbatch='auto' with BatchNorm ({layers[0][0]!r}); it takes its statistics over one microbatch, whose size so changes "
                f"what is learned, not only the speed; {example}"
            )

    def _check_whole(self) -> None:
        """Raises `PlanError` where no process has the whole model."""
        plan = self.context.plan
        for axis in CUTTING:
            if (size := getattr(plan, axis)) != 1:
                name = self.names[0]
                raise PlanError(
                    f"{name}=auto with {axis}={size}; it is measured where each process has the whole model (replicate); give {name} "
                    "a value, such as the one that a run under replicate chose (its run.json says which)"
                )

    def _precisions(self) -> list[Any]:
        return precisions.choices(self.context.device)

    def _microbatches(self) -> list[Any]:
        """Up to one a rank."""
        recipe = self.recipe
        batch = recipe.global_batch if recipe.epochs is None else min(recipe.global_batch, len(recipe.data))
        return doubling(-(-batch // self.context.mesh.data.size))

    def _threads(self) -> list[Any]:
        """On a GPU, and in bitwise numerics, as they are."""
        if self.context.device.type != "cpu" or self.context.plan.numerics == "bitwise":
            return [torch.get_num_threads()]
        return doubling(threads_per_process(self.context.world.local_size))

    def _cached(self) -> tuple[Measured | None, Any]:
        """What an earlier run measured, the same on every rank, and, on rank 0, the file for it."""
        path, found, problem = None, None, None
        _ = self.model  # building it has collectives, and only rank 0 goes on to read it here
        if self.context.world.rank == 0:
            try:
                path = cached.folder(os.environ) / cached.name_of(self._facts())
                measured = cached.read(path, self._fits)
                found = None if measured is None else [measured.chosen, measured.figures, measured.seconds]
            except (OSError, ValueError, RuntimeError) as error:
                problem = str(error)
        found, problem = self.context.world.value_of(0, [found, problem])
        if problem is not None:
            self.context.recorder.event("cache-ignored", 0, path=str(path), reason=problem)
        return None if found is None else Measured(*found), path

    def _fits(self, chosen: Mapping[str, Any]) -> bool:
        """Whether these are values for what is to be chosen now."""
        return chosen.keys() == set(self.names) and all(
            value in self.candidates[name] if name in self.candidates else type(value) is int and value >= 0
            for name, value in chosen.items()
        )

    def _facts(self) -> dict[str, Any]:
        """All that the figures depend on, as JSON."""
        recipe, context, model = self.recipe, self.context, self.model
        with self._trial(1) as trial:
            item = next(trial.fetched(self._reference()), None)
        described = recipe.describe()
        return {
            "candidates": {name: self.candidates.get(name) for name in self.names},
            "recipe": {name: described[name] for name in ("data", "loss", "inputs", "collate", "global_batch", "microbatch", "precision")},
            "modules": {name: type(module).__qualname__ for name, module in model.named_modules()},
            "tensors": [
                [name, str(each.dtype), list(each.shape), each.requires_grad]
                for named in (model.named_parameters(), model.named_buffers())
                for name, each in named
            ],
            "batch": None if item is None else [str(structure(item.batch)), _shapes(item.batch)],
            "plan": str(context.plan),
            "world": [context.world.size, context.world.local_size, threads_per_process(1), torch.get_num_threads()],
            "machine": [socket.gethostname(), device_name(context.device), torch.__version__, __version__],
        }

    def _reference(self) -> int | None:
        """The microbatch that the rest is timed with."""
        given = self.recipe.microbatch
        return min(REFERENCE, self.candidates["microbatch"][-1]) if given == "auto" else given

    def _trial(self, timings: int) -> Trial:
        given = self.recipe.microbatch
        recipe = replace(self.recipe, microbatch=None) if given == "auto" else self.recipe
        return Trial(recipe, self.model, self.context, timings)

    def _measured(self) -> Measured:
        """Every rank calls it: they measure at once, as they will train."""
        began = time.perf_counter()
        several = [name for name in TIMED if name in self.candidates and name not in self.ruled]
        now: dict[str, Any] = {"threads": torch.get_num_threads(), "precision": self.recipe.precision, "microbatch": self._reference()}
        now |= self.ruled
        figures: dict[str, Any] = {}
        with self._trial(1 + sum(len(self.candidates[name]) for name in several)) as trial:
            for name in several:
                figures[name] = self._timed(trial, name, now)
                seconds = {each: value for each, value in figures[name].items() if value is not None}
                now[name] = preferred(self.candidates[name], seconds, WORTH[name])
            if "workers" in self.names or "prefetch" in self.names:
                mean, most = trial.fetch_seconds(now["microbatch"])
                computed = trial.compute_seconds(**now)
                figures |= {"fetch": {"mean": mean, "most": most}, "compute": computed}
                now |= self._loading(mean, most, computed)
        return Measured({name: now[name] for name in self.names}, figures, time.perf_counter() - began)

    def _timed(self, trial: Trial, name: str, now: Mapping[str, Any]) -> dict[Any, float | None]:
        """Seconds by the value of setting `name`, the others being as they are `now`, as far as there is time. None: there was no room.

        Of a microbatch, and for each size of microbatches, of all of a step's.
        """
        sizes = name == "microbatch"
        found: dict[Any, float | None] = {}
        for each in in_turn(self.candidates[name], now[name]) if sizes else self.candidates[name]:
            if found and trial.is_over():
                break
            if sizes and any(seconds is None and smaller < each for smaller, seconds in found.items()):
                continue
            case = {**now, name: each}
            try:
                found[each] = seconds = trial.compute_seconds(**case)
            except Exception as error:
                if self.recipe.microbatch == "auto":
                    error.add_note(f"raised in a timing of {case['microbatch']} samples at once, for microbatch='auto'; give a number")
                raise
            if sizes and seconds is not None:
                count = trial.length(each).most_microbatches
                found[each] = step_seconds(seconds, microbatches=count, ranks=self.context.mesh.data.size)
        return found

    def _loading(self, mean: float, most: float, computed: float | None) -> dict[str, int]:
        """How the data are fetched, where a microbatch is `computed` in so many seconds; None: that is not known."""
        plan, found = self.context.plan, {}
        workers = plan.workers
        if workers == "auto":
            cores = threads_per_process(self.context.world.local_size)
            workers = found["workers"] = 0 if computed is None else loader_workers(mean, computed, cores)
        if "prefetch" in self.names:
            found["prefetch"] = PREFETCH if computed is None else prefetch_depth(most, computed, workers)
        return found


def _shapes(batch: Any) -> Any:
    """Of its tensors, as they lie in it."""
    if isinstance(batch, torch.Tensor):
        return list(batch.shape)
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return [_shapes(part) for part in parts]
