"""Which values trials are given: by the seed, the trial's number and what was sampled before, and
by nothing else."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from processes import ran
from search.storages import PARAMETERS, Open, end_as_killed, make_trial, proposals

from lockstep.base.errors import LaunchError, RecipeError
from lockstep.options import LaunchOptions
from lockstep.recipe.parameters import Parameter
from lockstep.search.proposals import distribution_of, grid_of

TRIALS = 12
"""More than the 10 that TPE draws at random."""
ONE_MORE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from search.storages import make_trial, request
from lockstep.search.study import TrialStorage
print(make_trial(TrialStorage(request(Path(sys.argv[2]), sampler=sys.argv[3])), int(sys.argv[4])))
"""


@pytest.mark.parametrize(("sampler", "trials"), [("random", 4), ("tpe", TRIALS), ("cma", 6)])
def test_a_search_that_is_restarted_before_each_trial_samples_as_one_that_is_not(
    storage: Open, sampler: str, trials: int
) -> None:
    whole = storage("whole", sampler=sampler)
    made = [make_trial(whole, trials) for _ in range(trials)]
    for number in range(trials):
        again = storage("restarted", sampler=sampler)
        assert make_trial(again, trials) == made[number]
        end_as_killed(again)
    assert make_trial(storage("restarted", sampler=sampler), trials) is None
    other = storage("another seed", sampler=sampler, seed=1)
    assert [make_trial(other, 3) for _ in range(3)][1:] != made[1:3]


def test_another_process_samples_alike(storage: Open, tmp_path: Path) -> None:
    whole, part = (storage(name, sampler="tpe") for name in ("whole", "part"))
    made = [make_trial(whole, TRIALS) for _ in range(TRIALS)]
    assert [make_trial(part, TRIALS) for _ in range(TRIALS - 1)] == made[:-1]
    line = [
        sys.executable,
        "-c",
        ONE_MORE,
        str(Path(__file__).parent.parent),
        str(tmp_path / "part"),
        "tpe",
        str(TRIALS),
    ]
    found = ran(line, check=True)
    assert found.stdout == f"{made[-1]}\n"


@pytest.mark.parametrize("sampler", ["random", "tpe", "cma"])
def test_a_trial_that_was_given_a_part_of_its_values_is_given_the_rest(
    storage: Open, sampler: str
) -> None:
    whole, cut = storage("whole", sampler=sampler), storage("cut", sampler=sampler)
    made = [make_trial(whole, 4) for _ in range(4)]
    for _ in range(3):
        make_trial(cut, 4)
    claimed = cut.claim(4)
    assert claimed is not None
    proposals(cut)
    claimed.trial._suggest("lr", distribution_of(PARAMETERS[0]))
    end_as_killed(cut)
    assert make_trial(storage("cut", sampler=sampler), 4) == made[3]


def test_the_first_trial_has_the_defaults_and_all_values_are_within_the_bounds(
    storage: Open,
) -> None:
    opened = storage()
    made = [make_trial(opened, 8) for _ in range(8)]
    values = [each[1] for each in made if each is not None]
    assert [each[0] for each in made if each is not None] == list(range(8))
    assert values[0] == {"lr": 0.1, "width": 2, "layers": 3}
    assert len({each["lr"] for each in values}) == 8
    for parameter in PARAMETERS[:3]:
        for each in values:
            parameter.check(each[parameter.name], "sampled")


def test_a_parameter_that_set_fixes_is_not_sampled(storage: Open) -> None:
    opened = storage(launch=LaunchOptions(set=("lr=0.5",)))
    made = [make_trial_without_loss(opened) for _ in range(3)]
    assert [sorted(each) for each in made] == [["layers", "width"]] * 3


def make_trial_without_loss(opened: Any) -> dict[str, Any]:
    claimed = opened.claim(8)
    return dict(proposals(opened).values(claimed))


def test_a_grid_has_each_combination_once_and_ends_by_itself(storage: Open) -> None:
    parameters = (
        PARAMETERS[1],
        Parameter(name="step", default=0.1, low=0.0, high=0.3, step=0.1),
        PARAMETERS[3],
    )
    opened = storage(sampler="grid", trials=None)
    grid = proposals(opened, parameters)
    assert grid.wanted == 12
    found = []
    while (claimed := opened.claim(grid.wanted)) is not None:
        found.append(dict(grid.values(claimed)))
    steps = [0.0, 0.1, 0.2, 0.3]
    assert found == [{"width": width, "step": step} for width in (1, 2, 4) for step in steps]
    assert proposals(storage("short", sampler="grid", trials=5), parameters).wanted == 5


def test_an_endless_grid_is_refused_and_so_is_nothing_to_search(storage: Open) -> None:
    with pytest.raises(RecipeError) as raised:
        grid_of(PARAMETERS[:3])
    assert (
        str(raised.value)
        == "the parameter 'lr' with --sampler grid; a grid needs countable values; give choices= or"
        " step=, or fix it with --set lr=..."
    )
    with pytest.raises(RecipeError, match="--set lr="):
        proposals(storage(sampler="grid")).check()
    with pytest.raises(
        LaunchError,
        match=(
            "the script has no parameter to search: seed; a search samples parameters with bounds"
            " or choices"
        ),
    ):
        proposals(storage("empty"), PARAMETERS[3:]).check()
    with pytest.raises(
        LaunchError,
        match="the script has no parameter to search: none at all; a search samples parameters with",
    ):
        proposals(storage("none"), ()).check()


@pytest.mark.parametrize(
    ("parameter", "distribution"),
    [
        (PARAMETERS[0], FloatDistribution(1e-3, 1.0, log=True)),
        (PARAMETERS[1], CategoricalDistribution((1, 2, 4))),
        (PARAMETERS[2], IntDistribution(1, 8)),
        (Parameter(name="x", default=4, low=2, high=9, log=True), IntDistribution(2, 9, log=True)),
        (Parameter(name="x", default=3, low=1, high=9, step=3), IntDistribution(1, 7, step=3)),
        (
            Parameter(name="x", default=0.1, low=0.0, high=0.25, step=0.1),
            FloatDistribution(0.0, 0.2, step=0.1),
        ),
        (Parameter(name="x", default=0, low=0, high=10**12), IntDistribution(0, 10**12)),
        (
            Parameter(name="x", default=None, choices=(None, True, "a", 0.5)),
            CategoricalDistribution((None, True, "a", 0.5)),
        ),
    ],
)
def test_a_parameter_has_optunas_distribution(parameter: Parameter, distribution: Any) -> None:
    assert distribution_of(parameter) == distribution


def test_a_step_that_does_not_divide_the_range_ends_at_its_last_value() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Optuna changes the range, and says so
        found = distribution_of(Parameter(name="x", default=0.3, low=0.0, high=1.0, step=0.3))
    assert found == FloatDistribution(0.0, 0.9, step=0.3)
