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
    "cli/test_search.py",
    "device/test_training.py",
    "training/test_remedies.py",
    "cli/test_slurm.py",
    "examples/test_cookbook.py",
    "cli/test_search_killed.py",
    "cli/test_machines_in_place.py",
    "cli/test_audit.py",
    "cli/test_search_database.py",
    "cli/test_plan.py",
    "training/test_transport.py",
    "cli/test_in_place.py",
    "cli/test_machines.py",
    "training/test_balance.py",
    "planner/test_tracer.py",
    "device/test_sharing_devices.py",
    "training/test_context_axis.py",
    "device/test_device_path.py",
    "cli/test_killed.py",
    "test_pool.py",
    "launch/test_spawn.py",
    "examples/test_start.py",
    "device/test_out_of_memory.py",
    "checkpoint/test_object_store.py",
    "test_docs.py",
    "cli/test_seeding.py",
    "training/test_stream.py",
    "planner/test_context.py",
    "planner/test_predict.py",
    "training/test_same_bits.py",
    "training/test_sharded_models.py",
    "audit/test_zoo.py",
    "training/test_resume.py",
    "doctor/test_containers.py",
    "cli/test_run.py",
    "model/tensor/test_tensor.py",
    "training/test_optimizer_state.py",
    "test_platforms.py",
    "planner/test_tracing.py",
    "launch/test_agent.py",
    "launch/test_recovery.py",
    "cli/test_parameters.py",
    "training/test_documents.py",
    "search/test_sampling.py",
    "search/test_study.py",
    "base/test_torch_private.py",
    "checkpoint/test_damage.py",
    "cli/test_inspect_export.py",
    "test_leaks.py",
    "data/test_streams.py",
    "verify/test_verdict.py",
    "device/test_hangs.py",
)
"""Files of tests that take 10 s or more each, the longest first: pytest begins with them."""


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
