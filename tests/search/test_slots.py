"""How many trials run at a time, and what each has of the machine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from lockstep.base.errors import LaunchError
from lockstep.search.slots import TrialSlot, slots


@pytest.mark.parametrize(
    ("parallel", "processes", "cpus", "gpus", "visible", "expected"),
    [
        (None, 1, 4, 0, None, [TrialSlot(threads=1)] * 4),
        (None, 3, 8, 0, None, [TrialSlot(threads=1)] * 2),
        (None, 3, 2, 0, None, [TrialSlot(threads=1)]),
        (2, 1, 8, 0, None, [TrialSlot(threads=4)] * 2),
        (6, 1, 2, 0, None, [TrialSlot(threads=1)] * 6),
        (
            None,
            2,
            16,
            5,
            None,
            [TrialSlot(threads=4, gpus=["0", "1"]), TrialSlot(threads=4, gpus=["2", "3"])],
        ),
        (1, 2, 16, 4, None, [TrialSlot(threads=8, gpus=["0", "1"])]),
        (9, 1, 4, 2, "3,1", [TrialSlot(threads=2, gpus=["3"]), TrialSlot(threads=2, gpus=["1"])]),
    ],
)
def test_the_machine_is_divided_among_trials(
    parallel: int | None, processes: int, cpus: int, gpus: int, visible: str | None, expected: Any
) -> None:
    assert slots(parallel, processes, cpus=cpus, gpus=gpus, visible=visible) == expected


def test_a_trial_that_needs_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(
        LaunchError,
        match=(
            r"a trial of 3 processes on 2 GPUs; each process needs its own GPU; give a smaller"
            r" --plan"
        ),
    ):
        slots(None, 3, cpus=8, gpus=2, visible=None)
    (shared,) = slots(4, 3, cpus=8, gpus=2, visible="4,5", share_devices=True)
    assert (shared.gpus, shared.threads) == (["4", "5"], 2)


@given(st.none() | st.integers(1, 20), st.integers(1, 6), st.integers(1, 64), st.integers(0, 16))
def test_no_gpu_is_given_twice_and_no_more_threads_than_cpus(
    parallel: int | None, processes: int, cpus: int, gpus: int
) -> None:
    if gpus and gpus < processes:
        return
    found = slots(parallel, processes, cpus=cpus, gpus=gpus, visible=None)
    assert 1 <= len(found) <= (parallel or max(gpus, cpus))
    given = [name for slot in found for name in slot.gpus]
    assert len(set(given)) == len(given) == (len(found) * processes if gpus else 0)
    assert all(slot.threads == 1 or slot.threads * processes * len(found) <= cpus for slot in found)


def test_its_processes_see_its_gpus_and_keep_the_threads_that_were_given() -> None:
    slot = TrialSlot(threads=4, gpus=["2", "3"])
    assert slot.variables({}) == {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert slot.variables({"OMP_NUM_THREADS": "7"}) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert TrialSlot(threads=2).variables({}) == {"OMP_NUM_THREADS": "2"}
