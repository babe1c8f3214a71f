"""Digests of a recipe's functions: they differ if a function does something else, not if it only
looks different."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lockstep.base import contents
from lockstep.data.digests import differing_part
from lockstep.recipe.code import digest_function, note_source, other_sources, parts, programs, texts
from lockstep.schedule import warmup_cosine

BASE = """
import types
SCALE = 2.0
TABLE = {"scale": [2.0]}
config = types.SimpleNamespace(width=3, unused=0)
class Settings:
    rate = 0.1
class Model0:
    @staticmethod
    def fixed(x):
        return x * 5
    @property
    def half(self):
        return 0.5
def helper(x):
    return x + 1
class Model:
    def forward(self, x):
        return x
def function(x, offset=3):
    def inner(y):
        return y * SCALE
    found = TABLE["scale"][0] + config.width + Settings.rate + Model0.fixed(x) + Model0().half
    return inner(helper(x)) + offset + found if x in {"a", "b"} else Model().forward(x)
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
        ("[2.0]", "[3.0]"),
        ("width=3", "width=4"),
        ("rate = 0.1", "rate = 0.2"),
        ("x * 5", "x * 6"),
        ("return 0.5", "return 0.25"),
    ],
)
def test_what_the_function_does_counts_with_all_that_it_uses(before: str, after: str) -> None:
    assert before in BASE
    assert digest_function(function_of(BASE)) != digest_function(
        function_of(BASE.replace(before, after))
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("\nSCALE", "\n\n# a comment\nimport os\nUNUSED = 7\nSCALE"),
        ("def helper(x):\n", 'def helper(x):\n    """Says what it does."""\n'),
        ("x + 1", "(x  +  1)"),
        ("unused=0", "unused=1"),
    ],
)
def test_how_it_is_written_does_not(before: str, after: str) -> None:
    assert before in BASE
    assert digest_function(function_of(BASE)) == digest_function(
        function_of(BASE.replace(before, after))
    )


def scaled(factor: float) -> Callable[[float], float]:
    def loss(x: float) -> float:
        return factor * x

    return loss


def test_closures_and_partials_count_with_their_values() -> None:
    assert digest_function(scaled(1.0)) == digest_function(scaled(1.0))
    assert digest_function(scaled(1.0)) != digest_function(scaled(2.0))
    assert digest_function(partial(scaled, 1.0)) != digest_function(partial(scaled, 2.0))
    assert digest_function(partial(scaled, factor=1.0)) != digest_function(
        partial(scaled, other=1.0)
    )


@pytest.mark.parametrize("other", [{"warmup": 6}, {"total": 100_000}, {"floor": 0.1}])
def test_so_does_a_schedule_of_ours(other: dict[str, Any]) -> None:
    same = {"warmup": 5, "total": 1000}
    assert digest_function(warmup_cosine(**same)) == digest_function(warmup_cosine(**same))  # type: ignore[arg-type]
    assert digest_function(warmup_cosine(**same)) != digest_function(
        warmup_cosine(**{**same, **other})
    )  # type: ignore[arg-type]


def test_so_does_a_function_of_a_library_with_its_numbers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contents, "is_users", lambda module: False)

    def made(number: float, found: object) -> Callable[[], object]:
        return lambda: (number, found)

    assert digest_function(made(1.0, object())) == digest_function(made(1.0, object()))
    assert digest_function(made(1.0, (1, "a"))) != digest_function(made(1.0, (2, "a")))
    assert digest_function(made(1.0, object())) != digest_function(made(2.0, object()))


def recursive(count: int) -> int:
    return count and recursive(count - 1)


def test_a_function_that_calls_itself_has_a_digest() -> None:
    assert digest_function(recursive) == digest_function(recursive)


def test_code_that_is_not_the_users_counts_by_its_name() -> None:
    assert digest_function(warmup_cosine) != digest_function(sorted)
    assert digest_function(len) == digest_function(len)


