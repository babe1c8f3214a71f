"""The state of a session in a checkpoint: tensors by name, and JSON. The names do not depend on the plan.

`0/model/fc.weight` is a parameter or buffer of the first model, `0/optimizer/0/fc.weight/exp_avg` its first optimizer's
state for it, and `state/average/...` an entry of the state_dict of a hook or of an object given to `session.include`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base.errors import CheckpointError, first_few
from lockstep.base.torch_private import own_buffers, own_modules, own_parameters
from lockstep.checkpoint.json_state import decode, encode, tensors_in
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.tensor_shards import torch_dtype
from lockstep.comm.mesh import Mesh
from lockstep.comm.world import World
from lockstep.training.train_module import TrainModule

_PLAN_SETTINGS = {"params", "foreach", "fused", "capturable", "differentiable"}
"""Settings of param groups that are not saved, because they depend on the plan."""


@runtime_checkable
class Stateful(Protocol):
    """An object with state that a run must have to resume."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors, numbers, text, None, and lists, tuples and dicts of them; alike on all ranks, or DTensors."""

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class StateReader(Protocol):
    """A saved state: a checkpoint (`CheckpointReader`), or the images in memory of all ranks (`ImageReader`)."""

    manifest: Manifest

    @property
    def tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Name -> dtype and shape of each saved tensor."""

    def load_into(self, state: Mapping[str, Tensor], world: World) -> None:
        """Load the saved values into this rank's tensors, whose names are among the saved ones. Every rank calls it."""


@dataclass(slots=True)
class State:
    """The state of a session on this rank; the tensors are not copied."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # JSON; in a pipeline, of this rank's stages


def state_of(modules: Sequence[TrainModule], others: Mapping[str, Stateful], known: KnownTensors | None = None) -> State:
    """Return the state of a session. Raises `CheckpointError` if a part of it cannot be saved.

    `known`: given again and again by one caller, it saves the search for the tensors of modules, which takes longer
    than to copy a small model. The tensors are then the modules' own, with their gradients: read them at once."""
    state = State()
    found = [(known or KnownTensors()).of(module, number) for number, module in enumerate(modules)]
    state.values["modules"] = {
        str(number): _module_state(module, number, each, state.tensors)
        for number, (module, each) in enumerate(zip(modules, found, strict=True))
    }
    state.values["state"] = {name: encode(other.state_dict(), f"state/{name}", state.tensors) for name, other in others.items()}
    if known is None:
        state.tensors = {name: tensor.detach() for name, tensor in state.tensors.items()}
    return state


@dataclass(frozen=True, slots=True)
class _ModuleTensors:
    """The tensors of a module in a state, and where they were found."""

    tensors: dict[str, Tensor]
    rests: list[dict[str, dict[str, Any]]]
    """For each optimizer the values that are no tensors, by parameter."""
    tied: dict[str, str]
    places: list[tuple[Mapping[Any, Any], Sequence[Any]]]
    """The dicts that held them, and their values."""
    states: Sequence[tuple[Optimizer, object]]
    """Each optimizer, and its dict of states."""

    @classmethod
    def find(cls, module: TrainModule, number: int) -> _ModuleTensors:
        saved = list(_saved(module.model))
        tied = _aliases(saved)
        tensors = {f"{number}/model/{name}": tensor for name, tensor in saved if name not in tied}
        places: list[Mapping[Any, Any]] = [
            each for part in module.model.modules() for each in (own_modules(part), own_parameters(part), own_buffers(part))
        ]
        rests = []
        for place, optimizer in enumerate(module.optimizers):
            of_optimizer, rest = _optimizer_state(optimizer, _named_parameters(module), f"{number}/optimizer/{place}")
            tensors.update(of_optimizer)
            rests.append(rest)
            places += [optimizer.state, *optimizer.state.values()]
        states = [(optimizer, optimizer.state) for optimizer in module.optimizers]
        return cls(tensors, rests, tied, [(place, [*place.values()]) for place in places], states)

    def is_current(self) -> bool:
        """True if the module and its optimizers hold the same objects as then."""
        if not all(optimizer.state is state for optimizer, state in self.states):
            return False
        return all(len(place) == len(values) and all(map(is_, place.values(), values)) for place, values in self.places)


