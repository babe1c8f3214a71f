"""Population-based training (Jaderberg et al. 2017, arXiv:1711.09846).

Trial n is member n % M of generation n // M, and trains one segment of the steps. After each
generation, the worst quarter of the members continues from checkpoints of the best quarter, with
changed values.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.base.errors import LaunchError
from lockstep.recipe.parameters import Parameter, Value
from lockstep.search.results import ENDED, SearchResults

PART = 4
FACTORS = (0.8, 1.2)
RESAMPLED = 0.25
CHANGEABLE = frozenset(
    {
        "parameters",
        "model",
        "loss",
        "inputs",
        "weight",
        "collate",
        "optimizer",
        "schedule",
        "clip_norm",
    }
)
"""Fields of the recipe whose hyper-parameters may change during a training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Population:
    members: int
    generations: int
    segment: int

    @classmethod
    def of(cls, *, trials: int, members: int, steps: int | None, every: int | None) -> Population:
        if steps is None or every is None:
            raise LaunchError(
                "--sampler pbt on a recipe without a known number of steps, of the training or"
                " between evaluations; members are compared during training; give"
                " Recipe(steps=...) and ls.Evaluation(every=...)"
            )
        if members < 2 or trials % members:
            raise LaunchError(
                f"--trials {trials} with --population {members}; each generation has one trial for"
                " each member, and there are at least two generations; give a multiple, such as"
                f" --trials {max(2, trials // members) * members}"
            )
        generations = trials // members
        segment = steps // generations // every * every
        if not segment:
            raise LaunchError(
                f"{generations} generations in {steps} steps, with an evaluation every {every};"
                " each generation has at least one evaluation; give fewer --trials, a larger"
                " --population, or more evaluations"
            )
        return cls(members=members, generations=generations, segment=segment)

    def generation(self, number: int) -> int:
        return number // self.members

    def until(self, number: int) -> int | None:
        generation = self.generation(number)
        return None if generation == self.generations - 1 else self.segment * (generation + 1)

    def ready(self, results: SearchResults) -> int:
        ended = {trial.number for trial in results.trials if trial.state in ENDED}
        done = 0
        while done < self.generations and ended.issuperset(
            range(done * self.members, (done + 1) * self.members)
        ):
            done += 1
        return (done + 1) * self.members

    def parent(self, number: int, results: SearchResults, seed: int) -> int | None:
        """Return the trial from whose checkpoint trial `number` continues; None in the first
        generation."""
        generation = self.generation(number)
        if generation == 0:
            return None
        before = range((generation - 1) * self.members, generation * self.members)
        ranked = [trial.number for trial in results.ranked if trial.number in before]
        if not ranked:
            raise LaunchError(
                f"no member of generation {generation - 1} has succeeded; the next one continues"
                " from their checkpoints"
            )
        part = max(1, self.members // PART)
        own = number - self.members
        is_replaced = own not in ranked or (
            len(ranked) > part and own in ranked[self.members - part :]
        )
        return (
            random.Random(f"{seed}/{number}/parent").choice(ranked[:part]) if is_replaced else own
        )

    def values(
        self,
        number: int,
        parent: int,
        given: Mapping[str, Value],
        parameters: Sequence[Parameter],
        seed: int,
    ) -> dict[str, Value]:
        if parent == number - self.members:
            return {each.name: given[each.name] for each in parameters}
        chance = random.Random(f"{seed}/{number}/values")
        return {each.name: _changed(each, given[each.name], chance) for each in parameters}


def _changed(parameter: Parameter, value: Any, chance: random.Random) -> Value:
    if parameter.choices:
        return chance.choice(parameter.choices) if chance.random() < RESAMPLED else value
    assert parameter.low is not None, "it is searched"
    assert parameter.high is not None, "it is searched"
    changed = float(min(parameter.high, max(parameter.low, value * chance.choice(FACTORS))))
    if parameter.step is not None:
        changed = parameter.low + round((changed - parameter.low) / parameter.step) * parameter.step
        changed = changed if changed <= parameter.high else changed - parameter.step
    return round(changed) if parameter.is_int else changed
