"""Calls every collective of torch.distributed, and compares its output with the expected output."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lockstep.base import accelerator
from lockstep.doctor.coordination import ProbeCoordinator
from lockstep.doctor.expected_results import (
    COLLECTIVES,
    Collective,
    CollectiveCase,
    Operation,
    cases,
    expected_output,
    rank_input,
    root,
)

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
    "avg": dist.ReduceOp.AVG,
}
_UNSUPPORTED_ERRORS = (RuntimeError, ValueError, TypeError, NotImplementedError)
_NOT_CALLED = {"nccl": ("int16",)}
"""Maps backends to dtypes that are not checked. With torch 2.11, NCCL fails on int16 without an
error."""
_MOST_CONTRIBUTIONS = 85
"""At each position, at most this many ranks have inputs other than 0. A bfloat16 average of this
many inputs is exact."""
_BARRIERS = 3
_STAGGER_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class RankGroup:
    name: str
    global_ranks: list[int]
    group_rank: int
    process_group: Any
    device: torch.device
    backend: str

    @property
    def suffix(self) -> str:
        return f" in {self.name}" if self.process_group is not None else ""


def collective_rows(coordinator: ProbeCoordinator, group: RankGroup) -> Iterator[dict[str, Any]]:
    """Check all collectives of a process group. All ranks of the group must call this function."""
    for collective in COLLECTIVES:
        if collective == "barrier":
            outcomes = _check_barrier(coordinator, group)
            yield _row(group, collective, None, None, outcomes)
            continue
        for case in cases(collective):
            with coordinator.probe(f"{case.name}{group.suffix}"):
                outcomes = coordinator.all_gather(_outcome(coordinator, case, group))
            yield _row(group, collective, case.operation, case.data_type.name, outcomes)


def _row(
    group: RankGroup,
    collective: Collective,
    operation: Operation | None,
    data_type: str | None,
    outcomes: list[Any],
) -> dict[str, Any]:
    by_rank = {str(rank): each for rank, each in enumerate(outcomes) if each is not None}
    row = {"collective": collective, "operation": operation, "type": data_type}
    return {**row, "group": group.name, "outcomes": by_rank}


def _outcome(
    coordinator: ProbeCoordinator, case: CollectiveCase, group: RankGroup
) -> dict[str, str] | None:
    if case.data_type.name in _NOT_CALLED.get(group.backend, ()):
        return {"unsupported": f"{group.backend} has no {case.data_type.name}"}
    try:
        result = call(case, group)
    except _UNSUPPORTED_ERRORS as error:
        coordinator.record_error(error)
        return {"unsupported": (str(error).splitlines() or [type(error).__name__])[0]}
    expected = expected_output(case, group.global_ranks, group.group_rank)
    if expected is None:
        return None
    wrong = _difference(result, expected, case, len(group.global_ranks))
    return {"wrong": wrong} if wrong else None


def call(case: CollectiveCase, group: RankGroup) -> Tensor:
    values = torch.from_numpy(rank_input(case, group.global_ranks, group.group_rank))
    own = values * (1 if case.data_type.real else 1 + 1j)
    own = own.to(getattr(torch, case.data_type.name)).to(group.device)
    result = exchange(case.collective, own, group, operation=case.operation)
    accelerator.synchronize(group.device)
    return result


def exchange(
    collective: Collective, own: Tensor, group: RankGroup, *, operation: Operation | None = "sum"
) -> Tensor:
    size, process_group = len(group.global_ranks), group.process_group
    block = own.numel() // size
    root_rank = group.global_ranks[root(group.global_ranks)]
    is_root = group.group_rank == root(group.global_ranks)
    op: Any = _OPERATIONS[operation or "sum"]
    match collective:
        case "send/recv":
            received = torch.empty_like(own)
            following = group.global_ranks[(group.group_rank + 1) % size]
            preceding = group.global_ranks[group.group_rank - 1]
            # Send and receive are not batched: if NCCL rejects a data type, it leaves the batch
            # open. Odd ranks receive first, because otherwise the ring would deadlock.
            if group.group_rank % 2:
                dist.recv(received, preceding, group=process_group)
            dist.send(own, following, group=process_group)
            if group.group_rank % 2 == 0:
                dist.recv(received, preceding, group=process_group)
            return received
        case "broadcast":
            dist.broadcast(own, root_rank, group=process_group)
        case "reduce":
            dist.reduce(own, root_rank, op=op, group=process_group)
        case "all-reduce":
            dist.all_reduce(own, op=op, group=process_group)
        case "scatter":
            received = own.new_empty(block)
            blocks = list(own.view(size, block)) if is_root else None
            dist.scatter(received, blocks, root_rank, group=process_group)
            return received
        case "gather":
            parts = [torch.empty_like(own) for _ in range(size)] if is_root else None
            dist.gather(own, parts, root_rank, group=process_group)
            return torch.cat(parts) if parts is not None else own
        case "all-gather":
            received = own.new_empty(size * own.numel())
            dist.all_gather_single(received, own, group=process_group)
            return received
        case "reduce-scatter":
            received = own.new_empty(block)
            dist.reduce_scatter_single(received, own, op=op, group=process_group)
            return received
        case "all-to-all":
            received = torch.empty_like(own)
            dist.all_to_all_single(received, own, group=process_group)
            return received
        case "barrier":
            dist.barrier(group=process_group)
    return own


def _difference(result: Tensor, expected: NDArray[Any], case: CollectiveCase, size: int) -> str:
    if result.numel() != len(expected):
        return f"has {result.numel()} numbers, and must have {len(expected)}"
    if case.data_type.real:
        values = result.cpu().to(torch.float64 if case.operation == "avg" else torch.int64).numpy()
        error = np.abs(values - expected)
        is_exact = result.cpu().to(torch.float64).numpy() == values
    else:
        parts = torch.view_as_real(result.cpu().to(torch.complex128)).numpy()
        error = np.abs(parts - expected[:, None]).max(axis=1)
        is_exact = np.ones(len(parts), dtype=np.bool_)
    tolerance = 0.0
    if case.operation == "avg":
        roundings = 2 + min(size, _MOST_CONTRIBUTIONS) / 2
        eps = torch.finfo(getattr(torch, case.data_type.name)).eps
        tolerance = roundings * eps * float(np.abs(expected).max())
    wrong = np.flatnonzero(~((error <= tolerance) & is_exact))
    if not len(wrong):
        return ""
    first = int(wrong[0])
    right = bool(expected[first]) if case.data_type.name == "bool" else f"{expected[first]:g}"
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    wrong_text = f"{result[first].item()} at index {first} of {len(expected)}"
    return f"has {wrong_text}, and must have {right}{more}"


def _check_barrier(coordinator: ProbeCoordinator, group: RankGroup) -> list[Any]:
    """Let the ranks enter a barrier one after another, and find ranks that leave it too early."""
    early, size = None, len(group.global_ranks)
    for number in range(_BARRIERS):
        with coordinator.probe(f"barrier{group.suffix}"):
            time.sleep(_STAGGER_SECONDS * ((group.group_rank + number) % min(4, size)))
            name = f"{group.name}/{group.global_ranks[0]}/{number}"
            coordinator.add_to_counter(name, 1)
            exchange("barrier", torch.empty(0), group)
            entered = coordinator.add_to_counter(name, 0)
            if entered < size:
                early = {"wrong": f"left when {entered} of {size} ranks had entered"}
            outcomes = coordinator.all_gather(early)
    return outcomes