class KnownTensors:
    """The tensors of modules, as `state_of` found them."""

    def __init__(self) -> None:
        self._found: dict[int, _ModuleTensors] = {}

    def of(self, module: TrainModule, number: int) -> _ModuleTensors:
        """Those of the module with this number; found again if it or its optimizers hold other objects than before."""
        found = self._found.get(number)
        if found is None or not found.is_current():
            found = self._found[number] = _ModuleTensors.find(module, number)
        return found


def restore(reader: StateReader, modules: Sequence[TrainModule], others: Mapping[str, Stateful], mesh: Mesh) -> None:
    """Load everything from a saved state. Every rank calls it. After an error the state is undefined.

    Raises `CheckpointError` if the checkpoint is of another model or run, and `DamagedError`; both on every rank.
    """
    values = reader.manifest.values
    _check_same_parts(values, modules, others)
    targets = {f"{number}/model/{name}": tensor for number, module in enumerate(modules) for name, tensor in tensors_of(module.model)}
    for number, module in enumerate(modules):
        for place, optimizer in enumerate(module.optimizers):
            _allocate_saved_state(optimizer, dict(_named_parameters(module)), f"{number}/optimizer/{place}", reader.tensors)
            targets |= _optimizer_state(optimizer, _named_parameters(module), f"{number}/optimizer/{place}")[0]
    other_tensors = set(tensors_in(values))
    _check_tensors(targets, {name: kind for name, kind in reader.tensors.items() if name not in other_tensors}, mesh)
    now = state_of((), others).tensors
    targets |= {name: _empty_like(now.get(name), *reader.tensors[name]) for name in tensors_in(values)}
    reader.load_into(targets, mesh.world)
    for number, module in enumerate(modules):
        _restore_module(module, values["modules"][str(number)], targets)
    for name, other in others.items():
        other.load_state_dict(decode(values["state"][name], targets.__getitem__))


def _module_state(module: TrainModule, number: int, found: _ModuleTensors, tensors: dict[str, Tensor]) -> dict[str, Any]:
    tensors.update(found.tensors)
    optimizers: dict[str, Any] = {}
    for place, (optimizer, rest) in enumerate(zip(module.optimizers, found.rests, strict=True)):
        groups = [
            {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if key not in _PLAN_SETTINGS}
            for group in optimizer.param_groups
        ]
        described = {"class": type(optimizer).__qualname__, "groups": groups, "rest": rest}
        optimizers[str(place)] = encode(described, f"{number}/optimizer/{place}", tensors)
    training = encode(module.state_dict(), f"{number}/training", tensors)
    return {"optimizers": optimizers, "training": training, "tied": found.tied}


