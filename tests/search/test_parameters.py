"""`ls.param`: what a declaration may be, and where the value comes from."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, strategies as st

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.recipe import parameters
from lockstep.recipe.parameters import Declared, Parameter


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> Declared:
    """The parameters of this test alone."""
    fresh = Declared()
    monkeypatch.setattr(parameters, "declared", fresh)
    for name in (parameters.ASSIGNMENTS, parameters.RUN_DIR):
        monkeypatch.delenv(name, raising=False)
    return fresh


@pytest.fixture
def assign(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give values as `--set` does."""
    return lambda *texts: monkeypatch.setenv(parameters.ASSIGNMENTS, json.dumps(texts))


def test_alone_it_is_its_default() -> None:
    assert ls.param("lr", 3e-4, low=1e-5, high=1e-2, log=True) == 3e-4
    assert ls.param("width", 128, choices=[64, 128]) == 128
    assert ls.param("name", "a") == "a"
    assert ls.param("clip", None) is None


@pytest.mark.parametrize(
    ("text", "default", "options", "value"),
    [
        ("1e-3", 3e-4, {"low": 1e-5, "high": 1e-2}, 1e-3),
        ("1", 0.5, {}, 1.0),
        ("1e-5", 3e-4, {"low": 1e-5, "high": 1e-2}, 1e-5),
        ("-3", 0, {}, -3),
        ("true", False, {}, True),
        ("0", True, {}, False),
        ("False", True, {}, False),
        ("a=b, c", "x", {}, "a=b, c"),
        ("", "x", {}, ""),
        ("None", None, {}, None),
        ("0.5", None, {}, "0.5"),
        ("None", "x", {}, "None"),
        ("None", 1.0, {"choices": [None, 1.0]}, None),
        ("1", 0.5, {"choices": [0.5, 1.0]}, 1.0),
        ("1e2", 64, {"choices": [64, 100]}, 100),
        ("true", False, {"choices": [False, True]}, True),
        ("sgd", "adam", {"choices": ["adam", "sgd"]}, "sgd"),
        ("1.0", "1.0", {"choices": [1, "1.0"]}, "1.0"),
        ("true", True, {"choices": [True, "true"]}, "true"),
    ],
)
def test_set_gives_a_value_of_its_type(
    assign: Callable[..., None], text: str, default: Any, options: dict[str, Any], value: Any
) -> None:
    assign("other=1", f"x={text}")
    found = ls.param("x", default, **options)
    assert (found, type(found)) == (value, type(value))


