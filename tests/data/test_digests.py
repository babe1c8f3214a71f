"""Digests of samples: equal for equal bits, and different at the part that differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from lockstep.base.errors import DataError
from lockstep.data.digests import (
    SAMPLES,
    Digests,
    changing,
    check_same_samples,
    counting,
    differing_part,
    not_compared,
    sample_digests,
    spread,
)


@dataclass
class Pair:
    image: torch.Tensor
    label: int


class Unknown:
    pass


def sample(**changed: Any) -> dict[str, Any]:
    parts = {
        "tensor": torch.arange(6.0).reshape(2, 3),
        "array": np.arange(4, dtype=np.int16),
        "numbers": [1, 2.5, "word", None, True],
        "nested": (torch.tensor(1), [np.float32(2), {"deep": b"bytes"}]),
        "pair": Pair(torch.ones(2, dtype=torch.bfloat16), 3),
        "names": {"b", "a"},
        "half": torch.zeros(0),
    }
    return {**parts, **changed}


def test_equal_samples_have_equal_digests_by_the_path_of_each_part() -> None:
    found = sample_digests(sample())
    assert found == sample_digests(sample())
    assert list(found) == [
        "['tensor']",
        "['array']",
        "['numbers']",
        "['nested'][0]",
        "['nested'][1][0]",
        "['nested'][1][1]['deep']",
        "['pair'].image",
        "['pair'].label",
        "['names']",
        "['half']",
    ]


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"tensor": torch.arange(6.0).reshape(3, 2)}, "['tensor']"),
        ({"tensor": torch.arange(6).reshape(2, 3)}, "['tensor']"),
        ({"tensor": -torch.arange(6.0).reshape(2, 3)}, "['tensor']"),
        ({"array": np.arange(4, dtype=np.uint16)}, "['array']"),
        ({"numbers": [1, 2.5, "Word", None, True]}, "['numbers']"),
        ({"numbers": (1, 2.5, "word", None, True)}, "['numbers']"),
        (
            {"nested": (torch.tensor(1), [np.float32(2), {"deep": b"Bytes"}])},
            "['nested'][1][1]['deep']",
        ),
        ({"pair": Pair(torch.ones(2, dtype=torch.bfloat16), 4)}, "['pair'].label"),
        ({"names": {"b", "c"}}, "['names']"),
        ({"half": torch.zeros(0, 1)}, "['half']"),
        ({"more": 1}, "['more']"),
    ],
)
def test_another_value_shape_or_dtype_is_found_where_it_is(
    changed: Mapping[str, Any], path: str
) -> None:
    assert differing_part(sample_digests(sample()), sample_digests(sample(**changed))) == path


def test_an_object_of_an_unknown_class_counts_by_its_class_and_what_it_holds() -> None:
    assert sample_digests(Unknown()) == sample_digests(Unknown())
    assert sample_digests(Unknown()) != sample_digests(object())
    one, other = Unknown(), Unknown()
    one.held, other.held = 1, 2  # type: ignore[attr-defined]
    assert differing_part(sample_digests([one]), sample_digests([other])) == "[0].held"


def test_parts_that_cannot_be_compared_are_named() -> None:
    plain, locked = digests([{"x": 1}]), digests([{"x": 1, "lock": Lock()}])
    assert not_compared("data", [plain, plain]) is None
    assert not_compared("data", [plain, locked]) == "data: sample 0['lock']"
    assert not_compared("data", [plain, UNREAD]) == "data: sample 0 (OSError: lost) on rank 1"
    assert locked.changing is None
    check_same_samples("data", [locked, digests([{"x": 1, "lock": Lock()}])])


def test_lengths_are_compared_where_samples_cannot_be() -> None:
    check_same_samples("data", [digests([1, 2]), digests([1, 3])], lengths_only=True)
    with pytest.raises(DataError, match="their lengths differ"):
        check_same_samples(
            "data",
            [Digests.of(["sample 0"], lambda _: 0), Digests.of(["sample 1"], lambda _: 0)],
            lengths_only=True,
        )


def test_a_sample_of_many_parts_has_the_last_ones_in_one_digest() -> None:
    parts = [torch.tensor(i) for i in range(100)]
    assert len(sample_digests(parts)) == 65
    assert (
        differing_part(sample_digests(parts), sample_digests([*parts[:-1], torch.tensor(-1)]))
        == " beyond its first 64 parts"
    )


@given(st.integers(1, 10**12))
def test_the_indices_are_few_spread_over_the_dataset_and_begin_with_its_ends(length: int) -> None:
    indices = spread(length)
    assert len(set(indices)) == len(indices) == min(length, SAMPLES)
    assert all(0 <= index < length for index in indices)
    assert indices[:2] == [0, length - 1][: len(indices)]


UNREAD = Digests([], None, unread="sample 0 (OSError: lost)")


def digests(values: list[Any]) -> Digests:
    return Digests.of([f"sample {i}" for i in range(len(values))], values.__getitem__)


def test_ranks_with_the_same_samples_pass_even_if_one_had_time_for_fewer() -> None:
    check_same_samples("data", [digests([1, 2, 3]), UNREAD, digests([1, 2])])


def test_the_first_sample_that_differs_is_named() -> None:
    with pytest.raises(DataError) as caught:
        check_same_samples(
            "data", [UNREAD, digests([1, [torch.ones(1)]]), digests([1, [torch.zeros(1)]])]
        )
    assert (
        str(caught.value)
        == "data: sample 1[0] differs between rank 1 and rank 2; all ranks have one dataset, of"
        " which each computes a part, so every rank must make the same: seed what is drawn"
        " (torch.Generator().manual_seed(0), also for random_split), sort what is listed"
        " (sorted(os.listdir(folder))), and leave rank and clock out of it"
    )


def test_datasets_of_other_lengths_are_refused() -> None:
    one, other = (
        Digests.of([f"sample {index}" for index in spread(length)], lambda _: 0)
        for length in (10, 11)
    )
    with pytest.raises(
        DataError,
        match="data has sample 9 on rank 0 where rank 1 has sample 10: their lengths differ",
    ):
        check_same_samples("data", [one, other])


def test_for_a_save_each_sample_is_made_once() -> None:
    made: list[int] = []
    Digests.of(["sample 0", "sample 1"], made.append, lambda: made.append(-1), again=False)
    assert made == [0, 1]


def test_a_sample_that_changes_when_it_is_fetched_again_is_named() -> None:
    values = iter([1, 2])
    found = Digests.of(["sample 0"], lambda _: next(values))
    reason = changing("data", [digests([1]), found])
    assert reason is not None
    assert reason.startswith("data: sample 0 on rank 1 has other bits each time that it is fetched")
    assert changing("data", [digests([1]), UNREAD]) is None


@pytest.mark.parametrize(("again", "expected"), [(lambda i: i + 1, "n"), (lambda i: 1, None)])
def test_a_number_that_each_fetch_changes_is_named(again: Any, expected: str | None) -> None:
    counts = {"n": 0}

    def fetch(_: int) -> int:
        counts["n"] = again(counts["n"])
        return 0

    found = Digests.of(["sample 0"], fetch, numbers=counts.copy)
    assert found.counted == expected
    reason = counting("data", [digests([1]), found])
    assert (reason is None) == (expected is None)
    assert reason is None or "fetch of a sample on rank 1 changes the dataset's number n" in reason
