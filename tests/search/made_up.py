"""Made-up results of a search, as a random search with a pruner would have them."""

from __future__ import annotations

import math
import random
from typing import Any

from lockstep.recipe.parameters import Parameter
from lockstep.search.results import SearchResults, State, TrialResult

BEGAN = 1_790_000_000.0
PARAMETERS = (
    Parameter(name="lr", default=3e-4, low=1e-5, high=1e-1, log=True),
    Parameter(name="width", default=128, choices=(64, 128, 256, 512)),
    Parameter(name="dropout", default=0.1, low=0.0, high=0.5),
    Parameter(name="optimizer", default="adamw", choices=("sgd", "adamw", "lion")),
)
FAILED = (
    "LossError: the loss is nan at step {step}; lower the learning rate, or clip the gradients",
    "torch.OutOfMemoryError: 17.4 GB were asked for, 3.2 GB are free",
)


def trial(number: int, state: State = "complete", **given: Any) -> TrialResult:
    """A trial of the parameter lr."""
    start = BEGAN + 10.0 * number
    filled: dict[str, Any] = {
        "parameters": {"lr": 1e-3 * (number + 1)},
        "started": start,
        "ended": start + 10.0 if state != "running" else None,
    } | given
    return TrialResult(number=number, state=state, **filled)


def search(*trials: TrialResult, **given: Any) -> SearchResults:
    filled: dict[str, Any] = {
        "name": "s",
        "script": "train.py",
        "metric": "loss",
        "direction": "minimize",
        "wanted": len(trials),
    }
    return SearchResults(**filled | {"parameters": PARAMETERS[:1], "trials": trials} | given)


def random_search(
    count: int = 40, *, seed: int = 0, steps: int = 500, every: int = 25, metric: str = "loss"
) -> SearchResults:
    """Some are pruned, some fail, one ends with NaN, the last two are running. A metric other than
    the loss is larger where that is smaller."""
    source = random.Random(seed)
    trials = [_trial(source, number, count, steps, every, metric) for number in range(count)]
    direction: Any = "minimize" if metric == "loss" else "maximize"
    return SearchResults(
        name="digits",
        script="examples/digits.py",
        metric=metric,
        direction=direction,
        wanted=count,
        parameters=PARAMETERS,
        trials=trials,
    )


def _trial(
    source: random.Random, number: int, count: int, steps: int, every: int, metric: str
) -> TrialResult:
    given: dict[str, Any] = {
        "lr": 10 ** source.uniform(-5, -1),
        "width": source.choice((64, 128, 256, 512)),
        "dropout": source.uniform(0, 0.5),
        "optimizer": source.choice(("sgd", "adamw", "lion")),
    }
    away = abs(math.log10(given["lr"]) + 2.7)
    final = (
        0.05
        + 0.12 * away**2
        + 0.1 * abs(given["dropout"] - 0.15)
        + 4.0 / given["width"]
        + source.uniform(0, 0.02)
    )
    losses = {
        step: final + (2.3 - final) * math.exp(-step / 90) + source.gauss(0, 0.006)
        for step in range(every, steps + 1, every)
    }
    values = (
        losses if metric == "loss" else {step: math.exp(-loss) for step, loss in losses.items()}
    )
    state: State = (
        "running" if number >= count - 2 else "failed" if given["lr"] > 0.06 else "complete"
    )
    reason = None
    if state != "complete":
        values = dict(list(values.items())[: source.randrange(1, 6)])
    elif number % 9 == 4:
        values[steps] = math.nan
    elif number > 5 and final > 0.25:
        state, reason = "pruned", "below the 75th percentile of rung 1"
        values = dict(list(values.items())[: source.choice((3, 3, 6, 12))])
    if state == "failed":
        reason = FAILED[number % 2].format(step=max(values, default=0))
    began = BEGAN + (number // 2) * 61 + source.uniform(0, 9)
    seconds = 2 + 0.11 * max(values, default=0) * (given["width"] / 256) ** 0.5
    return TrialResult(
        number=number,
        state=state,
        parameters=given,
        value=None if state in ("failed", "running") else list(values.values())[-1],
        values=values,
        started=began,
        ended=None if state == "running" else began + seconds,
        reason=reason,
        run_dir=f"runs/digits/trial-{number:04d}",
    )
