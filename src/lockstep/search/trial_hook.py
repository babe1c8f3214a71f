"""A hook in the processes of a trial that reports each evaluation to the search, and stops a pruned
trial.

Rank 0 sends three kinds of messages to the search. `opened` has the script's parameters and their
values. The answer to `opened` says if the trial is refused, because the script differs from the
search's script. `refused` reports a mistake that every trial would repeat, and gets no answer.
`report` has the metric at a step. The answer to `report` says if the trial is pruned.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from lockstep.base.errors import RecipeError, UserError
from lockstep.hooks.metrics import check_metric
from lockstep.launch.recovery.channel import Channel
from lockstep.recipe.code import programs, texts
from lockstep.recipe.parameters import declared
from lockstep.recipe.recipe import Recipe
from lockstep.search.request import PRUNED, TrialRequest
from lockstep.training.context import Overrides
from lockstep.training.hook import Hook
from lockstep.training.loop import interval_of, total_steps_of
from lockstep.training.run import Run

_trainings = 0


def install(environ: Mapping[str, str]) -> tuple[Overrides, tuple[Hook, ...]]:
    global _trainings
    _trainings += 1
    request = _request(environ)
    return Overrides(), (TrialHook(request, _channel(request, environ), number=_trainings),)


def train(recipe: Recipe) -> NoReturn:
    """Replaces `ls.train`: report the script's parameters to the search, and end the process."""
    channel = _channel(_request(os.environ), os.environ)
    if channel is not None:
        channel.send(
            "opened", **_script(), every=_interval(recipe, ""), steps=total_steps_of(recipe)
        )
    os._exit(0)


def _interval(recipe: Recipe, metric: str) -> int | None:
    """Return the smallest number of steps between two evaluations with `metric` ("" for any
    metric); None if it is unknown."""
    found = [
        interval_of(recipe, each)
        for prefix, each in recipe.evaluations.items()
        if metric.startswith(prefix) or not metric
    ]
    return min((every for every in found if every is not None), default=None)


def _script() -> dict[str, Any]:
    return {
        "parameters": declared.describe(),
        "values": declared.values,
        "programs": programs(texts()),
    }


def _request(environ: Mapping[str, str]) -> TrialRequest:
    request = TrialRequest.read(environ)
    assert request is not None, "the search has asked"
    return request


def _channel(request: TrialRequest, environ: Mapping[str, str]) -> Channel | None:
    os.set_inheritable(request.channel, False)
    is_first = environ.get("RANK", "0") == "0"
    return Channel(socket.socket(fileno=os.dup(request.channel))) if is_first else None


class TrialHook(Hook):
    def __init__(self, request: TrialRequest, channel: Channel | None, *, number: int) -> None:
        self._request, self._channel, self._number = request, channel, number

    def on_start(self, run: Run) -> None:
        try:
            self._check(run)
        except UserError as error:
            if self._channel is not None:
                self._channel.send("refused", reason=str(error))
            raise
        answer = None
        if self._channel is not None:
            every = None if run.recipe is None else _interval(run.recipe, self._request.metric)
            self._channel.send("opened", **_script(), every=every, steps=run.total_steps)
            answer = self._channel.receive()
        refused = run.context.world.value_of(0, answer and answer["refused"])
        if refused is not None:
            raise RecipeError(refused)

    def _check(self, run: Run) -> None:
        if self._number > 1:
            raise RecipeError(
                "lockstep search on a script that trains several times; a trial has one metric, of"
                " one training; keep one ls.train"
            )
        metric = self._request.metric
        if run.recipe is None:
            raise RecipeError(
                "lockstep search on a script with its own loop; the metric is one of a recipe's"
                " evaluations; call ls.train"
            )
        if run.recipe.evaluations:
            check_metric(run, metric, f"--metric {metric}")
        elif metric != "loss":
            raise RecipeError(
                f"--metric {metric}, but the recipe has no evaluation, so only the training loss is"
                " measured; give ls.Evaluation(...), or --metric loss"
            )
        checkpoints = json.loads((run.dir / "run.json").read_text(encoding="utf-8"))["checkpoints"]
        if checkpoints is not None:
            raise RecipeError(
                f"lockstep search with Saving(folder={checkpoints!r}); all trials would save"
                " there, and resume from each other's checkpoints; leave it out: each trial has"
                " its own folder"
            )

    def after_evaluation(self, run: Run, metrics: dict[str, float]) -> None:
        value = metrics.get(self._request.metric)
        if value is None or self._channel is None:
            return
        self._channel.send("report", step=run.step, value=value)
        answer = self._channel.receive()
        # it is complete
        if (
            answer is not None
            and answer["prune"]
            and self._request.can_be_pruned
            and run.step != run.total_steps
        ):
            run.stop(f"{PRUNED}{self._request.metric} {value:.6g} after step {run.step}")
        elif self._request.until is not None and run.step >= self._request.until:
            run.stop("the end of its generation")
