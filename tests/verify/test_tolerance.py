"""Rounding, as perturbed runs measure it: the unit of distances and of the tolerance."""

from __future__ import annotations

import math

import pytest
import torch
from verify.built import built, noise

from lockstep.evidence.tensors import EPS, distance, pooled
from lockstep.evidence.tolerance import MINIMUM_ULPS, MeasuredRounding
from lockstep.evidence.trace import tensor_distance

SIZE = 1000


def measured(
    sizes: dict[str, float], noises: dict[str, float], steps: int = 1, **options: float
) -> MeasuredRounding:
    """Return the rounding of tensors with elements of `sizes`, from three perturbed runs with
    relative noise of `noises`."""
    reference = {
        name: size * torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
        for name, size in sizes.items()
    }
    perturbed = [
        {
            name: value * (1 + noises[name] * noise(seed, name, SIZE))
            for name, value in reference.items()
        }
        for seed in range(3)
    ]
    return MeasuredRounding(
        built([reference] * steps), [built([tensors] * steps) for tensors in perturbed], **options
    )


def relative(rounding: MeasuredRounding, step: int = 0) -> dict[str, float]:
    summaries = rounding.reference.rank_0.steps[step].tensors["gradients"]
    found = rounding.of_tensors(step, "gradients")
    return {
        name: value / summary.norm
        for name, value in found.items()
        if (summary := summaries[name]) is not None
    }


def test_rounding_is_the_largest_distance_between_any_two_runs() -> None:
    for value in relative(
        measured({"a": 1.0, "b": 100.0, "c": 0.01}, dict.fromkeys("abc", 1e-3))
    ).values():
        assert 0.8e-3 < value < 3e-3


def test_a_tensor_that_is_equal_in_all_runs_has_the_typical_rounding_of_the_others() -> None:
    found = relative(measured({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1e-3, "b": 1e-3, "c": 0.0}))
    assert found["c"] == pytest.approx(min(found["a"], found["b"]), rel=0.3)


def test_a_tensor_of_noise_alone_does_not_hide_faults_in_the_others() -> None:
    found = relative(
        measured({"a": 1.0, "b": 1.0, "zero": 1e-9}, {"a": 1e-6, "b": 1e-6, "zero": 2.0})
    )
    assert found["zero"] > 1
    assert max(found["a"], found["b"]) < 1e-5


def test_without_perturbed_runs_rounding_is_a_few_units_in_the_last_place() -> None:
    found = MeasuredRounding(measured({"a": 1.0, "b": 1.0}, dict.fromkeys("ab", 0.0)).reference, [])
    assert relative(found) == pytest.approx(dict.fromkeys("ab", MINIMUM_ULPS * EPS["float32"]))
    assert found.of_scalar(0, "loss") == pytest.approx(MINIMUM_ULPS * EPS["float32"] * 1.0)


def test_a_later_step_keeps_the_rounding_of_an_earlier_one() -> None:
    base = {"a": torch.ones(SIZE)}
    other = {"a": base["a"] * (1 + 1e-3 * noise(0, "a", SIZE))}
    found = MeasuredRounding(built([base, base]), [built([other, base])])
    assert found.of_tensors(1, "gradients") == found.of_tensors(0, "gradients")


def test_rounding_shrinks_with_the_precision_and_its_minimum_is_that_of_the_new_reference() -> None:
    found = measured({"a": 1.0, "b": 1.0}, {"a": 1e-3, "b": 1e-3})
    reference = built([{name: torch.ones(SIZE, dtype=torch.float64) for name in "ab"}])
    scaled = found.in_float64(reference, [], scale=1e-6, margin=4.0)
    for name, value in found.of_tensors(0, "gradients").items():
        assert scaled.of_tensors(0, "gradients")[name] == pytest.approx(1e-6 * value, rel=0.2)
    exact = found.in_float64(reference, [], scale=0.0, margin=4.0)
    assert exact.of_tensors(0, "gradients")["a"] == pytest.approx(
        MINIMUM_ULPS * EPS["float64"] * math.sqrt(SIZE)
    )
    perturbed = built([{name: torch.ones(SIZE, dtype=torch.float64) * (1 + 1e-9) for name in "ab"}])
    own = found.in_float64(reference, [perturbed], scale=0.0, margin=4.0)
    assert own.of_tensors(0, "gradients")["a"] == pytest.approx(4e-9 * math.sqrt(SIZE), rel=0.5)


def test_the_minimum_of_a_small_tensor_follows_the_size_of_the_others() -> None:
    found = measured({"a": 1.0, "b": 1e-6}, dict.fromkeys("ab", 0.0), minimum=1e-2).of_tensors(
        0, "gradients"
    )
    assert found["b"] == pytest.approx(1e-2 * math.sqrt(SIZE / 2), rel=0.1)


def test_saved_tensors_are_preferred_to_projections() -> None:
    value = torch.arange(12.0)
    one, other = built([{"a": torch.zeros(12)}]), built([{"a": value}])
    assert tensor_distance(one, other, 0, "gradients", "a") != pytest.approx(
        float(value.norm()), rel=1e-6
    )
    one.exact, other.exact = (
        {("gradients", 0, "a"): torch.zeros(12)},
        {("gradients", 0, "a"): value},
    )
    assert tensor_distance(one, other, 0, "gradients", "a") == pytest.approx(
        float(value.norm()), rel=1e-6
    )


def test_tensors_of_equal_norm_are_distinguished() -> None:
    one, other = (
        built([{"a": torch.tensor(value)}]).rank_0.steps[0].tensors["gradients"]["a"]
        for value in ([1.0, 2.0], [2.0, 1.0])
    )
    assert distance(one, other) > 0.5


def test_tensors_are_pooled_by_their_squares() -> None:
    summaries = (
        built([{"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}])
        .rank_0.steps[0]
        .tensors["gradients"]
    )
    assert pooled([0.3, 0.4], summaries) == pytest.approx(0.1)
