"""The state of a session in a checkpoint. The names of tensors do not depend on the plan. The first
number in a name is the index of the model.

| name | tensor |
|---|---|
| `0/model/fc.weight` | a parameter or buffer of the first model, or a module's extra state |
| `0/transient/queue` | a buffer with persistent=False that has changed |
| `0/train-mode/fc.weight` | a parameter in the optimizer's training mode; use `0/model/...` |
| `0/optimizer/0/fc.weight/exp_avg` | the first optimizer's state for a parameter |
| `state/average/...` | an entry of the state_dict of a hook or of `session.include` |
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base.dtypes import TensorSpec, tensor_spec, torch_dtype
from lockstep.base.errors import CheckpointError, first_few
from lockstep.base.torch_private import own_buffers, own_modules, own_parameters, tree_map
from lockstep.checkpoint.json_state import decode, encode, tensor_names_in
from lockstep.checkpoint.manifest import DamagedError, Manifest
from lockstep.comm.mesh import Mesh, like_parameter, shard_as
from lockstep.comm.world import World
from lockstep.training.left_out import not_persistent, tensors_in_state
from lockstep.training.optim.optimizer_state import (
    OptimizerState,
    allocate,
    overrides_state_dict,
    remedy,
)
from lockstep.training.train_module import HostValues, TrainModule

_PLAN_SETTINGS = {"params", "foreach", "fused", "capturable", "differentiable"}
"""Param group settings that depend on the plan and are not saved."""

_FORM: Mapping[str, Any] = {"modules": dict, "state": dict}
_MODULE_FORM: Mapping[str, Any] = {
    "optimizers": dict,
    "training": dict,
    "tied": dict,
    "extra": dict,
    "resized": dict,
}
_OPTIMIZER_FORM: Mapping[str, Any] = {
    "class": str,
    "rest": dict,
    "shared": dict,
    "more": dict,
    "groups": list,
}
_TRAINING_FORM: Mapping[str, Any] = {
    "schedule": list, "loss_scale": list | None, "overflows": int, "prescale": float | None,
    "trainable": list | None
}  # fmt: skip

EXTRA_STATE = "_extra_state"


@runtime_checkable
class Stateful(Protocol):
    """An object whose state a resumed run needs."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return tensors, numbers, text, None, and lists, tuples and dicts of them. Values must be
        DTensors or the same on all ranks."""

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class StateReader(Protocol):
    """Reads a saved state: a checkpoint, or copies of the state in shared memory."""

    manifest: Manifest

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Maps a tensor's name to its dtype and shape."""

    def load_into(self, state: Mapping[str, Tensor], world: World) -> None:
        """Every rank must call this method."""


