"""Hyper-parameters of a script, whose values come from `--set`, a search or the resumed run. A
script declares all hyper-parameters before its first recipe."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from lockstep.base.errors import RecipeError
from lockstep.base.files import read_object
from lockstep.recipe.checks import is_int_or_float

Value = bool | int | float | str | None
T = TypeVar("T", bool, int, float, str, None)

ASSIGNMENTS = "LOCKSTEP_SET"
"""Environment variable with a JSON list of texts `name=value`."""
RUN_DIR = "LOCKSTEP_RUN_DIR"
_NAME = re.compile(r"[A-Za-z_][\w.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A declared hyper-parameter."""

    name: str
    default: Value
    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = None
    """Distance between allowed values, counted from `low`. With None, any value is allowed; an int
    may be any whole number."""
    choices: tuple[Value, ...] = ()
    """All allowed values. Empty: every value between the bounds is allowed."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise RecipeError(
                f"ls.param({self.name!r}, ...); a name is letters, digits, '_', '.' and '-'; choose"
                " such a name"
            )
        if not isinstance(self.default, bool | int | float | str | None):
            raise self._error(
                f"has the default {self.default!r}; it must be a bool, int, float, str or None"
            )
        if self.choices:
            self._check_choices()
        elif self.low is not None or self.high is not None:
            self._check_bounds()
        elif self.log or self.step is not None:
            raise self._error(
                "has log or step without bounds; both apply to values between low and high; give"
                " low= and high="
            )
        self.check(self.default, "default")

    def _check_choices(self) -> None:
        if self.low is not None or self.high is not None or self.log or self.step is not None:
            raise self._error(
                "has choices and bounds; it can have only one of the two; leave one out"
            )
        if not all(isinstance(each, bool | int | float | str | None) for each in self.choices):
            raise self._error(
                f"has the choices {list(self.choices)}; each is a bool, int, float, str or None"
            )
        if min(len({str(each) for each in self.choices}), len(set(self.choices))) < len(
            self.choices
        ):
            raise self._error(
                f"has the choices {list(self.choices)}; two of them are equal, or equal as text for"
                " --set; give each once"
            )

    def _check_bounds(self) -> None:
        if self.low is None or self.high is None:
            raise self._error("has one bound; a search needs both; give low= and high=")
        if not all(map(is_int_or_float, (self.low, self.high, self.default))):
            raise self._error(
                f"has bounds and the default {self.default!r}; all three are numbers; give choices="
                " for others"
            )
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise self._error(
                f"has low={self.low} and high={self.high}; low is less than high, and both are"
                " finite"
            )
        if self.step is not None and not (
            isinstance(self.step, int | float) and 0 < self.step <= self.high - self.low
        ):
            raise self._error(
                f"has step={self.step!r}; it must be more than 0 and at most high - low ="
                f" {self.high - self.low}"
            )
        if self.is_int and any(
            each is not None and each != int(each) for each in (self.low, self.high, self.step)
        ):
            raise self._error(
                f"has the integer default {self.default}, but bounds or a step that are not whole;"
                f" write {self.default}.0, or whole numbers"
            )
        if self.log and (self.low <= 0 or self.step is not None):
            raise self._error(
                f"has log=True with low={self.low}, step={self.step}; log needs low > 0, and no"
                " step; change one"
            )

    @property
    def is_int(self) -> bool:
        return isinstance(self.default, int) and not isinstance(self.default, bool)

    @property
    def is_searched(self) -> bool:
        return bool(self.choices) or self.low is not None

    @property
    def values(self) -> Sequence[Value] | None:
        """None if the values cannot be listed."""
        if self.choices:
            return self.choices
        if (
            self.low is None
            or self.high is None
            or self.log
            or (self.step is None and not self.is_int)
        ):
            return None
        if self.is_int:
            return range(int(self.low), int(self.high) + 1, int(self.step or 1))
        assert self.step is not None, "else they are not countable"
        # 3 * 0.1 > 0.3
        low, high, step = (Decimal(str(each)) for each in (self.low, self.high, self.step))
        return [float(low + number * step) for number in range(int((high - low) / step) + 1)]

    def check(self, value: Value, source: str) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            raise self._error(
                f"has the value {value!r} ({source}); a value is finite; give a number, or None for"
                " no value"
            )
        if self.choices and not any(
            value == each and type(value) is type(each) for each in self.choices
        ):
            raise self._error(
                f"has the value {value!r} ({source}); its choices are"
                f" {', '.join(map(repr, self.choices))}"
            )
        if self.low is None or self.high is None:
            return
        if not is_int_or_float(value) or not self.low <= value <= self.high:
            raise self._error(
                f"has the value {value!r} ({source}); it must be a number from {self.low} to"
                f" {self.high}; change it, or the bounds"
            )

    def read(self, text: str, source: str) -> Value:
        value: Value
        if self.choices:
            same = [each for each in self.choices if text == str(each)] or [
                each for each in self.choices if _same(text, each)
            ]
            value = same[0] if same else text
        elif isinstance(self.default, bool):
            if text.lower() not in ("true", "false", "1", "0"):
                raise self._error(f"has the value {text!r} ({source}); it must be true or false")
            value = text.lower() in ("true", "1")
        elif isinstance(self.default, int | float):
            try:
                value = int(text) if self.is_int else float(text)
            except ValueError:
                kind = "a whole number" if self.is_int else "a number"
                raise self._error(
                    f"has the value {text!r} ({source}); it must be {kind}, like its default"
                    f" {self.default}"
                ) from None
        else:
            value = None if self.default is None and text == "None" else text
        self.check(value, source)
        return value

    def describe(self) -> dict[str, Any]:
        return {
            name: list(value) if isinstance(value := getattr(self, name), tuple) else value
            for name in self.__slots__
        }

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Parameter:
        return cls(**{**described, "choices": tuple(described["choices"])})

    def _error(self, text: str) -> RecipeError:
        return RecipeError(f"the parameter {self.name!r} {text}")


def _same(text: str, choice: Value) -> bool:
    if isinstance(choice, bool) and text.lower() == str(choice).lower():
        return True
    try:
        return is_int_or_float(choice) and float(text) == choice
    except ValueError:
        return False


def param(
    name: str,
    default: T,
    *,
    low: float | None = None,
    high: float | None = None,
    log: bool = False,
    step: float | None = None,
    choices: Sequence[T] | None = None,
) -> T:
    """Return the value of a hyper-parameter: from `--set name=value`, the trial of a search, or the
    resumed run. Return `default` if no value is given. The value is the same on every rank.

    - `low`, `high`: bounds, both inclusive.
    - `choices`: all allowed values, instead of bounds. Without bounds and choices, a search does
      not vary the parameter.
    - `log`: a search samples the logarithm of the value. `step`: distance between values.
    - With an int `default`, all values are whole numbers.

    Call `param` on every rank, before the `Recipe` is created. The run directory's `run.json`
    contains the values of all hyper-parameters. Raises `RecipeError` for contradictory values, for
    a parameter that is declared twice in different ways, and after the recipe was created.
    """
    if choices is not None and len(choices) == 0:
        raise RecipeError(
            f"ls.param({name!r}, ..., choices={choices!r}); give at least one value, or leave"
            " choices out"
        )
    declaration = Parameter(
        name=name,
        default=default,
        low=low,
        high=high,
        log=log,
        step=step,
        choices=tuple(choices or ()),
    )
    value: Any = declared.add(declaration, os.environ)
    return value  # type: ignore[no-any-return]


class Declared:
    def __init__(self) -> None:
        self.parameters: dict[str, Parameter] = {}
        self.values: dict[str, Value] = {}
        self.is_closed = False

    def add(self, parameter: Parameter, environ: Mapping[str, str]) -> Value:
        name, before = parameter.name, self.parameters.get(parameter.name)
        if before is not None and before != parameter:
            changed = [
                f"{key}={old!r} and {new!r}"
                for key, new in parameter.describe().items()
                if (old := before.describe()[key]) != new
            ]
            raise RecipeError(
                f"the parameter {name!r} is declared twice, with {', '.join(changed)}; it has one"
                " declaration; declare it once"
            )
        if before is None:
            if self.is_closed:
                raise RecipeError(
                    f"ls.param({name!r}, ...) after the recipe was made; values of parameters are"
                    " part of the recipe; declare all of them before ls.Recipe(...)"
                )
            self.values[name] = _value(parameter, environ)
            self.parameters[name] = parameter
        return self.values[name]

    def close(self) -> None:
        self.is_closed = True

    def check_all_used(self, environ: Mapping[str, str]) -> None:
        unknown = [name for name in given_values(environ) if name not in self.parameters]
        if unknown:
            there = ", ".join(self.parameters) or "none"
            raise RecipeError(
                f"--set {unknown[0]}=... or a search names a parameter that the script has not"
                f" declared before its recipe; it has declared {there}; correct the name, or"
                " call ls.param unconditionally"
            )

    def describe(self) -> list[dict[str, Any]]:
        return [parameter.describe() for parameter in self.parameters.values()]


declared = Declared()


def given_values(environ: Mapping[str, str]) -> dict[str, str]:
    return dict(
        map(split_assignment, read_assignments(environ.get(ASSIGNMENTS) or "[]", ASSIGNMENTS))
    )


def read_assignments(text: str, name: str) -> tuple[str, ...]:
    try:
        assignments = json.loads(text)
    except ValueError:
        assignments = None
    if not isinstance(assignments, list) or not all(isinstance(each, str) for each in assignments):
        raise RecipeError(
            f'{name}={text!r}; it must be a JSON list of texts: ["lr=1e-3"];'
            " correct what sets it, or"
            " unset it"
        )
    return tuple(assignments)


def split_assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise RecipeError(
            f"--set {text!r}; it must be a parameter's name and its value: --set lr=1e-3"
        )
    return name, value


def saved_values(run_dir: Path) -> dict[str, Value]:
    try:
        described = read_object(run_dir, "run.json")["recipe"]["parameters"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    values = described.items() if isinstance(described, dict) else ()
    return {
        name: value for name, value in values if _NAME.fullmatch(name) and isinstance(value, Value)
    }


def _value(parameter: Parameter, environ: Mapping[str, str]) -> Value:
    given = given_values(environ)
    if parameter.name in given:
        return parameter.read(given[parameter.name], "--set")
    run_dir = environ.get(RUN_DIR)
    saved = saved_values(Path(run_dir)) if run_dir else {}
    if parameter.name in saved:
        return parameter.read(str(saved[parameter.name]), f"of the run in {run_dir}")
    return parameter.default
