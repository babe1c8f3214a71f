"""Records the operations, collectives and allocations of a step on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.base.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    in_backward,
    resolve_process_group,
    tree_leaves,
)
from lockstep.planner.trace import (
    DEFAULT_STREAM,
    DISPATCH,
    Await,
    AwaitEvent,
    Cause,
    Collective,
    CollectiveKind,
    Communicate,
    Compute,
    Item,
    Mark,
    MemoryChange,
    Phase,
    RecordEvent,
    TracedStep,
)
from lockstep.planner.tracing.kernels import kernel
from lockstep.planner.tracing.torch_fakes import DEVICE, cpu_streams, replaced

FUNCTIONAL: Mapping[str, CollectiveKind] = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
"""Torch's functional collectives, which DTensor calls."""
WITHOUT_LABEL: tuple[Cause, ...] = ("activations", "temporary")
PLAIN = (Tensor, FakeTensor, torch.nn.Parameter)
P = ParamSpec("P")


class TraceRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations inside its `with` block."""

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.items: list[Item] = []
        self.phase: Phase = "other"
        self.loss: Cause | None = None
        """Cause to record for memory that the loss function allocates."""
        self._is_recording = False
        self.streams = Streams(self._note)
        self.allocations: list[MemoryChange] = []
        self.causes: dict[int, Cause] = {}
        self._axes = axes
        self._numbers: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._finalizers: list[weakref.finalize[Any, Any]] = []
        self._pending: dict[int, int] = {}
        self._collectives = 0
        self._outstanding: set[int] = set()

    @contextmanager
    def streams_and_storages(self) -> Iterator[None]:
        """Make torch use recorded streams, and record the sizes of storages."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._note_storage(storage)
            if not size:
                self._label_storage(storage, "gathered")
            return result

        try:
            with self.streams.used(), replaced(torch.UntypedStorage, resize_=resized):
                yield
        finally:
            for finalizer in self._finalizers:
                finalizer.detach()

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._is_recording = True
        try:
            with self:
                yield
        finally:
            self._is_recording = False

    def mark(self, name: str) -> None:
        self._note(Mark(name))

    def _note(self, item: Item) -> None:
        if self._is_recording:
            self.items.append(item)

    def trace(self, rank: int) -> TracedStep:
        return TracedStep(rank, self.items, self.allocations, self.causes)

    # Operations

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(kind not in PLAIN for kind in types):
            if any(issubclass(kind, DTensor) for kind in types):
                self.mark(DISPATCH)
            return NotImplemented
        kwargs = kwargs or {}
        if self.phase != "update":
            self.phase = "forward"
            if in_backward():
                self.phase = "recompute" if torch.is_grad_enabled() else "backward"
        if function is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        result = function(*args, **kwargs)
        if function.namespace == "_c10d_functional":
            self._note_functional(function, args, result)
        elif (found := kernel(function, args, kwargs, result, self.phase)) is not None:
            self._note(Compute(found, self.streams.current.number))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._note_storage(each.untyped_storage())
        return result

    def _note_functional(self, function: Any, args: Any, result: Any) -> None:
        name = function.overloadpacket.__name__
        if name == "wait_tensor":
            if (number := self._pending.pop(id(args[0].untyped_storage()), None)) is not None:
                self.wait(number)
            return
        kind, group = FUNCTIONAL[name.removesuffix("_")], resolve_process_group(args[-1])
        number = self.begin(kind, group, (args[0] if kind == "reduce_scatter" else result).nbytes)
        self._pending[id(result.untyped_storage())] = number

    # Collectives

    def begin(
        self,
        kind: CollectiveKind,
        group: Any,
        size: int,
        *,
        buffers: Sequence[Tensor] = (),
        peer: int | None = None,
        receives: bool = False,
    ) -> int:
        for each in buffers:
            number = self._note_storage(each.untyped_storage())
            if self.causes[number] in WITHOUT_LABEL:
                self.causes[number] = "communication"
        self._collectives += 1
        ranks, name = dist.get_process_group_ranks(group), group.group_name
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        axis = self._axes.get(name, "")
        collective = Collective(kind, len(ranks), stride, size, axis, self.phase)
        stream = self.streams.current.number
        self._note(Communicate(collective, self._collectives, stream, name, peer, receives))
        self._outstanding.add(self._collectives)
        return self._collectives

    def wait(self, number: int) -> None:
        self._outstanding.discard(number)
        self._note(Await(number, self.streams.current.number))

    def wait_for_all(self) -> None:
        """Record waits for all collectives. DDP waits for its buckets in C++, which a trace cannot
        record."""
        for number in sorted(self._outstanding):
            self.wait(number)

    # Memory

    def labelling(self, function: Callable[P, Tensor], cause: Cause) -> Callable[P, Tensor]:
        def labelled(*arguments: P.args, **keywords: P.kwargs) -> Tensor:
            result = function(*arguments, **keywords)
            self.label(result, cause)
            return result

        return labelled

    def label(self, tensors: Any, cause: Cause) -> None:
        for each in tree_leaves(tensors):
            local = each.to_local() if isinstance(each, DTensor) else each
            if type(local) in PLAIN:
                self._label_storage(local.untyped_storage(), cause)

    def _label_storage(self, storage: torch.UntypedStorage, cause: Cause) -> None:
        self.causes[self._note_storage(storage)] = cause

    def _note_storage(self, storage: torch.UntypedStorage) -> int:
        identity, size = id(storage), storage.nbytes()
        if identity not in self._numbers:
            number = len(self.causes)
            self._numbers[identity], self._sizes[number] = number, 0
            unlabelled: Cause = "activations" if self.phase == "forward" else "temporary"
            self.causes[number] = self.loss or unlabelled
            self._finalizers.append(weakref.finalize(storage, self._free, identity, number))
        self._note_size(self._numbers[identity], size)
        return self._numbers[identity]

    def _note_size(self, number: int, size: int) -> None:
        if change := size - self._sizes[number]:
            self.allocations.append(MemoryChange(number, change, len(self.items)))
            self._sizes[number] = size

    def _free(self, identity: int, number: int) -> None:
        if self._numbers.get(identity) == number:
            del self._numbers[identity]
        self._note_size(number, 0)


