"""Averages of weights, and the greedy soup: arithmetic, without a process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from lockstep.base.dtypes import tensor_spec
from lockstep.base.errors import CheckpointError
from lockstep.checkpoint.averaging import AverageMember, WeightAverage, greedy_soup, normalised
from lockstep.checkpoint.saved_model import StateDictReader

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.1, 1e-7, 3.0, -57344.0, 448.0)


def reader(tensors: Mapping[str, Tensor]) -> StateDictReader:
    specs = {name: tensor_spec(tensor) for name, tensor in tensors.items()}
    return StateDictReader(specs, lambda name: memoryview(bits(tensors[name])))


def bits(tensor: Tensor) -> bytes:
    data: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def average(
    models: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None = None
) -> WeightAverage:
    shares = weights or [1.0] * len(models)
    return WeightAverage(
        [AverageMember(f"run-{i}", reader(model), shares[i]) for i, model in enumerate(models)]
    )


def mean(tensors: Sequence[Tensor], weights: Sequence[float] | None = None) -> bytes:
    return bytes(average([{"w": tensor} for tensor in tensors], weights).model.read("w"))


def holding(dtype: torch.dtype, values: Sequence[float]) -> Tensor:
    """The values, and such as are not like others, in a type that may be too narrow for them."""
    infinities = () if dtype.itemsize == 1 else (math.inf, -math.inf)
    wide = torch.tensor([*SPECIAL, *values, *infinities], dtype=torch.float64)
    return (wide.clamp(-448, 448) if dtype.itemsize == 1 else wide).to(dtype)


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
some_weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(weights=some_weights, values=st.lists(numbers, max_size=5))
def test_the_average_of_equal_models_has_their_bits(
    dtype: torch.dtype, weights: list[float], values: list[float]
) -> None:
    tensor = holding(dtype, values)
    assert mean([tensor] * len(weights), weights) == bits(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=st.integers(0, 2**31), place=st.integers(0, 3))
def test_weights_that_pick_one_model_give_its_bits(
    dtype: torch.dtype, seed: int, place: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        (torch.randn(9, generator=generator, dtype=torch.float64) * 10.0**exponent).to(dtype)
        for exponent in (2, -20, 0, 1)
    ]
    assert mean(tensors, [float(index == place) for index in range(4)]) == bits(tensors[place])


@given(
    columns=st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=9),
    weights=st.lists(st.floats(0.01, 10), min_size=3, max_size=3),
)
def test_it_is_the_weighted_mean_rounded_once_and_between_the_smallest_and_the_largest(
    columns: list[tuple[float, float, float]], weights: list[float]
) -> None:
    models = torch.stack(
        [torch.tensor(row, dtype=torch.float32) for row in zip(*columns, strict=True)]
    )
    found = torch.frombuffer(bytearray(mean(list(models), weights)), dtype=torch.float32)
    assert (models.min(0).values <= found).all()
    assert (found <= models.max(0).values).all()
    for value, column in zip(found.tolist(), columns, strict=True):
        exact = math.fsum(
            weight * each for weight, each in zip(weights, column, strict=True)
        ) / math.fsum(weights)
        slack = 2.0**-48 * max(map(abs, column))  # of the sums in float64
        assert abs(value - exact) <= slack + max(2.0**-24 * abs(exact), 2.0**-150)


@given(one=numbers, other=numbers)
def test_the_mean_of_two_does_not_depend_on_their_order(one: float, other: float) -> None:
    tensors = [torch.tensor([value], dtype=torch.float32) for value in (one, other)]
    if one != other:  # 0.0 and -0.0 are equal: the first one's counts
        assert mean(tensors) == mean(tensors[::-1])


def test_pieces_of_a_large_tensor_are_all_averaged() -> None:
    tensors = [torch.arange(3_000_000, dtype=torch.float32) + index for index in range(3)]
    assert mean(tensors) == bits(tensors[1])


def test_tensors_of_no_elements_and_of_no_dims() -> None:
    assert mean([torch.empty(0, 3), torch.empty(0, 3)]) == b""
    assert mean([torch.tensor(1.0), torch.tensor(2.0)]) == bits(torch.tensor(1.5))


def test_what_has_no_mean_is_the_first_models_and_a_difference_is_told() -> None:
    same, one, other = torch.tensor([True, False]), torch.tensor(3), torch.tensor(4)
    made = average(
        [{"same": same, "step": one}, {"same": same, "step": one}, {"same": same, "step": other}]
    )
    assert (bytes(made.model.read("same")), bytes(made.model.read("step"))) == (
        bits(same),
        bits(one),
    )
    assert made.differing == {"step": "run-2"}


def test_running_statistics_are_named_if_they_are_averaged() -> None:
    model = {
        "1.running_mean": torch.zeros(2),
        "1.running_var": torch.ones(2),
        "1.num_batches_tracked": torch.tensor(1),
        "mean": torch.ones(1),
    }
    assert average([model, model]).statistics == ["1.running_mean", "1.running_var"]
    assert average([model, model], [0.0, 1.0]).statistics == []


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"a": torch.zeros(2, 3)}, "run-0 has b, and run-1 has no tensor of that name"),
        (
            {"a": torch.zeros(2, 3), "b": torch.zeros(1), "c": torch.zeros(1)},
            "run-1 has c, and run-0 has no tensor of that name",
        ),
        (
            {"a": torch.zeros(3, 2), "b": torch.zeros(1)},
            r"'a' is float32 \[2, 3\] in run-0, and float32 \[3, 2\] in run-1",
        ),
        (
            {"a": torch.zeros(2, 3), "b": torch.zeros(1).half()},
            r"'b' is float32 \[1\] in run-0, and float16 \[1\] in run-1",
        ),
    ],
)
def test_models_that_are_not_alike_are_refused(other: dict[str, Tensor], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        average([{"a": torch.zeros(2, 3), "b": torch.zeros(1)}, other])


def test_nan_is_refused_by_the_name_of_the_run_and_the_tensor() -> None:
    with pytest.raises(CheckpointError, match="run-1 has NaN in 'w'"):
        mean([torch.zeros(2), torch.tensor([0.0, math.nan])])
    with pytest.raises(CheckpointError, match="run-0 has NaN in 'w'"):
        mean([torch.tensor([math.nan, 0.0]), torch.zeros(2)])


@pytest.mark.parametrize("values", [(0.0, math.inf), (math.inf, 0.0), (math.inf, -math.inf)])
def test_an_infinity_that_not_all_have_is_refused(values: tuple[float, float]) -> None:
    with pytest.raises(CheckpointError, match="'w' has infinities in only one of run-0 and run-1"):
        mean([torch.tensor([value]) for value in values])


@given(st.lists(st.floats(min_value=0, allow_infinity=False), min_size=1, max_size=9).filter(any))
def test_parts_add_up_to_one_for_weights_of_any_size(weights: list[float]) -> None:
    parts = normalised(weights)
    assert math.fsum(parts) == pytest.approx(1.0)
    assert all(0 <= part <= 1 for part in parts)


@pytest.mark.parametrize("weights", [[1.0, -0.5], [math.nan, 1.0], [math.inf, 1.0], [0.0, 0.0]])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(CheckpointError, match="average"):
        normalised(weights)


def soup_of(
    scores: Sequence[float], ingredients: Mapping[frozenset[int], float], mode: str = "min"
) -> tuple[list[int] | None, list[list[int]]]:
    tried: list[list[int]] = []

    def measure(indices: list[int]) -> float:
        tried.append(indices)
        return ingredients[frozenset(indices)]

    return greedy_soup(scores, measure, mode), tried  # type: ignore[arg-type]


def test_a_run_stays_in_the_greedy_soup_only_if_it_makes_it_better() -> None:
    made = {frozenset({2, 0}): 0.4, frozenset({2, 0, 3}): 0.4, frozenset({2, 0, 1}): 0.3}
    assert soup_of([0.6, 0.9, 0.5, 0.7], made) == ([2, 0, 1], [[2, 0], [2, 0, 3], [2, 0, 1]])


def test_the_larger_is_better_if_that_is_the_mode() -> None:
    assert soup_of([0.6, 0.9], {frozenset({0, 1}): 0.95}, "max") == ([1, 0], [[1, 0]])
    assert soup_of([0.6, 0.9], {frozenset({0, 1}): 0.85}, "max") == ([1], [[1, 0]])


def test_nan_is_never_better() -> None:
    assert soup_of([math.nan, 0.9, 0.8], {frozenset({1, 2}): math.nan}) == ([2], [[2, 1]])
    assert soup_of([math.nan, math.nan], {}) == (None, [])
