"""Axes and words for numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from lockstep.pages.scale import format_duration, format_number, scale_of, step_scale, time_scale

FINITE = st.floats(-1e12, 1e12, allow_nan=False).map(
    lambda value: 0.0 if abs(value) < 1e-12 else value
)


@given(
    st.lists(FINITE, min_size=1, max_size=30),
    st.booleans(),
    st.sampled_from(["", "bytes", "share", "seconds"]),
)
def test_all_values_fit_and_ticks_rise(values: list[float], from_zero: bool, unit: str) -> None:
    scale = scale_of(values, unit, from_zero=from_zero)  # type: ignore[arg-type]
    assert all(-1e-6 <= scale.position(value) <= 1 + 1e-6 for value in values)
    assert 2 <= len(scale.ticks) == len(scale.labels) <= 10
    assert all(before < after for before, after in zip(scale.ticks, scale.ticks[1:], strict=False))
    assert not from_zero or scale.position(0.0) == pytest.approx(
        0 if min(values) >= 0 else scale.position(0.0)
    )


@given(st.floats(1e-9, 1e9), st.floats(1.01, 1e6))
def test_labels_tell_neighbouring_ticks_apart(low: float, factor: float) -> None:
    labels = scale_of([low, low * factor]).labels
    assert len(set(labels)) == len(labels), labels


def test_a_few_values_that_would_hide_the_others_make_it_logarithmic() -> None:
    assert scale_of([0.5] * 99 + [40.0]).logarithmic
    assert not scale_of([0.5] * 99 + [4.0]).logarithmic
    assert not scale_of([-0.5] + [0.5] * 98 + [40.0]).logarithmic
    assert not scale_of([0.5] * 99 + [40.0], may_be_logarithmic=False).logarithmic
    scale = scale_of([0.01] * 9 + [1.0])
    assert (scale.position(0.1), scale.labels) == (
        pytest.approx(0.5),
        ("0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1"),
    )


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([1.2, 5.1], ("1", "2", "3", "4", "5", "6")),
        ([0.031, 0.068], ("0.03", "0.04", "0.05", "0.06", "0.07")),
        ([0.009, 0.0105], ("0.0090", "0.0095", "0.0100", "0.0105")),
        ([0, 3e-4], ("0", "1e−4", "2e−4", "3e−4")),
        ([0, 1.36e6], ("0", "500k", "1.0M", "1.5M")),
        ([0, 2e4], ("0", "5k", "10k", "15k", "20k")),
        ([-0.02, 0.04], ("−0.02", "0", "0.02", "0.04")),
        ([2.0, 2.0], ("1.8", "1.9", "2.0", "2.1", "2.2")),
        ([], ("0", "0.2", "0.4", "0.6", "0.8", "1.0")),
    ],
)
def test_labels(values: list[float], labels: tuple[str, ...]) -> None:
    assert scale_of(values).labels == labels


@pytest.mark.parametrize("last", [0, 1, 7, 92, 1000, 100_000, 3_000_000])
def test_the_axis_of_steps_has_whole_steps(last: int) -> None:
    scale = step_scale(last)
    assert all(tick == round(tick) for tick in scale.ticks)
    assert scale.position(max(last, 1)) == 1
    assert 2 <= len(scale.ticks) <= 8


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (0.2, "0 s, 1 s"),
        (105, "0 s, 15 s, 30 s, 45 s, 1:00, 1:15, 1:30, 1:45"),
        (86400, "0 s, 6 h 00 m, 12 h 00 m, 18 h 00 m, 24 h 00 m"),
    ],
)
def test_the_axis_of_time_has_whole_units(seconds: float, labels: str) -> None:
    assert ", ".join(time_scale(seconds).labels) == labels


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.50771, "", "1.508"), (0, "", "0"), (12.0, "", "12"), (-0.25, "", "−0.25"), (1294921.3, "", "1,294,921"), (3e-7, "", "3e−7"),
        (math.nan, "", "nan"), (math.inf, "bytes", "∞"), (-math.inf, "", "−∞"), (0.4112, "share", "41.1 %"), (5.4e10, "bytes", "54 GB"),
        (999_990, "bytes", "1 MB"), (0, "bytes", "0 B"), (0.0521, "seconds", "52.1 ms"), (0.99996, "seconds", "1 s"),
        (9.9999e-4, "seconds", "1 ms"),
        (4000.0, "seconds", "1 h 07 m"), (0, "seconds", "0"),
    ],
)  # fmt: skip
def test_numbers_in_words(value: float, unit: str, text: str) -> None:
    assert format_number(value, unit) == text  # type: ignore[arg-type]


def test_durations_in_words() -> None:
    assert [format_duration(seconds) for seconds in (0, 0.4, 9.96, 59.6, 754, 11100, 190_000)] == [
        "0 s",
        "0.4 s",
        "10 s",
        "1:00",
        "12:34",
        "3 h 05 m",
        "2 d 4 h",
    ]
