"""The greedy soup (Wortsman et al., "Model soups", 2022, arXiv:2203.05482, recipe 1). Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal


def greedy_soup(
    scores: Sequence[float], measure: Callable[[list[int]], float], mode: Literal["min", "max"]
) -> list[int] | None:
    """Return the models whose average is kept, best first; None if every score is NaN.

    Tries the models from best to worse; each stays if the average with it scores better. `measure`:
    models -> score of their average.
    """
    sign = 1 if mode == "min" else -1
    ordered = sorted(
        (index for index, score in enumerate(scores) if not math.isnan(score)),
        key=lambda index: sign * scores[index],
    )
    if not ordered:
        return None
    chosen, best = ordered[:1], scores[ordered[0]]
    for index in ordered[1:]:
        score = measure([*chosen, index])
        if sign * score < sign * best:
            chosen, best = [*chosen, index], score
    return chosen
