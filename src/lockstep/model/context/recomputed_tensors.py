from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lockstep.base.torch_private import saved_tensor_hooks, storage_address

Make = Callable[[], Tensor]


class RecomputedTensors:
    """A context in which autograd does not save the added tensors or their views. The backward
    makes an added tensor again, and keeps the tensor until all of its saved views have been used.
    Enter the context once, for the forward of one attention."""

    def __init__(self) -> None:
        self._sources: dict[int, Source] = {}
        self._copies: dict[int, Tensor] = {}
        self._others: list[_Other] = []
        self._hooks: saved_tensors_hooks | None = None

    def add(self, tensor: Tensor, make: Make) -> Source:
        """`make` computes the tensor (or a view of it) again in the backward, with the same memory
        order. If `make` calls collectives, every rank must add the same tensors."""
        # this object keeps the tensor alive, so that no other tensor gets its address
        source = Source(make, tensor)
        self._sources[storage_address(tensor.untyped_storage())] = source
        return source

    def add_copy(self, tensor: Tensor, copy: Tensor) -> None:
        self._copies[storage_address(tensor.untyped_storage())] = copy

    def drop(self, tensor: Tensor) -> None:
        """Drop the reference to a tensor that was added. The memory is freed if no other code in
        the forward needs the tensor."""
        self._sources.pop(storage_address(tensor.untyped_storage())).release()

    def __enter__(self) -> None:
        outer = saved_tensor_hooks()

        def pack(tensor: Tensor) -> Any:
            source = self._sources.get(storage_address(tensor.untyped_storage()))
            if source is not None:
                return _Saved(source, tensor)
            self._others.append(_Other(tensor, outer))
            return self._others[-1]

        def unpack(packed: Any) -> Any:
            return packed.tensor()

        self._hooks = saved_tensors_hooks(pack, unpack)
        self._hooks.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._hooks is not None
        self._hooks.__exit__(kind, error, traceback)
        for other in self._others:
            other.pack(self._copies, self._sources)
        self._others, self._copies = [], {}
        for source in self._sources.values():
            source.release()
        self._sources = {}


class Source:
    """A tensor that the backward can compute again, and the number of its saved views."""

    def __init__(self, make: Make, tensor: Tensor) -> None:
        self._make = make
        self._tensor: Tensor | None = tensor
        self.saved = self._unused = 0

    def release(self) -> None:
        self._tensor, self._unused = None, self.saved

    def use(self) -> Tensor:
        if self._tensor is None:
            with torch.no_grad():
                self._tensor = self._make()
        tensor = self._tensor
        self._unused -= 1
        if not self._unused:
            self.release()
        return tensor


class _Saved:
    def __init__(self, source: Source, view: Tensor) -> None:
        source.saved += 1
        self._source = source
        self._place = view.size(), view.stride(), view.storage_offset()

    def tensor(self) -> Tensor:
        return self._source.use().as_strided(*self._place)


class _Other:
    def __init__(self, tensor: Tensor, hooks: tuple[Any, Any] | None) -> None:
        self._packed: Any = tensor
        self._unpack: Callable[[Any], Any] = lambda tensor: tensor
        self._outer = hooks

    def pack(self, copies: dict[int, Tensor], sources: dict[int, Source]) -> None:
        tensor: Tensor = self._packed
        copy = copies.get(storage_address(tensor.untyped_storage()), tensor)
        if copy.shape == tensor.shape:
            tensor = copy
        source = sources.get(storage_address(tensor.untyped_storage()))
        if source is not None:
            self._packed, self._unpack = _Saved(source, tensor), _Saved.tensor
        elif self._outer is not None:
            self._packed, self._unpack = self._outer[0](tensor), self._outer[1]
        else:
            # saved with its graph, an output would keep the graph alive until a backward
            self._packed = tensor.detach()

    def tensor(self) -> Any:
        return self._unpack(self._packed)
