"""Optuna's samplers and pruners by name, seeded anew for each trial.

A sampler's generator dies with its process. So each trial has its own sampler, seeded by the
search's seed and the trial's number: a killed search goes on as it would have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, CmaEsSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from lockstep.base.errors import RecipeError
from lockstep.recipe.parameters import Parameter, Value
from lockstep.search.request import PrunerName, SamplerName

_KEPT = 3
"""ASHA keeps one of so many trials."""

Given = Callable[[int], Mapping[str, Value] | None]
"""Number -> values of a trial that is not sampled; None: it is."""


class PerTrialSampler(BaseSampler):
    """A sampler made anew for each trial."""

    def __init__(self, make: Callable[[int], BaseSampler], seed: int, given: Given) -> None:
        """`make`: seed -> sampler."""
        self._make, self._seed, self._given = make, seed, given

    def _sampler(self, trial: FrozenTrial, name: str = "") -> BaseSampler:
        digest = blake2b(f"{self._seed}/{trial.number}/{name}".encode(), digest_size=4).digest()
        return self._make(int.from_bytes(digest, "big") >> 1)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        if self._given(trial.number) is not None:
            return {}
        return self._sampler(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return (
            self._sampler(trial).sample_relative(study, trial, search_space) if search_space else {}
        )

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        given = self._given(trial.number)
        if given is not None:
            return given[param_name]
        return self._sampler(trial, param_name).sample_independent(
            study, trial, param_name, param_distribution
        )

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._sampler(trial).after_trial(study, trial, state, values)


def sampler_of(name: SamplerName, *, seed: int, given: Given) -> BaseSampler:
    makers: dict[SamplerName, Callable[[int], BaseSampler]] = {
        "tpe": lambda seed: TPESampler(seed=seed, constant_liar=True),
        "cma": lambda seed: CmaEsSampler(seed=seed, warn_independent_sampling=False),
    }
    return PerTrialSampler(makers.get(name, lambda seed: RandomSampler(seed=seed)), seed, given)


def pruner_of(name: PrunerName, every: int | None, steps: int | None) -> BasePruner:
    """Return a pruner. `every`: steps between evaluations. `steps`: of a training. None:
    unknown."""
    match name:
        case "asha":
            return SuccessiveHalvingPruner(
                min_resource=first_rung(every, steps) or "auto", reduction_factor=_KEPT
            )
        case "median":
            return MedianPruner()
        case "none":
            return NopPruner()


def first_rung(every: int | None, steps: int | None) -> int | None:
    """Return the steps after which ASHA first prunes; None: unknown.

    Two thirds end after about 1/9 of the training, two thirds of the rest after 1/3. Optuna's
    defaults end three quarters after the first evaluation, however early: with 30 evaluations of
    the digits classifier that left 3 or 4 of 40 trials, and one of three searches missed the best
    by two digits.
    """
    if every is None or steps is None:
        return every
    return every * (steps // (_KEPT**2 * every) + 1)  # the third rung is then beyond the end


def distribution_of(parameter: Parameter) -> BaseDistribution:
    if parameter.choices:
        return CategoricalDistribution(parameter.choices)
    assert parameter.low is not None, "it is searched"
    assert parameter.high is not None, "it is searched"
    values = parameter.values
    high = parameter.high if values is None else float(values[-1] or 0)  # a step from low
    if parameter.is_int:
        return IntDistribution(
            int(parameter.low), int(high), log=parameter.log, step=int(parameter.step or 1)
        )
    return FloatDistribution(
        float(parameter.low), float(high), log=parameter.log, step=parameter.step
    )


def grid_of(parameters: Sequence[Parameter]) -> list[dict[str, Value]]:
    """Return all combinations; the last parameter changes the fastest. Raises `RecipeError` if they
    are endless."""
    for parameter in parameters:
        if parameter.values is None:
            raise RecipeError(
                f"the parameter {parameter.name!r} with --sampler grid; a grid needs countable"
                f" values; give choices= or step=, or fix it with --set {parameter.name}=..."
            )
    names = [parameter.name for parameter in parameters]
    return [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*[parameter.values or [] for parameter in parameters])
    ]
