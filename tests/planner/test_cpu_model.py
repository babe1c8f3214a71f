"""The model of a CPU that the planner is held against: curves, costs, calibration."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from planner.subjects import MICROBATCH, recipe

from benchmarks.cpu_model import calibration
from benchmarks.cpu_model.calibration import calibrated
from benchmarks.cpu_model.machine import MeasuredMachine, SecondsCurve, machine_of
from benchmarks.cpu_model.reference import ReferenceStep
from lockstep.plan import Plan
from lockstep.planner.predict import predict
from lockstep.planner.simulate import Costs
from lockstep.planner.trace import Collective, Operation

SIZES = st.floats(1, 1e12)
POINTS = st.dictionaries(SIZES, st.floats(1e-7, 10), min_size=1, max_size=8)
MACHINE = MeasuredMachine(
    processes=2,
    threads=1,
    cores=2,
    memory_bytes=2**34,
    operations={
        "memory": SecondsCurve((1e3, 1e6, 1e9), (1e-6, 1e-4, 0.2)),
        "matmul float32": SecondsCurve((1e4, 1e7, 1e10), (2e-6, 1e-4, 0.1)),
        "thin matmul": SecondsCurve((1e4, 1e7), (1e-6, 1e-3)),
        "aten.gelu float32": SecondsCurve((1e4, 1e6), (1e-5, 1e-3)),
    },
    around={"forward": 2e-6, "backward": 3e-6},
    collectives={
        "shared all_reduce 2": SecondsCurve((256.0, 4e6), (2e-5, 6e-4)),
        "shared all_gather 2": SecondsCurve((256.0, 4e6), (2e-5, 5e-4)),
        "gloo all_reduce 2": SecondsCurve((256.0, 4e6), (2e-4, 3e-3)),
        "gloo send 2": SecondsCurve((256.0, 4e6), (3e-5, 2e-3)),
    },
    exchanges={"shard 2": 3e-4, "pipeline": 1e-4},
    microbatch_seconds=2e-4,
    step_seconds=5e-4,
)


def memory(name: str, size: int) -> Operation:
    return Operation("memory", "float32", 0, size, name=name)


def reduction(axis: str, size: int = 2**20) -> Collective:
    return Collective("all_reduce", 2, 1, size, axis)


@given(POINTS, SIZES, SIZES)
def test_a_curve_never_falls(points: dict[float, float], one: float, other: float) -> None:
    curve = SecondsCurve.through(points)
    low, high = sorted((one, other))
    assert curve.at(low) <= curve.at(high) * (1 + 1e-9)


@given(POINTS)
def test_a_curve_is_at_most_its_points(points: dict[float, float]) -> None:
    curve = SecondsCurve.through(points)
    assert all(curve.at(size) <= seconds * (1 + 1e-9) for size, seconds in points.items())


def test_a_point_above_a_larger_one_is_lowered() -> None:
    assert SecondsCurve.through({1.0: 5.0, 10.0: 2.0}).at(1.0) == 2.0


@given(
    st.integers(1, 2**40), st.integers(1, 2**40), st.sampled_from(["aten.gelu", "aten.unheard_of"])
)
def test_more_bytes_take_no_less_time(one: int, other: int, name: str) -> None:
    low, high = sorted((one, other))
    assert MACHINE.operation_seconds(memory(name, low)) <= MACHINE.operation_seconds(
        memory(name, high)
    ) * (1 + 1e-9)


@given(st.integers(1, 2**12), st.integers(1, 2**12), st.integers(1, 2**12))
def test_more_rows_take_no_less_time(rows: int, more: int, width: int) -> None:
    def seconds(m: int) -> float:
        flops, size = 2 * m * width * width, 4 * (2 * m * width + width * width)
        return MACHINE.operation_seconds(
            Operation("matmul", "float32", flops, size, (1, m, width, width), name="aten.mm")
        )

    assert seconds(rows) <= seconds(rows + more) * (1 + 1e-9)


def test_small_operations_of_known_names_grow_no_faster_than_memory() -> None:
    far = MACHINE.operation_seconds(memory("aten.gelu", 10**8)) - MACHINE.operation_seconds(
        memory("aten.gelu", 10**6)
    )
    assert far == pytest.approx(
        MACHINE.operations["memory"].at(1e8) - MACHINE.operations["memory"].at(1e6)
    )


def test_data_axes_use_shared_memory_and_others_gloo() -> None:
    assert MACHINE.collective_seconds(reduction("replicate")) < MACHINE.collective_seconds(
        reduction("tensor")
    )
    assert MACHINE.collective_seconds(reduction("shard")) == pytest.approx(
        MACHINE.collective_seconds(reduction("replicate")) + 3e-4
    )


def test_a_collective_that_is_not_measured_has_the_cost_of_one_alike() -> None:
    broadcast = Collective("broadcast", 2, 1, 2**16, "replicate")
    assert MACHINE.collective_seconds(broadcast) == MACHINE.collectives["shared all_gather 2"].at(
        2**16
    )


def test_memory_is_shared_between_the_processes() -> None:
    machine = machine_of(MACHINE)
    assert machine.capacity_bytes == 2**33
    assert not machine.is_gpu
    assert machine.cluster.count == machine.cluster.devices_per_node == 2
    assert machine.costs.is_synchronous


def test_processes_that_have_fewer_microbatches_leave_the_cores_to_the_others() -> None:
    """Eight microbatches on three processes are 3, 3 and 2; two cores then compute for 8/9 of the
    time of nine."""
    collectives = {
        name.replace(" 2", " 3"): SecondsCurve((1.0, 2.0), (1e-7, 1e-7))
        for name in MACHINE.collectives
    }
    curves = dict.fromkeys(MACHINE.operations, SecondsCurve((1.0, 1e12), (1e-4, 1e-4)))
    three = replace(
        MACHINE,
        processes=3,
        operations=curves,
        collectives=collectives,
        exchanges={},
        microbatch_seconds=0.0,
        step_seconds=0.0,
    )

    def seconds(microbatches: int) -> float:
        return predict(
            recipe(global_batch=microbatches * MICROBATCH), Plan(replicate=3), machine_of(three)
        ).seconds

    assert seconds(8) == pytest.approx(seconds(9) * 8 / 9, rel=0.01)


# Calibration


STEPS = [
    *(ReferenceStep("replicate=2", "tiny", 1), ReferenceStep("replicate=2", "tiny", 5)),
    *(ReferenceStep("replicate=2", "middle", 3), ReferenceStep("replicate=2", "large", 3)),
    *(
        ReferenceStep(f"{axis}=2", "middle", count)
        for axis in ("shard", "tensor", "pipeline")
        for count in (2, 6)
    ),
]
BARE = replace(MACHINE, exchanges={}, microbatch_seconds=0.0, step_seconds=0.0)


def prediction(step: ReferenceStep, machine: MeasuredMachine) -> Callable[[Costs], float]:
    """A step of ten operations and four collectives or messages a microbatch, one after another."""
    del machine
    axis, size = (
        step.plan.partition("=")[0],
        {"tiny": 2**10, "middle": 2**18, "large": 2**24}[step.scale],
    )

    def seconds(costs: Costs) -> float:
        microbatch = (
            10 * costs.operation(memory("aten.gelu", size)) + costs.host.marks["microbatch"]
        )
        exchange = (
            costs.host.collectives["pipeline"]
            if axis == "pipeline"
            else costs.collective(reduction(axis))
        )
        return step.microbatches * (microbatch + 4 * exchange) + costs.host.marks["end"]

    return seconds


@settings(max_examples=30)
@given(
    numbers=st.tuples(st.floats(0, 1e-3), st.floats(0, 1e-3), st.floats(1, 2)),
    shard=st.floats(-1e-4, 1e-3),
    tensor=st.floats(-1e-4, 1e-3),
    pipeline=st.floats(0, 1e-3),
)
def test_calibration_finds_what_the_steps_were_made_with(
    numbers: tuple[float, float, float], shard: float, tensor: float, pipeline: float
) -> None:
    microbatch, step, in_run = numbers
    known = replace(BARE, microbatch_seconds=microbatch, step_seconds=step)
    truth = replace(
        known, in_run=in_run, exchanges={"shard 2": shard, "tensor 2": tensor, "pipeline": pipeline}
    )
    tiny = replace(truth, in_run=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_prediction", prediction)
        found = calibrated(
            BARE,
            {
                each: prediction(each, truth)((tiny if each.scale == "tiny" else truth).costs())
                for each in STEPS
            },
        )
    for each in STEPS[2:]:
        assert prediction(each, found)(found.costs()) == pytest.approx(
            prediction(each, truth)(truth.costs()), rel=0.02
        )
    assert found.exchanges == pytest.approx(truth.exchanges, abs=2e-5)
    assert found.in_run == pytest.approx(in_run, rel=0.02)
    assert found.microbatch_seconds == pytest.approx(microbatch, abs=1e-6)


def test_steps_that_take_no_longer_than_predicted_add_nothing() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_prediction", prediction)
        found = calibrated(BARE, {each: prediction(each, BARE)(BARE.costs()) for each in STEPS})
    assert (found.in_run, found.exchanges["pipeline"]) == (1, 0)
    assert found.exchanges["shard 2"] == pytest.approx(0, abs=1e-6)


def test_operations_in_a_run_are_between_what_a_middle_and_a_large_step_show() -> None:
    steps = {each: prediction(each, BARE)(BARE.costs()) for each in STEPS}
    steps |= {
        each: seconds * {"tiny": 1, "middle": 1.2, "large": 1.6}[each.scale]
        for each, seconds in steps.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_prediction", prediction)
        assert 1.3 < calibrated(BARE, steps).in_run < 1.55


def test_an_exchange_is_between_what_few_and_many_microbatches_show() -> None:
    truth = replace(BARE, exchanges={"shard 2": 1e-3})
    steps = {each: prediction(each, truth)(truth.costs()) for each in STEPS}
    few, many = (each for each in STEPS if each.plan == "shard=2")
    steps[few] *= 1.1
    steps[many] *= 0.9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_prediction", prediction)
        found = calibrated(BARE, steps)
    told = [prediction(each, found)(found.costs()) / steps[each] for each in (few, many)]
    assert told[0] < 1 < told[1]
    assert sum(told) == pytest.approx(2, abs=1e-3)


@pytest.mark.slow
def test_the_benchmark_holds_predicted_steps_against_measured_ones(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "planner_here.py"
    few = ["--only", "mlp", "--processes", "1", "--rounds", "1", "--json", str(tmp_path / "rows")]
    subprocess.run([sys.executable, script, *few], check=True, timeout=300)
    (row,) = json.loads((tmp_path / "rows").read_text(encoding="utf-8"))["rows"]
    assert 0.3 < row["predicted_seconds"] / row["measured_seconds"] < 3
