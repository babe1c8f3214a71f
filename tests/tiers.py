"""Which tier a case is in: with more than 3 processes on 2 cores it is slow (`make slow`), but for one or two that stand for their kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest

MOST = 3
"""Processes of a case that runs with every change."""


def tiered(plans: Mapping[str, int], *, always: Collection[str] = ()) -> list[Any]:
    """The plans, which need so many processes each, to parametrize with. `always`: those that are not slow whatever they need."""
    return [pytest.param(plan, marks=tier(processes) if plan not in always else ()) for plan, processes in plans.items()]


def tier(processes: int) -> Any:
    """The marks of a case."""
    return pytest.mark.slow if processes > MOST else ()
