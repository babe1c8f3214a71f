"""Finds what surrounds operations and collectives in a run, from measured steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

from lockstep.base.container import available_memory_bytes, memory_limit_bytes, usable_cpus
from lockstep.plan import Plan
from lockstep.planner.predict import seconds_on_costs
from lockstep.planner.simulate import PIPELINE, Costs

from .machine import MeasuredMachine, SecondsCurve, machine_of
from .measuring import Measurements
from .reference import ReferenceStep, reference_recipe

MOST_AROUND_SECONDS = 0.02
"""More than what surrounds an operation or a collective can take."""
MOST_IN_RUN = 4.0
"""More times as long than an operation takes in a run."""
HALVINGS = 18
"""Bisections with which a quantity is found."""


def measured_machine(found: Measurements, processes: int, threads: int) -> MeasuredMachine:
    """Return the machine on which so many processes, of so many threads each, have measured
    this."""
    memory = memory_limit_bytes() or available_memory_bytes()
    bare = MeasuredMachine(
        processes=processes,
        threads=threads,
        cores=usable_cpus(),
        memory_bytes=memory,
        operations={
            name: SecondsCurve.through(points) for name, points in found.operations.items()
        },
        around=found.around,
        collectives={
            name: SecondsCurve.through(points) for name, points in found.collectives.items()
        },
        exchanges={},
        microbatch_seconds=0.0,
        step_seconds=0.0,
        slice_seconds=found.slice_seconds,
    )
    with warnings.catch_warnings():
        # the reference model's, which nobody can change
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        return calibrated(bare, found.steps)


def calibrated(bare: MeasuredMachine, steps: Mapping[ReferenceStep, float]) -> MeasuredMachine:
    """Return the machine with what surrounds steps, microbatches, operations and collectives.

    `steps`: the seconds of `reference_steps`. Two tiny ones show a step's and a microbatch's own
    time, a middle and a large one together how much longer operations take in a run; the others, in
    pairs, what Python and waking the other ranks add to a collective of their axis.
    """
    (few, many, middle, large), others = list(steps)[:4], list(steps)[4:]
    predicted = {each: _prediction(each, bare) for each in steps}

    def beyond(machine: MeasuredMachine, step: ReferenceStep) -> float:
        return steps[step] - predicted[step](machine.costs())

    each = max(
        0.0, (beyond(bare, many) - beyond(bare, few)) / (many.microbatches - few.microbatches)
    )
    known = replace(
        bare,
        microbatch_seconds=each,
        step_seconds=max(0.0, beyond(bare, few) - few.microbatches * each),
    )

    def slower(in_run: float) -> float:
        machine = replace(known, in_run=in_run)
        return sum(beyond(machine, step) / steps[step] for step in (middle, large))

    known = replace(known, in_run=_root(slower, 1.0, MOST_IN_RUN))
    for fewer, more in zip(others[::2], others[1::2], strict=True):
        known = _with_exchange(
            known, (fewer, steps[fewer], predicted[fewer]), (more, steps[more], predicted[more])
        )
    return known


Probe = tuple[ReferenceStep, float, Callable[[Costs], float]]
"""A step, its seconds, and their prediction."""


def _with_exchange(machine: MeasuredMachine, few: Probe, many: Probe) -> MeasuredMachine:
    """Return the machine with what surrounds each collective, or message, of an axis."""
    axis, _, ranks = few[0].plan.rpartition(",")[2].partition("=")
    name = axis if axis == PIPELINE else f"{axis} {ranks}"

    def changed(around: float) -> MeasuredMachine:
        return replace(machine, exchanges={**machine.exchanges, name: around})

    def beyond(around: float) -> float:
        costs = changed(around).costs()
        return sum(1 - predicted(costs) / seconds for _, seconds, predicted in (few, many))

    least = 0.0 if axis == PIPELINE else -MOST_AROUND_SECONDS
    return changed(_root(beyond, least, MOST_AROUND_SECONDS))


def _prediction(step: ReferenceStep, machine: MeasuredMachine) -> Callable[[Costs], float]:
    return seconds_on_costs(reference_recipe(step, 100), Plan.parse(step.plan), machine_of(machine))


def _root(beyond: Callable[[float], float], low: float, high: float) -> float:
    """Return the value where a function that falls is zero; `low` or `high` where it is not between
    them."""
    if beyond(low) <= 0:
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) > 0 else (low, middle)
    return (low + high) / 2