BOUNDS = {"low": 0.1, "high": 1.0}
DECLARATIONS: list[tuple[Any, dict[str, Any], str]] = [
    ([1], {}, "has the default [1]; it must be a bool, int, float, str or None"),
    (
        1,
        {"choices": [1, 2], **BOUNDS},
        "has choices and bounds; it can have only one of the two; leave one out",
    ),
    (
        1,
        {"choices": [1, 2], "log": True},
        "has choices and bounds; it can have only one of the two; leave one out",
    ),
    (
        1,
        {"choices": [1, (2,)]},
        "has the choices [1, (2,)]; each is a bool, int, float, str or None",
    ),
    (
        1,
        {"choices": [1, 2, 2]},
        (
            "has the choices [1, 2, 2]; two of them are equal, or equal as text for --set; give"
            " each once"
        ),
    ),
    (
        1,
        {"choices": [1, 1.0]},
        (
            "has the choices [1, 1.0]; two of them are equal, or equal as text for --set; give each"
            " once"
        ),
    ),
    (
        1,
        {"choices": [1, "1"]},
        (
            "has the choices [1, '1']; two of them are equal, or equal as text for --set; give each"
            " once"
        ),
    ),
    (3, {"choices": [1, 2]}, "has the value 3 (default); its choices are 1, 2"),
    (True, {"choices": [1, 2]}, "has the value True (default); its choices are 1, 2"),
    (0.5, {"low": 0.1}, "has one bound; a search needs both; give low= and high="),
    (0.5, {"high": 0.1}, "has one bound; a search needs both; give low= and high="),
    (
        "a",
        BOUNDS,
        "has bounds and the default 'a'; all three are numbers; give choices= for others",
    ),
    (
        True,
        BOUNDS,
        "has bounds and the default True; all three are numbers; give choices= for others",
    ),
    (
        0.5,
        {"low": "0", "high": 1},
        "has bounds and the default 0.5; all three are numbers; give choices= for others",
    ),
    (
        0.5,
        {"low": 1.0, "high": 1.0},
        "has low=1.0 and high=1.0; low is less than high, and both are finite",
    ),
    (
        0.5,
        {"low": 0.0, "high": math.inf},
        "has low=0.0 and high=inf; low is less than high, and both are finite",
    ),
    (
        0.5,
        {"low": math.nan, "high": 1.0},
        "has low=nan and high=1.0; low is less than high, and both are finite",
    ),
    (
        1,
        {"low": 0.5, "high": 2},
        "has the integer default 1, but bounds or a step that are not whole; write 1.0, or whole numbers",
    ),
    (
        1,
        {"low": 0, "high": 2, "step": 0.5},
        "has the integer default 1, but bounds or a step that are not whole; write 1.0, or whole numbers",
    ),
    (
        0.5,
        {"low": 0.0, "high": 1.0, "log": True},
        "has log=True with low=0.0, step=None; log needs low > 0, and no step; change one",
    ),
    (
        0.5,
        {**BOUNDS, "log": True, "step": 0.1},
        "has log=True with low=0.1, step=0.1; log needs low > 0, and no step; change one",
    ),
    (
        0.5,
        {**BOUNDS, "step": 0.0},
        "has step=0.0; it must be more than 0 and at most high - low = 0.9",
    ),
    (
        1,
        {"low": 0, "high": 9, "step": math.inf},
        "has step=inf; it must be more than 0 and at most high - low = 9",
    ),
    (
        0.5,
        {**BOUNDS, "step": "1"},
        "has step='1'; it must be more than 0 and at most high - low = 0.9",
    ),
    (
        0.5,
        {"log": True},
        (
            "has log or step without bounds; both apply to values between low and high; give low= and"
            " high="
        ),
    ),
    (
        0.5,
        {"step": 0.1},
        (
            "has log or step without bounds; both apply to values between low and high; give low= and"
            " high="
        ),
    ),
    (
        2.0,
        BOUNDS,
        "has the value 2.0 (default); it must be a number from 0.1 to 1.0; change it, or the bounds",
    ),
    (
        math.nan,
        {},
        "has the value nan (default); a value is finite; give a number, or None for no value",
    ),
]


