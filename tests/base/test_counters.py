"""Numbers that each call of the user's code changes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from lockstep.base.counters import (
    carried,
    changed_each_time,
    numbers_of_dataset,
    numbers_of_functions,
    numbers_of_model,
)

calls = 0


def of_its_module(output: Any, batch: Any) -> float:
    global calls
    calls += 1
    return factor()


def factor() -> float:
    return 0.5 if calls > 9 else 1.0


def for_a_log(output: Any, batch: Any) -> None:
    global logged
    logged += len(batch)


logged = 0


def of_a_closure(*, used: bool = True) -> Any:
    seen = {"samples": 0}
    first, again, losses = 0, False, 0

    @torch.no_grad()
    def loss(output: Any, batch: Any) -> Any:
        nonlocal first, again, losses
        losses += 1
        seen["samples"] += len(batch)
        first, again = first or len(batch), True
        return len(batch)

    @torch.no_grad()
    def uses(output: Any, batch: Any) -> Any:
        return loss(output, batch) / seen["samples"]

    return uses if used else loss


class Memory:
    """A loss that uses its memory after a few calls. Its logs may grow."""

    def __init__(self) -> None:
        self.calls, self.samples, self.weight, self.log = 0, 0, 0.5, [0.0]

    def __call__(self, output: Any, batch: Any) -> float:
        self.calls += 1
        self.samples += len(batch)
        self.log.append(self.weight)
        return self.weight if self.calls > 9 else 0.0

    def method(self, output: Any, batch: Any) -> None:
        self(output, batch)


class Trainer:
    """An object that cannot be called, with a loss among its methods."""

    def __init__(self) -> None:
        self.calls, self.samples = 0, 0

    def loss(self, output: Any, batch: Any) -> int:
        self.calls += 1
        self.samples += len(batch)
        return self.calls


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (of_its_module, ["calls"]),
        (for_a_log, []),
        (of_a_closure(), ["seen['samples']"]),
        (of_a_closure(used=False), []),
        (Memory(), ["calls"]),
        (Memory().method, ["calls"]),
        (Trainer().loss, ["calls"]),
        (functools.partial(Memory(), batch=[1]), ["calls"]),
        ("".format, []),  # without Python code
        (lambda output, batch: len(batch), []),
    ],
)
def test_the_numbers_that_each_call_changes_and_uses_are_named(
    function: Any, expected: list[str]
) -> None:
    found = [numbers_of_functions([function])]
    for _ in range(2):
        function(None, batch=[1, 2])
        found.append(numbers_of_functions([function]))
    assert changed_each_time(*found) == expected


class Reversal(nn.Module):
    """Counts its forwards, and notes the first one and the size of the latest."""

    def __init__(self) -> None:
        super().__init__()
        self.iteration, self.is_built, self.rows = 0, False, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.iteration, self.is_built, self.rows = self.iteration + 1, True, len(x)
        return x


def test_a_number_that_stays_nan_has_not_changed() -> None:
    model = nn.Linear(1, 1)
    model.best = float("nan")
    assert changed_each_time(*[dict(numbers_of_model(model)) for _ in range(3)]) == []


def test_a_counter_in_a_module_is_named_by_its_path() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Reversal())
    found = [dict(numbers_of_model(model))]
    for _ in range(2):
        model(torch.ones(3, 2))
        found.append(dict(numbers_of_model(model)))
    assert changed_each_time(*found) == ["1.iteration"]


class Tally:
    """An object of the user's."""

    def __init__(self) -> None:
        self.calls, self.total = 0, 0

    def add(self, count: int) -> None:
        self.total += count


forwards = 0


class Counts(nn.Module):
    """Counts its forwards in a list, an object and a variable of its module, and for a log."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.log, self.tally, self.only_logged = [0], [0.0], Tally(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global forwards
        forwards += 1
        self.only_logged += 1
        self.calls[0] += 1
        self.tally.calls += 1
        self.tally.add(1)
        self.log.append(1.0)
        return x if self.calls[0] + forwards + self.tally.calls > 9 else 2 * x


def test_counters_in_lists_objects_and_variables_are_named_but_not_those_for_a_log() -> None:
    model = nn.Sequential(Counts())
    found = [dict(numbers_of_model(model))]
    for _ in range(2):
        model(torch.ones(1))
        found.append(dict(numbers_of_model(model)))
    changed = changed_each_time(*found)
    assert sorted(changed) == ["0.calls[0]", "0.only_logged", "0.tally.calls", "forwards"]
    assert carried(model, changed) == ["0.calls[0]", "0.tally.calls", "forwards"]


class Cached(torch.utils.data.Dataset[int]):
    """Counts its hits for a log, and its misses, which its samples depend on."""

    def __init__(self) -> None:
        self.hits, self.misses = 0, 0

    def __getitem__(self, index: int) -> int:
        return self.look_up(index)

    def look_up(self, index: int) -> int:
        self.hits += 1
        self.misses += 1
        return index + (self.misses > 9)


def test_a_number_of_a_dataset_counts_if_its_samples_depend_on_it() -> None:
    data = Cached()
    found = [numbers_of_dataset(data)]
    for _ in range(2):
        _ = data[0]
        found.append(numbers_of_dataset(data))
    assert changed_each_time(*found) == ["misses"]


class Growing(torch.utils.data.Dataset[int]):
    """Counts its reads; and knows which file is open."""

    def __init__(self) -> None:
        self.reads, self.open_file = 0, -1

    def __getitem__(self, index: int) -> int:
        self.reads, self.open_file = self.reads + 1, index // 2
        return index


def test_a_number_that_is_not_one_is_not_changed() -> None:
    model = nn.Linear(2, 2)
    model.fill = model.worst = float("nan")  # type: ignore[assignment]
    before = numbers_of_model(model)
    model.worst = 1.0  # type: ignore[assignment]
    assert changed_each_time(before, before, numbers_of_model(model)) == []


class Logs(nn.Module):
    """Sets numbers in each forward for a log, and uses one of an earlier forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale, self.mean, self.log = 0.0, 1.0, 0.0, {"norm": 0.0, "mean": 0.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm = x.norm().item()
        self.log["norm"] = self.norm
        return x / (1.0 + self.average(x))

    @torch.no_grad()
    def average(self, x: torch.Tensor) -> float:
        self.mean = 0.9 * self.mean + 0.1 * x.mean().item()
        return self.mean


class LogsTwice(Logs):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log["mean"] += x.mean().item()
        self.scale = x.std().item()
        return super().forward(x) * grown(self)


def grown(module: Any) -> float:
    return 1.0 + float(getattr(module, "scale", 0.0))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Logs, ["0.mean"]), (LogsTwice, ["0.mean", "0.scale"])],
)
def test_numbers_that_no_forward_reads_before_it_sets_them_are_not_carried(
    kind: type[nn.Module], expected: list[str]
) -> None:
    model = nn.Sequential(kind())
    assert carried(model, numbers_of_model(model)) == expected


def test_each_number_of_a_model_without_python_code_may_be_carried() -> None:
    model = nn.Linear(2, 2)
    model.forward = functools.partial(print)  # type: ignore[method-assign]
    assert carried(nn.Sequential(model), ["0.calls"]) == ["0.calls"]


def test_a_dataset_inside_a_subset_is_looked_at_too() -> None:
    data = Subset(Growing(), [0, 1, 2])
    found = [numbers_of_dataset(data)]
    for _ in range(2):
        _ = [data[place] for place in range(3)]
        found.append(numbers_of_dataset(data))
    assert changed_each_time(*found) == ["reads"]