def _restore_module(module: TrainModule, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    for optimizer, encoded in zip(module.optimizers, saved["optimizers"].values(), strict=True):
        its = decode(encoded, tensors.__getitem__)
        for group, values in zip(optimizer.param_groups, its["groups"], strict=True):
            for key, value in values.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
        for name, parameter in _named_parameters(module):
            if name in its["rest"]:
                optimizer.state[parameter].update(its["rest"][name])
    module.load_state_dict(decode(saved["training"], tensors.__getitem__))


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers in the model's state dict, tied ones once, by their first names."""
    saved = list(_saved(model))
    others = _aliases(saved)
    return ((name, tensor.detach()) for name, tensor in saved if name not in others)


def aliases(model: nn.Module) -> dict[str, str]:
    """Further name -> first name of tied parameters and buffers in the state dict."""
    return _aliases(list(_saved(model)))


def _aliases(saved: Sequence[tuple[str, Tensor]]) -> dict[str, str]:
    firsts: dict[int, str] = {}
    found = {name: firsts.setdefault(id(tensor), name) for name, tensor in saved}
    return {name: first for name, first in found.items() if name != first}


def _saved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, under all of their names in the state dict."""
    saved = model.state_dict().keys()
    for named in (model.named_parameters, model.named_buffers):
        yield from ((name, tensor) for name, tensor in named(remove_duplicate=False) if name in saved)


def _named_parameters(module: TrainModule) -> Iterator[tuple[str, nn.Parameter]]:
    return iter(module.held.items())


def _optimizer_state(
    optimizer: Optimizer, named: Iterator[tuple[str, nn.Parameter]], prefix: str
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return the optimizer's state: tensors by name, and other values by parameter."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, dict[str, Any]] = {}
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}/{name}/{key}"] = value
            else:
                rest.setdefault(name, {})[key] = value
    return tensors, rest


def _allocate_saved_state(
    optimizer: Optimizer, named: Mapping[str, nn.Parameter], prefix: str, saved: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Allocate the state tensors that the optimizer would create in its first step, as in the checkpoint."""
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    on_device = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
    for full, (dtype, shape) in saved.items():
        if not full.startswith(f"{prefix}/"):
            continue
        name, _, key = full.removeprefix(f"{prefix}/").rpartition("/")
        parameter = named.get(name)
        if parameter is None or id(parameter) not in mine or key in optimizer.state[parameter]:
            continue
        if shape == tuple(parameter.shape):
            optimizer.state[parameter][key] = torch.empty_like(parameter.detach(), dtype=torch_dtype(dtype))
        else:
            device = "cpu" if key == "step" and not on_device else parameter.device
            optimizer.state[parameter][key] = torch.empty(shape, dtype=torch_dtype(dtype), device=device)


def _empty_like(template: Tensor | None, dtype: str, shape: tuple[int, ...]) -> Tensor:
    if template is not None and tuple(template.shape) == shape and template.dtype == torch_dtype(dtype):
        return torch.empty_like(template)
    return torch.empty(shape, dtype=torch_dtype(dtype))


def _check_same_parts(values: Mapping[str, Any], modules: Sequence[TrainModule], others: Mapping[str, Stateful]) -> None:
    if len(values["modules"]) != len(modules):
        raise CheckpointError(f"the checkpoint holds {len(values['modules'])} models with optimizers and this run prepared {len(modules)}")
    for number, module in enumerate(modules):
        saved = values["modules"][str(number)]["optimizers"]
        theirs, ours = [each["class"] for each in saved.values()], [type(optimizer).__qualname__ for optimizer in module.optimizers]
        if theirs != ours:
            raise CheckpointError(
                f"the checkpoint's optimizers are {theirs} and this run's are {ours}; resume with those that it was saved with"
            )
        for place, (optimizer, its) in enumerate(zip(module.optimizers, saved.values(), strict=True)):
            if len(its["groups"]) != len(optimizer.param_groups):
                raise CheckpointError(
                    f"optimizer {place} has {len(optimizer.param_groups)} parameter groups and had {len(its['groups'])} in the checkpoint"
                )
    missing, unexpected = sorted(others.keys() - values["state"].keys()), sorted(values["state"].keys() - others.keys())
    if missing or unexpected:
        raise CheckpointError(
            "the checkpoint's other state is not this run's: "
            + listed({"not in the checkpoint": missing, "only in the checkpoint": unexpected})
            + "; use the same hooks and the same session.include as before"
        )


def _check_tensors(targets: Mapping[str, Tensor], saved: Mapping[str, tuple[str, tuple[int, ...]]], mesh: Mesh) -> None:
    """Raise `CheckpointError` unless `targets` are the saved tensors. Every rank calls it."""
    mine = {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in targets.items()}
    everyone = {name: described for part in mesh.axis("pipeline").gather_values(mine) for name, described in part.items()}
    there = {name: [dtype, list(shape)] for name, (dtype, shape) in saved.items()}
    other = sorted(name for name in there.keys() & everyone.keys() if there[name] != everyone[name])
    found = {
        "not in the checkpoint": [_describe(name, everyone[name]) for name in sorted(everyone.keys() - there.keys())],
        "only in the checkpoint": [_describe(name, there[name]) for name in sorted(there.keys() - everyone.keys())],
        "different": [f"{_describe(name, everyone[name])}, saved as {_describe('', there[name])}" for name in other],
    }
    if any(found.values()):
        raise CheckpointError(f"the checkpoint is of another model: {listed(found)}")


def _describe(name: str, kind: Sequence[Any]) -> str:
    dtype, shape = kind
    return f"{name.replace('/model/', ' ')} {dtype}{tuple(shape)}".removeprefix("0 ").strip()


def listed(found: Mapping[str, Sequence[str]]) -> str:
    """One line with the first few names of each kind."""
    return "; ".join(f"{kind}: {first_few(names)}" for kind, names in found.items() if names)
