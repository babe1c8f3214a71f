"""One process on several devices. Naive model parallelism puts consecutive layers on each device,
and all other modules on the first device. Also supports `torch.nn.DataParallel`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base import accelerator
from lockstep.base.errors import PlanError, RecipeError, first_few
from lockstep.base.torch_private import (
    BatchNormBase,
    apply_to_own_tensors,
    own_buffers,
    own_modules,
    own_parameters,
)
from lockstep.model.blocks import blocks_of, blocks_with_shared_parameters, module_tensors
from lockstep.model.pipeline.stages import balanced_runs


@dataclass(frozen=True, slots=True)
class PlacedLayer:
    name: str
    feeds_next: bool


def devices_of(home: torch.device, count: int) -> list[torch.device]:
    """Return `count` devices, the first of which is `home`. On a CPU, all devices are the same
    device."""
    if not accelerator.is_accelerator(home):
        return [home] * count
    there = accelerator.count()
    if there < count:
        raise PlanError(
            f"split over {count} devices and {there} GPUs; each device needs its own GPU; split "
            f"over {there}, or hide the GPUs ({accelerator.how_to_hide()}) to compute on the CPU"
        )
    return [torch.device(home.type, number) for number in range(count)]


def layers_of(
    model: nn.Module, patterns: Sequence[str] | None, parts: Sequence[str]
) -> list[PlacedLayer]:
    """Return the layers that can be on different devices. The layers are the blocks if `patterns`
    are given or the sequential `parts` are unknown. In all other cases, the layers are the
    sequential parts, with the members of an `nn.Sequential` in its place. Layers that share a
    parameter with another module are left out."""
    blocks = blocks_of(model, patterns)
    if patterns is None and parts:
        names = [
            name for part in parts for name in _members(model.get_submodule(part), part, blocks)
        ]
        shared = blocks_with_shared_parameters(model, names)
        return [
            PlacedLayer(name, after is not None and after not in shared)
            for name, after in zip(names, [*names[1:], None], strict=True)
            if name not in shared
        ]
    lists = [name.rpartition(".")[0] for name in blocks]
    return [
        PlacedLayer(
            name,
            own == following
            and isinstance(model.get_submodule(own), nn.ModuleList | nn.Sequential),
        )
        for name, own, following in zip(blocks, lists, [*lists[1:], None], strict=False)
    ]


def device_indices(
    names: Sequence[str], nbytes: Sequence[int], rest_bytes: int, wanted: int | tuple[int, ...]
) -> list[int]:
    """Return the index of each layer's device. `rest_bytes` is the size of all tensors outside the
    layers, which are on the first device. `wanted` is the number of devices, or the number of
    layers on each device."""
    listed = first_few(names) or "none"
    if isinstance(wanted, tuple):
        if sum(wanted) != len(names):
            raise RecipeError(
                f"split={'+'.join(map(str, wanted))} places {sum(wanted)} layers, but the model "
                f"has {len(names)} ({listed}); the numbers must add up to the layers; correct the "
                "plan, or name the layers in Recipe.blocks"
            )
        return [device for device, count in enumerate(wanted) for _ in range(count)]
    if len(names) < wanted:
        raise RecipeError(
            f"split={wanted} and a model of {len(names)} layers ({listed}); each device needs at "
            "least one; use fewer devices, or name smaller parts in Recipe.blocks (parts that "
            "share a parameter stay together)"
        )
    runs = balanced_runs([nbytes[0] + rest_bytes, *nbytes[1:]], wanted)
    return [device for device, run in enumerate(runs) for _ in run]


def split_over_devices(
    model: nn.Module,
    layers: Sequence[PlacedLayer],
    devices: Sequence[torch.device],
    wanted: int | tuple[int, ...],
) -> None:
    names = [layer.name for layer in layers]
    modules = [model.get_submodule(name) for name in names]
    nbytes = [sum(tensor.nbytes for tensor in module_tensors(module)) for module in modules]
    numbers = device_indices(
        names, nbytes, sum(tensor.nbytes for tensor in module_tensors(model)) - sum(nbytes), wanted
    )
    _check_shared(names, modules, numbers)
    home = devices[0]
    inside = {id(module) for layer in modules for module in layer.modules()}
    for layer, module, number in zip(layers, modules, numbers, strict=True):
        module.to(devices[number])
        _compute_on(module, devices[number], home, comes_home=not layer.feeds_next)
    for module in model.modules():
        if id(module) not in inside:
            apply_to_own_tensors(module, lambda tensor: tensor.to(home))
            if module is not model and (own_parameters(module) or own_buffers(module)):
                _compute_on(module, home, home, comes_home=False)
    _compute_on(model, home, home, comes_home=True)
    _explain(model)


def move_tensors(
    value: Any, device: torch.device, copies: list[tuple[Any, list[Any]]] | None = None
) -> Any:
    """Return the same object if no tensor moves. A copied list or mapping is added to `copies`,
    with its members."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        members: list[Any] = list(value.values())
    elif isinstance(value, list | tuple):
        members = list(value)
    else:
        return value
    parts = [move_tensors(member, device, copies) for member in members]
    if _identical(parts, members):
        return value
    if isinstance(value, tuple):
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    copied: Any = copy.copy(value)
    keys = value if isinstance(value, Mapping) else range(len(parts))
    for key, part in zip(keys, parts, strict=True):
        copied[key] = part
    if copies is not None:
        copies.append((copied, parts))
    return copied


