"""Finds changed parameters and buffers that a model's state dict leaves out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.torch_private import non_persistent_buffers, own_buffers, own_parameters, version
from lockstep.comm.mesh import to_local
from lockstep.comm.world import World

_PIECE = 1 << 20


class LeftOut:
    """The tensors of a model that are neither in its state dict nor in an optimizer. Checkpoints
    contain the changed tensors."""

    def __init__(self, model: nn.Module, held: Collection[str]) -> None:
        """Create the object before a checkpoint is loaded. `changed` compares the tensors with
        their values at that time."""
        saved = dict(tensors_in_state(model, held))
        ours = set(map(id, saved.values()))
        named = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        self._saved = {*saved, *(name for name, tensor in named if id(tensor) in ours)}
        self._modules = list(model.named_modules())
        self._before = {name: _checksum(tensor) for name, tensor in self.tensors().items()}
        self._shapes = {name: tensor.shape for name, tensor in model.named_buffers()}
        self._model = model
        self._agreed: set[str] = set()

    def tensors(self) -> dict[str, Tensor]:
        left_out = {}
        for prefix, module in self._modules:
            for own in (own_parameters(module), own_buffers(module)):
                for key, tensor in own.items():
                    name = f"{prefix}.{key}" if prefix else key
                    if tensor is not None and name not in self._saved:
                        left_out[name] = tensor
        return left_out

    def agree(self, world: World) -> None:
        """Make `changed` return a tensor on all ranks if the tensor has changed on any rank. Every
        rank must call this method."""
        for names in world.gather_values(sorted(self.changed())):
            self._agreed |= set(names)

    def changed(self) -> dict[str, Tensor]:
        return {
            name: tensor
            for name, tensor in self.tensors().items()
            if name in self._agreed or self._before.get(name) != _checksum(tensor)
        }

    def resized(self) -> list[str]:
        return [
            name
            for name, tensor in self._model.named_buffers()
            if self._shapes.get(name, tensor.shape) != tensor.shape
        ]


def tensors_in_state(model: nn.Module, held: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the state dict and of the optimizers. A tied tensor occurs once per
    name."""
    saved = model.state_dict().keys()
    for named in (model.named_parameters, model.named_buffers):
        yield from (
            (name, tensor)
            for name, tensor in named(remove_duplicate=False)
            if name in saved or name in held
        )


def not_persistent(model: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in non_persistent_buffers(module)
    }


def complete_state_dict(
    model: nn.Module, held: Collection[str], changed: Mapping[str, Tensor], world: World
) -> dict[str, Any]:
    """Return the model's state dict, with the tensors of `held` and `changed` that the state dict
    leaves out. Every rank must call this function."""
    state = dict(model.state_dict())
    transient = not_persistent(model)
    more = {
        name: tensor.detach() for name, tensor in tensors_in_state(model, held) if name not in state
    }
    more |= {name: tensor.detach() for name, tensor in changed.items() if name not in transient}
    there = {
        address
        for value in state.values()
        if isinstance(value, Tensor) and (address := _address(value))
    }
    renamed = world.gather_values(
        [name for name, tensor in more.items() if _address(tensor) in there]
    )
    return state | {
        name: tensor for name, tensor in more.items() if not any(name in names for names in renamed)
    }


def _address(tensor: Tensor) -> int:
    return to_local(tensor).detach().data_ptr() if to_local(tensor).numel() else 0


def _checksum(tensor: Tensor) -> tuple[object, ...]:
    """The checksum depends on every byte of this rank's part and on the byte's position. For a
    tensor without dense storage, returns the version counter."""
    part, kind = to_local(tensor).detach(), (str(tensor.dtype), tuple(tensor.shape))
    if (
        type(part) is not Tensor
        or part.layout != torch.strided
        or part.is_quantized
        or part.is_meta
    ):
        return (*kind, id(tensor), version(tensor))
    raw = part.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    raw = torch.nn.functional.pad(raw, (0, -len(raw) % 8)).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for start in range(0, len(raw), _PIECE):
        piece = raw[start : start + _PIECE]
        places = torch.arange(1, 2 * len(piece), 2, device=raw.device) + 2 * start
        total += (piece * places).sum()
    return (*kind, int(total))
