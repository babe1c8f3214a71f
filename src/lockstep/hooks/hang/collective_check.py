"""Compares collectives across ranks before they start, for debugging. Each collective sends some
requests to torch's store. Each torch operation calls Python code."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch.distributed as dist

from lockstep.base.dtypes import dtype_name
from lockstep.base.errors import MismatchError
from lockstep.base.nested import tree_tensors
from lockstep.base.torch_private import (
    TorchDispatchMode,
    resolve_process_group,
    schema,
)
from lockstep.base.words import listed
from lockstep.comm.active_calls import CollectiveCall, announce
from lockstep.hooks.hang.snapshot import innermost_line, stack_of

_SAME_SIZES = frozenset(
    (
        *("allreduce", "broadcast", "allgather", "allgather_base", "reduce_scatter"),
        *("reduce_scatter_base", "reduce", "all_reduce", "all_gather_into_tensor"),
        "reduce_scatter_tensor",
    )
)
# numbers the instances of `CollectiveCheck` in this process, for their keys in the store; the
# numbers are the same on all ranks
_numbers = count()
_NOT_ON_ALL_RANKS = ("send", "recv", "recv_any_source", "wait_tensor", "monitored_barrier")


class CollectiveCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every rank enters this context at the same point of the program. Only one `CollectiveCheck`
    may be active at a time."""

    def __init__(self, store: Any, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store: Any = dist.PrefixStore(f"lockstep/check/{next(_numbers)}", store.clone())  # type: ignore[attr-defined]
        self._rank = rank
        self._calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = schema(func).name.rpartition("::")[2].strip("_")
            if name not in _NOT_ON_ALL_RANKS:
                names = [argument.name for argument in schema(func).arguments]
                given = dict(zip(names, args, strict=False)) | (kwargs or {})
                if "group_name" in given or "process_group" in given:
                    self._compare(name, given)
        return func(*args, **(kwargs or {}))

    def _compare(self, name: str, given: Mapping[str, Any]) -> None:
        group = _group_of(given)
        if group.size() == 1:
            return
        self._calls[group.group_name] += 1
        number = self._calls[group.group_name]
        tensors = _tensors(given) if name in _SAME_SIZES else ""
        call = CollectiveCall(name, group.group_desc, number, tensors)
        mine = {
            "rank": self._rank,
            "call": _described(call, given),
            "line": str(innermost_line(stack_of(sys._getframe(2)))),
        }
        key, before = (f"{group.group_name}/{each}" for each in (number, number - 1))
        with announce(call):
            text = self._mismatch(key, before, mine, group.size())
        if text:
            raise MismatchError(
                f"call {number} of {group.group_desc} differs between ranks; all must make the"
                f" same calls in the same order: {text}"
            )

    def _mismatch(self, key: str, before: str, mine: Mapping[str, Any], size: int) -> str:
        self._store.set(f"{key}/{mine['rank']}", json.dumps(mine))
        self._store.append(f"{key}/ranks", f"{mine['rank']} ")
        if self._store.add(f"{key}/count", 1) == size:
            ranks = sorted(self._store.get(f"{key}/ranks").decode().split(), key=int)
            text = call_difference([json.loads(self._store.get(f"{key}/{rank}")) for rank in ranks])
            for name in (*ranks, "ranks", "count"):
                self._store.delete_key(f"{key}/{name}")
            # all ranks have read the result of the previous call
            self._store.delete_key(f"{before}/mismatch")
            self._store.set(f"{key}/mismatch", json.dumps(text))
        pause_seconds = 1e-4
        # the watchdog reports ranks that do not arrive
        while not self._store.check([f"{key}/mismatch"]):
            # torch's wait ignores signals, and prints to stderr at each timeout
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, 0.05)
        mismatch: str = json.loads(self._store.get(f"{key}/mismatch"))
        return mismatch


def call_difference(everyone: Sequence[Mapping[str, Any]]) -> str:
    """Return the difference between the ranks' calls as text. Empty if all calls are equal."""
    by_call: dict[str, list[Mapping[str, Any]]] = {}
    for each in everyone:
        by_call.setdefault(each["call"], []).append(each)
    texts = [
        f"{listed('rank', [each['rank'] for each in several])} {call} at {several[0]['line']}"
        for call, several in by_call.items()
    ]
    return "; ".join(texts) if len(texts) > 1 else ""


def _group_of(given: Mapping[str, Any]) -> dist.ProcessGroup:
    if "group_name" in given:
        return resolve_process_group(given["group_name"])
    unboxed: dist.ProcessGroup = dist.ProcessGroup.unbox(given["process_group"])
    return unboxed


def _described(call: CollectiveCall, given: Mapping[str, Any]) -> str:
    details: dict[str, int | str] = {
        name: given[name] for name in ("root_rank", "src") if name in given
    }
    if "reduce_op" in given:
        # a name in torch's functional collectives, otherwise a `ReduceOp`
        op = given["reduce_op"]
        details["reduce_op"] = (
            op if isinstance(op, str) else dist.ReduceOp.RedOpType(op.op()).name.lower()
        )
    return f"{call}{''.join(f', {name} {value}' for name, value in details.items())}"


def _tensors(given: Mapping[str, Any]) -> str:
    tensors = tree_tensors(list(given.values()))
    return ", ".join(f"{dtype_name(each.dtype)} {tuple(each.shape)}" for each in tensors)