@dataclass(slots=True)
class State:
    """The state of a session on this rank. The tensors are not copies: the next step changes
    them."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    # JSON; in a pipeline, the values of this rank's stages
    values: dict[str, Any] = field(default_factory=dict)


def state_of(
    modules: Sequence[TrainModule],
    others: Mapping[str, Stateful],
    known: KnownTensors | None = None,
    *,
    host: Sequence[HostValues] | None = None,
) -> State:
    """`known` is a cache of the tensors, because finding a small model's tensors takes more time
    than copying them. With the cache, the returned tensors are not detached."""
    state = State()
    tensors = [
        (known or KnownTensors()).of(module, number) for number, module in enumerate(modules)
    ]
    host = [module.host_values() for module in modules] if host is None else host
    state.values["modules"] = {
        str(number): _module_state(module, number, each, state.tensors, its)
        for number, (module, each, its) in enumerate(zip(modules, tensors, host, strict=True))
    }
    state.values["state"] = {
        name: encode(other.state_dict(), f"state/{name}", state.tensors)
        for name, other in others.items()
    }
    if known is None:
        state.tensors = {name: tensor.detach() for name, tensor in state.tensors.items()}
    return state


@dataclass(frozen=True, slots=True)
class _ModuleTensors:
    """The tensors of a `TrainModule` by their names in a checkpoint."""

    tensors: dict[str, Tensor]
    optimizers: list[OptimizerState]
    tied: dict[str, str]
    places: list[tuple[Mapping[Any, Any], Sequence[Any]]]
    """Each dict that holds tensors, with its values at the time when the cache was filled."""
    states: Sequence[tuple[Optimizer, object]]
    """Each optimizer, with its `state` dict at the time when the cache was filled."""

    @classmethod
    def find(cls, module: TrainModule, number: int) -> _ModuleTensors:
        saved = list(tensors_in_state(module.model, module.held))
        tied = _aliases(saved)
        tensors = {f"{number}/model/{name}": tensor for name, tensor in saved if name not in tied}
        places: list[Mapping[Any, Any]] = [
            each
            for part in module.model.modules()
            for each in (own_modules(part), own_parameters(part), own_buffers(part))
        ]
        optimizers = []
        for place, optimizer in enumerate(module.optimizers):
            state = OptimizerState.of(optimizer, module.held)
            tensors.update(_optimizer_tensors(state.tensors, f"{number}/optimizer/{place}"))
            optimizers.append(state)
            places += [
                optimizer.state,
                *(values for values in optimizer.state.values() if isinstance(values, Mapping)),
            ]
        states = [(optimizer, optimizer.state) for optimizer in module.optimizers]
        return cls(
            tensors, optimizers, tied, [(place, [*place.values()]) for place in places], states
        )

    def is_current(self) -> bool:
        if any(
            optimizer.state is not state or overrides_state_dict(optimizer)
            for optimizer, state in self.states
        ):
            return False
        return all(
            len(place) == len(values) and all(map(is_, place.values(), values))
            for place, values in self.places
        )


class KnownTensors:
    """Cache of the tensors in modules and optimizers."""

    def __init__(self) -> None:
        self._found: dict[int, _ModuleTensors] = {}

    def of(self, module: TrainModule, number: int) -> _ModuleTensors:
        cached = self._found.get(number)
        if cached is None or not cached.is_current():
            cached = self._found[number] = _ModuleTensors.find(module, number)
        return cached


def restore(
    reader: StateReader, modules: Sequence[TrainModule], others: Mapping[str, Stateful], mesh: Mesh
) -> None:
    """Every rank must call this function. After an error, the values of models, optimizers and
    `others` are undefined."""
    values, now = reader.manifest.values, state_of((), others).tensors
    targets: dict[str, Tensor] = {}
    states = []
    with damage_in("the manifest's values"):
        _check_form(values)
        _check_same_parts(values, modules, others)
        for number, module in enumerate(modules):
            targets |= _model_targets(
                module, number, values["modules"][str(number)], reader.tensors
            )
            for place, optimizer in enumerate(module.optimizers):
                state = OptimizerState(
                    allocate(optimizer, module.held, f"{number}/optimizer/{place}", reader.tensors)
                )
                targets |= _optimizer_tensors(state.tensors, f"{number}/optimizer/{place}")
                states.append(state)
        encoded = set(tensor_names_in([values["modules"], values["state"]]))
        not_loaded = {
            name.replace("/train-mode/", "/model/", 1)
            for name in reader.tensors
            if name.split("/")[1] == "train-mode"
        }
        _check_tensors(
            targets,
            {
                name: kind
                for name, kind in reader.tensors.items()
                if name not in encoded | not_loaded
            },
            mesh,
        )
        targets |= {name: _empty_like(now.get(name), *reader.tensors[name]) for name in encoded}
        # decode everything first: an error must come before anything is loaded
        decode([values["modules"], values["state"]], targets.__getitem__)
    reader.load_into(targets, mesh.world)
    left = iter(states)
    for number, module in enumerate(modules):
        _restore_module(module, values["modules"][str(number)], left, targets)
    for name, other in others.items():
        other.load_state_dict(decode(values["state"][name], targets.__getitem__))


@contextmanager
def damage_in(what: str) -> Iterator[None]:
    """Convert errors about values of a wrong type to `DamagedError`."""
    try:
        yield
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise DamagedError(
            f"{what} were not written by a run ({type(error).__name__}: {error})"
        ) from error


def _check_form(values: Mapping[str, Any]) -> None:
    for module in _checked(values, _FORM)["modules"].values():
        for optimizer in _checked(module, _MODULE_FORM)["optimizers"].values():
            _checked(optimizer, _OPTIMIZER_FORM)
            if not all(
                isinstance(each, dict)
                for each in (*optimizer["rest"].values(), *optimizer["groups"])
            ):
                raise TypeError("the state of a parameter, or a group, is not an object")
        training = _checked(module["training"], _TRAINING_FORM)
        if not all(isinstance(each, dict) for each in training["schedule"]):
            raise TypeError("the state of a schedule is not an object")
        if not all(isinstance(each, str) for each in training["trainable"] or ()):
            raise TypeError("a trainable parameter has no name")
        scale = training["loss_scale"]
        if scale is not None and (
            len(scale) != 2 or not all(isinstance(each, int | float) for each in scale)
        ):
            raise ValueError("the loss scale is not two numbers")


def _checked(values: Any, form: Mapping[str, Any]) -> Any:
    for name, kind in form.items():
        if not isinstance(values[name], kind):
            raise TypeError(f"{name} is a {type(values[name]).__name__}")
    return values


def _model_targets(
    module: TrainModule, number: int, saved: Mapping[str, Any], there: Mapping[str, TensorSpec]
) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {
        **dict(module.model.named_parameters()),
        **dict(module.model.named_buffers()),
    }
    targets = {
        f"{number}/model/{name}": tensor
        for name, tensor in named_tensors(module.model, module.held)
    }
    for name, tensor in named.items():
        for key in (f"{number}/model/{name}", f"{number}/transient/{name}"):
            if key in there:
                if name in saved["resized"] and tensor.shape != there[key][1]:
                    tensor.data = torch.empty(
                        there[key][1], dtype=tensor.dtype, device=tensor.device
                    )
                targets[key] = tensor.detach()
        if f"{number}/train-mode/{name}" in there:
            targets[f"{number}/train-mode/{name}"] = targets.pop(f"{number}/model/{name}")
    return targets


def _module_state(
    module: TrainModule,
    number: int,
    found: _ModuleTensors,
    tensors: dict[str, Tensor],
    host: HostValues,
) -> dict[str, Any]:
    tensors.update(found.tensors)
    tensors.update(
        {
            f"{number}/train-mode/{name}": value
            for name, value in module.modes.training_values.items()
        }
    )
    resized: list[str] = []
    if module.left_out is not None:
        transient, resized = not_persistent(module.model), module.left_out.resized()
        tensors.update(
            {
                f"{number}/{'transient' if name in transient else 'model'}/{name}": t
                for name, t in module.left_out.changed().items()
            }
        )
    optimizers: dict[str, Any] = {}
    for place, (optimizer, state) in enumerate(
        zip(module.optimizers, found.optimizers, strict=True)
    ):
        if state.more and module.parallel.pipeline is not None:
            raise CheckpointError(
                f"{type(optimizer).__name__}.state_dict() has {', '.join(state.more)} besides"
                " 'state', with a pipeline; each stage has an optimizer, and a state that belongs"
                " to no parameter cannot be saved in one checkpoint; return it in 'state', by"
                " parameter, or use another plan"
            )
        described: dict[str, Any] = {
            "class": type(optimizer).__qualname__,
            "rest": state.rest,
            "shared": state.shared,
            "more": state.more,
        }
        described["groups"] = [
            {key: value for key, value in group.items() if key not in _PLAN_SETTINGS}
            for group in host.groups[place]
        ]
        optimizers[str(place)] = encode(
            described, f"{number}/optimizer/{place}", tensors, remedy(optimizer)
        )
    extra = {
        key: encode(
            value, f"{number}/{'model' if isinstance(value, Tensor) else 'extra'}/{key}", tensors
        )
        for key, value in extra_state(module.model).items()
    }
    training = encode(module.state_dict(host), f"{number}/training", tensors)
    return {
        "optimizers": optimizers,
        "training": training,
        "tied": found.tied,
        "extra": extra,
        "resized": dict.fromkeys(resized, True),
    }


def _restore_module(
    module: TrainModule,
    saved: Mapping[str, Any],
    states: Iterator[OptimizerState],
    tensors: Mapping[str, Tensor],
) -> None:
    for optimizer, encoded in zip(module.optimizers, saved["optimizers"].values(), strict=True):
        state, its = next(states), decode(encoded, tensors.__getitem__)
        like = _to_device if module.steps_whole_tensors(optimizer) else _like_parameter
        state.rest = {
            name: tree_map(partial(like, parameter), its["rest"][name])
            for name, parameter in module.held.items()
            if name in its["rest"]
        }
        state.shared, state.more = its["shared"], its["more"]
        state.load(optimizer, module.held, its["groups"])
    for name, part in module.model.named_modules():
        key = f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE
        if key in saved["extra"]:
            part.set_extra_state(decode(saved["extra"][key], tensors.__getitem__))
    module.load_state_dict(decode(saved["training"], tensors.__getitem__))


def extra_state(model: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE: module.get_extra_state()
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _optimizer_tensors(
    tensors: Mapping[str, Mapping[str, Tensor]], prefix: str
) -> dict[str, Tensor]:
    return {
        f"{prefix}/{name}/{key}": tensor
        for name, by_key in tensors.items()
        for key, tensor in by_key.items()
    }


def _to_device(parameter: Tensor, value: Any) -> Any:
    return value.to(parameter.device) if isinstance(value, Tensor) else value


def _like_parameter(parameter: Tensor, value: Any) -> Any:
    value = _to_device(parameter, value)
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return like_parameter(parameter, shard_as(parameter, value))


def named_tensors(model: nn.Module, also: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter and buffer in the state dict with its name. A tied tensor occurs
    once."""
    saved = list(tensors_in_state(model, also))
    others = _aliases(saved)
    return ((name, tensor.detach()) for name, tensor in saved if name not in others)


