"""Finds the routers of a model's experts, and records their logits and the experts that they choose
in a forward."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.errors import RecipeError, first_few
from lockstep.base.torch_private import in_backward, own_buffers, own_parameters
from lockstep.base.uncompiled import Uncompiled
from lockstep.comm.mesh import full_tensor
from lockstep.model.blocks import matching_names
from lockstep.model.context.active import active
from lockstep.model.expert.find import Experts, find_experts
from lockstep.model.trial import in_trial

BIAS = "e_score_correction_bias"
NAME_THE_ROUTERS = (
    "name the modules that return the logits: ls.Balance(routers=['blocks.*.router'])"
)


@dataclass(frozen=True, slots=True)
class RoutedLayer:
    """A layer of experts with its router."""

    name: str
    experts: Experts
    router: str
    bias: str | None = None
    """Name of the buffer that is added to the router's scores before experts are chosen. None if
    `Recipe.balance` does not update the buffer."""


@dataclass(slots=True)
class Choices:
    """The logits of one layer's router in a forward, and the chosen experts. All fields are empty
    if the forward skipped the layer."""

    logits: list[Tensor] = field(default_factory=list)
    """For each call of the router, logits of shape (tokens, experts)."""
    index: list[Tensor] = field(default_factory=list)
    """For each call of the module of experts, the chosen experts of each token, of shape (tokens,
    k)."""
    places: Tensor | None = None
    """The positions of this rank's tokens in the sequence, if ranks divide the sequence."""


def find_routers(
    model: nn.Module,
    experts: Sequence[str] | None,
    routers: Sequence[str] | None,
    *,
    with_bias: bool = False,
) -> list[RoutedLayer]:
    """Call this function before the model is parallelized. If `with_bias` is True, also finds each
    router's bias."""
    layers = find_experts(model, experts)
    if not layers:
        raise RecipeError(
            "Recipe.balance with a model without experts; they are modules whose parameters are"
            " stacked, with the experts as dim 0, and whose forward takes (tokens, index, weights);"
            " name them in Recipe.experts, or leave balance out"
        )
    if routers is None:
        names = [router_beside(model, name, each) for name, each in layers.items()]
    else:
        names = _routers_matching(model, routers)
        if len(names) != len(layers):
            raise RecipeError(
                f"Balance.routers names {len(names)} modules ({first_few(names)}), but the model"
                f" has {len(layers)} layers of experts"
                f" ({first_few(list(layers))}); each layer has one router; name one for each"
            )
    pairs = zip(layers.items(), names, strict=True)
    return [
        RoutedLayer(name, each, router, bias_of(model, name, each, router) if with_bias else None)
        for (name, each), router in pairs
    ]


