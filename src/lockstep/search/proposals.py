"""Proposes the hyper-parameters of each trial, from a sampler, a grid, a sweep or a population."""

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

from lockstep.base.errors import LaunchError, RecipeError
from lockstep.recipe.parameters import Parameter, Value, split_assignment
from lockstep.search.population import Population
from lockstep.search.request import PrunerName, SamplerName, SearchRequest
from lockstep.search.study import ClaimedTrial, TrialStorage


class Proposals:
    def __init__(self, request: SearchRequest, storage: TrialStorage) -> None:
        self._request, self._storage = request, storage
        self._parameters: list[Parameter] = []
        if request.sweep:
            storage.study.sampler = sampler_of("random", seed=request.seed, given=self._given)
            storage.study.pruner = pruner_of("none", None, None)

    def _look(self) -> None:
        if self._request.sweep or self._parameters or not (found := self._storage.parameters):
            return
        self._parameters = found
        self._storage.study.sampler = sampler_of(
            self._request.sampler, seed=self._request.seed, given=self._given
        )
        self._storage.study.pruner = pruner_of(
            self._request.pruner, self._storage.fact("every"), self._storage.fact("steps")
        )

    @property
    def are_known(self) -> bool:
        self._look()
        return bool(self._request.sweep) or self._storage.parameters is not None

    @property
    def need_probe(self) -> bool:
        return self._request.sampler in ("grid", "pbt")

    @property
    def searched(self) -> list[Parameter]:
        self._look()
        fixed = {text.partition("=")[0] for text in self._request.launch.set}
        return [each for each in self._parameters if each.is_searched and each.name not in fixed]

    def check(self) -> None:
        if self._request.sweep:
            return
        if not self.searched:
            raise LaunchError(
                "the script has no parameter to search:"
                f" {', '.join(each.name for each in self._parameters) or 'none at all'}; a search"
                ' samples parameters with bounds or choices; write lr = ls.param("lr", 3e-4,'
                " low=1e-5, high=1e-2, log=True) before the recipe"
            )
        if self._request.sampler == "grid":
            grid_of(self.searched)
        if self._request.sampler == "pbt":
            self.population.until(0)  # this raises if the generations do not fit

    @property
    def wanted(self) -> int:
        self._look()
        is_grid = self._request.sampler == "grid" and bool(self._parameters)
        grid = len(grid_of(self.searched)) if is_grid else None
        limits = (self._request.trials, len(self._request.combinations), grid)
        return min(filter(None, limits), default=1)

    @property
    def ready(self) -> int:
        """Number of trials that may start. In population-based training, a trial waits for all
        trials of the previous generation."""
        self._look()
        if self._request.sampler != "pbt" or not self._parameters:
            return self.wanted
        return min(self.wanted, self.population.ready(self._storage.results()))

    @property
    def population(self) -> Population:
        facts = {name: self._storage.fact(name) for name in ("steps", "every")}
        return Population.of(trials=self.wanted, members=self._request.population, **facts)

    def parent(self, number: int) -> int | None:
        return self.population.parent(number, self._storage.results(), self._request.seed)

    def values(self, claimed: ClaimedTrial) -> Mapping[str, Value]:
        distributions = {each.name: distribution_of(each) for each in self.searched}
        for name, texts in self._request.sweep:
            distributions[name] = CategoricalDistribution(texts)
        trial = claimed.trial
        return {name: trial._suggest(name, each) for name, each in distributions.items()}

    def _given(self, number: int) -> Mapping[str, Value] | None:
        if self._request.sweep:
            return dict(map(split_assignment, self._request.combinations[number]))
        if self._request.sampler == "grid":
            return grid_of(self.searched)[number]
        if self._request.sampler == "pbt" and (parent := self.parent(number)) is not None:
            given = self._storage.results().trials[parent].parameters
            return self.population.values(number, parent, given, self.searched, self._request.seed)
        return {each.name: each.default for each in self.searched} if number == 0 else None


_KEPT = 3

Given = Callable[[int], Mapping[str, Value] | None]
"""Returns the values of a trial by its number; None if a sampler chooses them."""


class PerTrialSampler(BaseSampler):
    """Makes a sampler for each trial, seeded with the trial's number. A resumed search then
    proposes the same values as an uninterrupted search."""

    def __init__(self, make: Callable[[int], BaseSampler], seed: int, given: Given) -> None:
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
    """Return the step at which ASHA prunes first, about 1/9 of the training. Optuna's default, the
    first evaluation, may be too early to prune."""
    if every is None or steps is None:
        return every
    # the third pruning would then be after the end of the training
    return every * (steps // (_KEPT**2 * every) + 1)


def distribution_of(parameter: Parameter) -> BaseDistribution:
    if parameter.choices:
        return CategoricalDistribution(parameter.choices)
    low, high, log, step = parameter.low, parameter.high, parameter.log, parameter.step
    assert low is not None, "it is searched"
    assert high is not None, "it is searched"
    if (values := parameter.values) is not None:
        high = float(values[-1] or 0)  # whole steps counted from low
    if parameter.is_int:
        return IntDistribution(int(low), int(high), log=log, step=int(step or 1))
    return FloatDistribution(float(low), float(high), log=log, step=step)


def grid_of(parameters: Sequence[Parameter]) -> list[dict[str, Value]]:
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
