"""The values of each trial's parameters: sampled, of a grid or a sweep, or of a population."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optuna.distributions import BaseDistribution, CategoricalDistribution

from lockstep.base.errors import LaunchError
from lockstep.recipe.parameters import Parameter, Value, split_assignment
from lockstep.search.population import Population
from lockstep.search.request import SearchRequest
from lockstep.search.sampling import distribution_of, grid_of, pruner_of, sampler_of
from lockstep.search.study import ClaimedTrial, TrialStorage


class Proposals:
    def __init__(self, request: SearchRequest, storage: TrialStorage) -> None:
        self._request, self._storage = request, storage
        self._parameters: list[Parameter] = []
        if request.sweep:
            storage.study.sampler = sampler_of("random", seed=request.seed, given=self._given)
            storage.study.pruner = pruner_of("none", None, None)

    def _look(self) -> None:
        """Take up the script's parameters once a trial has told them."""
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
        """True if a trial's values are known before its script runs."""
        self._look()
        return bool(self._request.sweep) or self._storage.parameters is not None

    @property
    def need_probe(self) -> bool:
        """True if even the first trial needs the parameters."""
        return self._request.sampler in ("grid", "pbt")

    @property
    def searched(self) -> list[Parameter]:
        """Parameters with bounds or choices that `--set` does not fix."""
        self._look()
        fixed = {text.partition("=")[0] for text in self._request.launch.set}
        return [each for each in self._parameters if each.is_searched and each.name not in fixed]

    def check(self) -> None:
        """Raise `LaunchError` if nothing is searched or generations do not fit, `RecipeError` for
        an endless grid."""
        if self._request.sweep:
            return
        if not self.searched:
            raise LaunchError(
                "the script has no parameter to search:"
                f" {', '.join(each.name for each in self._parameters) or 'none at all'}; a search"
                ' samples those with bounds or choices; write lr = ls.param("lr", 3e-4,'
                " low=1e-5, high=1e-2, log=True) before the recipe"
            )
        if self._request.sampler == "grid":
            grid_of(self.searched)
        if self._request.sampler == "pbt":
            self.population.until(0)  # raises if the generations do not fit

    @property
    def wanted(self) -> int:
        """Trials of the whole search."""
        self._look()
        is_grid = self._request.sampler == "grid" and bool(self._parameters)
        limits = (
            self._request.trials,
            len(self._request.combinations),
            len(grid_of(self.searched)) if is_grid else None,
        )
        return min(filter(None, limits), default=1)

    @property
    def ready(self) -> int:
        """Trials that may have begun by now."""
        self._look()
        if self._request.sampler != "pbt" or not self._parameters:
            return self.wanted
        return min(self.wanted, self.population.ready(self._storage.results()))

    @property
    def population(self) -> Population:
        """The generations of population-based training."""
        facts = {name: self._storage.fact(name) for name in ("steps", "every")}
        return Population.of(trials=self.wanted, members=self._request.population, **facts)

    def parent(self, number: int) -> int | None:
        """Return the trial whose checkpoint a trial goes on from, or None."""
        return self.population.parent(number, self._storage.results(), self._request.seed)

    def values(self, claimed: ClaimedTrial) -> Mapping[str, Value]:
        """Return a trial's values; none for the first, with the defaults, while parameters are
        unknown."""
        if self._request.sweep:
            distributions: dict[str, BaseDistribution] = {
                name: CategoricalDistribution(texts) for name, texts in self._request.sweep
            }
        else:
            distributions = {each.name: distribution_of(each) for each in self.searched}
        return self._storage.suggest(claimed, distributions)

    def _given(self, number: int) -> Mapping[str, Value] | None:
        """Return the values of a trial that is not sampled; else None."""
        if self._request.sweep:
            return dict(map(split_assignment, self._request.combinations[number]))
        if self._request.sampler == "grid":
            return grid_of(self.searched)[number]
        if self._request.sampler == "pbt" and (parent := self.parent(number)) is not None:
            given: Sequence[Mapping[str, Value]] = [
                trial.parameters for trial in self._storage.results().trials
            ]
            return self.population.values(
                number, parent, given[parent], self.searched, self._request.seed
            )
        return {each.name: each.default for each in self.searched} if number == 0 else None
