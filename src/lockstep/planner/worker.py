"""Runs in the script's process, in the place of `ls.train`: predicts plans, each in a fork, and
ends the process."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.base.control_group import usable_cpus
from lockstep.base.errors import UserError
from lockstep.base.processes import die_with_parent
from lockstep.base.units import size
from lockstep.hooks.hang.snapshot import error_with_line
from lockstep.plan import Plan
from lockstep.planner.loader import MEASURED_SECONDS, LoaderTime
from lockstep.planner.machines.hardware import parse_target
from lockstep.planner.machines.machine import Machine
from lockstep.planner.predict import is_splittable, predict
from lockstep.planner.prediction import Prediction, text
from lockstep.planner.request import OUTCOMES, Ended, PlanRequest
from lockstep.planner.search import Outcome, Space, search
from lockstep.planner.tracing.tracer import model_size
from lockstep.planner.tracing.values import ValueNeeded
from lockstep.recipe.recipe import Recipe

MOST_COPIES = 8
"""A model is computed with values if so many copies of it fit into memory."""


def train(recipe: Recipe) -> None:
    """Predict the plans of the request for this recipe, and end the process."""
    request = PlanRequest.read(os.environ)
    assert request is not None, "the command has asked"
    # which the command removes, however this process and its forks end
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
    os._exit(0)  # the script goes no further


class _Evaluation:
    """Predicts plans for one recipe."""

    def __init__(self, recipe: Recipe, request: PlanRequest) -> None:
        self._recipe, self._request = recipe, request
        self._machine = Machine.of(parse_target(request.target), request.memory_bytes)
        self._known: dict[str, Outcome] = {}
        loader = LoaderTime.measured(
            recipe, Path(request.folder), MEASURED_SECONDS if request.is_here else 0.0
        )
        self._loader = loader if request.is_here else None

    def search(self) -> Ended:
        """Search all plans; those for fewer devices if a step has too few microbatches and nothing
        else is legal."""
        space = self.space()
        if self._searched(space) or space.usable_devices == space.devices:
            return Ended()
        cluster = self._machine.cluster.of(space.usable_devices)
        self._machine = Machine.of(cluster, self._request.memory_bytes)
        fewer = replace(space, devices=cluster.count, devices_per_node=cluster.devices_per_node)
        return (
            Ended(devices=cluster.count, why=space.why_fewer())
            if self._searched(fewer)
            else Ended()
        )

    def _searched(self, space: Space) -> bool:
        """Search, and report what is found. Returns True if a plan can be run, whatever the
        memory."""
        outcomes = search(space, self.evaluate)
        self.report([each for each in outcomes if each.prediction is None])
        return not all(each.is_refused for each in outcomes)

    def space(self) -> Space:
        """Return the space in which plans for this recipe are searched for."""
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
            capacity_bytes=self._machine.capacity_bytes,
        )

    def evaluate(self, plans: Sequence[Plan]) -> list[Outcome]:
        """Predict the plans, each in a fork of this process, a few at once."""
        waiting, running = list(plans), dict[int, tuple[Plan, Path]]()
        found: dict[str, Outcome] = {}
        while waiting or running:
            while waiting and len(running) < self._request.slots:
                plan = waiting.pop(0)
                path = (
                    Path(self._request.folder)
                    / f"plan-{len(self._known) + len(found) + len(running)}-{os.getpid()}.json"
                )
                running[self._fork(plan, path)] = plan, path
            process, status = os.wait()
            if process in running:
                plan, path = running.pop(process)
                found[text(plan)] = outcome = self._read(plan, path, status)
                self._report(outcome)
        self._known |= found
        return [found[text(plan)] for plan in plans]

    def _fork(self, plan: Plan, path: Path) -> int:
        own = os.getpid()
        process = os.fork()
        if process:
            return process
        die_with_parent(own)
        try:
            outcome = self._with_loader(_predicted(self._recipe, plan, self._machine), plan)
        except BaseException as error:
            outcome = Outcome(
                plan=text(plan),
                reason=f"it could not be traced: {error_with_line(error)}",
                is_refused=True,
            )
        try:
            path.write_text(json.dumps(outcome.as_json()), encoding="utf-8")
        finally:
            os._exit(0)

    def _with_loader(self, outcome: Outcome, plan: Plan) -> Outcome:
        if self._loader is None or outcome.prediction is None:
            return outcome
        loaded = self._loader.added_to(
            outcome.prediction, plan, processes=self._machine.cluster.count, cores=usable_cpus()
        )
        return replace(outcome, prediction=loaded)

    def _read(self, plan: Plan, path: Path, status: int) -> Outcome:
        try:
            outcome = Outcome.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            reason = (
                f"the process that traced it ended with status {os.waitstatus_to_exitcode(status)}"
            )
            return Outcome(plan=text(plan), reason=reason, is_refused=True)
        path.unlink()
        return outcome

    def report(self, outcomes: Sequence[Outcome]) -> None:
        """Write the outcomes that nobody has written yet."""
        for outcome in outcomes:
            if outcome.plan not in self._known:
                self._report(outcome)

    def _report(self, outcome: Outcome) -> None:
        with (Path(self._request.folder) / OUTCOMES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(outcome.as_json()) + "\n")


def _predicted(recipe: Recipe, plan: Plan, machine: Machine) -> Outcome:
    try:
        try:
            prediction = predict(recipe, plan, machine)
        except ValueNeeded as error:
            if MOST_COPIES * model_size(recipe).parameter_bytes > available_bytes():
                raise
            note = f"computed with values on this CPU, because {error}"
            prediction = replace(predict(recipe, plan, machine, is_fake=False), note=note)
    except UserError as error:
        return Outcome(plan=text(plan), reason=f"{type(error).__name__}: {error}", is_refused=True)
    return Outcome(
        plan=text(plan),
        prediction=prediction,
        reason=None if prediction.fits else _why_not(prediction),
    )


def available_bytes() -> int:
    """Return the memory of this machine that is free."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _why_not(prediction: Prediction) -> str:
    peak, capacity = prediction.peak, prediction.capacity_bytes or 0
    return (
        f"needs {size(prediction.needed_bytes)} of {size(capacity)}, on rank {peak.rank} in"
        f" {peak.moment}"
    )
