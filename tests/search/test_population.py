"""Population-based training: which trial goes on from which, with which values."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lockstep.base.errors import LaunchError
from lockstep.recipe.parameters import Parameter
from lockstep.search.population import FACTORS, Population
from lockstep.search.results import SearchResults, State, TrialResult

LR = Parameter(name="lr", default=0.1, low=0.01, high=1.0, log=True)
LAYERS = Parameter(name="layers", default=2, low=1, high=8)
WIDTH = Parameter(name="width", default=2, choices=(1, 2, 4))
EIGHT = Population(members=8, generations=3, segment=10)


def results(values: dict[int, float | None], state: State = "complete") -> SearchResults:
    """The trials with these values; one with None has failed."""
    trials = [
        TrialResult(
            number=number,
            state=state if value is not None else "failed",
            parameters={},
            value=value,
        )
        for number, value in sorted(values.items())
    ]
    return SearchResults(
        name="s", script="s.py", metric="loss", direction="minimize", wanted=24, parameters=[LR],
        trials=trials
    )  # fmt: skip


def test_generations_end_at_evaluations_and_the_last_with_the_training() -> None:
    population = Population.of(trials=12, members=4, steps=100, every=10)
    assert (population.generations, population.segment) == (3, 30)
    assert [population.until(number) for number in (0, 3, 4, 7, 8, 11)] == [
        30,
        30,
        60,
        60,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"trials": 10, "members": 4, "steps": 100, "every": 10},
            "--trials 10 with --population 4; .* such as --trials 8",
        ),
        (
            {"trials": 12, "members": 4, "steps": 20, "every": 10},
            "3 generations in 20 steps, with an evaluation every 10",
        ),
        (
            {"trials": 12, "members": 4, "steps": 20, "every": None},
            "without a known number of steps",
        ),
        ({"trials": 12, "members": 4, "steps": None, "every": 5}, "give Recipe\\(steps=...\\)"),
    ],
)
def test_generations_that_do_not_fit_are_refused(given: dict[str, int], told: str) -> None:
    with pytest.raises(LaunchError, match=told):
        Population.of(**given)


def test_a_generation_begins_when_the_one_before_has_ended() -> None:
    first = {number: float(number) for number in range(8)}
    assert EIGHT.ready(results({})) == 8
    assert (
        EIGHT.ready(results({number: value for number, value in first.items() if number != 3})) == 8
    )
    assert EIGHT.ready(results(first)) == 16
    assert EIGHT.ready(results({**first, 5: None})) == 16
    assert EIGHT.ready(results(first, state="running")) == 8


def test_the_worst_quarter_goes_on_from_the_best_and_the_others_from_themselves() -> None:
    ranked = [3, 6, 0, 1, 2, 7, 5, 4]  # the best first
    told = results({number: float(ranked.index(number)) for number in range(8)})
    parents = {number: EIGHT.parent(number, told, seed=0) for number in range(8, 16)}
    assert {number: parent for number, parent in parents.items() if number - 8 not in (5, 4)} == {
        number: number - 8 for number in range(8, 16) if number - 8 not in (5, 4)
    }
    assert {parents[12], parents[13]} <= {3, 6}
    assert EIGHT.parent(2, told, seed=0) is None


def test_the_best_is_the_largest_where_more_is_better() -> None:
    told = results({number: float(number) for number in range(8)})
    told = SearchResults(
        **{name: getattr(told, name) for name in told.__slots__} | {"direction": "maximize"}
    )
    assert {EIGHT.parent(8, told, seed=seed) for seed in range(20)} == {6, 7}
    assert EIGHT.parent(15, told, seed=0) == 7


def test_a_failed_member_is_replaced_and_without_any_there_is_no_generation() -> None:
    told = results({**{number: float(number) for number in range(8)}, 0: None})
    assert EIGHT.parent(8, told, seed=0) in (1, 2)
    with pytest.raises(LaunchError, match="no member of generation 0 has succeeded"):
        EIGHT.parent(8, results(dict.fromkeys(range(8), None)), seed=0)


@given(
    st.integers(0, 2**31), st.floats(0.01, 1.0), st.integers(1, 8), st.sampled_from(WIDTH.choices)
)
def test_changed_values_stay_within_the_bounds(
    seed: int, lr: float, layers: int, width: int
) -> None:
    given = {"lr": lr, "layers": layers, "width": width}
    told = EIGHT.values(13, 3, given, [LR, LAYERS, WIDTH], seed)
    for parameter in (LR, LAYERS, WIDTH):
        parameter.check(told[parameter.name], "changed")
    assert isinstance(told["layers"], int)
    assert told["lr"] in [min(1.0, max(0.01, lr * factor)) for factor in FACTORS]


def test_the_values_of_one_that_goes_on_from_itself_are_unchanged_and_chance_is_the_seeds() -> None:
    given = {"lr": 0.1, "layers": 4, "width": 2}
    assert EIGHT.values(13, 5, given, [LR, LAYERS, WIDTH], seed=1) == given
    changed = [EIGHT.values(13, 3, given, [LR, LAYERS, WIDTH], seed) for seed in range(40)]
    assert changed == [EIGHT.values(13, 3, given, [LR, LAYERS, WIDTH], seed) for seed in range(40)]
    assert {each["lr"] for each in changed} == {0.1 * factor for factor in FACTORS}
    assert {each["width"] for each in changed} == {1, 2, 4}
