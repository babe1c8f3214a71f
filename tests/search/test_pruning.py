"""When ASHA first ends trials."""

from __future__ import annotations

import pytest

from lockstep.search.proposals import first_rung


@pytest.mark.parametrize(
    ("every", "steps", "first"),
    [
        (20, 600, 80),
        (1, 600, 67),
        (100, 600, 100),
        (1000, 600, 1000),
        (10, 90, 20),
        (5, None, 5),
        (None, 90, None),
    ],
)
def test_it_is_an_evaluation_after_a_ninth_of_the_training(
    every: int | None, steps: int | None, first: int | None
) -> None:
    assert first_rung(every, steps) == first
