"""Notes of which tensors are where in memory, with marks in the trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from lockstep.base.torch_private import is_compiled_in_place, to_local, tree_leaves
from lockstep.hooks.profiling.memory import MARK, KnownTensor, MemoryNote
from lockstep.training.train_module import TrainModule


class MemoryNotes:
    """One rank's notes while its profiler runs. Holds no tensor, changes none."""

    def __init__(self, modules: Sequence[TrainModule], device: torch.device) -> None:
        self.notes: list[MemoryNote] = []
        self._modules = modules
        self._device = device.type
        self._hooks = ExitStack()
        for module in modules:
            # a hook would be compiled with the module
            if not any(map(is_compiled_in_place, module.model.modules())):
                for name, part in module.model.named_modules():
                    self._hooks.callback(
                        part.register_forward_hook(partial(self._note_output, name)).remove
                    )

    def close(self) -> None:
        self._hooks.close()

    def note_all(self) -> None:
        """Note all parameters, buffers, gradients and optimizer state."""
        found: dict[int, KnownTensor] = {}
        for cause, name, tensor in self._everything():
            if (known := self._known(cause, name, tensor)) is not None:
                found.setdefault(known.address, known)
        self._mark(MemoryNote(list(found.values()), is_complete=True))

    def _everything(self) -> Iterator[tuple[str, str, Tensor]]:
        for module in self._modules:
            names: dict[Tensor, str] = {}
            for name, parameter in module.model.named_parameters():
                names[parameter] = name
                yield "parameters", name, parameter
                if parameter.grad is not None:
                    yield "gradients", f"gradient of {name}", parameter.grad
            for name, buffer in module.model.named_buffers():
                yield "parameters", f"buffer {name}", buffer
            for optimizer in module.optimizers:
                for held, state in optimizer.state.items():
                    of = names.get(held, "a parameter")
                    leaves = (
                        (kind, leaf) for kind, value in state.items() for leaf in tree_leaves(value)
                    )
                    yield from (
                        ("optimizer state", f"{kind} of {of}", leaf) for kind, leaf in leaves
                    )

    def _known(self, cause: str, name: str, tensor: Any) -> KnownTensor | None:
        """Return a tensor's memory on the rank's device; None if it has none there."""
        if (
            not isinstance(tensor, Tensor)
            or (tensor := to_local(tensor)).device.type != self._device
            or tensor.layout is not torch.strided
        ):
            return None
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return None
        dtype = str(tensor.dtype).removeprefix("torch.")
        return KnownTensor(
            cause, storage.data_ptr(), storage.nbytes(), name, tuple(tensor.shape), dtype
        )

    def _note_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Note what a module made: a forward hook."""
        found = [
            self._known("", f"output of {name or type(module).__name__}", leaf)
            for leaf in tree_leaves(output)
        ]
        self._mark(MemoryNote([each for each in found if each is not None], is_complete=False))

    def _mark(self, note: MemoryNote) -> None:
        with record_function(f"{MARK}{len(self.notes)}"):
            self.notes.append(note)
