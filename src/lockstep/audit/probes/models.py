"""Finds the models of the script, the names of their parameters, and the wrappers that reduce
gradients."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.audit.probes.recorder import RecordWriter

BROADCAST = "DistributedDataParallel's broadcast of buffers"
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_forward_module", "_checkpoint_wrapped_module"}
"""Parts of parameter names that wrappers insert."""


class Models:
    def __init__(self, recorder: RecordWriter) -> None:
        self._recorder = recorder
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []
        # wrappers whose forward is running, while no backward runs in it
        self._within: list[DistributedDataParallel] = []

    def install(self) -> None:
        self._recorder.wrap(DistributedDataParallel, "__init__", after=self._after_wrap)
        self._recorder.watch(DistributedDataParallel, "forward", self._forward, traced=True)

    def names(self, parameters: Sequence[Tensor], *, again: bool = False) -> list[str]:
        if again or any(id(each) not in self._names for each in parameters):
            self._search(parameters)
        return [
            self._names.get(id(each), f"parameter {number}")
            for number, each in enumerate(parameters)
        ]

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        for root in self._roots:
            for name, buffer in root.named_buffers():
                yield plain(name), buffer

    def untrained(self, trained: set[int]) -> list[str]:
        return [
            plain(name)
            for root in self._roots
            for name, each in root.named_parameters()
            if each.requires_grad and each.grad is not None and id(each) not in trained
        ]

    def note_backward(self) -> None:
        """Record a backward that begins inside a forward, as in Lightning's manual optimization."""
        for wrapper in self._within:
            self._write_forward(wrapper)
        self._within = []

    def _search(self, parameters: Sequence[Tensor]) -> None:
        wanted = {id(each) for each in parameters}
        modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
        children = {id(child) for module in modules for child in module.children()}
        self._roots = [
            each
            for each in modules
            if id(each) not in children
            and any(id(p) in wanted or p.grad is not None for p in each.parameters())
        ]
        self._names = {}
        for root in self._roots:
            for name, parameter in root.named_parameters():
                self._names.setdefault(id(parameter), plain(name))
        several = Counter[str]()
        for key, name in self._names.items():  # the two models of a GAN may have the same names
            several[name] += 1
            if several[name] > 1:
                self._names[key] = f"{name} ({several[name]})"

    def _after_wrap(self, _: Any, wrapper: DistributedDataParallel, *__: Any, **___: Any) -> None:
        self._recorder.write(
            "ddp",
            line=self._recorder.line(),
            broadcast_buffers=bool(wrapper.broadcast_buffers),
        )

    def _forward(
        self,
        original: Callable[..., Any],
        wrapper: DistributedDataParallel,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Record the state of DistributedDataParallel at the end of its forward, where it decides
        if the backward reduces gradients."""
        self._recorder.safely(self._note_broadcast, wrapper)
        if not (torch.is_grad_enabled() and wrapper.training):
            return original(wrapper, *args, **kwargs)
        self._within.append(wrapper)
        try:
            result = original(wrapper, *args, **kwargs)
            if any(each is wrapper for each in self._within):
                self._recorder.safely(self._write_forward, wrapper)
            return result
        finally:
            self._within = [each for each in self._within if each is not wrapper]

    def _note_broadcast(self, wrapper: DistributedDataParallel) -> None:
        if wrapper.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            line = self._recorder.line(caller_of_forward=True)
            self._recorder.write_collective(BROADCAST, _ranks(wrapper), line)

    def _write_forward(self, wrapper: DistributedDataParallel) -> None:
        self._recorder.write(
            "ddp_forward",
            wrapper=id(wrapper),
            ranks=_ranks(wrapper),
            reduces=bool(wrapper.require_backward_grad_sync),
            line=self._recorder.line(),
        )


def _ranks(wrapper: DistributedDataParallel) -> list[int]:
    return dist.get_process_group_ranks(wrapper.process_group)


def plain(name: str) -> str:
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" and len(parts) > 1 else parts)