def _members(part: nn.Module, name: str, blocks: Sequence[str]) -> Iterator[str]:
    is_list = isinstance(part, nn.Sequential) and type(part).forward is nn.Sequential.forward
    if name in blocks or not is_list:
        yield name
        return
    for child_name, child in own_modules(part).items():
        if child is not None:
            yield from _members(child, f"{name}.{child_name}", blocks)


def _check_shared(
    names: Sequence[str], modules: Sequence[nn.Module], numbers: Sequence[int]
) -> None:
    holders: dict[int, int] = {}
    for place, module in enumerate(modules):
        for tensor in module_tensors(module):
            first = holders.setdefault(id(tensor), place)
            if numbers[first] != numbers[place]:
                raise RecipeError(
                    f"the layers {names[first]!r} and {names[place]!r} share a buffer of shape "
                    f"{tuple(tensor.shape)}, and are placed on two devices; give each its own "
                    "buffer, or place them together: split=3+5 sets the layers of each device"
                )


def _compute_on(
    module: nn.Module, device: torch.device, home: torch.device, *, comes_home: bool
) -> None:
    forward: Callable[..., Any] = module.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        copies: list[tuple[Any, list[Any]]] = []
        args = move_tensors(args, device, copies)
        kwargs = {name: move_tensors(value, device, copies) for name, value in kwargs.items()}
        with _current_device(device, home):
            output = forward(*args, **kwargs)
        for copied, members in copies:
            now = list(copied.values()) if isinstance(copied, Mapping) else copied
            if not _identical(now, members):
                raise RecipeError(
                    f"the forward of a {type(module).__name__} changed a {type(copied).__name__} "
                    "among its arguments; split gave it a copy on another device, so the change "
                    "would be lost; return the additions instead"
                )
        return move_tensors(output, home) if comes_home else output

    module.forward = wrapped


def _identical(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(
        mine is theirs for mine, theirs in zip(one, other, strict=True)
    )


@contextmanager
def _current_device(device: torch.device, home: torch.device) -> Iterator[None]:
    """Make `device` the current GPU. The GPU's default generator continues the sequence of the
    first device's generator."""
    if device == home or not accelerator.is_accelerator(device):
        yield
        return
    mine, homes = accelerator.generator(device), accelerator.generator(home)
    mine.set_state(homes.get_state())
    with accelerator.current(device):
        yield
    homes.set_state(mine.get_state())


def _explain(model: nn.Module) -> None:
    forward: Callable[..., Any] = model.forward

    @functools.wraps(forward)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            if "same device" not in str(error):
                raise
            raise RecipeError(
                "the model is split, and its code uses tensors of two devices"
                f" ({str(error).splitlines()[0]}); the output of a member of a list of layers"
                " stays on its device for the next member; write other.to(x.device) where the two"
                " are combined, name larger parts in Recipe.blocks, and register a layer's"
                " tensors as buffers"
            ) from error

    model.forward = explained


def gpus_of(home: torch.device, count: int) -> list[int]:
    if accelerator.is_accelerator(home) and not accelerator.runs_data_parallel(home):
        raise PlanError(
            f"data_parallel={count} on {home.type}; torch.nn.DataParallel works only on CUDA and"
            f" ROCm; use replicate={count}, which works on every device, and is faster"
        )
    there = accelerator.count() if accelerator.is_accelerator(home) else 0
    if there < count:
        raise PlanError(
            f"data_parallel={count} and {there} GPUs; it splits each microbatch over the GPUs of"
            f" one process; use replicate={count}, which runs on CPUs too, and faster on GPUs"
        )
    return list(range(count))


def wrap_data_parallel(model: nn.Module, gpus: list[int]) -> None:
    modules = model.named_modules()
    layer = next((name for name, each in modules if isinstance(each, BatchNormBase)), None)
    if layer is not None:
        raise RecipeError(
            f"data_parallel={len(gpus)} and a model with BatchNorm ({layer!r}); each GPU would "
            "take the statistics of its part of a microbatch, and only the first GPU's would be "
            f"kept; use replicate={len(gpus)}"
        )
    parallel = nn.DataParallel(_OwnForward(model), device_ids=gpus)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # draw a seed for each GPU from the microbatch's generator, so that each part has different
        # masks
        for gpu in gpus[1:]:
            generator = accelerator.generator(torch.device(str(accelerator.kind()), gpu))
            generator.manual_seed(int(torch.randint(2**62, ())))
        return parallel(*args, **kwargs)

    model.forward = forward


class _OwnForward(nn.Module):
    """The module that DataParallel replicates, because `model.forward` calls DataParallel."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.model).forward(self.model, *args, **kwargs)