@pytest.mark.parametrize(
    ("default", "options", "text"), DECLARATIONS, ids=lambda value: str(value)[:40]
)
def test_a_declaration_that_contradicts_itself_is_refused(
    default: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        ls.param("x", default, **options)
    assert str(raised.value) == f"the parameter 'x' {text}"


def test_no_choices_are_refused() -> None:
    with pytest.raises(
        RecipeError,
        match=re.escape("ls.param('x', ..., choices=[]); give at least one value, or leave"),
    ):
        ls.param("x", 1, choices=[])


@pytest.mark.parametrize("name", ["", "2x", "a b", "a=b", 3])
def test_a_name_is_a_word(name: Any) -> None:
    with pytest.raises(
        RecipeError,
        match=re.escape(
            f"ls.param({name!r}, ...); a name is letters, digits, '_', '.' and '-'; choose such"
        ),
    ):
        ls.param(name, 1)


@pytest.mark.parametrize(
    ("text", "default", "options", "error"),
    [
        (
            "fast",
            0.1,
            {},
            "has the value 'fast' (--set); it must be a number, like its default 0.1",
        ),
        (
            "0.5",
            1,
            {},
            "has the value '0.5' (--set); it must be a whole number, like its default 1",
        ),
        ("yes", True, {}, "has the value 'yes' (--set); it must be true or false"),
        (
            "inf",
            0.1,
            {},
            "has the value inf (--set); a value is finite; give a number, or None for no value",
        ),
        (
            "2.0",
            0.5,
            BOUNDS,
            "has the value 2.0 (--set); it must be a number from 0.1 to 1.0; change it, or the bounds",
        ),
        (
            "0.01",
            0.5,
            BOUNDS,
            "has the value 0.01 (--set); it must be a number from 0.1 to 1.0; change it, or the bounds",
        ),
        (
            "nan",
            0.5,
            BOUNDS,
            "has the value nan (--set); a value is finite; give a number, or None for no value",
        ),
        ("3", 1, {"choices": [1, 2]}, "has the value '3' (--set); its choices are 1, 2"),
        (
            "none",
            None,
            {"choices": [None, 1]},
            "has the value 'none' (--set); its choices are None, 1",
        ),
    ],
)
def test_a_text_that_is_no_value_of_it_is_refused(
    assign: Callable[..., None], text: str, default: Any, options: Any, error: str
) -> None:
    assign(f"x={text}")
    with pytest.raises(RecipeError) as raised:
        ls.param("x", default, **options)
    assert str(raised.value) == f"the parameter 'x' {error}"


@pytest.mark.parametrize("text", ["lr", "=1", "l r=1", ""])
def test_an_assignment_is_a_name_and_a_value(text: str) -> None:
    with pytest.raises(
        RecipeError,
        match=re.escape(
            f"--set {text!r}; it must be a parameter's name and its value: --set lr=1e-3"
        ),
    ):
        parameters.split_assignment(text)


def test_asked_for_twice_it_has_one_value_and_with_other_bounds_it_is_refused() -> None:
    assert ls.param("lr", 0.1, low=0.01, high=1.0) == ls.param("lr", 0.1, low=0.01, high=1.0) == 0.1
    with pytest.raises(RecipeError) as raised:
        ls.param("lr", 0.1, low=0.01, high=2.0, log=True)
    assert (
        str(raised.value)
        == "the parameter 'lr' is declared twice, with high=1.0 and 2.0, log=False and True; it"
        " has one declaration; declare it once"
    )


def test_after_the_recipe_was_made_none_is_added() -> None:
    nothing: Any = lambda *_: None  # noqa: E731
    assert ls.param("lr", 0.1) == 0.1
    ls.Recipe(
        model=nothing,
        data=[1],
        loss=nothing,
        optimizer=nothing,
        global_batch=8,
        microbatch=4,
        steps=5,
    )
    assert ls.param("lr", 0.1) == 0.1
    with pytest.raises(RecipeError) as raised:
        ls.param("width", 2)
    assert (
        str(raised.value)
        == "ls.param('width', ...) after the recipe was made; values of parameters are part of the"
        " recipe; declare all of them before ls.Recipe(...)"
    )


def test_a_value_for_a_parameter_that_is_not_there_is_refused(declared: Declared) -> None:
    given = {parameters.ASSIGNMENTS: '["lr=1", "wdith=2"]'}
    with pytest.raises(
        RecipeError,
        match=("has not declared before its recipe; it has declared none; correct the name, or "),
    ):
        declared.check_all_used(given)
    ls.param("lr", 0.1)
    ls.param("width", 2)
    with pytest.raises(
        RecipeError,
        match=r"^--set wdith=\.\.\. or a search .* it has declared lr, width; correct the name",
    ):
        declared.check_all_used(given)
    declared.check_all_used({parameters.ASSIGNMENTS: '["lr=1"]'})


class TestOfTheRunThatIsResumed:
    """Values in its run.json."""

    @pytest.fixture(autouse=True)
    def run_dir(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        saved = {"recipe": {"parameters": {"lr": 0.5, "width": 4, "clip": None, "flag": True}}}
        (tmp_path / "run.json").write_text(json.dumps(saved))
        monkeypatch.setenv(parameters.RUN_DIR, str(tmp_path))

    def test_they_are_taken_up(self) -> None:
        assert ls.param("lr", 0.1, low=0.01, high=1.0) == 0.5
        assert ls.param("width", 2, choices=[2, 4]) == 4
        assert ls.param("clip", None) is None
        assert ls.param("flag", False) is True
        assert ls.param("new", 7) == 7

    def test_set_goes_before(self, assign: Callable[..., None]) -> None:
        assign("lr=0.25")
        assert ls.param("lr", 0.1) == 0.25
        assert ls.param("width", 2) == 4

    @pytest.mark.parametrize(
        ("name", "default", "options", "error"),
        [
            (
                "lr",
                0.1,
                {"low": 0.01, "high": 0.2},
                (
                    "has the value 0.5 (of the run in {}); it must be a number from 0.01 to 0.2; change"
                    " it, or the bounds"
                ),
            ),
            (
                "lr",
                1,
                {"low": 0, "high": 2},
                "has the value '0.5' (of the run in {}); it must be a whole number, like its default 1",
            ),
            (
                "width",
                2,
                {"choices": [1, 2]},
                "has the value '4' (of the run in {}); its choices are 1, 2",
            ),
        ],
    )
    def test_those_that_it_cannot_have_any_more_are_refused(
        self, tmp_path: Path, name: str, default: Any, options: Any, error: str
    ) -> None:
        with pytest.raises(RecipeError) as raised:
            ls.param(name, default, **options)
        assert str(raised.value) == f"the parameter {name!r} {error.format(tmp_path)}"

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"recipe": null}', '{"recipe": []}'])
    def test_a_run_without_any_gives_none(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "run.json").write_text(text)
        assert ls.param("lr", 0.1) == 0.1


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"default": 2, "choices": (1, 2)}, [1, 2]),
        ({"default": 2, "low": 1, "high": 4}, [1, 2, 3, 4]),
        ({"default": 3, "low": 1, "high": 6, "step": 2}, [1, 3, 5]),
        ({"default": 0.1, "low": 0.0, "high": 0.3, "step": 0.1}, [0.0, 0.1, 0.2, 0.3]),
        ({"default": 0.1, "low": 0.0, "high": 0.25, "step": 0.1}, [0.0, 0.1, 0.2]),
        ({"default": 0.3, "low": 0.0, "high": 1.0, "step": 0.3}, [0.0, 0.3, 0.6, 0.9]),
        ({"default": 0.1, "low": 0.0, "high": 0.3}, None),
        ({"default": 2, "low": 1, "high": 4, "log": True}, None),
        ({"default": 2}, None),
    ],
)
def test_its_values_where_they_are_countable(options: Any, values: list[Any] | None) -> None:
    parameter = Parameter(name="x", **options)
    assert (None if parameter.values is None else list(parameter.values)) == values
    for value in parameter.values or ():
        parameter.check(value, "test")


