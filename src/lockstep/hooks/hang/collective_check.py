"""Collectives compared across ranks before they are made: a mismatch is an error on all, with every rank's line, and no wait.

For looking for one: each collective costs some exchanges with torch's store, and every operation a call of Python.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.errors import MismatchError
from lockstep.base.torch_private import TorchDispatchMode, resolve_process_group, schema
from lockstep.comm.active_calls import CollectiveCall, announce
from lockstep.hooks.hang.snapshot import line_of, stack_of

_SAME_SIZES = frozenset(
    (
        *("allreduce", "broadcast", "allgather", "allgather_base", "reduce_scatter", "reduce_scatter_base", "reduce"),
        *("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"),
    )
)
"""Those to which all ranks give the same sizes, as torch's operators are called."""
_numbers = count()
"""Sequence numbers of the checks that this process has made; the same on all ranks."""
_NOT_OF_ALL = ("send", "recv", "recv_any_source", "wait_tensor", "monitored_barrier")


class Checked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, what this thread calls is compared. Every rank enters it, at the same moment. One at a time."""

    def __init__(self, store: Any, rank: int) -> None:
        """`store`: torch's, that all ranks meet at. `rank`: of all processes."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._store: Any = dist.PrefixStore(f"lockstep/check/{next(_numbers)}", store.clone())  # type: ignore[attr-defined]
        self._rank = rank
        self._made: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = schema(func).name.rpartition("::")[2].strip("_")
            if name not in _NOT_OF_ALL:
                given = {argument.name: value for argument, value in zip(schema(func).arguments, args, strict=False)}
                given |= kwargs or {}
                if "group_name" in given or "process_group" in given:
                    self._compare(name, given)
        return func(*args, **(kwargs or {}))

    def _compare(self, name: str, given: Mapping[str, Any]) -> None:
        group = _group_of(given)
        if group.size() == 1:
            return
        self._made[group.group_name] += 1
        number = self._made[group.group_name]
        call = CollectiveCall(name, group.group_desc, number, _tensors(given) if name in _SAME_SIZES else "")
        mine = {"rank": self._rank, "call": _said(call, given), "line": str(line_of(stack_of(sys._getframe(2))))}
        with announce(call):
            if text := self._verdict(f"{group.group_name}/{number}", f"{group.group_name}/{number - 1}", mine, group.size()):
                raise MismatchError(
                    f"call {number} of {group.group_desc} is not the same on all ranks, which make the same calls in the same order: {text}"
                )

    def _verdict(self, key: str, before: str, mine: Mapping[str, Any], size: int) -> str:
        """Empty where all agree."""
        self._store.set(f"{key}/{mine['rank']}", json.dumps(mine))
        self._store.append(f"{key}/ranks", f"{mine['rank']} ")
        if self._store.add(f"{key}/count", 1) == size:
            ranks = self._store.get(f"{key}/ranks").decode().split()
            text = difference([json.loads(self._store.get(f"{key}/{rank}")) for rank in sorted(ranks, key=int)])
            for name in (*ranks, "ranks", "count"):
                self._store.delete_key(f"{key}/{name}")
            self._store.delete_key(f"{before}/verdict")  # which all have read
            self._store.set(f"{key}/verdict", json.dumps(text))
        pause_seconds = 1e-4
        while not self._store.check([f"{key}/verdict"]):  # the watchdog looks after ranks that do not come
            time.sleep(pause_seconds)  # torch's own wait is deaf to signals, and says so on stderr each time that it ends for want of time
            pause_seconds = min(2 * pause_seconds, 0.05)
        found: str = json.loads(self._store.get(f"{key}/verdict"))
        return found


def difference(everyone: Sequence[Mapping[str, Any]]) -> str:
    """Return the differences between the ranks' calls, with their lines; empty if all call the same."""
    by_call: dict[str, list[Mapping[str, Any]]] = {}
    for said in everyone:
        by_call.setdefault(said["call"], []).append(said)
    if len(by_call) == 1:
        return ""
    return "; ".join(_group_in_words(call, several) for call, several in by_call.items())


def _group_in_words(call: str, several: Sequence[Mapping[str, Any]]) -> str:
    ranks = [str(said["rank"]) for said in several]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} {call} at {several[0]['line']}"


def _group_of(given: Mapping[str, Any]) -> dist.ProcessGroup:
    if "group_name" in given:
        return resolve_process_group(given["group_name"])
    unboxed: dist.ProcessGroup = dist.ProcessGroup.unbox(given["process_group"])
    return unboxed


def _said(call: CollectiveCall, given: Mapping[str, Any]) -> str:
    said: dict[str, int | str] = {name: given[name] for name in ("root_rank", "src") if name in given}
    if "reduce_op" in given:
        op = given["reduce_op"]  # the name in torch's functional collectives; else torch's own object
        said["reduce_op"] = op if isinstance(op, str) else dist.ReduceOp.RedOpType(op.op()).name.lower()
    return f"{call}{''.join(f', {name} {value}' for name, value in said.items())}"


def _tensors(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for value in given.values() for each in _each(value))


def _each(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _each(part)
