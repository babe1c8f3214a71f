"""Replaces `ls.train` in the user's script under `lockstep plan`. Each plan is predicted in a
forked process."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from lockstep.base.container import usable_cpus
from lockstep.base.errors import RecipeError, UserError
from lockstep.base.processes import die_with_parent
from lockstep.base.units import size
from lockstep.data.loader import Loader, Microbatch, Span, StreamLoader
from lockstep.hooks.hang.snapshot import error_with_line
from lockstep.plan import Plan
from lockstep.planner.machines.costs import Machine
from lockstep.planner.machines.hardware import parse_target
from lockstep.planner.predict import is_splittable, predict
from lockstep.planner.prediction import OUTCOMES, Ended, Outcome, PlanRequest, Prediction, text
from lockstep.planner.search import Space, search
from lockstep.planner.tracing.stand_ins import ValueNeeded
from lockstep.planner.tracing.tracer import model_size
from lockstep.recipe.data import Stream
from lockstep.recipe.recipe import Recipe

MOST_COPIES = 8
"""Factor by which the host's memory must exceed the size of a model that fake tensors cannot
trace."""
LOADER = "loader"
MEASURED_SECONDS = 1.0
"""Time for which the data loader is measured."""
PATIENCE_SECONDS = 60.0
"""Timeout of the data loader's first microbatch."""
MOST_SAMPLES = 32


def train(recipe: Recipe) -> None:
    """Replaces `ls.train`: predict the requested plans for this recipe, and end the process."""
    request = PlanRequest.read(os.environ)
    assert request is not None, "the command has asked"
    # The command removes the folder, no matter how this process and its forks end.
    tempfile.tempdir = request.folder
    evaluation = _Evaluation(recipe, request)
    ended = Ended()
    if request.plans:
        evaluation.evaluate([Plan.parse(plan) for plan in request.plans])
    else:
        ended = evaluation.search()
    ended.write(Path(request.folder))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the script must not continue


def _fork(path: Path, compute: Callable[[], float | Outcome]) -> int:
    """Fork a process that writes the result of `compute` to `path` as JSON. If `compute` raises,
    the process writes the error to `path`."""
    own = os.getpid()
    if process := os.fork():
        return process
    die_with_parent(own)
    answer: Any
    try:
        try:
            computed = compute()
            answer = computed.as_json() if isinstance(computed, Outcome) else computed
        except BaseException as error:
            answer = error_with_line(error)
        path.write_text(json.dumps(answer), encoding="utf-8")
    finally:
        os._exit(0)


class _Evaluation:
    def __init__(self, recipe: Recipe, request: PlanRequest) -> None:
        self._recipe, self._request, self._folder = recipe, request, Path(request.folder)
        self._machine = Machine.of(parse_target(request.target), request.memory_bytes)
        self._known: dict[str, Outcome] = {}
        seconds = MEASURED_SECONDS if request.is_here else 0.0
        loader = LoaderTime.measured(recipe, self._folder, seconds)
        self._loader = loader if request.is_here else None

    def search(self) -> Ended:
        """Search plans on all devices, or on fewer if a step has too few microbatches for all."""
        space = self._space()
        if self._searched(space) or space.usable_devices == space.devices:
            return Ended()
        cluster = self._machine.cluster.of(space.usable_devices)
        self._machine = Machine.of(cluster, self._request.memory_bytes)
        fewer = replace(space, devices=cluster.count, devices_per_node=cluster.devices_per_node)
        if not self._searched(fewer):
            return Ended()
        return Ended(devices=cluster.count, why=space.why_fewer())

    def _searched(self, space: Space) -> bool:
        outcomes = search(space, self.evaluate)
        for each in outcomes:
            if each.prediction is None and each.plan not in self._known:
                self._report(each)
        return not all(each.is_refused for each in outcomes)

    def _space(self) -> Space:
        recipe, cluster = self._recipe, self._machine.cluster
        model = model_size(recipe)
        return Space(
            devices=cluster.count,
            devices_per_node=cluster.devices_per_node,
            samples=recipe.global_batch or 1,
            microbatch=recipe.microbatch if isinstance(recipe.microbatch, int) else None,
            is_splittable=is_splittable(recipe, model),
            state_bytes=2 * model.parameter_bytes,
            stages=model.parts,
            has_head=model.has_head,
            chunks=None if recipe.sequence is None else recipe.sequence.chunks,
            experts=model.experts,
            expert_bytes=2 * model.expert_bytes,
            capacity_bytes=self._machine.capacity_bytes,
        )

    def evaluate(self, plans: Sequence[Plan]) -> list[Outcome]:
        waiting, running = list(plans), dict[int, tuple[str, Path]]()
        outcomes: dict[str, Outcome] = {}
        while waiting or running:
            while waiting and len(running) < self._request.slots:
                plan = waiting.pop(0)
                number = len(self._known) + len(outcomes) + len(running)
                path = self._folder / f"plan-{number}-{os.getpid()}.json"
                process = _fork(path, partial(self._predicted, plan))
                running[process] = text(plan), path
            process, status = os.wait()
            if process in running:
                name, path = running.pop(process)
                outcomes[name] = _outcome(name, path, status)
                self._report(outcomes[name])
        self._known |= outcomes
        return [outcomes[text(plan)] for plan in plans]

    def _predicted(self, plan: Plan) -> Outcome:
        recipe, machine = self._recipe, self._machine
        try:
            try:
                prediction = predict(recipe, plan, machine)
            except ValueNeeded as error:
                if MOST_COPIES * model_size(recipe).parameter_bytes > available_bytes():
                    raise
                note = f"computed with values on this CPU, because {error}"
                prediction = replace(predict(recipe, plan, machine, is_fake=False), note=note)
        except UserError as error:
            reason = f"{type(error).__name__}: {error}"
            return Outcome(plan=text(plan), reason=reason, is_refused=True)
        why_not = None if prediction.fits else _why_not(prediction)
        if self._loader is not None:
            processes = machine.cluster.count
            prediction = self._loader.added_to(
                prediction, plan, processes=processes, cores=usable_cpus()
            )
        return Outcome(plan=text(plan), prediction=prediction, reason=why_not)

    def _report(self, outcome: Outcome) -> None:
        with (self._folder / OUTCOMES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(outcome.as_json()) + "\n")


