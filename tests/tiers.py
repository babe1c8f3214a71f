"""Which tier a case is in: with more than 3 processes on 2 cores it is slow (`make slow`), but for
one or two that stand for their kind."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import product
from typing import Any

import pytest

MOST = 3
"""Processes of a case that runs with every change."""
LONGEST = (
    "examples/test_cookbook.py",
    "cli/test_slurm.py",
    "training/test_remedies.py",
    "device/test_training.py",
    "cli/test_search.py",
    "cli/test_audit.py",
    "planner/test_tracer.py",
    "cli/test_in_place.py",
    "cli/test_search_database.py",
    "test_pool.py",
    "audit/test_zoo.py",
    "training/test_recomputation.py",
    "training/test_sharded_models.py",
    "training/test_expert_bits.py",
    "cli/test_plan.py",
    "device/test_device_path.py",
    "training/test_expert_axis.py",
    "training/test_slices.py",
    "test_docs.py",
    "training/test_measured_assignment.py",
    "training/test_bitwise_context.py",
    "training/test_context_axis.py",
    "cli/test_doctor.py",
    "training/test_balance.py",
    "training/test_expert_pipeline.py",
    "training/test_context_pipeline.py",
    "test_leaks.py",
    "cli/test_search_killed.py",
    "device/test_out_of_memory.py",
    "training/test_same_bits.py",
    "cli/test_elastic.py",
    "checkpoint/test_object_store.py",
    "verify/test_matrix.py",
    "hooks/test_carried_variables.py",
    "examples/test_start.py",
    "test_platforms.py",
    "training/test_resume.py",
    "training/test_loss_check.py",
    "report/test_browser.py",
    "training/test_pipeline_axis.py",
    "cli/test_machines.py",
    "search/test_sampling.py",
    "training/test_expert_tensor.py",
    "planner/test_expert.py",
    "cli/test_ordinary_scripts.py",
    "search/test_study.py",
    "device/test_hangs.py",
)
"""Files of tests that take 25 s or more each beside two other workers, the longest first: pytest
begins with them."""


def tiered(
    plans: Mapping[str, int], *, always: Collection[str] = (), most: int = MOST
) -> list[Any]:
    """The plans, which need so many processes each, to parametrize with. `always`: those that are
    not slow whatever they need."""
    return [
        pytest.param(plan, marks=tier(processes, most) if plan not in always else ())
        for plan, processes in plans.items()
    ]


def spread(first: Iterable[Any], second: Iterable[Any], every: int) -> list[Any]:
    """All pairs, to parametrize with. Not slow are those on every `every`-th diagonal: each value
    of both is in some of them."""
    return [
        pytest.param(one, other, marks=() if (place + row) % every == 0 else pytest.mark.slow)
        for row, one in enumerate(first)
        for place, other in enumerate(second)
    ]


def paired(plans: Mapping[str, int]) -> list[Any]:
    """Each plan before each, to parametrize with. Not slow are those of a ring of small ones: each
    of them before the next."""
    small = [plan for plan, processes in plans.items() if processes <= 2]
    ring = set(zip(small, [*small[1:], small[0]], strict=True))
    return [
        pytest.param(*pair, marks=() if pair in ring else pytest.mark.slow)
        for pair in product(plans, plans)
    ]


def tier(processes: int, most: int = MOST) -> Any:
    """The marks of a case."""
    return pytest.mark.slow if processes > most else ()
