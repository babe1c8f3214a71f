"""Hierarchical all-reduce over several hosts. The ranks of a host are summed through shared memory.
One leader rank of each host sums over the hosts through torch. Each host sends as many bytes as one
rank would.

This module has no `from __future__ import annotations`, because DDP reads the annotations of its
hooks.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.torch_private import GradBucket
from lockstep.comm.devices import TIMEOUT
from lockstep.comm.segment import Unavailable
from lockstep.comm.shared_memory import SharedMemoryGroup


class HierarchicalAllReduce:
    """All-reduces contiguous CPU tensors over the ranks of several hosts, with the same bits on
    every rank."""

    def __init__(self, shared_memory: SharedMemoryGroup | None, leaders: Sequence[int]) -> None:
        self.shared_memory = shared_memory
        """None if this host has only one rank."""
        self.leader_group: Any = None
        self.leaders = tuple(leaders)
        self._started: list[tuple[Tensor, dist.Work | None, torch.futures.Future[Tensor]]] = []

    @classmethod
    def create(cls, group: Any, hosts: Sequence[int]) -> "HierarchicalAllReduce | Unavailable":
        """`hosts` has the number of each rank's host. Every rank of `group` must call this method.
        Every process must call `connect` afterwards."""
        if len(set(hosts)) == len(hosts):
            return Unavailable("no two of its ranks are on one host")
        host = hosts[dist.get_rank(group)]
        mine = [rank for rank, each in enumerate(hosts) if each == host]
        shared_memory = SharedMemoryGroup.create(group, among=mine)
        if isinstance(shared_memory, Unavailable):
            return shared_memory
        if len(mine) == 1:
            shared_memory.close()
        global_ranks = dist.get_process_group_ranks(group)
        leaders = [global_ranks[hosts.index(each)] for each in dict.fromkeys(hosts)]
        return cls(shared_memory if len(mine) > 1 else None, leaders)

    @staticmethod
    def connect(
        leaders_of_all: Iterable[tuple[int, ...]], created_here: "Iterable[HierarchicalAllReduce]"
    ) -> None:
        """Make the process groups of the leader ranks. Every process must call this method."""
        for leaders in leaders_of_all:
            group = _new_group(leaders)
            for each in created_here:
                if each.leaders == leaders and dist.get_rank() in leaders:
                    each.leader_group = group

    def all_reduce(self, tensor: Tensor) -> None:
        self._finish(tensor, self._start(tensor))

    def sum_bucket(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook. The call for the last bucket waits for the sums of all
        buckets."""
        if bucket.index() == 0:
            self._started = []  # drop what a failed backward has left
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._started.append((bucket.buffer(), self._start(bucket.buffer()), future))
        if bucket.is_last():
            started, self._started = self._started, []
            for buffer, work, result in started:
                self._finish(buffer, work)
                result.set_result(buffer)
        return future

    def _start(self, tensor: Tensor) -> dist.Work | None:
        if self.shared_memory is not None:
            self.shared_memory.all_reduce(tensor)
        if self.leader_group is None:
            return None
        with self.abort_on_error():
            work: dist.Work = dist.all_reduce(tensor, group=self.leader_group, async_op=True)
        return work

    def _finish(self, tensor: Tensor, work: dist.Work | None) -> None:
        if work is not None:
            with self.abort_on_error():
                work.wait()
        if self.shared_memory is not None:
            self.shared_memory.broadcast(tensor, 0)

    @contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """Abort shared memory after an error, so that no rank of the host waits for a failed
        leader."""
        try:
            yield
        except BaseException:
            if self.shared_memory is not None:
                self.shared_memory.abort()
            raise

    def close(self) -> None:
        if self.shared_memory is not None:
            self.shared_memory.close()


@functools.cache
def _new_group(ranks: tuple[int, ...]) -> Any:
    """Every process must call this function, because torch numbers the groups."""
    return dist.new_group(ranks, timeout=TIMEOUT, group_desc="hosts")


def forget_leader_groups() -> None:
    """Call this function before the default process group is destroyed."""
    _new_group.cache_clear()
