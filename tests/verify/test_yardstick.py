"""The unit that distances are counted in."""

from __future__ import annotations

import math

import pytest
import torch
from verify.built import built, noise

from lockstep.verify.records import EPS
from lockstep.verify.yardstick import FLOOR_ULPS, Yardstick, distance, pooled, tensor_distance

SIZE = 1000


def yardstick(sizes: dict[str, float], noises: dict[str, float], steps: int = 1, **given: object) -> Yardstick:
    """A reference with tensors of these element sizes, and three twins that differ from it by noise of these sizes, relative."""
    base = {name: size * torch.randn(SIZE, generator=torch.Generator().manual_seed(1)) for name, size in sizes.items()}
    twins = [{name: value * (1 + noises[name] * noise(seed, name, SIZE)) for name, value in base.items()} for seed in range(3)]
    return Yardstick(built([base] * steps), [built([twin] * steps) for twin in twins], **given)  # type: ignore[arg-type]


def relative(found: Yardstick, step: int = 0) -> dict[str, float]:
    marks = found.reference.first.steps[step].tensors["gradients"]
    return {name: unit / mark.norm for name, unit in found.units(step, "gradients").items() if (mark := marks[name]) is not None}


def test_the_unit_is_the_largest_distance_of_any_two() -> None:
    units = relative(yardstick({"a": 1.0, "b": 100.0, "c": 0.01}, dict.fromkeys("abc", 1e-3)))
    for unit in units.values():
        assert 0.8e-3 < unit < 3e-3


def test_twins_that_coincide_in_a_tensor_lend_it_the_noise_of_the_others() -> None:
    units = relative(yardstick({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1e-3, "b": 1e-3, "c": 0.0}))
    assert units["c"] == pytest.approx(min(units["a"], units["b"]), rel=0.3)


def test_a_tensor_that_is_nothing_but_noise_does_not_hide_faults_in_the_others() -> None:
    units = relative(yardstick({"a": 1.0, "b": 1.0, "zero": 1e-9}, {"a": 1e-6, "b": 1e-6, "zero": 2.0}))
    assert units["zero"] > 1
    assert max(units["a"], units["b"]) < 1e-5


def test_without_twins_the_unit_is_a_few_units_in_the_last_place() -> None:
    found = Yardstick(yardstick({"a": 1.0, "b": 1.0}, dict.fromkeys("ab", 0.0)).reference, [])
    assert relative(found) == pytest.approx(dict.fromkeys("ab", FLOOR_ULPS * EPS["float32"]))
    assert found.scalar(0, "loss") == pytest.approx(FLOOR_ULPS * EPS["float32"] * 1.0)


def test_a_later_step_keeps_the_unit_of_an_earlier_one() -> None:
    base = {"a": torch.ones(SIZE)}
    apart = {"a": base["a"] * (1 + 1e-3 * noise(0, "a", SIZE))}
    found = Yardstick(built([base, base]), [built([apart, base])])
    assert found.units(1, "gradients") == found.units(0, "gradients")


def test_noise_shrinks_with_the_precision_and_the_floor_is_that_of_the_subject() -> None:
    found = yardstick({"a": 1.0, "b": 1.0}, {"a": 1e-3, "b": 1e-3})
    subject = built([{name: torch.ones(SIZE, dtype=torch.float64) for name in "ab"}])
    scaled = found.in_float64(subject, [], scale=1e-6, margin=4.0)
    for name, unit in found.units(0, "gradients").items():
        assert scaled.units(0, "gradients")[name] == pytest.approx(1e-6 * unit, rel=0.2)
    exact = found.in_float64(subject, [], scale=0.0, margin=4.0)
    assert exact.units(0, "gradients")["a"] == pytest.approx(FLOOR_ULPS * EPS["float64"] * math.sqrt(SIZE))
    twin = built([{name: torch.ones(SIZE, dtype=torch.float64) * (1 + 1e-9) for name in "ab"}])
    own = found.in_float64(subject, [twin], scale=0.0, margin=4.0)
    assert own.units(0, "gradients")["a"] == pytest.approx(4e-9 * math.sqrt(SIZE), rel=0.5)


def test_a_floor_counts_for_small_tensors_by_the_size_of_the_others() -> None:
    units = yardstick({"a": 1.0, "b": 1e-6}, dict.fromkeys("ab", 0.0), floor=1e-2).units(0, "gradients")
    assert units["b"] == pytest.approx(1e-2 * math.sqrt(SIZE / 2), rel=0.1)


def test_exact_tensors_go_before_projections() -> None:
    value = torch.arange(12.0)
    one, other = built([{"a": torch.zeros(12)}]), built([{"a": value}])
    marks = (one.first.steps[0].tensors["gradients"]["a"], other.first.steps[0].tensors["gradients"]["a"])
    assert tensor_distance(one, other, 0, "gradients", "a", marks) != pytest.approx(float(value.norm()), rel=1e-6)
    one.exact, other.exact = {("gradients", 0, "a"): torch.zeros(12)}, {("gradients", 0, "a"): value}
    assert tensor_distance(one, other, 0, "gradients", "a", marks) == pytest.approx(float(value.norm()), rel=1e-6)


def test_tensors_of_one_norm_are_told_apart() -> None:
    one, other = (built([{"a": torch.tensor(value)}]).first.steps[0].tensors["gradients"]["a"] for value in ([1.0, 2.0], [2.0, 1.0]))
    assert distance(one, other) > 0.5


def test_tensors_are_pooled_by_their_squares() -> None:
    marks = built([{"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}]).first.steps[0].tensors["gradients"]
    assert pooled([0.3, 0.4], marks) == pytest.approx(0.1)
