"""A process group of which only one process exists. Collectives are recorded, and transfer
nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lockstep.base.torch_private import (
    FakeTensor,
    disable_current_modes,
    forget_distributed_operations,
)
from lockstep.comm import mesh
from lockstep.comm.shared_memory import SharedMemoryGroup
from lockstep.comm.world import World
from lockstep.planner.trace import CollectiveKind
from lockstep.planner.tracing.recorder import TraceRecorder
from lockstep.planner.tracing.torch_fakes import (
    FakeStore,
    PythonProcessGroup,
    group_name,
    replaced,
    temporary_backend,
)

BACKEND = "lockstep_fake"


_recorder: TraceRecorder | None = None


@contextmanager
def recorded_by(recorder: TraceRecorder) -> Iterator[None]:
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before


def _begin(kind: CollectiveKind, group: Any, size: int, **given: Any) -> int:
    return 0 if _recorder is None else _recorder.begin(kind, group, size, **given)


def _wait(number: int) -> None:
    if _recorder is not None:
        _recorder.wait(number)


class FakeWork(dist.Work):
    """The handle of a collective that is already complete."""

    def __init__(self, number: int, result: Any) -> None:
        super().__init__()
        self._number = number
        self._future: Future[Any] = Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        _wait(self._number)
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class RecordedGroup(PythonProcessGroup):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._place, self._ranks = rank, size

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return self._place

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return group_name(self)

    pg_name = group_name

    def _get_backend(self, device: torch.device) -> RecordedGroup:
        """Return an object without `supports_coalescing`, an attribute that torch 2.15 reads."""
        return self

    def _done(
        self,
        kind: CollectiveKind,
        result: Any,
        tensors: Sequence[Tensor],
        buffers: Sequence[Tensor] = (),
        **peer: Any,
    ) -> FakeWork:
        size = sum(tensor.nbytes for tensor in tensors)
        return FakeWork(_begin(kind, self, size, buffers=buffers, **peer), result)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> FakeWork:
        return self._done("all_reduce", tensors, tensors, tensors)

    allreduce_coalesced = reduce = allreduce

    def _allgather_base(self, output: Tensor, given: Tensor, options: Any = None) -> FakeWork:
        _fill(output, given)
        return self._done("all_gather", [output], [output], [output, given])

    all_gather_single = _allgather_base

    def allgather(
        self, outputs: list[list[Tensor]], given: list[Tensor], options: Any = None
    ) -> FakeWork:
        parts = [each for several in outputs for each in several]
        for part in parts:
            _fill(part, given[0])
        return self._done("all_gather", outputs, parts, [*parts, *given])

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, options: Any = None) -> FakeWork:
        _fill(output, given)
        return self._done("reduce_scatter", [output], [given], [output, given])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter(
        self, outputs: list[Tensor], given: list[list[Tensor]], options: Any = None
    ) -> FakeWork:
        _fill(outputs[0], given[0][self._place])
        parts = [each for several in given for each in several]
        return self._done("reduce_scatter", outputs, parts, [*outputs, *parts])

    def alltoall_base(self, output: Tensor, given: Tensor, *options: Any) -> FakeWork:
        _fill(output, given)
        larger = max(output, given, key=lambda each: each.nbytes)
        return self._done("all_to_all", [output], [larger], [output, given])

    def alltoall(self, outputs: list[Tensor], given: list[Tensor], options: Any = None) -> FakeWork:
        for output in outputs:
            _fill(output, given[self._place])
        return self._done("all_to_all", outputs, given, [*outputs, *given])

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> FakeWork:
        return self._done("broadcast", tensors, tensors)

    def barrier(self, options: Any = None) -> FakeWork:
        return FakeWork(0, None)

    def send(self, tensors: list[Tensor], target: int, tag: int) -> FakeWork:
        return self._done("send", tensors, tensors, peer=target)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> FakeWork:
        for tensor in tensors:
            # 1 is the vote of a torch stage that knows the shapes that it receives
            _fill(tensor, tensor.new_full((1,), int(not tensor.is_floating_point())))
        return self._done("send", tensors, tensors, tensors, peer=source, receives=True)


def _fill(output: Tensor, given: Tensor) -> None:
    size = output.numel()
    if size and given.numel() and not isinstance(output, FakeTensor):
        with disable_current_modes(), torch.no_grad():
            flat = given.detach().reshape(-1)[:size]
            filled = flat.repeat(-(-size // flat.numel()))[:size]
            output.detach().copy_(filled.view(output.shape))


class RecordedMemory(SharedMemoryGroup):
    """A fake of the shared memory between processes of one host, for a single process."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self._group = group.rank(), group.size(), group
        self.name, self.pending, self.is_closed = "shared memory", None, False

    def label(self, text: str) -> int:
        return 0

    def all_reduce(self, tensor: Tensor) -> None:
        self._note("all_reduce", tensor, tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, label: int = 0) -> None:
        _fill(output, tensor)
        self._note("reduce_scatter", tensor, output, tensor)

    def all_gather(self, output: Tensor, tensor: Tensor, label: int = 0) -> None:
        _fill(output, tensor)
        self._note("all_gather", output, output, tensor)

    def start_all_gather(self, output: Tensor, tensor: Tensor, label: int = 0) -> Any:
        _fill(output, tensor)
        return FakeWork(self._note("all_gather", output, output, tensor), output)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._note("broadcast", tensor)

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int],
        sizes: Sequence[int],
        label: int = 0,
    ) -> None:
        _fill(output, tensor)
        self._note("all_to_all", max(tensor, output, key=lambda each: each.nbytes), output, tensor)

    def finish(self) -> None: ...

    def close(self) -> None: ...

    def _note(self, kind: CollectiveKind, tensor: Tensor, *buffers: Tensor) -> int:
        number = _begin(kind, self._group, tensor.nbytes, buffers=buffers)
        _wait(number)
        return number


@dataclass(frozen=True, slots=True)
class FakeWorld(World):
    """A `World` in which all ranks have this rank's values."""

    def leave(self) -> None: ...

    def any(self, flag: bool) -> bool:
        return flag

    def gather_values(self, value: Any) -> list[Any]:
        return [value] * self.size

    def value_of(self, rank: int, value: Any) -> Any:
        return value

    def value_from(self, rank: int, compute: Callable[[], Any]) -> Any:
        return compute()

    def gather_ragged(self, rows: Tensor | None) -> Tensor:
        assert rows is not None, "this rank has a part of everything"
        return rows.cpu()


@contextmanager
def fake_world(rank: int, size: int, local_size: int) -> Iterator[FakeWorld]:
    """Make a default process group of `size` ranks, of which only `rank` exists."""
    excepthook = sys.excepthook
    with temporary_backend(BACKEND, lambda store, rank, size, timeout: RecordedGroup(rank, size)):
        if size > 1:
            dist.init_process_group(BACKEND, rank=rank, world_size=size, store=FakeStore())
        try:
            with replaced(SharedMemoryGroup, create=staticmethod(RecordedMemory)):
                local, here = rank % local_size, min(local_size, size)
                cpu = torch.device("cpu")
                yield FakeWorld(rank, size, local, here, cpu, owns_group=size > 1)
        finally:
            mesh.forget_meshes()
            forget_distributed_operations()
            if size > 1:
                dist.destroy_process_group()
            sys.excepthook = excepthook  # torch prepends another hook for each group