def _outcome(plan: str, path: Path, status: int) -> Outcome:
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
    except (OSError, ValueError):
        ended = os.waitstatus_to_exitcode(status)
        answer = f"the process that traced it ended with status {ended}"
    else:
        if not isinstance(answer, str):
            return Outcome.from_json(answer)
        answer = f"it could not be traced: {answer}"
    return Outcome(plan=plan, reason=answer, is_refused=True)


def available_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _why_not(prediction: Prediction) -> str:
    peak, capacity = prediction.peak, prediction.capacity_bytes or 0
    return (
        f"needs {size(prediction.needed_bytes)} of {size(capacity)}, on rank {peak.rank} in"
        f" {peak.moment}"
    )


@dataclass(frozen=True, slots=True)
class LoaderTime:
    seconds: float
    note: str

    @classmethod
    def measured(cls, recipe: Recipe, folder: Path, seconds: float) -> LoaderTime:
        path = folder / "loader.json"
        process = _fork(path, lambda: _seconds_of_a_sample(recipe, seconds))
        if not _ends(process, PATIENCE_SECONDS):
            problem = f"took longer than {PATIENCE_SECONDS:.0f} s"
        elif not path.exists():
            problem = "killed its process"
        elif isinstance(problem := json.loads(path.read_text(encoding="utf-8")), str):
            problem = f"failed with {problem}"
        else:
            return cls(problem, f"a process loads {1 / problem:,.4g} samples/s here")
        raise RecipeError(
            f"loading a microbatch of Recipe.data {problem}; a plan is made from a microbatch;"
            " correct the dataset, or `collate`"
        )

    def added_to(
        self, prediction: Prediction, plan: Plan, *, processes: int, cores: float
    ) -> Prediction:
        """Add the time of data loading to a prediction. The loader's workers load in parallel with
        the computation."""
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
        twice, skewed = prediction.seconds_with_twice.items(), prediction.skewed
        if skewed is not None:
            skewed = replace(skewed, seconds=max(skewed.seconds + added, loading))
        return replace(
            noted,
            seconds=max(prediction.seconds + added, loading),
            by_limit=dict(sorted(by_limit.items(), key=lambda each: -each[1])),
            seconds_with_twice={name: max(each + added, loading) for name, each in twice},
            skewed=skewed,
        )


def _ends(process: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return False
        time.sleep(0.01)
    return True


def _seconds_of_a_sample(recipe: Recipe, seconds: float) -> float:
    size = recipe.microbatch
    if not isinstance(size, int):
        size = min(recipe.global_batch or 1, MOST_SAMPLES)
    loaded, began = 0, time.perf_counter()
    for microbatch in _microbatches(recipe, size):
        loaded += microbatch.size
        if (spent := time.perf_counter() - began) >= seconds:
            return spent / loaded
    raise AssertionError("there is always another microbatch")


def _microbatches(recipe: Recipe, size: int) -> Iterator[Microbatch]:
    in_step = -(-(recipe.global_batch or size) // size)
    spans = (
        Span(step=at // in_step, index=at % in_step, start=at * size, stop=(at + 1) * size)
        for at in count()
    )
    device = torch.device("cpu")
    if isinstance(recipe.data, Stream):
        stream = StreamLoader(recipe.data, collate=recipe.collate, seed=recipe.seed, device=device)
        return stream.fetch(spans, microbatches=in_step, positions={})
    loader = Loader(
        recipe.data, collate=recipe.collate, seed=recipe.seed, ahead=size, device=device
    )
    return loader.fetch(spans)
