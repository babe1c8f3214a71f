"""The probe of `lockstep verify` on a mixture of experts: right plans pass, and a balance of a
rank's own tokens, planted in lockstep itself, is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor
from training.test_balance import STAGES, balance, recipe

import lockstep as ls
from lockstep.evidence.tolerance import MeasuredRounding
from lockstep.evidence.trace import Trace, read_traces
from lockstep.testing.pool import WorkerPool
from lockstep.training.balance import ExpertBalance
from lockstep.verify.causes.evidence import Evidence
from lockstep.verify.compare import compare_traces
from lockstep.verify.jobs import TraceRequest
from lockstep.verify.verification import likely_cause


def own_loads(balance: ExpertBalance) -> Tensor:
    return balance._own_loads.clone()


def own_part(balance: ExpertBalance, routed: Any) -> Tensor:
    return balance._loads_of(routed).sum(0)


PATCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "right": nullcontext,
    "own microbatches": lambda: patch.object(ExpertBalance, "_summed", own_loads),
    "own part": lambda: patch.object(ExpertBalance, "_loads_of_f", own_part),
}


def train(folder: str, plan: str, over: str, faults: list[str]) -> None:
    """Train as `lockstep verify` starts it, once for each fault."""
    for fault in faults:
        trace = Path(folder) / fault
        trace.mkdir(exist_ok=True)
        with ExitStack() as stack, pytest.MonkeyPatch.context() as environment:
            stack.enter_context(PATCHES[fault]())
            request = TraceRequest(folder=trace, steps=2)
            for name, value in request.write(trace).items():
                environment.setenv(name, value)
            given = recipe(balance=balance(over=over, bias_rate=0.0), stages=STAGES)
            with pytest.raises(SystemExit, check=lambda ended: ended.code == 0):
                ls.train(given, plan=plan, run_dir=f"{trace}/run")


def traced(
    pool: WorkerPool, path: Path, size: int, plan: str, over: str, faults: list[str]
) -> Iterator[Trace]:
    path.mkdir()
    pool.run(size, train, str(path), plan, over, faults)
    for fault in faults:
        yield read_traces(path / fault)[0]


@pytest.mark.parametrize(
    ("plan", "over", "fault", "cause"),
    [
        (
            "replicate=2",
            "step",
            "own microbatches",
            "balance of a rank's own tokens: in microbatch 0 on rank 0 the balance loss of"
            " 'blocks.0.experts' takes the load of experts from",
        ),
        (
            "context=2",
            "microbatch",
            "own part",
            "those of ranks 0 to 1 together are the reference's; sum the counts over the ranks",
        ),
    ],
)
def test_a_balance_of_a_ranks_own_tokens_is_named(
    pool: WorkerPool, tmp_path: Path, plan: str, over: str, fault: str, cause: str
) -> None:
    (alone,) = traced(pool, tmp_path / "alone", 1, "replicate=1", over, ["right"])
    right, wrong = traced(pool, tmp_path / "plan", 2, plan, over, ["right", fault])
    rounding = MeasuredRounding(alone, [], minimum=1e-13)
    found = compare_traces(alone, right, rounding, bitwise=False)
    assert found.differences == []
    assert right.microbatches[0].loads == alone.microbatches[0].loads != {}
    found = compare_traces(alone, wrong, rounding, bitwise=False)
    assert found.differences
    said = likely_cause(Evidence(alone, wrong, found.differences))
    assert cause in str(said), found.differences[0]


def test_a_pipeline_passes_and_each_stage_has_the_loads_of_its_layers(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (alone,) = traced(pool, tmp_path / "alone", 1, "replicate=1", "microbatch", ["right"])
    (found,) = traced(pool, tmp_path / "plan", 2, "pipeline=2", "microbatch", ["right"])
    rounding = MeasuredRounding(alone, [], minimum=1e-13)
    assert compare_traces(alone, found, rounding, bitwise=False).differences == []
    expected = {each.index: each.loads for each in alone.microbatches}
    assert len({tuple(sorted(each.loads.items())) for each in alone.microbatches}) > 1
    of_stages: dict[int, dict[str, Any]] = {}
    for each in found.microbatches:
        assert len(each.loads) == 1
        of_stages.setdefault(each.index, {}).update(each.loads)
    assert of_stages == expected