def aliases(model: nn.Module, also: Collection[str] = ()) -> dict[str, str]:
    """Return a map from each duplicate name of a tied tensor to the name that checkpoints use."""
    return _aliases(list(tensors_in_state(model, also)))


def _aliases(saved: Sequence[tuple[str, Tensor]]) -> dict[str, str]:
    firsts: dict[int, str] = {}
    first_names = {name: firsts.setdefault(id(tensor), name) for name, tensor in saved}
    return {name: first for name, first in first_names.items() if name != first}


def _empty_like(template: Tensor | None, dtype: str, shape: tuple[int, ...]) -> Tensor:
    if (
        template is not None
        and tuple(template.shape) == shape
        and template.dtype == torch_dtype(dtype)
    ):
        return torch.empty_like(template)
    return torch.empty(shape, dtype=torch_dtype(dtype))


def _check_same_parts(
    values: Mapping[str, Any], modules: Sequence[TrainModule], others: Mapping[str, Stateful]
) -> None:
    if len(values["modules"]) != len(modules):
        raise CheckpointError(
            f"the checkpoint holds {len(values['modules'])} models with optimizers and this run"
            f" prepared {len(modules)}"
        )
    for number, module in enumerate(modules):
        saved = values["modules"][str(number)]["optimizers"]
        theirs = [each["class"] for each in saved.values()]
        ours = [type(optimizer).__qualname__ for optimizer in module.optimizers]
        if theirs != ours:
            raise CheckpointError(
                f"the checkpoint's optimizers are {theirs} and this run's are {ours}; resume with"
                " the optimizers that it was saved with"
            )
        for place, (optimizer, its) in enumerate(
            zip(module.optimizers, saved.values(), strict=True)
        ):
            if len(its["groups"]) != len(optimizer.param_groups):
                raise CheckpointError(
                    f"optimizer {place} has {len(optimizer.param_groups)} parameter groups and had"
                    f" {len(its['groups'])} in the checkpoint"
                )
    missing = sorted(others.keys() - values["state"].keys())
    unexpected = sorted(values["state"].keys() - others.keys())
    if missing or unexpected:
        raise CheckpointError(
            "the checkpoint's other state is not this run's: "
            + list_names({"not in the checkpoint": missing, "only in the checkpoint": unexpected})
            + "; use the same hooks and the same session.include as before"
        )