def test_a_large_range_of_whole_numbers_takes_no_memory() -> None:
    values = Parameter(name="seed", default=0, low=0, high=10**15).values
    assert values is not None
    assert len(values) == 10**15 + 1


ANY = st.one_of(
    st.booleans(), st.integers(-(10**6), 10**6), st.floats(allow_nan=False, allow_infinity=False),
    st.none(), st.text(max_size=3),
    st.sampled_from(["True", "true", "1", "1.0", "None", "0", "1e0"]),
)  # fmt: skip


@given(st.lists(ANY, min_size=1, max_size=6))
def test_each_choice_is_read_back_from_its_text(choices: list[Any]) -> None:
    assume(len({str(each) for each in choices}) == len(set(choices)) == len(choices))
    parameter = Parameter(name="x", default=choices[0], choices=tuple(choices))
    for choice in choices:
        found = parameter.read(str(choice), "test")
        assert (found, type(found)) == (choice, type(choice))


@given(ANY)
def test_each_value_is_read_back_from_its_text(value: Any) -> None:
    found = Parameter(name="x", default=value).read(str(value), "test")
    assert (found, type(found)) == (value, type(value))


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.floats(0.0, 1.0), st.booleans())
def test_each_number_between_the_bounds_is_read_back_from_its_text(
    low: float, width: float, part: float, is_int: bool
) -> None:
    low, high = (math.floor(low), math.floor(low + width) + 1) if is_int else (low, low + width)
    assume(low < high)
    parameter = Parameter(name="x", default=low, low=low, high=high)
    value: Any = min(high, low + part * (high - low))
    value = int(value) if is_int else value
    found = parameter.read(str(value), "test")
    assert (found, type(found)) == (value, type(value))


@given(ANY, st.booleans())
def test_a_description_is_json_and_makes_it_again(value: Any, is_one_of_several: bool) -> None:
    parameter = Parameter(
        name="x", default=value, choices=(value, "another one") if is_one_of_several else ()
    )
    assert Parameter.of(json.loads(json.dumps(parameter.describe()))) == parameter
