"""Runs in the script's process, in the place of `ls.train`: predicts plans, each in a fork, and ends the process."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.base.errors import UserError
from lockstep.plan import Plan
from lockstep.planner.machines.target import machine_at
from lockstep.planner.predict import Machine, predict
from lockstep.planner.prediction import Prediction
from lockstep.planner.request import ENDED, OUTCOMES, PlanRequest
from lockstep.planner.search import Outcome, Space, search, text
from lockstep.planner.tracing.tracer import model_size
from lockstep.planner.tracing.values import ValueNeeded
from lockstep.recipe.recipe import Recipe

MOST_COPIES = 8
"""A model is computed with values if so many copies of it fit into memory."""


def train(recipe: Recipe) -> None:
    """Predict the plans of the request for this recipe, and end the process."""
    request = PlanRequest.read(os.environ)
    evaluation = _Evaluation(recipe, request)
    if request.plans:
        evaluation.evaluate([Plan.parse(plan) for plan in request.plans])
    else:
        evaluation.report([each for each in search(evaluation.space(), evaluation.evaluate) if each.prediction is None])
    (Path(request.folder) / ENDED).write_text("{}", encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the script goes no further


class _Evaluation:
    """Predicts plans for one recipe."""

    def __init__(self, recipe: Recipe, request: PlanRequest) -> None:
        self._recipe, self._request = recipe, request
        self._machine = machine_at(request.target, request.memory_bytes)
        self._known: dict[str, Outcome] = {}

    def space(self) -> Space:
        """Return the space in which plans for this recipe are searched for."""
        recipe, cluster = self._recipe, self._machine.cluster
        batch, size = recipe.global_batch or 1, model_size(recipe)
        microbatch = recipe.microbatch if isinstance(recipe.microbatch, int) else 1
        return Space(
            devices=cluster.count,
            devices_per_node=cluster.devices_per_node,
            microbatches=-(-batch // microbatch),
            state_bytes=2 * size.parameter_bytes,
            microbatch=microbatch,
            stages=size.parts,
            capacity_bytes=self._machine.capacity_bytes,
        )

    def evaluate(self, plans: Sequence[Plan]) -> list[Outcome]:
        """Predict the plans, each in a fork of this process, a few at once."""
        waiting, running = list(plans), dict[int, tuple[Plan, Path]]()
        found: dict[str, Outcome] = {}
        while waiting or running:
            while waiting and len(running) < self._request.slots:
                plan = waiting.pop(0)
                path = Path(self._request.folder) / f"plan-{len(self._known) + len(found) + len(running)}-{os.getpid()}.json"
                running[self._fork(plan, path)] = plan, path
            process, status = os.wait()
            if process in running:
                plan, path = running.pop(process)
                found[text(plan)] = outcome = self._read(plan, path, status)
                self._report(outcome)
        self._known |= found
        return [found[text(plan)] for plan in plans]

    def _fork(self, plan: Plan, path: Path) -> int:
        process = os.fork()
        if process:
            return process
        try:
            told = _predicted(self._recipe, plan, self._machine)
        except BaseException as error:
            told = {"reason": _fault(error)}
        try:
            path.write_text(json.dumps(told), encoding="utf-8")
        finally:
            os._exit(0)

    def _read(self, plan: Plan, path: Path, status: int) -> Outcome:
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return Outcome(plan=text(plan), reason=f"the process that traced it ended with status {os.waitstatus_to_exitcode(status)}")
        path.unlink()
        if "prediction" not in told:
            return Outcome(plan=text(plan), reason=told["reason"])
        prediction = replace(Prediction.from_json(told["prediction"]), plan=text(plan))
        return Outcome(plan=text(plan), prediction=prediction, reason=None if prediction.fits else _why_not(prediction))

    def report(self, outcomes: Sequence[Outcome]) -> None:
        """Write the outcomes that nobody has written yet."""
        for outcome in outcomes:
            if outcome.plan not in self._known:
                self._report(outcome)

    def _report(self, outcome: Outcome) -> None:
        told = {"plan": outcome.plan, "reason": outcome.reason, "prediction": outcome.prediction and outcome.prediction.as_json()}
        with (Path(self._request.folder) / OUTCOMES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")


def _fault(error: BaseException) -> str:
    """Return what has failed that no user's mistake explains, and the place."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"it could not be traced: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"


def _predicted(recipe: Recipe, plan: Plan, machine: Machine) -> dict[str, Any]:
    try:
        try:
            return {"prediction": predict(recipe, plan, machine).as_json()}
        except ValueNeeded as error:
            if MOST_COPIES * model_size(recipe).parameter_bytes > available_bytes():
                raise
            predicted = predict(recipe, plan, machine, is_fake=False)
            note = f"computed with values on this CPU, because {error}"
            return {"prediction": replace(predicted, note=note).as_json()}
    except UserError as error:
        return {"reason": f"{type(error).__name__}: {error}"}


def available_bytes() -> int:
    """Return the memory of this machine that is free."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _why_not(prediction: Prediction) -> str:
    peak, capacity = prediction.peak, prediction.capacity_bytes or 0
    return f"needs {prediction.needed_bytes / 1e9:.1f} GB of {capacity / 1e9:.1f} GB, on rank {peak.rank} in {peak.moment}"
