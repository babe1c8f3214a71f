"""Every collective, called on the ranks of a group, and its result held against the definition."""

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

from lockstep.comm.world import all_gather_single
from lockstep.doctor.board import Board
from lockstep.doctor.definitions import COLLECTIVES, Case, Collective, DataType, Operation, cases, given, held, root

reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
    "avg": dist.ReduceOp.AVG,
}
_REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError)
"""What backends raise for a type or an operation that they do not have."""
_MOST_ROUNDINGS = 85
"""Of a sum's parts: no more ranks count at one place, in the types that round coarsely (bfloat16)."""
_BARRIERS = 3
_STAGGER_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Group:
    """Some of the ranks, this one among them."""

    name: str
    members: list[int]
    """Their ranks among all."""
    me: int
    """This rank, in the group."""
    process_group: Any
    """Torch's. None: all ranks."""
    device: torch.device

    @property
    def where(self) -> str:
        """What comes after the name of something that is done in it."""
        return f" in {self.name}" if self.process_group is not None else ""


def check(board: Board, group: Group) -> Iterator[dict[str, Any]]:
    """Check every collective in every data type and operation. Every rank calls it, with its own group of one name.

    Yields, of each case, `collective`, `operation`, `type`, `group` and `outcomes`: those of the ranks with something to say, by rank.
    An outcome is `absent` with the backend's words, or `wrong` with what was held.
    """
    for collective in COLLECTIVES:
        if collective == "barrier":
            yield _row(group, "barrier", None, None, _barrier(board, group))
            continue
        for case in cases(collective):
            with board.probe(f"{case.name}{group.where}"):
                outcomes = board.everyone(_outcome(board, case, group))
            yield _row(group, collective, case.operation, case.kind, outcomes)


def _row(group: Group, collective: Collective, operation: Operation | None, kind: DataType | None, outcomes: list[Any]) -> dict[str, Any]:
    return {
        "collective": collective,
        "operation": operation,
        "type": kind.name if kind is not None else None,
        "group": group.name,
        "outcomes": {str(rank): outcome for rank, outcome in enumerate(outcomes) if outcome is not None},
    }


def _outcome(board: Board, case: Case, group: Group) -> dict[str, str] | None:
    """None: as defined."""
    try:
        result = call(case, group)
    except _REFUSALS as error:
        board.tell(error)
        return {"absent": (str(error).splitlines() or [type(error).__name__])[0]}
    expected = held(case, group.members, group.me)
    if expected is None:
        return None
    wrong = _difference(result, expected, case, len(group.members))
    return {"wrong": wrong} if wrong else None


def call(case: Case, group: Group) -> Tensor:
    """The collective on what the definition gives. Returns what this rank holds then, blocks in the order of ranks."""
    mine = _tensor(given(case, group.members, group.me), case.kind, group.device)
    result = exchange(case.collective, mine, group, operation=case.operation)
    if group.device.type == "cuda":
        torch.cuda.synchronize()
    return result


def exchange(collective: Collective, mine: Tensor, group: Group, *, operation: Operation | None = "sum") -> Tensor:
    """One call, as training does it. `mine` is overwritten where the collective does so."""
    size, handle = len(group.members), group.process_group
    block = mine.numel() // size
    leader = group.members[root(group.members)]
    is_root = group.me == root(group.members)
    op: Any = _OPERATIONS[operation or "sum"]
    match collective:
        case "send/recv":
            received = torch.empty_like(mine)
            ahead, behind = group.members[(group.me + 1) % size], group.members[group.me - 1]
            # Not batched: NCCL leaves a batch open in which it refuses a type. One that receives first breaks the ring.
            if group.me % 2:
                dist.recv(received, behind, group=handle)
            dist.send(mine, ahead, group=handle)
            if group.me % 2 == 0:
                dist.recv(received, behind, group=handle)
            return received
        case "broadcast":
            dist.broadcast(mine, leader, group=handle)
            return mine
        case "reduce":
            dist.reduce(mine, leader, op=op, group=handle)
            return mine
        case "all-reduce":
            dist.all_reduce(mine, op=op, group=handle)
            return mine
        case "scatter":
            received = mine.new_empty(block)
            dist.scatter(received, list(mine.view(size, block)) if is_root else None, leader, group=handle)
            return received
        case "gather":
            parts = [torch.empty_like(mine) for _ in range(size)] if is_root else None
            dist.gather(mine, parts, leader, group=handle)
            return torch.cat(parts) if parts is not None else mine
        case "all-gather":
            received = mine.new_empty(size * mine.numel())
            all_gather_single(received, mine, group=handle)
            return received
        case "reduce-scatter":
            received = mine.new_empty(block)
            reduce_scatter_single(received, mine, op=op, group=handle)
            return received
        case "all-to-all":
            received = torch.empty_like(mine)
            dist.all_to_all_single(received, mine, group=handle)
            return received
        case "barrier":
            dist.barrier(group=handle)
            return mine


def _tensor(values: NDArray[Any], kind: DataType, device: torch.device) -> Tensor:
    whole = torch.from_numpy(values)
    if not kind.real:
        whole = whole * (1 + 1j)
    return whole.to(getattr(torch, kind.name)).to(device)


def _difference(result: Tensor, expected: NDArray[Any], case: Case, size: int) -> str:
    """The first place that does not hold what it must. Empty: all do. An average may be off by the rounding of a sum and a division."""
    if result.numel() != len(expected):
        return f"holds {result.numel()} numbers, and must hold {len(expected)}"
    if case.kind.real:
        found = result.cpu().to(torch.float64 if case.operation == "avg" else torch.int64).numpy()
        apart = np.abs(found - expected)
        exact = result.cpu().to(torch.float64).numpy() == found
    else:
        parts = torch.view_as_real(result.cpu().to(torch.complex128)).numpy()
        found = parts[:, 0]
        apart = np.abs(parts - expected[:, None]).max(axis=1)
        exact = np.ones(len(found), dtype=np.bool_)
    allowed = 0.0
    if case.operation == "avg":
        roundings = 2 + min(size, _MOST_ROUNDINGS) / 2
        allowed = roundings * torch.finfo(getattr(torch, case.kind.name)).eps * float(np.abs(expected).max())
    wrong = np.flatnonzero(~((apart <= allowed) & exact))
    if not len(wrong):
        return ""
    first = int(wrong[0])
    must = bool(expected[first]) if case.kind.name == "bool" else f"{expected[first]:g}"
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"holds {result[first].item()} at place {first} of {len(expected)}, and must hold {must}{more}"


def _barrier(board: Board, group: Group) -> list[Any]:
    """Nobody may leave before the last has come: ranks come one after another, and count themselves in just before."""
    early = None
    for number in range(_BARRIERS):
        with board.probe(f"barrier{group.where}"):
            time.sleep(_STAGGER_SECONDS * ((group.me + number) % min(4, len(group.members))))
            name = f"{group.name}/{group.members[0]}/{number}"
            board.count(name, 1)
            exchange("barrier", torch.empty(0), group)
            came = board.count(name, 0)
            if came < len(group.members):
                early = {"wrong": f"left when {came} of {len(group.members)} ranks had come"}
            outcomes = board.everyone(early)
    return outcomes