def _routers_matching(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    modules = [name for name, _ in model.named_modules() if name]
    matches = {
        name
        for pattern in patterns
        for name in matching_names(modules, pattern, "Balance.routers has", "blocks.*.router")
    }
    return [name for name in modules if name in matches]


def router_beside(model: nn.Module, name: str, experts: Experts) -> str:
    """Return the name of the router beside a module of experts, in the same parent module. The
    router's weight has a row for each expert."""
    around = name.rpartition(".")[0]
    parent = model.get_submodule(around)
    inside = {id(each) for each in experts.module.modules()}
    others = [
        (each, module)
        for each, module in parent.named_modules()
        if each and id(module) not in inside and _scores(module, experts.count)
    ]
    # prefer a module beside the experts to a deeper one
    nearest = min((each.count(".") for each, _ in others), default=0)
    candidates = [_joined_name(around, each) for each, _ in others if each.count(".") == nearest]
    if len(candidates) != 1:
        seen = first_few(candidates) if candidates else "no module"
        raise RecipeError(
            f"Recipe.balance: the router of {name!r} is not known: {seen} beside it has a weight"
            f" with a row for each of its {experts.count} experts; {NAME_THE_ROUTERS}"
        )
    return candidates[0]


def _scores(module: nn.Module, experts: int) -> bool:
    weight = own_parameters(module).get("weight")
    return weight is not None and weight.dim() == 2 and weight.shape[0] == experts


def bias_of(model: nn.Module, name: str, experts: Experts, router: str) -> str:
    """Return the name of the router's bias: the only buffer around the router with one value per
    expert."""
    around = name.rpartition(".")[0]
    inside = {id(each) for each in experts.module.modules()}
    roots = [
        router,
        *(_joined_name(around, each) for each, _ in model.get_submodule(around).named_modules()),
    ]
    biases = {
        id(buffer): _joined_name(root, each)
        for root in roots
        if id(model.get_submodule(root)) not in inside
        for each, buffer in own_buffers(model.get_submodule(root)).items()
        if buffer is not None and buffer.shape == (experts.count,) and buffer.is_floating_point()
    }
    named = [each for each in biases.values() if each.rpartition(".")[2] == BIAS]
    several = named or list(biases.values())
    if len(several) != 1:
        raise RecipeError(
            f"Balance.bias_rate: {len(several)} buffers around the router {router!r} have the"
            f" shape ({experts.count},); the bias is one such buffer, which the router adds"
            f" to its scores before it chooses; register it as {BIAS!r} in the router, or leave"
            " bias_rate out"
        )
    bias = model.get_buffer(several[0])
    if not any(each is bias for each in model.state_dict(keep_vars=True).values()):
        raise RecipeError(
            f"Balance.bias_rate: the bias of the router {router!r} was registered with"
            " persistent=False, so it would be in no checkpoint; leave persistent=False out"
        )
    return several[0]


def _joined_name(name: str, inside: str) -> str:
    return f"{name}.{inside}" if name and inside else name or inside


class RoutingRecorder:
    """Records the logits and choices of all routers in a forward, by hooks."""

    def __init__(self, model: nn.Module, layers: Sequence[RoutedLayer]) -> None:
        self.layers = layers
        self._choices: list[Choices] | None = None
        self._hooks = []
        for place, layer in enumerate(layers):
            router = model.get_submodule(layer.router)
            module = layer.experts.module
            names = list(inspect.signature(module.forward).parameters)
            self._hooks += [
                router.register_forward_hook(self._router_hook(place)),
                module.register_forward_pre_hook(
                    self._experts_hook(place, names[1]), with_kwargs=True
                ),
            ]

    def start(self) -> None:
        self._choices = [Choices() for _ in self.layers]

    def take(self) -> list[Choices]:
        """Return the records since `start`, and stop recording. Routing in the recomputation of a
        checkpointed block is not recorded."""
        choices, self._choices = self._choices, None
        return [Choices() for _ in self.layers] if choices is None else choices

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _router_hook(self, place: int) -> Any:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            if self._choices is not None and not in_trial():
                self._choices[place].logits.append(_logits_in(output, self.layers[place]))

        return Uncompiled(note)

    def _experts_hook(self, place: int, argument: str) -> Any:
        def note(_: nn.Module, args: Any, keywords: Any) -> Any:
            if self._choices is None and not in_backward():
                return None
            layer = self.layers[place]
            index = args[1] if len(args) > 1 else keywords[argument]
            if self._choices is not None and not in_trial():
                choices = self._choices[place]
                choices.index.append(_checked_index(index, layer))
                sequence = active()
                choices.places = None if sequence is None else sequence.places()
            if (valid := _in_range(index, layer.experts.count)) is index:
                return None
            if len(args) > 1:
                return (args[0], valid, *args[2:]), keywords
            return args, {**keywords, argument: valid}

        return Uncompiled(note)


def _in_range(index: Tensor, experts: int) -> Tensor:
    """Replace indices out of range on a CPU, because the module of experts would raise an error on
    this rank alone. The load also counts choices out of range, so that all ranks raise one error
    after the step's forwards."""
    if index.is_cpu and index.numel() and (int(index.min()) < 0 or int(index.max()) >= experts):
        return index.clamp(0, experts - 1)
    return index


def _logits_in(output: Any, layer: RoutedLayer) -> Tensor:
    several = output if isinstance(output, tuple | list) else [output]
    for each in several:
        if (
            isinstance(each, Tensor)
            and each.is_floating_point()
            and each.dim() > 1
            and each.shape[-1] == layer.experts.count
        ):
            return full_tensor(each).reshape(-1, layer.experts.count)
    shapes = [str(tuple(each.shape)) for each in several if isinstance(each, Tensor)]
    raise RecipeError(
        f"the router {layer.router!r} returned tensors of shapes {', '.join(shapes) or None}; the"
        " logits are a tensor with a column for"
        f" each of the {layer.experts.count} experts; {NAME_THE_ROUTERS}"
    )


def _checked_index(index: Any, layer: RoutedLayer) -> Tensor:
    if (
        not isinstance(index, Tensor)
        or index.is_floating_point()
        or index.dtype is torch.bool
        or index.dim() < 2
    ):
        kind = (
            f"{index.dtype} of shape {tuple(index.shape)}"
            if isinstance(index, Tensor)
            else type(index).__name__
        )
        raise RecipeError(
            f"the experts {layer.name!r} were called with {kind} as their second argument; it is"
            " the index of the chosen experts, integers of shape (tokens, k)"
        )
    return index.detach().reshape(-1, index.shape[-1])