class RecordedStream:
    def __init__(self, streams: Streams, number: int) -> None:
        self._streams = streams
        self.number = number

    def wait_event(self, event: RecordedEvent) -> None:
        if event.number is not None:
            self._streams.note(AwaitEvent(event.number, self.number))

    def wait_stream(self, other: RecordedStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: RecordedEvent | None = None) -> RecordedEvent:
        event = event or RecordedEvent(self._streams)
        event.record(self)
        return event

    def synchronize(self) -> None: ...


class RecordedEvent:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.number: int | None = None

    def record(self, stream: RecordedStream | None = None) -> None:
        self.number = next(self._streams.events)
        self._streams.note(RecordEvent(self.number, (stream or self._streams.current).number))

    def wait(self, stream: RecordedStream | None = None) -> None:
        (stream or self._streams.current).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Streams:
    def __init__(self, note: Callable[[Item], object]) -> None:
        self.note = note
        self.events = count()
        self._numbers = count(DEFAULT_STREAM)
        self.current = RecordedStream(self, next(self._numbers))

    def used(self) -> AbstractContextManager[None]:
        """Make torch use the fake streams for CPU tensors."""

        def stream(*_: Any, **__: Any) -> RecordedStream:
            return RecordedStream(self, next(self._numbers))

        def event(*_: Any, **__: Any) -> RecordedEvent:
            return RecordedEvent(self)

        return cpu_streams(stream, event, lambda *_: self.current, self._entered)

    @contextmanager
    def _entered(self, stream: RecordedStream | None) -> Iterator[None]:
        before = self.current
        self.current = stream or before
        try:
            yield
        finally:
            self.current = before
