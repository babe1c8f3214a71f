"""What a search and a sweep are asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from search.storages import request

from lockstep.base.errors import LaunchError, RecipeError, UserError
from lockstep.options import LaunchOptions
from lockstep.scripts.line import ScriptLine
from lockstep.search.request import direction_of, sweep_of


def test_a_sweep_has_each_combination_once_and_the_last_name_changes_the_fastest(
    tmp_path: Path,
) -> None:
    sweep = sweep_of(["lr=1e-3,3e-3", "seed=0,1", "name=a b"])
    assert request(tmp_path, sweep=sweep).combinations == [
        ("lr=1e-3", "seed=0", "name=a b"),
        ("lr=1e-3", "seed=1", "name=a b"),
        ("lr=3e-3", "seed=0", "name=a b"),
        ("lr=3e-3", "seed=1", "name=a b"),
    ]
    assert request(tmp_path).combinations == []


@pytest.mark.parametrize(
    ("texts", "kind", "error"),
    [
        (
            [],
            LaunchError,
            (
                "a sweep without --set; it trains with each combination of values; give --set"
                " lr=1e-3,3e-3"
            ),
        ),
        (
            ["lr"],
            RecipeError,
            "--set 'lr'; it must be a parameter's name and its value: --set lr=1e-3",
        ),
        (
            ["lr=1,2", "lr=3"],
            LaunchError,
            "--set lr is given twice; all its values are one list: --set lr=1,2,3",
        ),
        (
            ["lr=1,2,1"],
            LaunchError,
            "--set lr=1,2,1 has a value twice; each combination is one trial; give each value once",
        ),
    ],
)
def test_a_sweep_that_says_something_twice_or_nothing_is_refused(
    texts: list[str], kind: type[UserError], error: str
) -> None:
    with pytest.raises(kind, match=f"^{re.escape(error)}$"):
        sweep_of(texts)


@pytest.mark.parametrize(
    ("metric", "mode", "direction"),
    [
        ("loss", None, "minimize"),
        ("validation/loss", None, "minimize"),
        ("loss/a", None, "minimize"),
        ("loss", "max", "maximize"),
        ("accuracy", "max", "maximize"),
        ("error", "min", "minimize"),
    ],
)
def test_the_direction_is_known_of_a_loss_and_told_of_others(
    metric: str, mode: str | None, direction: str
) -> None:
    assert direction_of(metric, mode) == direction


def test_of_another_metric_the_direction_is_not_guessed() -> None:
    with pytest.raises(
        LaunchError,
        match=(
            "--metric accuracy without --mode; only for a loss is it known that less is better; give"
            " --mode"
        ),
    ):
        direction_of("accuracy", None)


def test_what_makes_another_search_and_what_does_not(tmp_path: Path) -> None:
    here = request(tmp_path).identity()
    for same in (
        {"trials": 99},
        {"parallel": 3},
        {"seed": 5},
        {"sampler": "tpe"},
        {"timeout_seconds": 5.0},
        {"storage": "sqlite:///x"},
    ):
        assert request(tmp_path, **same).identity() == here
    others = (
        {"line": ScriptLine("train.py", ["--epochs", "5"])}, {"metric": "a"}, {"direction": "maximize"},
        {"sweep": [("lr", ["1"])]},
        {"launch": LaunchOptions(set=("lr=1",))},
    )  # fmt: skip
    for changes in others:
        assert request(tmp_path, **changes).identity() != here
    one, two = (LaunchOptions(set=given) for given in (("a=1", "b=2"), ("b=2", "a=1")))
    assert request(tmp_path, launch=one).identity() == request(tmp_path, launch=two).identity()
