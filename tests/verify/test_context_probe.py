"""The probe of `lockstep verify` where ranks share out the tokens of each sequence: right plans
pass, and faults planted in lockstep itself are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from training.test_context_axis import recipe
from training.texts import weighted

import lockstep as ls
from lockstep.comm.mesh import Mesh
from lockstep.evidence.tolerance import MeasuredRounding
from lockstep.evidence.trace import Trace, read_traces
from lockstep.model.context import exchange, label_shift
from lockstep.model.context.active import ActiveSequence
from lockstep.model.context.cut import SequenceCut
from lockstep.testing.pool import WorkerPool
from lockstep.verify.causes.evidence import Evidence
from lockstep.verify.compare import compare_traces
from lockstep.verify.jobs import TraceRequest
from lockstep.verify.verification import likely_cause


def own_positions(sequence: ActiveSequence) -> Tensor:
    return torch.tensor(range(sequence.layout.local))


def own_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, None]:
    """The backward of a gather that leaves out the gradients from other ranks."""
    return gradient.index_select(0, ctx.layout.places), None


def without_last_pairs(
    original: Callable[..., Iterator[tuple[Any, Any]]],
) -> Callable[..., Iterator[tuple[Any, Any]]]:
    """Ignore the label of each token whose next one is elsewhere."""

    def parts_of(
        output: Tensor, batch: Any, cut: Any, rank: int, shift: int
    ) -> Iterator[tuple[Any, Any]]:
        for own, (text, labels) in original(output, batch, cut, rank, shift):
            ends = cut.layout.places_of(rank).diff() != 1
            yield own, (text, labels.index_fill(1, ends.nonzero().flatten(), -100))

    return parts_of


def patches(fault: str) -> Iterator[Any]:
    # these would refuse the faults
    yield patch.object(SequenceCut, "check", lambda *given: None)
    yield patch.object(SequenceCut, "_find_shift", lambda *given: 0)
    if fault == "double positions":
        yield patch.object(ActiveSequence, "places", own_positions)
    if fault == "own gradient":
        yield patch.object(exchange.GatherRows, "backward", staticmethod(own_gradient))
    if fault == "pairs":
        yield patch.object(label_shift, "parts_of", without_last_pairs(label_shift.parts_of))
    if fault == "not summed":
        yield patch.object(Mesh, "summed", lambda mesh, parameter=None: mesh.data)


def train(folder: str, plan: str, faults: list[str]) -> None:
    """Train as `lockstep verify` starts it, once for each fault."""
    for fault in faults:
        trace = Path(folder) / fault
        trace.mkdir(exist_ok=True)
        with ExitStack() as stack, pytest.MonkeyPatch.context() as environment:
            for each in patches(fault):
                stack.enter_context(each)
            request = TraceRequest(folder=trace, steps=2, tokens=True)
            for name, value in request.write(trace).items():
                environment.setenv(name, value)
            given = recipe(loss=weighted, weight=None, clip_norm=None, evaluation=None)
            with pytest.raises(SystemExit, check=lambda ended: ended.code == 0):
                ls.train(given, plan=plan, run_dir=f"{trace}/run")


def traced(pool: WorkerPool, path: Path, size: int, plan: str, faults: list[str]) -> list[Trace]:
    path.mkdir()
    pool.run(size, train, str(path), plan, faults)
    return [read_traces(path / fault)[0] for fault in faults]


def test_faults_where_ranks_share_out_sequences_are_named(pool: WorkerPool, tmp_path: Path) -> None:
    (alone,) = traced(pool, tmp_path / "alone", 1, "replicate=1", ["right"])
    causes = {
        "right": None,
        "double positions": "places of another chunk: in microbatch 0 outputs are right up to",
        "own gradient": "or did not add the gradients of keys and values over the ranks",
        "pairs": "a pair lost at each cut: the loss leaves out the tokens at",
        "not summed": "the gradient was not summed over context: rank 0 holds the gradient of its",
    }
    traces = traced(pool, tmp_path / "cut", 2, "context=2,exchange=keys", list(causes))
    rounding = MeasuredRounding(alone, [], minimum=1e-13)
    for (fault, cause), trace in zip(causes.items(), traces, strict=True):
        found = compare_traces(alone, trace, rounding, bitwise=False)
        if cause is None:
            assert found.differences == []
            assert trace.microbatches[0].together == (0, 1)
            continue
        assert found.differences, fault
        said = likely_cause(Evidence(alone, trace, found.differences))
        assert cause in str(said), fault


def test_tokens_are_traced_where_parameters_are_sharded(pool: WorkerPool, tmp_path: Path) -> None:
    (alone,) = traced(pool, tmp_path / "alone", 1, "replicate=1", ["right"])
    (sharded,) = traced(pool, tmp_path / "sharded", 2, "shard=2", ["right"])
    found = compare_traces(
        alone, sharded, MeasuredRounding(alone, [], minimum=1e-13), bitwise=False
    )
    assert found.differences == []


def test_a_microbatch_whose_chunks_are_computed_by_themselves_counts_once(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (alone,) = traced(pool, tmp_path / "alone", 1, "replicate=1,numerics=bitwise", ["right"])
    (cut,) = traced(pool, tmp_path / "cut", 2, "context=2,numerics=bitwise", ["right"])
    found = compare_traces(alone, cut, MeasuredRounding(alone, [], minimum=1e-13), bitwise=True)
    assert found.differences == []
