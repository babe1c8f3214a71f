"""`lockstep verify` of a mixture of experts whose experts are on several ranks: right plans pass,
and faults that are planted in lockstep itself are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from training.test_balance import balance, recipe
from verify.expert_faults import FAULTS, OtherRanksState

import lockstep as ls
from lockstep.evidence.tolerance import MeasuredRounding
from lockstep.evidence.trace import Trace, read_traces
from lockstep.testing.pool import WorkerPool
from lockstep.verify.causes.evidence import Evidence
from lockstep.verify.compare import compare_traces
from lockstep.verify.jobs import TraceRequest
from lockstep.verify.verification import likely_cause

RIGHT, BALANCED, STATE = "right", "right with balance", "state of another rank"
WITH_BALANCE = BALANCED, "balance shrinks"
CAUSES: dict[str, tuple[int, str, str]] = {
    "expert gradients times N": (
        0,
        "gradients",
        "expert gradient 2 times: the gradients of the experts of 'blocks.0.experts' and"
        " 'blocks.1.experts' are 2 times what they should be, multiplied by the number of ranks",
    ),
    "expert gradients averaged": (
        0,
        "gradients",
        "expert gradient 1/2 times: the gradients of the experts of 'blocks.0.experts' and"
        " 'blocks.1.experts' are 0.5 times what they should be, divided by the number of ranks",
    ),
    "averaged on a rank": (
        0,
        "gradients",
        "expert gradient 1/2 times: the gradients of experts 2 and 3 of 'blocks.1.experts.",
    ),
    "dense gradients not summed": (
        0,
        "gradients",
        "was not reduced: rank 0 holds the sum over its own microbatches alone",
    ),
    "dummies discarded": (
        0,
        "gradients",
        "gradients of some experts: the gradients of experts 2 and 3 of 'blocks.1.experts.",
    ),
    "norm of own experts": (
        0,
        "norm",
        "it is that of the experts of rank 0 of expert and of all other parameters",
    ),
    "norm without experts": (0, "norm", "norm without other ranks' experts: rank 0 clips by"),
    "router detached": (
        0,
        "missing",
        "a router's gradient: the loss and the gradients of the experts of 'blocks.1.experts' are"
        " right, and the gradient of 'blocks.1.router.weight' is lost",
    ),
    "router in part": (
        0,
        "gradients",
        "right, and the gradient of 'blocks.1.router.weight' is wrong",
    ),
    "rows of another token": (
        0,
        "gradients",
        "rows returned to the wrong token: in microbatch 0 on rank 0 the input of"
        " 'blocks.0.experts' and its choices are right, and token 0 has the output of token",
    ),
    "rows unsorted wrongly": (
        0,
        "gradients",
        "rows returned to the wrong token, or weighted by another token's weights: in microbatch 0",
    ),
    "rows over capacity": (
        0,
        "gradients",
        "rows of expert 2 (of rank 1 of expert) lost: in microbatch 0 on rank 0 the input of"
        " 'blocks.0.experts'",
    ),
    "balance shrinks": (
        0,
        "gradients",
        "a term of the loss that shrinks with the ranks: 'balance' is 0.5 times the reference's",
    ),
    "experts alike": (
        -1,
        "initial",
        "the experts' initial values: only experts ('blocks.1.experts.",
    ),
    STATE: (1, "states", "it is that of another rank's experts"),
}


def train(folder: str, plan: str, faults: Sequence[str]) -> None:
    """Train as `lockstep verify` starts it, once for each fault."""
    for fault in faults:
        trace = Path(folder) / fault
        trace.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack, pytest.MonkeyPatch.context() as environment:
            stack.enter_context(FAULTS.get(fault, nullcontext)())
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            steps = 2 if fault in (RIGHT, STATE) else 1
            request = TraceRequest(folder=trace, steps=steps, float64=True, experts=True)
            for name, value in request.write(trace).items():
                environment.setenv(name, value)
            with_balance = fault in WITH_BALANCE
            staged = {"stages": ["words", "blocks.*", "head"], "experts": ["blocks.*.experts"]}
            given = recipe(
                **staged if "pipeline" in plan else {},
                microbatch=3,
                clip_norm=0.1,
                balance=balance(over="microbatch", bias_rate=0.0) if with_balance else None,
            )
            hooks: list[ls.Hook] = [OtherRanksState()] if fault == STATE else []
            with pytest.raises(SystemExit, check=lambda ended: ended.code == 0):
                ls.train(given, plan=plan, run_dir=f"{trace}/run", hooks=hooks)


Traces = Mapping[str, Trace]


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Traces:
    return traced(pool, tmp_path_factory.mktemp("alone"), "replicate=1", 1, [RIGHT, BALANCED])


@pytest.fixture(scope="module")
def divided(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Traces:
    wanted = [RIGHT, BALANCED, *CAUSES]
    return traced(pool, tmp_path_factory.mktemp("divided"), "expert=2", 2, wanted)


def traced(
    pool: WorkerPool, folder: Path, plan: str, size: int, faults: Sequence[str]
) -> dict[str, Trace]:
    pool.run(size, train, str(folder), plan, faults)
    return {fault: read_traces(folder / fault)[0] for fault in faults}


def verified(alone: Traces, found: Trace, fault: str) -> tuple[Any, str | None]:
    """Return the first difference and its cause."""
    reference = alone[BALANCED if fault in WITH_BALANCE else RIGHT]
    rounding = MeasuredRounding(reference, [], minimum=1e-13)
    comparison = compare_traces(reference, found, rounding, bitwise=False)
    if not comparison.differences:
        return None, None
    cause = likely_cause(Evidence(reference, found, comparison.differences))
    return comparison.differences[0], cause


@pytest.mark.parametrize("fault", CAUSES)
def test_a_planted_fault_is_named(alone: Traces, divided: Traces, fault: str) -> None:
    first, cause = verified(alone, divided[fault], fault)
    step, check, text = CAUSES[fault]
    assert first is not None, "not caught"
    assert text in str(cause), first
    assert (first.step, first.check) == (step, check)


@pytest.mark.parametrize("twin", [RIGHT, BALANCED])
def test_a_right_plan_passes(alone: Traces, divided: Traces, twin: str) -> None:
    assert verified(alone, divided[twin], twin) == (None, None)
    layers = divided[twin].metadata["experts"]
    assert [layers[name]["router"] for name in layers] == [
        [f"blocks.{block}.router.weight"] for block in (0, 1)
    ]
    assert divided[twin].experts_of(0).keys() == {0}
    assert alone[twin].metadata["short_dtype_operations"] == [], "the trace has none"


IN_STAGES = "expert gradients times N", "averaged on a rank", "experts alike"


@pytest.mark.slow
def test_faults_of_experts_in_two_stages_are_named(
    pool: WorkerPool, tmp_path: Path, alone: Traces
) -> None:
    found = traced(pool, tmp_path, "pipeline=2,expert=2", 4, [RIGHT, *IN_STAGES])
    assert verified(alone, found[RIGHT], RIGHT) == (None, None)
    for fault in IN_STAGES:
        _, cause = verified(alone, found[fault], fault)
        assert CAUSES[fault][2] in str(cause), fault


def test_every_fault_is_tried() -> None:
    assert {*FAULTS, STATE} == CAUSES.keys()


FOUR = {
    "replicate=2,expert=2": (
        *("expert gradients times N", "expert gradients averaged", "norm of own experts"),
        *("norm without experts", "router detached", "rows over capacity", "balance shrinks"),
    ),
    "shard=2,expert=2": ("router detached", "rows of another token", "rows over capacity"),
    "expert=2,context=2": (
        *("expert gradients times N", "norm of own experts", "router detached"),
        *("rows of another token", "rows over capacity"),
    ),
}
"""Plan of four ranks -> the faults that are planted under it."""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("plan", FOUR)
def test_faults_are_named_with_other_axes(
    pool: WorkerPool, tmp_path: Path, alone: Traces, plan: str
) -> None:
    found = traced(pool, tmp_path, plan, 4, [RIGHT, BALANCED, *FOUR[plan]])
    for twin in (RIGHT, BALANCED):
        assert verified(alone, found[twin], twin) == (None, None)
    for fault in FOUR[plan]:
        first, cause = verified(alone, found[fault], fault)
        assert first is not None, f"{fault} was not caught"
        text = CAUSES[fault][2].replace("on rank 0", RANKS.get(plan, "on rank 0"))
        if text.startswith("expert gradient"):  # these faults go by the number of all ranks
            text = text.partition(":")[0].replace("2", "4")
        text = text.replace("0.5 times the reference's", "0.25 times the reference's")
        assert text in str(cause), (fault, first)


RANKS = {"expert=2,context=2": "on ranks 0 and 1"}
"""Plan -> the ranks that compute microbatch 0, if it is not rank 0 alone."""