def _check_tensors(
    targets: Mapping[str, Tensor], saved: Mapping[str, TensorSpec], mesh: Mesh
) -> None:
    """Every rank must call this function."""
    mine = {name: tensor_spec(tensor) for name, tensor in targets.items()}
    everyone = {
        name: (dtype, tuple(shape))
        for part in mesh.stages.gather_values(mine)
        for name, (dtype, shape) in part.items()
    }
    other = sorted(name for name in saved.keys() & everyone.keys() if saved[name] != everyone[name])
    differences = {
        "not in the checkpoint": [
            _describe(name, everyone[name]) for name in sorted(everyone.keys() - saved.keys())
        ],
        "only in the checkpoint": [
            _describe(name, saved[name]) for name in sorted(saved.keys() - everyone.keys())
        ],
        "different": [
            f"{_describe(name, everyone[name])}, saved as {_describe('', saved[name])}"
            for name in other
        ],
    }
    if any(differences.values()):
        raise CheckpointError(f"the checkpoint is of another model: {list_names(differences)}")


def _describe(name: str, spec: TensorSpec) -> str:
    dtype, shape = spec
    return f"{name.replace('/model/', ' ')} {dtype}{shape}".removeprefix("0 ").strip()


def list_names(found: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{kind}: {first_few(names)}" for kind, names in found.items() if names)
