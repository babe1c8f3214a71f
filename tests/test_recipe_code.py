"""Digests of a recipe's functions: they differ if a function does something else, not if it only looks different."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lockstep.recipe import code
from lockstep.recipe.code import digest
from lockstep.schedule import warmup_cosine

BASE = """
SCALE = 2.0
def helper(x):
    return x + 1
class Model:
    def forward(self, x):
        return x
def function(x, offset=3):
    def inner(y):
        return y * SCALE
    return inner(helper(x)) + offset if x in {"a", "b"} else Model().forward(x)
"""


def function_of(source: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "script.py", "exec"), namespace)
    function: Callable[..., Any] = namespace["function"]
    return function


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("SCALE = 2.0", "SCALE = 3.0"),
        ("x + 1", "x + 2"),
        ("return x\n", "return -x\n"),
        ("offset=3", "offset=4"),
        ("y * SCALE", "y / SCALE"),
        ('{"a", "b"}', '{"a", "c"}'),
    ],
)
def test_what_the_function_does_counts_with_all_that_it_uses(before: str, after: str) -> None:
    assert before in BASE
    assert digest(function_of(BASE)) != digest(function_of(BASE.replace(before, after)))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("\nSCALE", "\n\n# a comment\nimport os\nUNUSED = 7\nSCALE"),
        ("def helper(x):\n", 'def helper(x):\n    """Says what it does."""\n'),
        ("x + 1", "(x  +  1)"),
    ],
)
def test_how_it_is_written_does_not(before: str, after: str) -> None:
    assert before in BASE
    assert digest(function_of(BASE)) == digest(function_of(BASE.replace(before, after)))


def scaled(factor: float) -> Callable[[float], float]:
    def loss(x: float) -> float:
        return factor * x

    return loss


def test_closures_and_partials_count_with_their_values() -> None:
    assert digest(scaled(1.0)) == digest(scaled(1.0))
    assert digest(scaled(1.0)) != digest(scaled(2.0))
    assert digest(partial(scaled, 1.0)) != digest(partial(scaled, 2.0))
    assert digest(partial(scaled, factor=1.0)) != digest(partial(scaled, other=1.0))


@pytest.mark.parametrize("other", [{"warmup": 6}, {"total": 100_000}, {"floor": 0.1}])
def test_so_does_a_schedule_of_ours(other: dict[str, Any]) -> None:
    same = {"warmup": 5, "total": 1000}
    assert digest(warmup_cosine(**same)) == digest(warmup_cosine(**same))  # type: ignore[arg-type]
    assert digest(warmup_cosine(**same)) != digest(warmup_cosine(**{**same, **other}))  # type: ignore[arg-type]


def test_so_does_a_function_of_a_library_with_its_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_is_users", lambda module: False)

    def made(number: float, found: object) -> Callable[[], object]:
        return lambda: (number, found)

    assert digest(made(1.0, object())) == digest(made(1.0, object()))
    assert digest(made(1.0, (1, "a"))) != digest(made(1.0, (2, "a")))
    assert digest(made(1.0, object())) != digest(made(2.0, object()))


def recursive(count: int) -> int:
    return count and recursive(count - 1)


def test_a_function_that_calls_itself_has_a_digest() -> None:
    assert digest(recursive) == digest(recursive)


def test_code_that_is_not_the_users_counts_by_its_name() -> None:
    assert digest(warmup_cosine) != digest(sorted)
    assert digest(len) == digest(len)


def test_torchs_wrapper_of_an_optimizers_step_does_not_count() -> None:
    import torch

    class Sam(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    before = digest(Sam)
    Sam([torch.ones(1)], lr=0.1)
    assert getattr(Sam.step, "hooked", False)
    assert digest(Sam) == before