def test_torchs_wrapper_of_an_optimizers_step_does_not_count() -> None:
    import torch

    class Sam(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    before = digest_function(Sam)
    Sam([torch.ones(1)], lr=0.1)
    assert getattr(Sam.step, "hooked", False)
    assert digest_function(Sam) == before


def loss_with(content: Any) -> Callable[..., Any]:
    return lambda: content


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("torch.ones(3)", "torch.zeros(3)"),
        ("np.ones(3)", "np.zeros(3)"),
        ("nn.CrossEntropyLoss(label_smoothing=0.1)", "nn.CrossEntropyLoss(label_smoothing=0.2)"),
        ("nn.CrossEntropyLoss(weight=torch.ones(3))", "nn.CrossEntropyLoss(weight=torch.zeros(3))"),
        ("nn.Linear(2, 2)", "nn.Linear(2, 3)"),
        ("{1: 2}", "{1: 3}"),
        ("torch.ones(2**24 + 1)", "torch.cat([torch.ones(2**24), torch.zeros(1)])"),
    ],
)
def test_tensors_and_objects_count_with_their_values(one: str, other: str) -> None:
    import numpy as np
    import torch
    from torch import nn

    names = {"np": np, "torch": torch, "nn": nn}
    # of trained parameters, the shape counts
    assert digest_function(loss_with(eval(one, names))) == digest_function(
        loss_with(eval(one, names))
    )
    assert digest_function(loss_with(eval(one, names))) != digest_function(
        loss_with(eval(other, names))
    )


def test_the_source_of_a_module_counts_without_comments_and_docstrings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str, text: str) -> str:
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        module = ModuleType(name)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, name, module)
        note_source(str(path), text.encode())
        path.write_text("edited = True")
        texts.cache_clear()
        try:
            return programs([name])[name]
        finally:
            texts.cache_clear()

    first = found("edited_a", "x = 1\ndef f():\n    return x\n")
    assert (
        found(
            "edited_b",
            '"""A module."""\nx = 1  # one\n\ndef f():\n    """Return x."""\n    return x\n',
        )
        == first
    )
    assert found("edited_c", "x = 2\ndef f():\n    return x\n") != first
    assert found("edited_d", "not python") != first


def test_versions_are_compared_of_modules_that_both_have() -> None:
    assert other_sources({"a": "1", "b": "2", "c": "3"}, {"b": "2", "c": "4", "d": "5"}) == ["c"]


def test_what_is_in_an_object_counts_where_it_is_asked_for() -> None:
    one, other = (loss_with(SimpleNamespace(rate=rate)) for rate in (1, 2))
    assert digest_function(one) == digest_function(other)
    assert differing_part(parts(one, objects=True), parts(other, objects=True)) == "content.rate"


def test_of_an_object_that_is_left_out_only_the_class_counts() -> None:
    class Counter:
        number = 0

        def count(self) -> int:
            self.number += 1
            return self.number

    def found(counter: Any, content: Any, left_out: Any) -> dict[str, str]:
        def reads_all() -> Any:
            return content

        def reads_an_attribute() -> Any:
            return counter.number

        functions = [reads_all, reads_an_attribute, counter.count]
        return parts(functions, objects=True, unread=frozenset([id(left_out)]))

    one, other = Counter(), Counter()
    other.count()
    for held in (lambda it: it, lambda it: {"a": [it]}, lambda it: SimpleNamespace(it=it)):
        assert found(one, held(one), one) == found(other, held(other), other)
        assert found(one, held(one), None) != found(other, held(other), None)
    assert found(one, one, one) != found(one, SimpleNamespace(number=0), one)


def test_the_environment_and_loggers_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("of a test")
    function = loss_with([os.environ, logger])
    before = parts(function, objects=True)
    monkeypatch.setenv("SOMETHING", "new")
    logger.setLevel(logging.DEBUG)
    assert parts(function, objects=True) == before
