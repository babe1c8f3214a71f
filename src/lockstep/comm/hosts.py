"""Sums over the ranks of several hosts: in shared memory inside of each, and by torch between the first ranks of each.

What goes over the network is what one rank a host would send, and in fewer turns. The alternative, every rank exchanging a slice with those
at its place on the other hosts, sends as much and was no faster between two network namespaces of two ranks, and slower below 1 MB.

(No `from __future__ import annotations` here: DDP looks at its hooks' annotations, and wants classes.)
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.torch_private import GradBucket
from lockstep.comm.segment import Unavailable
from lockstep.comm.shared_memory import SharedGroup


class Hosts:
    """The ranks of a process group on several hosts, and their sums: the same bits on every rank, in no stated order. Made by `create`.

    Every rank calls the same in the same order, with CPU tensors that are contiguous. Raises an `ExchangeError` where a rank of this host
    fails, and what torch raises where the connection to another host is lost.
    """

    def __init__(self, memory: SharedGroup | None, firsts: Sequence[int]) -> None:
        """`memory`: that of this host's ranks, None for one alone. `firsts`: the first rank of each host, as the world numbers them."""
        self.memory = memory
        """That of this host's ranks; None for one alone."""
        self.between: Any = None
        """Torch's group of the first ranks of the hosts; None on the others."""
        self._sums: list[tuple[Tensor, dist.Work | None, torch.futures.Future[Tensor]]] = []
        self.firsts = tuple(firsts)

    @classmethod
    def create(cls, group: Any, hosts: Sequence[int]) -> "Hosts | Unavailable":
        """`hosts`: of each rank of `group`, the number of its host. Every rank calls it, and all get one, or the same reason.

        Before it is used, every process of the world must have called `connect`.
        """
        inside = [[rank for rank, each in enumerate(hosts) if each == host] for host in dict.fromkeys(hosts)]
        if len(inside) == len(hosts):
            return Unavailable("no two of its ranks are on one host")
        mine = next(each for each in inside if dist.get_rank(group) in each)
        memory = SharedGroup.create(group, among=mine)
        if isinstance(memory, Unavailable):
            return memory
        if len(mine) == 1:
            memory.close()
        ranks = dist.get_process_group_ranks(group)
        return cls(memory if len(mine) > 1 else None, [ranks[each[0]] for each in inside])

    @staticmethod
    def connect(everyone: Iterable[tuple[int, ...]], mine: "Iterable[Hosts]") -> None:
        """Make torch's groups between hosts. Every process of the world calls it, with the `firsts` of all that were made anywhere."""
        for firsts in everyone:
            group = _group_of(firsts)
            for hosts in mine:
                if hosts.firsts == firsts and dist.get_rank() in firsts:
                    hosts.between = group

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace `tensor`, of one size on all ranks, by the sum over ranks."""
        self._finish(tensor, self._start(tensor))

    def sum_bucket(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """A communication hook for DDP: the bucket's sum over ranks, not its mean. The backward goes on while it is on its way."""
        if bucket.index() == 0:
            self._sums = []  # of a backward that failed, there may be some
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._sums.append((bucket.buffer(), self._start(bucket.buffer()), future))
        if bucket.is_last():
            sums, self._sums = self._sums, []
            for buffer, work, promised in sums:
                self._finish(buffer, work)
                promised.set_result(buffer)
        return future

    def _start(self, tensor: Tensor) -> dist.Work | None:
        if self.memory is not None:
            self.memory.all_reduce(tensor)
        if self.between is None:
            return None
        with self.telling():
            work: dist.Work = dist.all_reduce(tensor, group=self.between, async_op=True)
        return work

    def _finish(self, tensor: Tensor, work: dist.Work | None) -> None:
        if work is not None:
            with self.telling():
                work.wait()
        if self.memory is not None:
            self.memory.broadcast(tensor, 0)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around an exchange with other hosts: where it fails, the other ranks of this host do not wait for what this one cannot give."""
        try:
            yield
        except BaseException:
            if self.memory is not None:
                self.memory.abort()
            raise

    def close(self) -> None:
        """Give the memory back. May be called again."""
        if self.memory is not None:
            self.memory.close()


@functools.cache
def _group_of(ranks: tuple[int, ...]) -> Any:
    """Torch's group of these ranks, made once for the life of the process group. Every process calls it: torch gives it a number."""
    return dist.new_group(ranks, group_desc="hosts")


def forget_hosts() -> None:
    """Let go of the process groups. For the end of the one that they are part of."""
    _group_of.cache_clear()
